"""From the sharded policy into the engine, and memory back to training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from lightrl.engine.base import Engine, GroupLoader


class Lender(Protocol):
    """Something with sharded weights (`training.policy.Policy`)."""

    def lend(self) -> Iterator[tuple[str, Tensor]]: ...

    def stream(self) -> Iterable[Sequence[tuple[str, Tensor]]]: ...

    def reclaim(self) -> None: ...


def sync_weights(policy: Lender, engine: Engine, version: int) -> None:
    """Give the engine version `version` of the policy's weights, until `release_engine`. A collective.

    An engine in this process borrows the policy's whole tensors, so no second copy of the model exists. One in another
    process gets them layer by layer, before it takes memory for its KV cache: whole copies are never held beside it.
    """
    engine.onload(("weights",))
    if isinstance(engine, GroupLoader):
        engine.load_groups(policy.stream(), version)
    else:
        engine.load_weights(policy.lend(), version, share=True)
    engine.onload(("kv_cache",))


def release_engine(policy: Lender, engine: Engine) -> None:
    """The engine lets go of its memory, and what it had borrowed is freed: training takes over."""
    engine.offload()
    policy.reclaim()
