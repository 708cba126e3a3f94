"""Where the randomness of samples comes from."""

from __future__ import annotations

import hashlib


def sample_seed(seed: int, stream: str, group_index: int, index: int) -> int:
    """Seed of one sample's random draws: the same on any number of ranks and after any restart."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{group_index}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
