"""JSON lines that survive a kill: values made JSON-safe, files replaced whole, torn lines passed over."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

_MAX_DEPTH = 20


def json_safe(value: Any, _depth: int = 0) -> Any:
    """The value as JSON can hold it: tensors and arrays as lists, NaN and infinities as null, the unknown as text."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if _depth >= _MAX_DEPTH:  # also ends self-containing lists
        return "…"
    if isinstance(value, dict):
        return {str(k): json_safe(v, _depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v, _depth + 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return [json_safe(v, _depth + 1) for v in sorted(value, key=repr)]
    if hasattr(value, "tolist"):  # tensors, numpy arrays and scalars
        return json_safe(value.tolist(), _depth + 1)
    return str(value)


def to_line(record: dict[str, Any]) -> bytes:
    """One JSON line. Lone surrogates (text cut inside a character) become JSON escapes and read back as they were."""
    try:
        text = _dumps(record)
    except (TypeError, ValueError, RecursionError):  # rare; token lists need not be walked in Python otherwise
        text = _dumps(json_safe(record))
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines in one piece, compressed when the name ends in `.gz`."""
    data = b"".join(to_line(record) for record in records)
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=1, mtime=0)  # no clock in it: equal records, equal file
    write_whole(path, data)


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file, unpacked when the name ends in `.gz`."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line; None for a line that holds none, as one torn by a kill."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, torn lines left out."""
    return [record for line in read_lines(path) if (record := parse_line(line)) is not None]
