"""What looks at a run's steps and changes nothing in them: dumps, timelines, torch's profiler, `run.on_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightrl.config.schema import Config, LogConfig
from lightrl.distributed.mesh import World
from lightrl.observe.rollouts import ROLLOUTS_FOLDER, RolloutWriter
from lightrl.observe.timeline import Timeline, write_timeline
from lightrl.observe.timing import StageTimer
from lightrl.rewards import Scorer
from lightrl.rollout.selection import Selection
from lightrl.training.hooks import OnStep, StepInfo, call_on_step
from lightrl.types import SampleGroup

PROFILE_FOLDER = "profile"


class StepProbe:
    """One rank's, of any kind of training: torch's profiler and `run.on_step`. A step calls `begin` and `finish`."""

    def __init__(self, log: LogConfig, run_dir: Path, world: World, on_step: OnStep | None = None) -> None:
        self._log, self._run_dir, self._world, self._on_step = log, run_dir, world, on_step
        self._profiler: tuple[int, torch.profiler.profile] | None = None

    def begin(self, step: int) -> StageTimer:
        """The timer of the step's stages."""
        if _within(step, self._log.profile_steps) and self._profiler is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._world.device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = step, torch.profiler.profile(activities=kinds)
            self._profiler[1].start()
        return StageTimer()

    def finish(self, step: int, groups: Sequence[SampleGroup], metrics: dict[str, float]) -> dict[str, float]:
        """The step is done. Its metrics, with those of `run.on_step`. A collective."""
        if self._log.profile_steps is not None and step >= self._log.profile_steps[1]:
            self._end_profile(step)
        if self._on_step is None:
            return metrics
        info = StepInfo(
            step=step,
            metrics=dict(metrics),
            groups=groups,
            rank=self._world.rank,
            world_size=self._world.size,
            run_dir=self._run_dir,
        )
        return metrics | self._world.gather(call_on_step(self._on_step, info))[0]

    def close(self) -> None:
        """A profile that the run did not come to the end of is written."""
        if self._profiler is not None:
            self._end_profile(None)

    def _end_profile(self, step: int | None) -> None:
        if self._profiler is None:
            return
        first, profiler = self._profiler
        self._profiler = None
        profiler.stop()
        folder = self._run_dir / PROFILE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        last = "end" if step is None else f"{step:06d}"
        profiler.export_chrome_trace(str(folder / f"steps_{first:06d}-{last}.rank{self._world.rank}.json.gz"))


class Probe(StepProbe):
    """Of steps that sample: dumps and timelines too. Between `begin` and `finish` a step calls `collected`."""

    def __init__(
        self, config: Config, run_dir: Path, world: World, scorer: Scorer, on_step: OnStep | None = None
    ) -> None:
        super().__init__(config.log, run_dir, world, on_step)
        self._scorer = scorer
        self._timer = StageTimer()
        self._timeline: Timeline | None = None
        dumps = config.dump.rollouts
        self._writer = rollout_writer(run_dir / ROLLOUTS_FOLDER, config, world) if dumps else None

    @property
    def watch(self) -> Callable[[str, int, Sequence[int], float, float], None] | None:
        """For what samples; None outside `log.timeline_steps`."""
        return None if self._timeline is None else self._timeline.span

    def watch_any(self, what: str, group: int, samples: Sequence[int], start: float, end: float) -> None:
        """`watch` of samples that may outlive their step: drawn into the one that is under way when they are done."""
        if (watch := self.watch) is not None:
            watch(what, group, samples, start, end)

    def begin(self, step: int) -> StageTimer:
        """The timer of the step's stages. What a step that broke off had begun is forgotten."""
        super().begin(step)
        self._timeline = Timeline(self._world.rank) if _within(step, self._log.timeline_steps) else None
        self._scorer.watch = self.watch
        self._timer = StageTimer(None if self._timeline is None else self._timeline.stage)
        return self._timer

    def collected(self, step: int, groups: Sequence[SampleGroup], selection: Selection) -> None:
        """The step's groups are there, scored and not yet trained on: they are dumped."""
        if self._writer is not None:
            with self._timer("dump"):
                self._writer.write(step, groups, selection.record())

    def finish(self, step: int, groups: Sequence[SampleGroup], metrics: dict[str, float]) -> dict[str, float]:
        """The step is done, and its timeline drawn. Its metrics, with those of `run.on_step`. A collective."""
        if self._timeline is not None:
            events = [event for part in self._world.gather(self._timeline.events(groups)) for event in part]
            self._timeline = self._scorer.watch = None
            if self._world.is_main:
                write_timeline(self._run_dir, step, events)
        return super().finish(step, groups, metrics)

    def resumed(self, step: int) -> None:
        """The run goes on after `step`: what was dumped of later ones will be made again."""
        if self._writer is not None and self._world.is_main:
            self._writer.drop_after(step)


def rollout_writer(folder: Path, config: Config, world: World) -> RolloutWriter:
    """A writer whose files say what readers need of the settings."""
    about: Mapping[str, Any] = {
        "model": config.model.path,
        "tokenizer": config.model.tokenizer or config.model.path,
        "reward": config.reward.type,
        "truncated": config.rollout.truncated,
    }
    return RolloutWriter(folder, rank=world.rank, world_size=world.size, about=about)


def _within(step: int, window: tuple[int, int] | None) -> bool:
    return window is not None and window[0] <= step <= window[1]
