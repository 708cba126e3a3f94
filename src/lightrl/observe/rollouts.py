"""Every rollout on disk, exactly as training takes it: `rollouts/step_000012.rank0.jsonl.gz`.

The first line says what the file is; each other line is a group: its prompt, and all fields of its samples. Nothing is
rounded, so training on what was read is training on what was sampled. Readers need no model.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.errors import UserError
from lightrl.observe.jsonl import json_safe
from lightrl.types import Prompt, Sample, SampleGroup, Status

ROLLOUTS_FOLDER = "rollouts"
FORMAT = 1
_FILE = re.compile(r"step_(?P<step>\d+)\.rank(?P<rank>\d+)\.jsonl(?:\.gz)?")
_NUMBER, _TENSOR = "$float", "$tensor"  # how numbers that JSON has not, and tensors, are written
_GROUP = re.compile(rb'\{"group":(-?\d+)')
_CHUNK = 1 << 18


class RolloutWriter:
    """Writes one rank's groups, a file a step. It appears whole or not at all, whenever the process dies.

    Takes the memory of one group's text, and no more disk than the file.
    """

    def __init__(self, folder: Path, *, rank: int = 0, world_size: int = 1, about: Mapping[str, Any] | None = None):
        self.folder = Path(folder)
        self._rank, self._world_size = rank, world_size
        self._about = dict(about or {})

    def write(self, step: int, groups: Sequence[SampleGroup], selection: Mapping[str, Any] | None = None) -> Path:
        """Write this rank's groups of a step. `selection`: how they were chosen, for `debug.rollouts`."""
        path = self.folder / f"step_{step:06d}.rank{self._rank}.jsonl.gz"
        header = {
            "lightrl_rollouts": FORMAT,
            "step": step,
            "rank": self._rank,
            "world_size": self._world_size,
            "groups": len(groups),
            "selection": dict(selection or {}),
            **self._about,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            # no clock and no name in it: equal groups, equal file
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed:
                packed.write(_line(header))
                for group in groups:
                    packed.write(_line(_group_record(group)))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        if self._rank == 0:
            self._remove(lambda s, rank: s == step and rank >= self._world_size)
        return path

    def drop_after(self, step: int) -> None:
        """Delete later steps, and what a killed process left: called on one rank when a run resumes at `step`."""
        self._remove(lambda s, rank: s > step)
        for left in self.folder.glob(".step_*.partial"):
            left.unlink()

    def _remove(self, wanted: Callable[[int, int], bool]) -> None:
        for path in self.folder.glob("step_*.rank*.jsonl*"):
            match = _FILE.fullmatch(path.name)
            if match and wanted(int(match["step"]), int(match["rank"])):
                path.unlink()


@dataclass(frozen=True)
class RolloutDump:
    """The steps in a run's folder, in a folder of rollouts, or in one file."""

    where: Path

    @cached_property
    def _files(self) -> dict[int, dict[int, Path]]:
        """step -> rank -> file."""
        where = Path(self.where).expanduser()
        if where.is_file():
            candidates = [where]
        else:
            inner = where / ROLLOUTS_FOLDER
            candidates = sorted((inner if inner.is_dir() else where).glob("step_*.jsonl*"))
        found: dict[int, dict[int, Path]] = {}
        for path in candidates:
            if match := _FILE.fullmatch(path.name):
                found.setdefault(int(match["step"]), {})[int(match["rank"])] = path
        if not found:
            fault = "no rollouts in it" if where.exists() else "no such file or folder"
            raise UserError(
                f"{self.where}: {fault}: name a run that was made with dump.rollouts = true, its {ROLLOUTS_FOLDER}/ or "
                "a file in there"
            )
        return dict(sorted(found.items()))

    @cached_property
    def headers(self) -> dict[int, dict[str, Any]]:
        """First line of each step that is there whole, by rising step."""
        return {s: header for s, (header, fault) in self._examined.items() if fault is None}

    @cached_property
    def faults(self) -> dict[int, str]:
        """Why a step is not whole: its run ended while ranks were writing."""
        return {s: fault for s, (_, fault) in self._examined.items() if fault is not None}

    @cached_property
    def _examined(self) -> dict[int, tuple[dict[str, Any], str | None]]:
        examined = {}
        for step, parts in self._files.items():
            header = _header(next(iter(parts.values())))
            missing = sorted(set(range(header["world_size"])) - set(parts))
            is_file = Path(self.where).expanduser().is_file()
            fault = f"{next(iter(parts.values()))}: no file of rank {missing[0]} beside it" if missing else None
            examined[step] = (header, None if is_file else fault)
        return examined

    def groups(self, step: int, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[SampleGroup]:
        """The groups of a step by rising number, of all ranks. Only those `wanted` by number are decoded.

        UserError with `file:line` for a file that is cut, damaged or of another format.
        """
        parts = [_numbered(path) for _, path in sorted(self._files[step].items())]
        return iter(sorted(_chosen(parts, wanted), key=lambda group: group.group_index))

    def numbers(self, step: int) -> list[int]:
        """Numbers of a step's groups, rising; nothing else is decoded."""
        return sorted(number for path in self._files[step].values() for number, _, _ in _numbered(path))


def _chosen(parts: Sequence[Iterator[tuple[int, bytes, str]]], wanted: Callable[[int], bool]) -> Iterator[SampleGroup]:
    for part in parts:
        for number, line, place in part:
            if wanted(number):
                yield _group(line, place)


def _header(path: Path) -> dict[str, Any]:
    lines = _lines(path)
    _, line = next(lines, (1, b""))
    lines.close()
    record = _parsed(line, f"{path}:1")
    numbers = (record.get("world_size"), record.get("groups"))
    whole = all(isinstance(n, int) for n in numbers) and isinstance(record.get("selection", {}), dict)
    if record.get("lightrl_rollouts") != FORMAT or not whole:
        raise UserError(f"{path}:1: not a dump of rollouts in format {FORMAT}: name one that this version has written")
    return record


def _numbered(path: Path) -> Iterator[tuple[int, bytes, str]]:
    """(group number, line, `file:line`) of each group of a file."""
    lines = _lines(path)
    expected = _header(path)["groups"]
    next(lines)
    count = 0
    for number, line in lines:
        place = f"{path}:{number}"
        match = _GROUP.match(line)
        yield (int(match[1]) if match else _parsed(line, place).get("group", -1)), line, place
        count += 1
    if count != expected:
        raise UserError(f"{path}:{count + 2}: cut: {count} of {expected} groups are there; copy it again")


def _lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Numbered lines, unpacked as they are read; all that are whole come before the error about the rest."""
    number, rest = 0, b""
    try:
        with path.open("rb") as file:
            unpack = zlib.decompressobj(wbits=31) if path.suffix == ".gz" else None
            while chunk := file.read(_CHUNK):
                *whole, rest = (rest + (chunk if unpack is None else unpack.decompress(chunk))).split(b"\n")
                for line in whole:
                    number += 1
                    yield number, line
    except (OSError, zlib.error) as error:
        raise UserError(f"{path}:{number + 1}: damaged or unreadable ({error}); copy it again, or remove it") from error
    if rest or (unpack is not None and not unpack.eof):
        raise UserError(f"{path}:{number + 1}: the file ends in the middle; copy it again, or remove it")


def _group(line: bytes, place: str) -> SampleGroup:
    record = _parsed(line, place)
    try:
        prompt = _prompt(record["prompt"])
        samples = [_sample(entry, prompt, record["group"]) for entry in record["samples"]]
        return SampleGroup(prompt=prompt, group_index=record["group"], samples=samples, **record.get("more", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{place}: not a group of this version's format ({text})") from error


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line, object_hook=_value)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: torch's too, of a tensor's shape
        raise UserError(f"{place}: not valid JSON ({error}); copy the file again, or remove it") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: not a JSON object: the file is no dump of rollouts")
    return record


def _value(value: dict[str, Any]) -> Any:
    """What stands for a number or a tensor as what it was."""
    if value.keys() == {_NUMBER}:
        return float(value[_NUMBER])
    return _tensor(*value[_TENSOR]) if value.keys() == {_TENSOR} else value


def _tensor(dtype: str, shape: list[int], data: str) -> Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"a tensor of type {dtype!r}")
    content = bytearray(base64.b64decode(data, validate=True))
    return torch.frombuffer(content, dtype=kind).reshape(shape) if content else torch.empty(shape, dtype=kind)


def _group_record(group: SampleGroup) -> dict[str, Any]:
    more = _set_fields(group, leave=("prompt", "group_index", "samples"))
    return {
        "group": group.group_index,
        "prompt": _set_fields(group.prompt),
        "samples": [_sample_record(sample, group) for sample in group.samples],
        **({"more": more} if more else {}),
    }


def _sample_record(sample: Sample, group: SampleGroup) -> dict[str, Any]:
    record = _set_fields(sample, leave=("prompt", "group_index", "tokens"))
    if sample.prompt != group.prompt:
        record["prompt"] = _set_fields(sample.prompt)
    head = len(sample.tokens) - sample.response_length
    if sample.tokens[:head] == sample.prompt.tokens:
        record["response_tokens"] = sample.tokens[head:]
    else:
        record["tokens"] = sample.tokens
    if sample.group_index != group.group_index:
        record["group_index"] = sample.group_index
    return record


def _sample(record: dict[str, Any], prompt: Prompt, group_index: int) -> Sample:
    values = dict(record)
    values["prompt"] = _prompt(values["prompt"]) if "prompt" in values else prompt
    if "tokens" not in values:
        values["tokens"] = values["prompt"].tokens + values.pop("response_tokens")
    if "status" in values:
        values["status"] = Status(values["status"])
    sample = Sample(**{"group_index": group_index, **values})
    for name in ("loss_mask", "rollout_logprobs", "rollout_top_ids", "rollout_top_logprobs"):
        per_token = getattr(sample, name)
        if per_token is not None and len(per_token) != sample.response_length:
            raise ValueError(f"{name} has {len(per_token)} entries for {sample.response_length} response tokens")
    return sample


def _prompt(record: dict[str, Any]) -> Prompt:
    return Prompt(**record)


def _set_fields(record: Any, leave: Sequence[str] = ()) -> dict[str, Any]:
    """Fields that are not at their default: those that later versions add are kept too."""
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if callable(field.default_factory) and has_factory else field.default
        if field.name not in leave and value is not default and not (has_factory and value == default):
            found[field.name] = value
    return found


def _line(record: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):  # rare; token lists need not be walked in Python otherwise
        text = json.dumps(_exact(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def _exact(value: Any) -> Any:
    """The value as JSON holds it: NaN, infinities and tensors marked, so that they come back; the unknown as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(float(value))}
    if isinstance(value, dict):
        return {str(key): _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").decode()
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), data]}
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return _exact(value.tolist())
    return json_safe(value)
