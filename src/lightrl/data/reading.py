"""All rows of `data.path`, whatever they are made into: prompts, conversations, pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightrl.config.schema import DataConfig
from lightrl.data.errors import BadRows, DataError
from lightrl.data.mapping import Mapper, RowMap
from lightrl.data.render import RowError, RowReader
from lightrl.data.rows import read_rows
from lightrl.data.turns import TurnError

T = TypeVar("T")


def read_all(
    data: DataConfig,
    rows: RowReader,
    read: Callable[[str, Mapping[str, Any]], T],
    row_map: RowMap | None = None,
) -> tuple[list[T], int]:
    """What `read(source, row)` makes of each row, in order; and how many rows `data.map` left out.

    `rows` is what `read` reads fields by. `row_map` stands in for `data.map`. Raises DataError with `file:line`, for
    the first bad row and the number of others, and where no row is left or has a field that is named.
    """
    mapped, bad = Mapper(data.map, row_map), BadRows()
    paths = [data.path] if isinstance(data.path, str) else list(data.path)
    if not any(paths):
        raise DataError("data.path is not set: name a jsonl or parquet file, a folder or a hub dataset")
    found: list[T] = []
    for path in paths:
        for source, row in mapped(read_rows(path, data.split, bad), bad):
            try:
                found.append(read(source, row))
            except (RowError, TurnError) as error:
                bad.add(f"{source}: {error}")
    bad.raise_if_any()
    mapped.check_any(", ".join(paths))
    rows.check_optional_keys(", ".join(paths))
    return found, mapped.left_out
