"""From the sharded policy into the engine, and memory back to training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from lightrl.engine.base import Colocated, Engine, GroupLoader


class Lender(Protocol):
    """Something with sharded weights (`training.policy.Policy`)."""

    def lend(self) -> Iterator[tuple[str, Tensor]]: ...

    def stream(self) -> Iterable[Sequence[tuple[str, Tensor]]]: ...

    def reclaim(self) -> None: ...


class State(Protocol):
    """What training keeps on this rank's GPU (`distributed.offload.TrainingState`)."""

    def free_cache(self, nbytes: int) -> None: ...

    def make_room(self, nbytes: int) -> None: ...

    def come_back(self) -> None: ...


def sync_weights(
    policy: Lender, engine: Engine, version: int, state: State | None = None, *, beside: bool = False
) -> None:
    """Give the engine version `version` of the policy's weights, until `release_engine`. A collective.

    An engine in this process borrows the policy's whole tensors, so no second copy of the model exists. One in another
    process gets them layer by layer. Where it shares the GPU, it takes its weights first, then the training `state`
    leaves if both do not fit, and only then comes its KV cache: the peak is that of training or of generating.

    With `beside` the engine generates while the policy is trained: one in this process makes a copy, and nothing is
    lent.
    """
    if not isinstance(engine, GroupLoader):
        engine.onload(("weights",))
        engine.load_weights(policy.lend(), version, share=not beside)
        if beside:
            policy.reclaim()
        engine.onload(("kv_cache",))
        return
    colocated = engine if isinstance(engine, Colocated) else None
    if state is not None and colocated is not None:
        # Where others generate already, as an engine was lost. All ranks of an engine release: the state may have left
        # some of their GPUs alone.
        engine.offload(("kv_cache",))
        state.come_back()
        state.free_cache(colocated.room("weights"))
    engine.onload(("weights",))
    engine.load_groups(policy.stream(), version)
    if state is not None and colocated is not None:
        state.make_room(colocated.room("kv_cache"))
    engine.onload(("kv_cache",))


def release_engine(policy: Lender, engine: Engine, state: State | None = None) -> None:
    """The engine lets go of its memory, and what it had borrowed is freed: training takes over."""
    engine.offload()
    policy.reclaim()
    if state is not None:
        state.come_back()
