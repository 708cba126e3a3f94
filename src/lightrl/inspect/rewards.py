"""A dump scored again by another reward: `lightrl replay-reward`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightrl.config.schema import RewardConfig
from lightrl.errors import UserError
from lightrl.inspect.show import preview
from lightrl.observe.rollouts import RolloutDump, RolloutWriter
from lightrl.rewards import Scorer
from lightrl.rollout.collect import apply_truncation, run_async
from lightrl.types import Sample, SampleGroup, Status

_LONGEST_LABEL, _LEAST_RESPONSE = 24, 12  # columns
_OF_SCORING = ("reward", "missing_think", "grading_limit")  # metadata that the old reward left
_NOT_ABOUT = ("lightrl_rollouts", "step", "rank", "world_size", "groups", "selection")


@dataclass
class Comparison:
    """Old and new rewards."""

    old: list[float | None] = field(default_factory=list)
    new: list[float | None] = field(default_factory=list)
    changed: list[tuple[int, Sample, Sample]] = field(default_factory=list)
    """(step, before, after), the largest changes first, no more than asked for."""
    num_changed: int = 0

    def add(self, step: int, before: Sample, after: Sample) -> None:
        self.old.append(before.reward)
        self.new.append(after.reward)
        if before.reward != after.reward:
            self.num_changed += 1
            self.changed.append((step, before, after))

    def keep(self, limit: int) -> None:
        """Let go of all but the largest changes; where one of the two failed first."""
        self.changed = sorted(self.changed, key=_change, reverse=True)[:limit]


def replay_reward(
    where: Path, config: RewardConfig, *, step: int | None, limit: int, out: Path | None, console: Console
) -> Comparison:
    """Score every sample of the dump (or of one step) by `config`, compare, and print. Samples whose generation failed
    stay as they are. With `out`, the dump with the new rewards is written there, for `debug.rollouts`.
    """
    dump = RolloutDump(where)
    if out is not None and out.exists() and any(out.iterdir()):
        raise UserError(f"replay-reward: --out: {out} is not empty; name a new folder")
    if step is not None and step not in dump.headers:
        raise UserError(f"{where}: no step {step}; it has: {', '.join(map(str, list(dump.headers)[:12]))}")
    comparison, scorer = Comparison(), Scorer(config)
    try:
        for number in dump.headers if step is None else (step,):
            header = dump.headers[number]
            groups = [_rescored(group, scorer, header, number, comparison) for group in dump.groups(number)]
            comparison.keep(limit)
            if out is not None:
                about = {k: v for k, v in header.items() if k not in _NOT_ABOUT} | {"reward": config.type}
                RolloutWriter(out, about=about).write(number, groups, header["selection"])
        stats = scorer.take_stats()
    finally:
        scorer.close()
    _print(comparison, console)
    if stats.failures:
        console.print(Text(f"{stats.failures} of {stats.total} calls failed; the first: {stats.first_failure}"))
        if stats.first_traceback:
            console.print(Text(stats.first_traceback))
    return comparison


def _rescored(
    group: SampleGroup, scorer: Scorer, header: dict[str, Any], step: int, comparison: Comparison
) -> SampleGroup:
    made = replace(group, samples=[_unscored(sample) for sample in group.samples])
    run_async(scorer.score([s for s in made.samples if s.status is not Status.FAILED]))
    if header.get("truncated") == "zero_reward":
        apply_truncation([made], "zero_reward")
    for before, after in zip(group.samples, made.samples, strict=True):
        comparison.add(step, before, after)
    return made


def _unscored(sample: Sample) -> Sample:
    """As before its reward. Where that failed, how the answer had ended is lost: it counts as complete."""
    metadata = {key: value for key, value in sample.metadata.items() if key not in _OF_SCORING}
    status = sample.status
    if status is Status.FAILED and str(metadata.get("failure", "")).startswith("reward: "):
        del metadata["failure"]
        status = Status.COMPLETED
    return replace(sample, reward=None, advantage=None, metadata=metadata, status=status)


def _change(entry: tuple[int, Sample, Sample]) -> float:
    _, before, after = entry
    if before.reward is None or after.reward is None:
        return float("inf")
    return abs(after.reward - before.reward)


def _print(comparison: Comparison, console: Console) -> None:
    if comparison.changed:
        console.print(_changes(comparison, console.width), crop=False)
    summary = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "samples", "scored", "mean", "±std", "lowest", "highest"):
        summary.add_column(name, justify="right")
    for name, rewards in (("old", comparison.old), ("new", comparison.new)):
        summary.add_row(name, *_summary(rewards))
    console.print(summary)
    console.print(Text(f"{comparison.num_changed} of {len(comparison.old)} rewards changed"))


def _changes(comparison: Comparison, width: int) -> Table:
    """A line a change. What gives way in a narrow window is the response, and not what it was given."""
    rows = [
        (str(step), f"{old.group_index}/{old.index}", _shown(old.reward), _shown(new.reward), _label(old), old.response)
        for step, old, new in comparison.changed
    ]
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(("step", "sample", "old", "new", "label")):
        widest = max([len(name), *(cell_len(row[i]) for row in rows)])
        grid.add_column(name, justify="left" if name == "label" else "right", no_wrap=True, min_width=widest)
        width -= widest + 2
    grid.add_column("response", no_wrap=True, min_width=_LEAST_RESPONSE)
    for row in rows:
        response = Text(preview(row[-1]))
        response.truncate(max(width, _LEAST_RESPONSE), overflow="ellipsis")
        grid.add_row(*(Text(cell) for cell in row[:-1]), response)
    return grid


def _label(sample: Sample) -> str:
    label = Text(preview(str(sample.prompt.label)))
    label.truncate(_LONGEST_LABEL, overflow="ellipsis")
    return label.plain


def _summary(rewards: Iterable[float | None]) -> list[str]:
    every = list(rewards)
    scored = [reward for reward in every if reward is not None]
    if not scored:
        return [str(len(every)), "0", "–", "–", "–", "–"]
    numbers = (statistics.fmean(scored), statistics.pstdev(scored), min(scored), max(scored))
    return [str(len(every)), str(len(scored)), *(f"{number:.4g}" for number in numbers)]


def _shown(reward: float | None) -> str:
    return "failed" if reward is None else f"{reward:.4g}"
