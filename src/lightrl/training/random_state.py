"""Random generators of a rank as tensors, so that they lie in a checkpoint's safetensors files like all else."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Generators = Mapping[str, torch.Generator]


def capture(generators: Generators | None = None) -> dict[str, Tensor]:
    """State of torch (CPU, and this rank's GPU), Python and numpy, and of `generators` of the caller's own."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert version == 3
    assert kind == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*(int(k) for k in keys), position], dtype=torch.int64),
        "numpy_gauss": torch.tensor([has_gauss, cached], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, generator in (generators or {}).items():
        states[f"generator.{name}"] = generator.get_state()
    return states


def restore(states: Mapping[str, Tensor], generators: Generators | None = None) -> None:
    """Set the generators to what `capture` saw; those it did not see stay as they are."""
    torch.set_rng_state(states["torch"])
    has, value = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), value if has else None))
    *keys, position = states["numpy"].tolist()
    has, value = states["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has), value))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    for name, generator in (generators or {}).items():
        if (state := states.get(f"generator.{name}")) is not None:
            generator.set_state(state)


def reseed(base: Tensor, rank: int, generators: Generators | None = None) -> None:
    """Seed the generators of a rank that the saved run did not have, from its rank 0's state and the rank's number."""
    seed = zlib.crc32(base.numpy().tobytes() + rank.to_bytes(4, "little"))
    torch.manual_seed(seed)  # the GPU's too
    random.seed(seed)
    np.random.seed(seed)
    for i, generator in enumerate((generators or {}).values(), start=1):
        generator.manual_seed(seed + i)
