"""What became of each sample, when: a trace for chrome://tracing or https://ui.perfetto.dev (`log.timeline_steps`).

A process is a rank; its first row holds the stages of the step, each other row a sample: its prompt, the engine's
answers, its reward, and the training it is part of.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.observe.jsonl import json_safe, write_whole
from lightrl.types import SampleGroup

TIMELINE_FOLDER = "timeline"


@dataclass(frozen=True)
class _Span:
    name: str
    start: float
    """`time.perf_counter`."""
    end: float


class Timeline:
    """One rank's spans of one step. `span` may be called from any thread."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._offset = time.time() - time.perf_counter()  # ranks have clocks of their own: the wall's is shared
        self._lock = threading.Lock()
        self._samples: dict[tuple[int, int], list[_Span]] = {}
        self._stages: list[_Span] = []

    def span(self, name: str, group: int, samples: Sequence[int], start: float, end: float) -> None:
        """Something was done for these samples of a group, by `time.perf_counter`."""
        with self._lock:
            for index in samples:
                self._samples.setdefault((group, index), []).append(_Span(name, start, end))

    def stage(self, name: str, start: float, end: float) -> None:
        """A stage of the step."""
        with self._lock:
            self._stages.append(_Span(name, start, end))

    def events(self, groups: Iterable[SampleGroup]) -> list[dict[str, Any]]:
        """Trace events; of samples those in `groups`, which were trained on, tell what they are."""
        about = {(g.group_index, s.index): s for g in groups for s in g.samples}
        with self._lock:
            rows, stages = sorted(self._samples.items()), list(self._stages)
        found = [self._meta("process_name", 0, f"rank {self._rank}"), self._meta("thread_name", 0, "step")]
        found += [self._event(span, 0, {}) for span in stages]
        train = next((span for span in stages if span.name == "train"), None)
        for row, (key, spans) in enumerate(rows, start=1):
            sample = about.get(key)
            what = "" if sample is None else f", prompt {sample.prompt.index}"
            found.append(self._meta("thread_name", row, f"group {key[0]} / {key[1]}{what}"))
            facts: dict[str, Any] = {"trained": sample is not None}
            if sample is not None:
                facts |= {"reward": sample.reward, "advantage": sample.advantage, "status": str(sample.status)}
                facts |= {"prompt_tokens": sample.prompt_length, "response_tokens": sample.response_length}
            first = min(span.start for span in spans)
            found.append({"name": "prompt", "ph": "i", "s": "t", "args": facts, **self._place(row, first)})
            found += [self._event(span, row, facts) for span in sorted(spans, key=lambda span: span.start)]
            if sample is not None and train is not None:
                found.append(self._event(train, row, facts))
        return found

    def _event(self, span: _Span, row: int, facts: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": span.name,
            "ph": "X",
            "dur": round((span.end - span.start) * 1e6, 1),
            "args": facts,
            **self._place(row, span.start),
        }

    def _place(self, row: int, start: float) -> dict[str, Any]:
        return {"pid": self._rank, "tid": row, "ts": round((start + self._offset) * 1e6, 1)}

    def _meta(self, name: str, row: int, text: str) -> dict[str, Any]:
        return {"name": name, "ph": "M", "pid": self._rank, "tid": row, "args": {"name": text}}


def write_timeline(run_dir: Path, step: int, events: Iterable[dict[str, Any]]) -> Path:
    """`timeline/step_000003.json`, of all ranks."""
    path = Path(run_dir) / TIMELINE_FOLDER / f"step_{step:06d}.json"
    text = json.dumps({"traceEvents": json_safe(list(events)), "displayTimeUnit": "ms"}, ensure_ascii=False)
    write_whole(path, text.encode("utf-8", errors="backslashreplace"))
    return path
