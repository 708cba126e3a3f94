"""What a rule sees of a sample. No torch here: rules also run in worker processes that start quickly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response and what it is graded against."""

    response: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    status: str = "completed"
    """How generation ended, a value of `lightrl.types.Status`."""
    boxed: bool = False
    """`response` is what stood in the last box (`boxed_NAME`): the rule takes it as the answer itself."""
    key: str = ""
    """Names the sample within the run, for rules that draw lots."""


def text_of(label: Any) -> str:
    """A label as stripped text. Whole floats lose their `.0`: tables often hold integers as floats.

    Raises ValueError for a label that is neither text nor a number.
    """
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        kind = "missing" if label is None else f"a {type(label).__name__}"
        raise ValueError(f"the label is {kind}, not a string or a number")
    if isinstance(label, float) and not math.isfinite(label):
        raise ValueError(f"the label is {label}, as tables write a missing one: not a string or a number")
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).strip()


def nonempty_text(answer: Answer) -> None:
    """Check of rules that compare with any text."""
    if not text_of(answer.label):
        raise ValueError("the label is empty")


def grade_none(_: Answer) -> float:
    """The rule `none`: 0 for everything, where no reward is trained on."""
    return 0.0
