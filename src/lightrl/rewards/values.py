"""What a reward function returned, as a number and extras."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.types import Sample

LARGEST = 1e18  # its square, summed over a group, is still a float32


class BadReward(ValueError):
    """A reward function returned something that is not a reward."""


class Guard:
    """What training takes of a sample, as it was before a function of the user's saw it."""

    _NAMES = ("tokens", "response_length", "loss_mask", "rollout_logprobs", "group_index", "index")

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        found = {name: getattr(sample, name) for name in self._NAMES}
        self._before = {name: list(v) if isinstance(v, list) else v for name, v in found.items()}

    def restore(self) -> str | None:
        """Put back what was changed; the name of the first such field."""
        changed = [name for name, value in self._before.items() if _differs(value, getattr(self._sample, name))]
        for name in changed:
            setattr(self._sample, name, self._before[name])
        if not isinstance(self._sample.metadata, dict):
            self._sample.metadata = {}
            changed.append("metadata")
        return changed[0] if changed else None

    def check(self) -> None:
        """As `restore`; BadReward where there was something: a reward of another answer than is trained."""
        if (name := self.restore()) is not None:
            raise BadReward(f"the function changed sample.{name}: return the reward, and leave the sample alone")


def _differs(before: Any, now: Any) -> bool:
    return bool(now != before) if isinstance(before, list | int) and type(now) is type(before) else now is not before


def reward_of(value: Any, key: str | None) -> tuple[float, dict[str, Any]]:
    """(number, the other entries of a dict). Without `key`, a dict's number is its `score`. Raises BadReward."""
    if not isinstance(value, Mapping):
        return _number(value, "the reward"), {}
    name = key if key is not None else "score"
    if name not in value:
        has = ", ".join(map(repr, value)) or "nothing"
        raise BadReward(f"the reward has no entry {name!r}, only {has}: set reward.key to the one to train on")
    return _number(value[name], f"the reward's {name!r}"), {str(k): v for k, v in value.items() if k != name}


def list_of(value: Any, length: int) -> list[Any]:
    """The results of a batched function, one a sample. Raises BadReward, also when the count is wrong."""
    if hasattr(value, "tolist"):  # numpy, torch
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadReward(f"a batched reward function must return a list, not {_describe(value)}")
    if len(value) != length:
        raise BadReward(f"the reward function returned {len(value)} results for {length} samples")
    return list(value)


def _number(value: Any, what: str) -> float:
    if not isinstance(value, str | bytes) and hasattr(value, "item") and getattr(value, "size", None) is not None:
        with contextlib.suppress(ValueError, RuntimeError):  # more than one element: refused below
            value = value.item()  # numpy and torch scalars
    if not isinstance(value, numbers.Real):  # bool is one
        raise BadReward(f"{what} is {_describe(value)}, not a number")
    return checked(float(value), what)


def checked(number: float, what: str) -> float:
    """A number that training can take as a reward, whoever gave it. Raises BadReward."""
    if not math.isfinite(number):
        raise BadReward(f"{what} is {number}, not a finite number")
    if abs(number) > LARGEST:
        raise BadReward(f"{what} is {number:g}: beyond {LARGEST:g} a group's deviation overflows")
    return number


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    return f"a {type(value).__name__} ({str(value)[:60]!r})" if isinstance(value, str) else f"a {type(value).__name__}"
