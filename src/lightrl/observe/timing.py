"""Wall-clock time of the stages of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """`with timer("generate"): …` -> `time/generate`.

    A stage that runs again adds up; one inside another is `time/OUTER/INNER`, so that the plain names never overlap.
    One thread, one stage at a time. The clock of `time/total` starts with the first stage. In a process that uses a GPU
    a stage ends when its work there has: weights on their way to the engine, or the last update, would else be counted
    in whatever comes next and waits for them. The queue runs dry once a stage, so take few and long ones.
    """

    def __init__(self, watch: Callable[[str, float, float], None] | None = None) -> None:
        self._watch = watch  # told each stage with its start and end, by `time.perf_counter`
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._start: float | None = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._open.append(stage)
        name = "/".join(self._open)
        start = _now()
        if self._start is None:
            self._start = start
        try:
            yield
            _wait_for_gpu()  # not after an error: a hanging collective would keep it from being seen
        finally:
            end = time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            self._open.pop()
            if self._watch is not None:
                self._watch(name, start, end)

    def seconds(self, stage: str) -> float:
        """Seconds spent in a stage so far; 0 when it did not run."""
        return self._seconds.get(stage, 0.0)

    def metrics(self) -> dict[str, float]:
        """`time/STAGE` of each stage and `time/total`, in seconds since the last call; starts anew."""
        now = _now()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/total"] = 0.0 if self._start is None else now - self._start
        self._seconds, self._start = {}, now
        return result


def _now() -> float:
    _wait_for_gpu()
    return time.perf_counter()


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
