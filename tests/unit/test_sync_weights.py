"""Who has the GPU when: the order of a step with an engine in another process, and a state that really left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor, nn

from lightrl.distributed.mesh import close_world
from lightrl.distributed.offload import Offloader, TrainingState
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training.trainer import Trainer


class Elsewhere:
    """The embedded engine behind the interface of one in another process; writes down what is asked of it."""

    def __init__(self, inner: Any, model: nn.Module) -> None:
        self._inner, self._model = inner, model
        self.events: list[str] = []
        self.taken: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_groups(self, groups: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> None:
        assert "weights" in self.taken
        self.note("load")
        self._inner.load_weights([(n, t.clone()) for group in groups for n, t in group], version)

    async def generate(self, request: Any) -> Any:
        assert self.taken == {"weights", "kv_cache"}
        self.note("generate")
        return await self._inner.generate(request)

    def room(self, tag: str) -> int:
        return 0 if tag in self.taken else {"weights": 10, "kv_cache": 20}[tag]

    def offload(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        if not self.taken & set(tags):
            return
        self.taken -= set(tags)
        self.note("release " + "+".join(tags))
        if "weights" in tags:
            self._inner.offload()

    def onload(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        self.taken |= set(tags)
        self.note("take " + "+".join(tags))
        self._inner.onload(tags)

    def note(self, what: str) -> None:
        there = "state here" if next(self._model.parameters()).to_local().untyped_storage().nbytes() else "state away"
        if not self.events or self.events[-1] != f"{what}, {there}":
            self.events.append(f"{what}, {there}")


STEP = [
    "take weights, state here",
    "load, state here",
    "take kv_cache, state away",
    "generate, state away",
    "release weights+kv_cache, state away",
]


def run(folder: Path, mode: str | None) -> tuple[list[str], list[Tensor]]:
    trainer = Trainer(tiny_run.make_run(folder, algorithm={"kl_coef": 0.01}))
    try:
        engine = Elsewhere(trainer.engine, trainer.policy.module)
        trainer.rollouts.engine = engine
        if mode is not None:
            assert trainer.reference is not None
            modules = nn.ModuleList([trainer.policy.module, trainer.reference.module])
            trainer.rollouts.state = TrainingState(Offloader(modules, trainer.optimizer, on_cpu=True), mode)  # type: ignore[arg-type]
        for _ in range(3):
            trainer.step(trainer.source.next(trainer.config.rollout.prompts_per_step))
        assert not trainer.rollouts.state.is_offloaded
        return engine.events, [p.to_local().detach().clone() for p in trainer.policy.parameters()]
    finally:
        trainer.close()
        close_world()


def test_order_of_a_step_and_the_same_weights_to_the_last_bit(tmp_path: Path) -> None:
    events, weights = run(tmp_path, "always")
    assert events == STEP * 3
    stayed, expected = run(tmp_path, None)
    assert stayed == [event.replace("away", "here") for event in STEP] * 3
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert run(tmp_path, "auto")[0] == stayed  # on a CPU nothing is short


def test_a_sync_while_others_generate_brings_the_state_back_first(tmp_path: Path) -> None:
    trainer = Trainer(tiny_run.make_run(tmp_path))
    try:
        engine = Elsewhere(trainer.engine, trainer.policy.module)
        state = TrainingState(Offloader(trainer.policy.module, trainer.optimizer, on_cpu=True), "always")
        sync_weights(trainer.policy, engine, 0, state)
        engine.events.clear()
        sync_weights(trainer.policy, engine, 0, state)
        assert engine.events == ["release kv_cache, state away", "take weights, state here", *STEP[1:3]]
        release_engine(trainer.policy, engine, state)
        assert not state.is_offloaded
        state.close()
    finally:
        trainer.close()
        close_world()


def test_export_after_a_rollout_that_was_interrupted(tmp_path: Path) -> None:
    """The engine has the GPU then, and the training state is away."""
    trainer = Trainer(tiny_run.make_run(tmp_path))
    try:
        trainer.rollouts.engine = Elsewhere(trainer.engine, trainer.policy.module)
        trainer.rollouts.state = TrainingState(
            Offloader(trainer.policy.module, trainer.optimizer, on_cpu=True), "always"
        )
        before = [p.to_local().detach().clone() for p in trainer.policy.parameters()]
        trainer.collect = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            trainer.step(trainer.source.next(3))
        assert trainer.rollouts.state.is_offloaded
        trainer.export(tmp_path / "exported")
        assert not trainer.rollouts.state.is_offloaded
        assert all(torch.equal(a, b.to_local()) for a, b in zip(before, trainer.policy.parameters(), strict=True))
    finally:
        trainer.close()
        close_world()


def test_ranks_of_one_engine_ask_the_same_of_it_wherever_their_states_are(tmp_path: Path) -> None:
    """Releasing is done together by the ranks that share an engine; with `auto` the state of one may have stayed."""
    asked = []
    for mode in ("always", "never"):
        trainer = Trainer(tiny_run.make_run(tmp_path))
        engine = Elsewhere(trainer.engine, trainer.policy.module)
        state = TrainingState(Offloader(trainer.policy.module, trainer.optimizer, on_cpu=True), mode)
        try:
            for _ in range(2):
                sync_weights(trainer.policy, engine, 0, state)
            asked.append([event.split(",")[0] for event in engine.events])
        finally:
            state.close()
            trainer.close()
            close_world()
    assert asked[0] == asked[1]


@pytest.mark.parametrize("text", ["sometimes", "true"])
def test_modes(text: str) -> None:
    from lightrl.config.schema import ParallelConfig

    with pytest.raises(ValueError, match="offload"):
        ParallelConfig(offload=text)  # type: ignore[arg-type]
