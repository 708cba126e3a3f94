"""Rows of a prompt set, each with the place it came from: jsonl, parquet, a folder, or a hub dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightrl.data.errors import BadRows, DataError, nearest, one_line

JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
_SAVED_DATASET = ("state.json", "dataset_dict.json")  # written by `Dataset.save_to_disk`
_BOM = b"\xef\xbb\xbf"


def read_rows(path: str, split: str, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of `path` or `path@[a:b]` as (source, row). What is wrong with single rows goes to `bad`.

    Raises DataError when the path as a whole is unusable: missing, unreadable, empty, or an empty slice.
    """
    if not path.strip() or "\0" in path:
        raise DataError(f"data.path: {path!r} names no file: give a jsonl or parquet file, a folder or a hub dataset")
    location, rows = split_slice(path)
    file = Path(location).expanduser()
    if file.is_file() and file.suffix in JSON_LINES:
        yield from _json_lines(file, location, rows, bad)
    else:
        yield from _dataset_rows(location, file, split, rows)


def split_slice(path: str) -> tuple[str, slice]:
    """`data.jsonl@[10:-5]` -> ("data.jsonl", slice(10, -5)). An existing file of that very name wins.

    >>> split_slice("data.jsonl@[:100]")
    ('data.jsonl', slice(None, 100, None))
    """
    if "@[" not in path or Path(path).expanduser().exists():
        plain = re.fullmatch(r"(.+)(\[-?\d*:-?\d*\])", path)
        if plain is not None and not Path(path).expanduser().exists():
            raise DataError(f"{path}: no such file (data.path); rows of one are named {plain[1]}@{plain[2]}")
        return path, slice(None)
    location, _, text = path.rpartition("@[")
    match = re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*\]", text)
    if match is None or not location:
        raise DataError(f"{path}: bad slice '@[{text}': write path@[start:stop] with whole numbers, such as @[:100]")
    start, stop = (None if bound is None else int(bound) for bound in match.groups())
    return location, slice(start, stop)


def _json_lines(file: Path, name: str, rows: slice, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with file.open("rb") as stream:
            lines = [(number, line) for number, line in enumerate(stream, start=1) if line.removeprefix(_BOM).strip()]
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from error
    for number, line in _sliced(lines, rows, name):
        source = f"{name}:{number}"
        try:
            row = json.loads(line.removeprefix(_BOM).decode("utf-8"))
        except UnicodeDecodeError as error:
            bad.add(f"{source}: not UTF-8 at byte {error.start}: save the file as UTF-8")
        except json.JSONDecodeError as error:
            hint = "one JSON object a line"
            if number == 1 and line.lstrip()[:1] == b"[":
                hint = "the file looks like a JSON array: write one object a line (jq -c '.[]')"
            bad.add(f"{source}: not valid JSON: {error.msg} at column {error.colno}: {hint}")
        except RecursionError:
            bad.add(f"{source}: not valid JSON: nested too deep")
        except ValueError as error:  # JSON that Python does not take: a number of thousands of digits
            bad.add(f"{source}: not usable JSON: {one_line(error)}: write long numbers as strings")
        else:
            if isinstance(row, dict):
                yield source, row
            else:
                bad.add(f"{source}: a row must be a JSON object, found {_json_type(row)}: one object a line")


def _dataset_rows(name: str, file: Path, split: str, rows: slice) -> Iterator[tuple[str, dict[str, Any]]]:
    dataset = _load_dataset(name, file, split)
    for index in _sliced(range(len(dataset)), rows, name):
        yield f"{name}[{index}]", dataset[index]


def _load_dataset(name: str, file: Path, split: str) -> Any:
    """A `datasets.Dataset`. Code that ships with a dataset is never run."""
    if file.is_file() and file.suffix not in PARQUET:
        kinds = ", ".join(JSON_LINES + PARQUET)
        raise DataError(
            f"{name}: unknown kind of file {file.suffix!r}: data.path takes {kinds}, a folder or a hub name"
        )
    if not file.exists():
        _refuse_missing(name, file)
    import datasets

    try:
        if file.is_file():
            return datasets.load_dataset("parquet", data_files=str(file), split="train")
        if any((file / marker).is_file() for marker in _SAVED_DATASET):
            saved = datasets.load_from_disk(str(file))
            return _pick_split(saved, split, name) if isinstance(saved, datasets.DatasetDict) else saved
        if file.is_dir():
            return datasets.load_dataset(str(file), split=split)
        hub_name, _, subset = name.partition(":")
        return datasets.load_dataset(hub_name, subset or None, split=split)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises many kinds, from the network to the parser
        where = "" if file.exists() else " from the hub (there is no such file or folder here either)"
        keys = "data.path" if file.is_file() else "data.path and data.split"
        raise DataError(f"{name}: cannot be loaded{where}: {one_line(error)}: check {keys}") from error


def _pick_split(saved: Any, split: str, name: str) -> Any:
    if split not in saved:
        raise DataError(f"{name}: no split {split!r} (data.split); it has: {', '.join(saved)}{nearest(split, saved)}")
    return saved[split]


def _refuse_missing(name: str, file: Path) -> None:
    """A path that only a local file could have must exist; anything else may be a hub name."""
    local = name.startswith((".", "/", "~")) or file.suffix in JSON_LINES + PARQUET or name.count("/") > 1
    if not local:
        return
    siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
    raise DataError(f"{name}: no such file or folder (data.path){nearest(file.name, siblings)}")


def _sliced(items: Any, rows: slice, name: str) -> Any:
    if not len(items):
        raise DataError(f"{name}: no rows: it is empty, or has blank lines only")
    picked = items[rows]
    if not len(picked):
        bounds = ":".join("" if bound is None else str(bound) for bound in (rows.start, rows.stop))
        raise DataError(f"{name}@[{bounds}]: the slice is empty: there are {len(items)} rows")
    return picked


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), f"a {type(value).__name__}")
