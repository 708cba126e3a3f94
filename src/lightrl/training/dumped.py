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
from lightrl.types import Sample, SampleGroup


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
    needs: tuple[tuple[str, str, int], ...] = ()
    """(key, field of a sample that it reads, least entries a token) of what only an engine that was asked has given."""

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
        found = cls(dump=dump, vocab_size=vocab_size, needs=_needs(config))
        if first <= config.run.steps:
            begin = dump.numbers(first)[:1]
            for group in dump.groups(first, begin.__contains__):
                found._check(first, group)
        return found

    def groups(self, step: int, selection: Selection, world: World) -> list[SampleGroup]:
        """This rank's share of the step's groups; `selection` is brought to where the dumped run's was.

        Which rank has a group does not matter to the weights: training deals them out anew. UserError where prompts
        come from another place in the data than they did, or others of another model.
        """
        header = self.dump.headers[step]
        before = header.get("selection")
        if before:
            selection.replay(before, f"debug.rollouts: step {step}")
        mine = set(deal(world, self.dump.numbers(step)))
        groups = list(self.dump.groups(step, mine.__contains__))
        for group in groups:
            self._check(step, group)
        return groups

    def _check(self, step: int, group: SampleGroup) -> None:
        """UserError for samples that the model, or the settings, cannot train on."""
        for sample in group.samples:
            where = f"debug.rollouts: step {step}: sample {sample.group_index}/{sample.index}"
            if (fault := _fault(sample)) is not None:
                raise UserError(f"{where}: {fault}: the file was changed; dump the run again")
            if sample.tokens and max(sample.tokens) >= self.vocab_size:
                raise UserError(
                    f"{where}: token {max(sample.tokens)} is none of the model's {self.vocab_size}: the samples are of "
                    f"another model ({self.dump.headers[step].get('model')})"
                )
            for key, name, least in self.needs if sample.response_length and sample in group.scored else ():
                record = getattr(sample, name)
                if record is None or len(record[0]) < least:
                    has = "none" if record is None else f"{len(record[0])} a token"
                    wants = f" of {least}" if least else ""
                    raise UserError(
                        f"{where}: {key} reads {name}{wants}, and it has {has}: dump a run with that key set"
                    )


def _needs(config: Config) -> tuple[tuple[str, str, int], ...]:
    correction, student_k = config.correction, config.teacher.student_k
    found = []
    if correction.routing_replay == "rollout":
        found.append(("correction.routing_replay", "rollout_routing", 0))
    if correction.score_centering_top_k:
        found.append(("correction.score_centering_top_k", "rollout_top_ids", correction.score_centering_top_k))
    if student_k:
        found.append(("teacher.top_k_from", "rollout_top_ids", student_k))
    return tuple(found)


def _fault(sample: Sample) -> str | None:
    """What is no sample, though it is JSON."""
    if not all(type(token) is int and token >= 0 for token in sample.tokens):
        return "tokens are not all ids, whole numbers from 0 on"
    if type(sample.response_length) is not int or not 0 <= sample.response_length <= len(sample.tokens):
        return f"response_length is {sample.response_length} of {len(sample.tokens)} tokens"
    if not all(value in (0, 1) for value in sample.mask):
        return "loss_mask holds other values than 0 and 1"
    for logprob, counts in zip(sample.rollout_logprobs or (), sample.mask, strict=False):
        if not isinstance(logprob, float | int) and (counts or logprob is not None):
            return f"rollout_logprobs holds {logprob!r}"
    if sample.reward is not None and not isinstance(sample.reward, float | int):
        return f"reward is {sample.reward!r}, not a number"
    return None
