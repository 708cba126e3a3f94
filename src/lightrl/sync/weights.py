"""From the sharded policy into the engine, and back to training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from lightrl.engine.base import Engine


class Lender(Protocol):
    """Something with sharded weights (`training.policy.Policy`)."""

    def lend(self) -> Iterator[tuple[str, Tensor]]: ...

    def reclaim(self) -> None: ...


@contextmanager
def weights_in_engine(policy: Lender, engine: Engine, version: int) -> Iterator[Engine]:
    """The engine holds version `version` of the policy's weights for the length of the block.

    An engine in this process borrows the policy's whole tensors, so no second copy of the model exists; they are freed
    when the block ends and training takes the memory. A collective on both ends: all ranks enter and leave together.
    """
    engine.onload()
    engine.load_weights(policy.lend(), version, share=True)
    try:
        yield engine
    finally:
        engine.offload()
        policy.reclaim()
