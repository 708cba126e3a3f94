"""Waits for other ranks on the host, whose failures say which rank did not come and how long it may take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from lightrl.threads import spawn

_KEY = "lightrl/came/{}"
_SIGNS = ("gloo", "timed out", "connection")  # of what torch says
_GRACE = 3.0
"""Seconds in which ranks that waited as well say so: when one gives up, it closes its connections to all of them."""


class MissingRankError(RuntimeError):
    """Other ranks did not come to a wait of all."""


@contextlib.contextmanager
def waiting(group: Any) -> Iterator[None]:
    """Around a collective of a gloo `group`: torch's own error names neither the ranks nor the setting.

    Raises MissingRankError in its place, after `_GRACE` seconds. The group, and with it the job, is of no use then.
    """
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error).lower() for sign in _SIGNS):
            raise
        seconds = time.monotonic() - begun
        ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        timed_out = "timed out" in str(error).lower()
        found = spawn(_who_came, ranks, timed_out)
        try:
            came = found.result(timeout=2 * _GRACE)  # where the store is gone as well, nobody is known
        except Exception:
            came = {}
        raise MissingRankError(_explain(ranks, came, timed_out, seconds)) from error


def _who_came(ranks: Sequence[int], timed_out: bool) -> dict[int, bool]:
    """Which of the others waited too, and whether in vain for too long; through torchrun's store, which outlives us."""
    store = dist.distributed_c10d._get_default_store()
    store.set(_KEY.format(dist.get_rank()), str(int(timed_out)))
    deadline = time.monotonic() + _GRACE
    came: dict[int, bool] = {}
    while len(came) < len(ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
        came |= {r: store.get(_KEY.format(r)) == b"1" for r in ranks if r not in came and store.check([_KEY.format(r)])}
    return came


def _explain(ranks: Sequence[int], came: dict[int, bool], timed_out: bool, seconds: float) -> str:
    missing = [rank for rank in ranks if rank not in came]
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    if not missing:
        return f"all ranks waited for each other, but the connections between them failed after {seconds:.0f} s"
    if timed_out or any(came.values()):
        return (
            f"parallel.timeout: {names} did not come to where the others wait, for {seconds:.0f} s here: see what it "
            "did meanwhile, or raise parallel.timeout if its work takes so long"
        )
    return f"{names} left the job while the others waited: its own error says why"
