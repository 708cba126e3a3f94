"""Evaluation by a service elsewhere (`[evaluator]`): it is told where a checkpoint is, and answers with metrics.

Training goes on meanwhile, and nothing that the service does ends it: what fails is counted and told.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightrl.config.schema import Config
from lightrl.distributed.mesh import World
from lightrl.keys import read_key
from lightrl.observe.console import Console
from lightrl.observe.trackers import Trackers
from lightrl.threads import spawn

_LARGEST = 1 << 20  # bytes of an answer
_MOST = 500  # metrics of an answer
_AGAIN = (408, 425, 429)  # and 5xx: it may answer later
_PAUSES = tuple(min(2.0**n, 60.0) for n in range(32))


class EvaluatorError(Exception):
    """No metrics; the message says why, without URL and key."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


@dataclass(frozen=True)
class Evaluator:
    """One service. `key` goes into the request's header and nowhere else."""

    url: str
    key: str | None
    timeout: float
    retries: int
    pauses: Sequence[float] = _PAUSES

    def ask(self, question: Mapping[str, Any]) -> dict[str, float]:
        """The metrics in its answer, after as many attempts as needed. Raises EvaluatorError after the last."""
        for attempt in range(self.retries + 1):
            try:
                return self._ask_once({**question, "attempt": attempt + 1})
            except EvaluatorError as error:
                if not error.again or attempt == self.retries:
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise EvaluatorError(f"{error}{tries}", again=False) from error
            time.sleep(self.pauses[min(attempt, len(self.pauses) - 1)])
        raise AssertionError("the last attempt returns or raises")

    @property
    def limit(self) -> float:
        """Seconds after which `ask` has ended, if the service keeps to HTTP."""
        return (self.retries + 1) * self.timeout + sum(self.pauses[: self.retries])

    def _ask_once(self, question: Mapping[str, Any]) -> dict[str, float]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request("POST", target, json.dumps(question).encode(), headers)
            response = connection.getresponse()  # redirects are not followed: the key is for this place
            body = response.read(_LARGEST + 1)
        except (OSError, http.client.HTTPException) as error:
            timed_out = isinstance(error, TimeoutError)
            text = f"no answer in {self.timeout:g} s" if timed_out else f"{type(error).__name__}: {error}"
            raise EvaluatorError(text, again=True) from error
        finally:
            connection.close()
        if response.status != 200:
            again = response.status in _AGAIN or response.status >= 500
            raise EvaluatorError(f"HTTP status {response.status}", again=again)
        if len(body) > _LARGEST:
            raise EvaluatorError(f"its answer has more than {_LARGEST} bytes", again=False)
        return metrics_in(body)


def metrics_in(body: bytes) -> dict[str, float]:
    """`eval/NAME` of each number in a JSON object; objects within give `eval/OUTER/NAME`. Raises EvaluatorError.

    >>> metrics_in(b'{"gsm8k": {"accuracy": 0.5}, "note": "fine"}')
    {'eval/gsm8k/accuracy': 0.5}
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EvaluatorError("its answer is not JSON", again=False) from error
    if not isinstance(answer, dict):
        raise EvaluatorError("its answer is not a JSON object of metrics", again=False)
    found: dict[str, float] = {}
    waiting: list[tuple[str, Any]] = [("", answer)]
    while waiting and len(found) < _MOST:
        name, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += [(f"{name}/{key}".strip("/"), item) for key, item in value.items()]
        elif isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value):
            found[f"eval/{name.removeprefix('eval/')}"[:200]] = float(value)
    if not found:
        raise EvaluatorError("its answer holds no number", again=False)
    return found


class OutsideEvaluation:
    """The run's side. One checkpoint is with the service at a time; of those that come meanwhile the newest waits."""

    def __init__(self, config: Config, run_dir: Path, world: World, console: Console) -> None:
        self._config, self._run_dir, self._world, self._console = config.evaluator, run_dir, world, console
        self._hf_every = config.checkpoint.hf_every
        self._evaluator = make_evaluator(config)
        self._running: tuple[int, float, Future[dict[str, float]]] | None = None
        self._waiting: tuple[int, Path] | None = None
        self._failures = self._skipped = 0

    def is_due(self, step: int, last: bool) -> bool:
        """The same on all ranks."""
        return self._evaluator is not None and (last or step % self._config.every == 0)

    def submit(self, step: int, export: Callable[[Path], None]) -> None:
        """Export the step, unless the run did, and send its place. A collective."""
        folder = self._run_dir / "hf" / f"step_{step:06d}"
        if not self._hf_every or step % self._hf_every:
            export(folder)
        if not self._world.is_main:
            return
        if self._waiting is not None:
            self._skipped += 1
            skipped, last = self._waiting[0], self._running[0] if self._running else step
            self._console.warning(f"evaluator.url: step {skipped} is left out: the evaluator is still at step {last}")
        self._waiting = step, folder
        self._go_on()

    def log(self, trackers: Trackers) -> None:
        """What has come since is logged beside the step that it is of. Does not wait."""
        if self._running is None or not self._running[2].done():
            return
        step, start, future = self._running
        self._running = None
        found: dict[str, float] = {"evaluator/failures": self._failures, "evaluator/skipped": self._skipped}
        if (error := future.exception()) is None:
            answer = future.result()
            found |= answer | {"evaluator/seconds": time.monotonic() - start}
            shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in list(answer.items())[:6])
            self._console.notice(f"evaluator's metrics of step {step}: {shown}")
        else:
            self._failures += 1
            found["evaluator/failures"] = self._failures
            reason = str(error) if isinstance(error, EvaluatorError) else type(error).__name__
            self._console.warning(f"evaluator.url: no metrics of step {step}: {reason}; the run goes on")
        trackers.log(step, found)
        self._go_on()

    def finish(self, trackers: Trackers) -> None:
        """Wait for what is under way at the end of a run."""
        while self._running is not None and self._evaluator is not None:
            about, start, future = self._running
            self._console.notice(f"waiting for the evaluator's answer about step {about}")
            wait([future], timeout=max(0.0, start + self._evaluator.limit + 10.0 - time.monotonic()))
            if not future.done():  # it sends a byte now and then: its thread is left behind
                late: Future[dict[str, float]] = Future()
                late.set_exception(EvaluatorError(f"no answer in {self._evaluator.limit:g} s", again=False))
                self._running = about, start, late
            self.log(trackers)

    def _go_on(self) -> None:
        if self._running is not None or self._waiting is None or self._evaluator is None:
            return
        step, folder = self._waiting
        self._waiting = None
        place = self._run_dir.resolve()
        question = {"run": place.name, "run_dir": str(place), "step": step, "checkpoint": str(folder.resolve())}
        self._running = step, time.monotonic(), spawn(self._evaluator.ask, question)


def make_evaluator(config: Config) -> Evaluator | None:
    """None without `evaluator.url`. UserError where its key is not in the environment."""
    spec = config.evaluator
    if spec.url is None:
        return None
    key = read_key(spec.api_key_env, "evaluator.api_key_env")
    return Evaluator(url=spec.url, key=key, timeout=spec.timeout, retries=spec.retries)
