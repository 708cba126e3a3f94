"""Every sample of a run on disk: `samples/step_000012.rank0.jsonl.gz`, one JSON object a line.

Training samples of a step, or `eval_NAME_step_000012.…` for an evaluation set. Read them with `read_samples`, `zcat`
or pandas (`read_json(path, lines=True)`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.errors import UserError
from lightrl.observe.jsonl import parse_line, read_lines, write_records
from lightrl.types import Sample

SAMPLES_FOLDER = "samples"
_FILE = re.compile(r"(?:eval_(?P<name>.+)_)?step_(?P<step>\d+)\.rank(?P<rank>\d+)\.jsonl\.gz")


@dataclass
class Dump:
    """The files of one step (or of one evaluation at a step), by rank."""

    step: int
    eval: str | None
    parts: list[Path] = field(default_factory=list)

    def lines(self) -> list[bytes]:
        """One undecoded JSON line a sample, of all ranks. A damaged file is a UserError that names it."""
        lines: list[bytes] = []
        for part in self.parts:
            try:
                lines += read_lines(part)
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"{part}: damaged or unreadable ({error}): delete it and go on without") from error
        return lines

    def samples(self) -> list[dict[str, Any]]:
        """Records of all ranks."""
        return [record for line in self.lines() if (record := parse_line(line)) is not None]


class SampleWriter:
    """Writes one rank's share of the samples. A step written again, as after a resume, replaces the old file."""

    def __init__(self, run_dir: Path, rank: int = 0, world_size: int = 1) -> None:
        self._folder = Path(run_dir) / SAMPLES_FOLDER
        self._rank = rank
        self._world_size = world_size

    def write(self, step: int, samples: Iterable[Sample], eval_name: str | None = None) -> Path:
        """Write the samples of a training step, or of evaluation set `eval_name` at that step."""
        stem = f"step_{step:06d}" if eval_name is None else f"eval_{_file_name(eval_name)}_step_{step:06d}"
        path = self._folder / f"{stem}.rank{self._rank}.jsonl.gz"
        write_records(path, (_record(step, sample, eval_name) for sample in samples))
        if self._rank == 0:
            # A run that went on with fewer ranks must not keep the parts that the others wrote before.
            for part in self._folder.glob(f"{stem}.rank*.jsonl.gz"):
                match = _FILE.fullmatch(part.name)
                if match and int(match["rank"]) >= self._world_size:
                    part.unlink()
        return path

    def drop_after(self, step: int) -> None:
        """Delete dumps of later steps: called on one rank when a run resumes at `step`."""
        for dump in list_dumps(self._folder.parent):
            if dump.step > step:
                for part in dump.parts:
                    part.unlink()


def list_dumps(run_dir: Path) -> list[Dump]:
    """What was dumped, by rising step, training before evaluation; empty when nothing was."""
    found: dict[tuple[int, str], Dump] = {}
    for path in sorted((Path(run_dir) / SAMPLES_FOLDER).glob("*.jsonl.gz")):
        match = _FILE.fullmatch(path.name)
        if match:
            key = (int(match["step"]), match["name"] or "")
            found.setdefault(key, Dump(step=key[0], eval=match["name"])).parts.append(path)
    return [found[key] for key in sorted(found)]


def read_samples(run_dir: Path, step: int | None = None, eval_name: str | None = None) -> list[dict[str, Any]]:
    """Training samples (or those of one evaluation set) of a step, or of all steps, ordered by step, group and number.

    A run's dumps can be large: give the step, or go through `list_dumps`.
    """
    wanted = None if eval_name is None else _file_name(eval_name)
    dumps = [d for d in list_dumps(run_dir) if d.eval == wanted and step in (None, d.step)]
    records = [record for dump in dumps for record in dump.samples()]
    return sorted(records, key=lambda r: (r.get("step", 0), r.get("group", 0), r.get("index", 0)))


def _rounded(value: float | list[float] | None) -> Any:
    """To six decimals: a number, or one a token."""
    if isinstance(value, list):
        return [round(v, 6) for v in value]
    return None if value is None else round(value, 6)


def _record(step: int, sample: Sample, eval_name: str | None) -> dict[str, Any]:
    logprobs = sample.rollout_logprobs
    record: dict[str, Any] = {"step": step}
    if eval_name is not None:
        record["eval"] = eval_name
    record |= {
        "group": sample.group_index,
        "index": sample.index,
        "prompt_index": sample.prompt.index,
        "status": sample.status,
        "reward": sample.reward,
        "advantage": _rounded(sample.advantage),
        "prompt": sample.prompt.text,
        "response": sample.response,
        "label": sample.prompt.label,
        "response_length": sample.response_length,
        "tokens": sample.tokens,
        "logprobs": None if logprobs is None else [None if value is None else round(value, 5) for value in logprobs],
        "policy_versions": sample.policy_versions,
        "metadata": sample.metadata,
    }
    if sample.loss_mask is not None:
        record["loss_mask"] = sample.loss_mask
    if sample.version_tokens is not None:
        record["version_tokens"] = sample.version_tokens
    return record


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name) or "set"
