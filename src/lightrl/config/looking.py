"""The sections `[dump]` and `[debug]`, and the rules of what looks into a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Faults

if TYPE_CHECKING:
    from lightrl.config.schema import Config


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DumpConfig:
    """What a run writes down for later (docs/inspect.md)."""

    rollouts: bool = False
    """Write every training sample to `dir/rollouts/`, exactly as training gets it, before the step's updates:
    `lightrl inspect`, `lightrl replay-reward` and `debug.rollouts` read it. About 13 bytes a response token."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DebugConfig:
    """Running a part of a step alone (docs/inspect.md)."""

    rollouts: str | None = None
    """Train on the samples of this dump (a run's folder, or its `rollouts`): no engine is started, nothing is
    generated, scored or evaluated. With the dumped run's settings and ranks, its weights come out bit for bit."""


_HOOKS = ("run.on_step", "data.map", "rollout.generate")


def of_looking(config: Config) -> Faults:
    """(key, what is wrong and what to do)."""
    problems = []
    for key in _HOOKS:
        section, name = key.split(".")
        if (value := getattr(getattr(config, section), name)) != "none" and ":" not in value:
            problems.append((key, f"{value!r} names no function: write package.module:function, or 'none'"))
    for i, spec in enumerate(config.eval.sets):
        if spec.map not in (None, "none") and ":" not in str(spec.map):
            problems.append((f"eval.sets.{i}.map", f"{spec.map!r} names no function: write package.module:function"))
    for name in ("profile_steps", "timeline_steps"):
        if (window := getattr(config.log, name)) is not None and window[0] > window[1]:
            problems.append((f"log.{name}", f"begins with step {window[0]}, after its end: exchange the two"))
    if config.debug.rollouts is not None and _within(config.debug.rollouts, config.run.dir):
        text = "holds the rollouts of debug.rollouts: name another folder for this run"
        problems.append(("run.dir", f"{config.run.dir} {text}"))
    return problems


def _within(place: str, folder: str) -> bool:
    """Whether `place` is the folder, or its `rollouts`, or a file in there."""
    inner, outer = Path(place).expanduser().resolve(), Path(folder).expanduser().resolve()
    return inner == outer or outer / "rollouts" in (inner, inner.parent)
