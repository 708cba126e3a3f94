"""What the report knows of a run: read from its folder, within limits whatever the run's size."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from lightrl.errors import UserError
from lightrl.observe.charts import Value
from lightrl.observe.console import shorten
from lightrl.observe.dumps import Dump, list_dumps
from lightrl.observe.environment import read_environment
from lightrl.observe.jsonl import parse_line
from lightrl.observe.trackers import read_metrics

CONFIG_FILE = "config.toml"
MAX_SAMPLES = 2000
MAX_DUMPS = 40
MAX_TEXT = 4000


@dataclass
class Run:
    """What is known of a run."""

    name: str
    steps: list[int]
    metrics: dict[str, list[Value]]
    """Each metric at each of `steps`; None where it was not measured."""
    environment: dict[str, Any]
    config_text: str
    config: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    early: list[dict[str, Any]] = field(default_factory=list)
    late: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def finite(self, name: str) -> list[float]:
        """Values of a metric, gaps left out."""
        return [v for v in self.metrics.get(name, []) if v is not None]

    def points(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric where it was measured."""
        pairs = [(s, v) for s, v in zip(self.steps, self.metrics.get(name, []), strict=False) if v is not None]
        return [s for s, _ in pairs], [v for _, v in pairs]


def load_run(run_dir: Path) -> Run:
    """Read a run's folder; what is missing beside the metrics is noted, not an error."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder: name the folder of a run (run.dir), which holds metrics.jsonl")
    rows = read_metrics(run_dir)
    if not rows:
        raise UserError(f"{run_dir}/metrics.jsonl: no step is logged yet: run the report once a step is done")
    names = dict.fromkeys(name for row in rows for name in row if "/" in name)
    metrics = {name: [number_of(row.get(name)) for row in rows] for name in names}
    try:
        text = (run_dir / CONFIG_FILE).read_text(encoding="utf-8")
        config = tomllib.loads(text)
    except (OSError, ValueError):
        text, config = "", {}
    run = Run(
        name=run_dir.resolve().name,
        steps=[row["step"] for row in rows],
        metrics=metrics,
        environment=read_environment(run_dir),
        config_text=text,
        config=config,
    )
    _load_samples(run, list_dumps(run_dir))
    return run


def _load_samples(run: Run, dumps: Sequence[Dump]) -> None:
    """Take samples of at most MAX_DUMPS steps, evenly over the run, and at most MAX_SAMPLES in all."""
    chosen = spread(dumps, MAX_DUMPS)
    training = [dump for dump in chosen if dump.eval is None]
    tenth = max(1, len(training) // 10)
    early, late = training[:tenth], training[tenth:][-tenth:]
    total = 0
    for dump in chosen:
        try:
            lines = dump.lines()
        except UserError as error:
            run.notes.append(str(error))
            continue
        total += len(lines)
        shown = spread(lines, max(1, MAX_SAMPLES // len(chosen)))
        run.samples += [_shown(record) for line in shown if (record := parse_line(line)) is not None]
        if dump in early:
            run.early += _brief(lines)
        elif dump in late:
            run.late += _brief(lines)
    if len(chosen) < len(dumps):
        run.notes.append(f"Samples of {len(chosen)} of {len(dumps)} dumps are looked at, evenly over the run.")
    if len(run.samples) < total:
        run.notes.append(f"{len(run.samples)} of their {total} samples are in this page, evenly taken.")


def _brief(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """What the histograms need of each sample."""
    records = [record for line in lines if (record := parse_line(line)) is not None]
    return [{key: record.get(key) for key in ("step", "reward", "response_length")} for record in records]


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a sample record that the page shows; texts are cut in the middle when very long."""
    logprobs = [v for v in record.get("logprobs") or [] if isinstance(v, (int, float))]
    metadata = record.get("metadata") or {}
    return {
        "step": record.get("step", 0),
        "set": record.get("eval") or "train",
        "group": record.get("group", 0),
        "index": record.get("index", 0),
        "status": str(record.get("status", "")),
        "reward": number_of(record.get("reward")),
        "advantage": number_of(record.get("advantage")),
        "length": record.get("response_length", 0),
        "logprob": round(fmean(logprobs), 4) if logprobs else None,
        "prompt": shorten(str(record.get("prompt", "")), MAX_TEXT),
        "response": shorten(str(record.get("response", "")), MAX_TEXT),
        "label": record.get("label"),
        "versions": list(dict.fromkeys(record.get("policy_versions") or [])),
        "metadata": shorten(json.dumps(metadata, ensure_ascii=False), 1000) if metadata else "",
    }


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the items, evenly, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def number_of(value: Any) -> Value:
    """The value when it is a number that can be drawn (differences and sums of a few stay finite), else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None
