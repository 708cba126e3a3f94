"""The table of rules. Adding one: write a function of an `Answer` in a file here, add its line below.

Functions are named as text, so that math-verify (two seconds to import) loads only where it is used.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightrl import hooks
from lightrl.errors import UserError

BOXED = "boxed_"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A way to grade. `grade` and `check` are `module:function` within this package."""

    grade: str
    """`Answer` -> number, or dict with the number as `score`."""
    check: str | None = "answer:nonempty_text"
    """`Answer` without a response: raises ValueError if its label cannot be graded against. None: any label will do."""
    isolated: bool = False
    """May hang on an odd input: runs in a worker process that can be killed."""
    worst: float = 0.0
    """Reward of no answer at all, and of one that the rule cannot get through within its limits."""


RULES: dict[str, Rule] = {
    "math": Rule(grade="math:grade_math", check="math:check_gold", isolated=True),
    "deepscaler": Rule(grade="math:grade_deepscaler", check="math:check_gold", isolated=True),
    "dapo": Rule(grade="dapo:grade_dapo", check="dapo:check_gold", worst=-1.0),
    "f1": Rule(grade="text:grade_f1"),
    "gpqa": Rule(grade="gpqa:grade_gpqa", check="gpqa:check_label"),
    "exact": Rule(grade="text:grade_exact"),
    "number": Rule(grade="text:grade_number", check="text:check_number"),
    "random": Rule(grade="random:grade_random", check=None),
    "none": Rule(grade="answer:grade_none", check=None),
}


def find_rule(name: str) -> tuple[Rule, bool]:
    """The rule of a name, and whether it grades the last box only. Raises UserError with the nearest names."""
    bare = name.removeprefix(BOXED)
    if bare in RULES:
        return RULES[bare], bare != name
    close = difflib.get_close_matches(bare, RULES, n=2)
    if "." in name and all(part.isidentifier() for part in name.split(".")):  # as Python writes a function, or a module
        is_module = not (hooks.fault(f"{name}:_") or "").startswith("no module")
        close = [f"{name}:FUNCTION" if is_module else ":".join(name.rsplit(".", 1))]
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise UserError(
        f"no reward rule {name!r}: {hint}the rules are {', '.join(RULES)} ({BOXED}NAME grades the last box); a "
        "function of your own is written package.module:function"
    )


def fault(name: str) -> str | None:
    """Why there is no reward of this name, None if there is: a rule, or `package.module:function`. Imports neither."""
    if ":" in name:
        return hooks.fault(name)
    try:
        find_rule(name)
    except UserError as error:
        return str(error)
    return None


def function_of(name: str) -> Callable[..., Any]:
    """The function behind `module:function` of this package."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"lightrl.rewards.{module}"), function)
