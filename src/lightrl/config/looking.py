"""The sections `[dump]` and `[debug]`, and the rules of what looks into a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT

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
_URL = r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[^\s@]*)?"


def looking_problems(config: Config) -> list[tuple[str, str]]:
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
    return problems + _of_evaluators(config)


def _of_evaluators(config: Config) -> list[tuple[str, str]]:
    spec = config.eval
    if spec.url is None:
        unused = [name for name in ("url_every", "url_api_key_env") if getattr(spec, name)]
        return [(f"eval.{name}", "only used with eval.url: set it, or drop this") for name in unused]
    problems = []
    if re.fullmatch(_URL, spec.url) is None:
        shown = re.sub(r"//.*@", "//…@", spec.url)
        text = f"{shown!r} is not of the form http://HOST:PORT/PATH (keys: eval.url_api_key_env)"
        problems.append(("eval.url", text))
    if spec.url_every == 0:
        problems.append(("eval.url", "it is never asked: set eval.url_every"))
    return problems


def _within(place: str, folder: str) -> bool:
    """Whether `place` is the folder, or its `rollouts`, or a file in there."""
    inner, outer = Path(place).expanduser().resolve(), Path(folder).expanduser().resolve()
    return inner == outer or outer / "rollouts" in (inner, inner.parent)
