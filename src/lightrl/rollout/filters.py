"""Which groups are worth training on: `rollout.filter`."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import stdev
from typing import Any

from lightrl import hooks
from lightrl.errors import UserError
from lightrl.types import SampleGroup

SMALLEST_STD = 1e-6
"""Rewards that differ by less are equal: rounding is no signal."""

Filter = Callable[[SampleGroup], tuple[bool, str]]
"""A scored group -> (whether it is kept, the reason if not, which names a metric)."""


def load_filter(name: str, given: Callable[[SampleGroup], Any] | None = None) -> Filter | None:
    """What `rollout.filter` names, or the function given in its place; None for `none`.

    UserError for a function that cannot be loaded or called.
    """
    if given is not None:
        if (fault := hooks.call_fault(given)) is not None:
            raise UserError(f"rollout.filter: {fault}")
        return lambda group: verdict_of(given(group), getattr(given, "__name__", "the function"))
    if name == "none":
        return None
    if name == "nonzero_std":
        return nonzero_std
    function = hooks.load(name, "rollout.filter")
    return lambda group: verdict_of(hooks.call(function, group, name, "rollout.filter"), name)


def nonzero_std(group: SampleGroup) -> tuple[bool, str]:
    """Keeps groups whose rewards differ, of several agents those of any one: in the others every advantage is 0.

    >>> from lightrl.types import Prompt, Sample
    >>> prompt = Prompt(index=0, tokens=[1], text="")
    >>> def group(*rewards):
    ...     return SampleGroup(prompt=prompt, group_index=0, samples=[
    ...         Sample(prompt=prompt, group_index=0, index=i, tokens=[1, 2], response_length=1, reward=reward)
    ...         for i, reward in enumerate(rewards)
    ...     ])
    >>> nonzero_std(group(0.0, 1.0)), nonzero_std(group(1.0, 1.0))
    ((True, ''), (False, 'zero_std'))
    """
    parts = [[float(s.reward) for s in part if s.reward is not None] for part in group.compared]
    deviations = [stdev(rewards) for rewards in parts if len(rewards) > 1]
    if not deviations:
        return False, "failed"
    return (True, "") if max(deviations) > SMALLEST_STD else (False, "zero_std")


def verdict_of(answer: Any, name: str) -> tuple[bool, str]:
    """What a function of the user's own returned: a bool (numpy's and torch's too), or (bool, reason)."""
    keep, reason = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "other")
    if keep is None or isinstance(keep, tuple | list | str):
        raise UserError(f"rollout.filter = {name!r}: it returned {answer!r}: return a bool, or (bool, reason)")
    return bool(keep), re.sub(r"[^\w.-]+", "_", str(reason or "other"))[:60]
