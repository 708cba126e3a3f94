"""Functions of the user's own around a step, given to the `Trainer` or named in the config."""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl import hooks
from lightrl.config.schema import Config
from lightrl.data.mapping import RowMap
from lightrl.errors import UserError
from lightrl.rollout.filters import Filter, load_filter
from lightrl.rollout.hooked import Generate, load_generate
from lightrl.types import SampleGroup


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """What an `on_step` hook is given, on every rank."""

    step: int
    """The one that is done, from 1 on."""
    metrics: Mapping[str, float]
    """The step's, equal on all ranks."""
    groups: Sequence[SampleGroup]
    """This rank's, with rewards and advantages; none where rows are given (`lightrl sft`, `dpo`, `rm`)."""
    rank: int
    world_size: int
    run_dir: Path


OnStep = Callable[[StepInfo], Mapping[str, float] | None]
"""An `on_step` hook. Numbers that it returns on the first rank are logged with the step's metrics."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions in the place of those that the config names. docs/inspect.md says what each is given and returns."""

    generate: Generate | None = None
    """In place of `rollout.generate`."""
    filter: Callable[[SampleGroup], Any] | None = None
    """In place of `rollout.filter`."""
    data_map: RowMap | None = None
    """In place of `data.map`."""
    on_step: OnStep | None = None
    """In place of `run.on_step`."""


@dataclass(frozen=True, kw_only=True)
class LoadedHooks:
    """As they are called. `data.map` is loaded by what reads the data."""

    generate: Generate | None
    filter: Filter | None
    row_map: RowMap | None
    on_step: OnStep | None


def load_hooks(config: Config, given: Hooks | None) -> LoadedHooks:
    """UserError for a function that cannot be loaded, or called as it will be."""
    given = given or Hooks()
    return LoadedHooks(
        generate=load_generate(config.rollout.generate, given.generate),
        filter=load_filter(config.rollout.filter, given.filter),
        row_map=given.data_map,
        on_step=load_on_step(config.run.on_step, given.on_step),
    )


def load_on_step(name: str, given: OnStep | None = None) -> OnStep | None:
    """What `run.on_step` names, or in its place what is `given`. UserError if it cannot be called as it will be."""
    function: Any = given
    if given is None and name != "none":
        function = hooks.load(name, "run.on_step")
    if function is not None and (fault := on_step_fault(function)) is not None:
        raise UserError(f"run.on_step: {fault}")
    return function


def on_step_fault(function: Callable[..., Any]) -> str | None:
    """Why a function cannot be an `on_step` hook, as far as its signature tells; else None."""
    if inspect.iscoroutinefunction(function):
        return "it is called between two steps, and nobody awaits it: write `def`, not `async def`"
    return hooks.call_fault(function)


def metrics_fault(returned: Any) -> str | None:
    """What is wrong with what an `on_step` hook returned; None if it can be logged."""
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        return f"it returned a {type(returned).__name__}: return a dict of numbers, or nothing"
    for name, value in returned.items():
        if not isinstance(name, str) or not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
            return f"it returned {name!r}: {value!r}: metrics are finite numbers by name"
    return None


def call_on_step(function: OnStep, info: StepInfo) -> dict[str, float]:
    """Its metrics. What it raises is a UserError with its traceback as a note."""
    try:
        returned = function(info)
    except Exception as error:  # whatever the user's function raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        failure = UserError(f"run.on_step: step {info.step}: {reason}")
        failure.add_note("".join(traceback.format_exception(error)).rstrip())
        raise failure from error
    if (fault := metrics_fault(returned)) is not None:
        raise UserError(f"run.on_step: step {info.step}: {fault}")
    return {name: float(value) for name, value in (returned or {}).items()}
