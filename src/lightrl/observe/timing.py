"""Wall-clock time of the stages of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """`with timer("generate"): …` -> `time/generate`.

    A stage that runs again adds up; one inside another is `time/OUTER/INNER`, so that the plain names never overlap.
    One thread, one stage at a time. The clock of `time/total` starts with the first stage. With `cuda_sync` a stage
    ends when its GPU work has: right, but it stalls the GPU.
    """

    def __init__(self, cuda_sync: bool = False) -> None:
        self._cuda_sync = cuda_sync and torch.cuda.is_available()
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._start: float | None = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._open.append(stage)
        name = "/".join(self._open)
        start = self._now()
        if self._start is None:
            self._start = start
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
            self._open.pop()

    def seconds(self, stage: str) -> float:
        """Seconds spent in a stage so far; 0 when it did not run."""
        return self._seconds.get(stage, 0.0)

    def metrics(self) -> dict[str, float]:
        """`time/STAGE` of each stage and `time/total`, in seconds since the last call; starts anew."""
        now = self._now()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/total"] = 0.0 if self._start is None else now - self._start
        self._seconds, self._start = {}, now
        return result

    def _now(self) -> float:
        if self._cuda_sync:
            torch.cuda.synchronize()
        return time.perf_counter()
