"""Training alone, on samples that were dumped: `debug.rollouts`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lightrl.config.rundir import newest_state
from lightrl.config.schema import Config, EngineConfig
from lightrl.distributed.mesh import World, deal
from lightrl.engine.base import Completion, GenerateRequest
from lightrl.errors import UserError
from lightrl.observe.rollouts import RolloutDump
from lightrl.rollout.selection import Selection
from lightrl.types import SampleGroup


class NoEngine:
    """Stands where an engine would: it takes no weights and no memory, and cannot generate."""

    policy_version = -1

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        raise UserError("debug.rollouts: there is no engine to generate with: remove it")

    def abort(self, request_id: str | None = None) -> None:
        """Nothing is under way."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, share: bool = False) -> None:
        """They are not looked at, so none is gathered."""

    def flush_cache(self) -> None:
        """There is none."""

    def offload(self, tags: tuple[str, ...] = ()) -> None:
        """It has no memory."""

    def onload(self, tags: tuple[str, ...] = ()) -> None:
        """It takes none."""

    def close(self) -> None:
        """Nothing to free."""


def without_engine(config: Any) -> Any:
    """The settings in force: with `debug.rollouts` those of no engine, and no evaluation, which would need one."""
    if not isinstance(config, Config) or config.debug.rollouts is None:
        return config
    return replace(config, engine=EngineConfig(), eval=replace(config.eval, every=0))


@dataclass(frozen=True, kw_only=True)
class DumpedRollouts:
    """The dump in the place of engine and rewards."""

    dump: RolloutDump
    vocab_size: int

    @classmethod
    def open(cls, config: Config, vocab_size: int) -> DumpedRollouts | None:
        """None without `debug.rollouts`. UserError where a step that the run needs is not there whole."""
        if config.debug.rollouts is None:
            return None
        dump = RolloutDump(Path(config.debug.rollouts))
        newest = newest_state(config.run.dir) if config.run.resume else None
        first = 1 if newest is None else int(newest[1].get("step", 0)) + 1
        steps = list(dump.headers)
        for step in range(first, config.run.steps + 1):
            if step in dump.headers:
                continue
            if step in dump.faults:
                raise UserError(f"debug.rollouts: step {step} is not whole: {dump.faults[step]}")
            has = f"steps {steps[0]} to {steps[-1]}" if steps else "no whole step"
            raise UserError(
                f"debug.rollouts: {dump.where} has {has}, and no step {step}: set run.steps to the last one, or replay "
                "into a run.dir whose checkpoint is of the step before the first"
            )
        return cls(dump=dump, vocab_size=vocab_size)

    def groups(self, step: int, selection: Selection, world: World) -> list[SampleGroup]:
        """This rank's share of the step's groups; `selection` is brought to where the dumped run's was.

        Which rank has a group does not matter to the weights: training deals them out anew. UserError where prompts
        come from another place in the data than they did, or others of another model.
        """
        header = self.dump.headers[step]
        before = header["selection"]
        if before:
            selection.replay(before, f"debug.rollouts: step {step}")
        mine = set(deal(world, self.dump.numbers(step)))
        groups = list(self.dump.groups(step, mine.__contains__))
        for sample in (s for group in groups for s in group.samples):
            if sample.tokens and max(sample.tokens) >= self.vocab_size:
                raise UserError(
                    f"debug.rollouts: step {step}: token {max(sample.tokens)} is none of the model's "
                    f"{self.vocab_size}: the samples are of another model ({header.get('model')})"
                )
        return groups


__all__ = ["DumpedRollouts", "NoEngine", "without_engine"]
