"""Errors in prompt data, and how many of them are told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lightrl.errors import UserError


class DataError(UserError):
    """Prompt data that cannot be used: one line with `file:line` and what to do."""


class BadRows:
    """Collects what is wrong with rows: the first is told in full, the others are counted."""

    def __init__(self) -> None:
        self.first: str | None = None
        self.count = 0

    def add(self, message: str) -> None:
        self.first = self.first or message
        self.count += 1

    def raise_if_any(self) -> None:
        if self.first is None:
            return
        more = self.count - 1
        raise DataError(self.first + (f" (and {more} more bad row{'s' * (more > 1)})" if more else ""))


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing when no name is close."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def one_line(error: BaseException) -> str:
    """An exception of a library as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
