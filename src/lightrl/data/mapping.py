"""A function of the user's own over the rows of a prompt set: `data.map`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lightrl import hooks
from lightrl.data.errors import BadRows, DataError, one_line

RowMap = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""A row as it was read -> the row to use, or None to leave it out. The same row must always give the same."""


class Mapper:
    """Applies `data.map`. `left_out` counts the rows for which it returned None."""

    def __init__(self, name: str, given: RowMap | None = None) -> None:
        self.left_out = 0
        self._function: RowMap | None = given
        if given is None and name != "none":
            self._function = hooks.load(name, "data.map")
        elif given is not None and (fault := hooks.call_fault(given)) is not None:
            raise DataError(f"data.map: {fault}")
        self._used = 0

    def __call__(
        self, rows: Iterable[tuple[str, dict[str, Any]]], bad: BadRows
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The (source, row) to use. The first row on which the function raises ends it, with its traceback."""
        for source, row in rows:
            if self._function is None:
                yield source, row
                continue
            try:
                made = self._function(dict(row))
            except Exception as error:  # whatever the user's function raises
                failure = DataError(f"{source}: data.map raised {one_line(error)}: correct the function, or the row")
                failure.add_note("".join(traceback.format_exception(error)).rstrip())
                raise failure from error
            if made is None:
                self.left_out += 1
            elif (fault := row_fault(made)) is not None:
                bad.add(f"{source}: data.map {fault}")
            else:
                self._used += 1
                yield source, dict(made)

    def check_any(self, path: str) -> None:
        """DataError when the function left out every row."""
        if self.left_out and not self._used:
            raise DataError(f"{path}: data.map left out all {self.left_out} rows: return a dict for those to use")


def row_fault(made: Any) -> str | None:
    """What is wrong with what a `data.map` function returned for a row; None if it can be used."""
    if not isinstance(made, Mapping):
        return f"returned a {type(made).__name__}: return a dict, or None to leave the row out"
    names = [name for name in made if not isinstance(name, str)]
    if names:
        return f"returned a row with a key that is no string: {names[0]!r}"
    for name, value in made.items():
        try:
            json.dumps(value, default=_plain)
        except (TypeError, ValueError, RecursionError):
            return f"returned {name!r} as a {type(value).__name__}, which no file could hold: return plain data"
    return None


def _plain(value: Any) -> Any:
    if hasattr(value, "isoformat"):  # dates, which parquet files have
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)
