"""Worker processes for rules that may hang: started when needed, killed on timeout, replaced."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightrl.rewards.answer import Answer

START_TIMEOUT = 300.0  # seconds; a first import from a slow shared disk takes long

# -P and the explicit path: neither a `math.py` in the working directory nor the user's script is imported.
_COMMAND = "import sys; sys.path.append(sys.argv[1]); from lightrl.rewards.worker import main; main(int(sys.argv[2]))"


class WorkerError(RuntimeError):
    """A call that raised in the worker, or a worker that died. `remote_traceback` is the worker's."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_traceback = remote_traceback


class LimitError(RuntimeError):
    """A call on which a worker broke off at one of its limits: what it was given is to blame, not the machine."""


class WorkerPool:
    """Up to `size` processes. `call` may be used from many threads; closing it again and again does no harm."""

    def __init__(self, size: int) -> None:
        self._slots = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    def call(self, function: str, answer: Answer, timeout: float) -> Any:
        """Run `module:function` of this package on `answer` in a worker.

        Raises LimitError after `timeout` seconds (waiting for a worker and starting one do not count) and for a worker
        that broke off by itself, out of the memory it is allowed; WorkerError for what the function raised and for a
        worker that was killed.
        """
        with self._slots:
            worker = self._take(function)
            try:
                reply = worker.ask({"function": function, "answer": asdict(answer), "timeout": timeout}, timeout)
            except BaseException:
                self._discard(worker)
                raise
            with self._lock:
                if not self._closed:
                    self._idle.append(worker)
        if "error" in reply:
            raise WorkerError(reply["error"], reply["traceback"])
        return reply["value"]

    def close(self) -> None:
        """End all workers, busy ones too."""
        with self._lock:
            self._closed = True
            workers, self._idle = list(self._all), []
            self._all.clear()
        for worker in workers:
            worker.kill()

    def _take(self, function: str) -> _Worker:
        with self._lock:
            if self._closed:
                raise WorkerError("the reward workers are closed")
            if self._idle:
                return self._idle.pop()
            worker = _Worker()
            self._all.add(worker)
        try:
            worker.ask({"function": function, "answer": None, "timeout": START_TIMEOUT}, START_TIMEOUT)
        except BaseException as error:  # a limit, too: no answer was given to it yet
            self._discard(worker)
            raise WorkerError(f"a reward worker did not start: {error}") from error
        return worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()


class _Worker:
    """One process and the pipes to it."""

    def __init__(self) -> None:
        source = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, source, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request, wait for its reply. A worker that raised anything here is to be discarded."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._process.kill()  # closes its end of the pipe: the read below returns

        timer = threading.Timer(timeout, expire)
        timer.daemon = True
        timer.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request, default=str) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
            timer.join()  # it may be firing right now: know before the worker is used again
        if line and not expired.is_set():
            return json.loads(line)
        if expired.is_set():
            raise LimitError(f"took longer than {timeout:g} s")
        self._process.kill()
        code = self._process.wait()
        if code in (0, -signal.SIGKILL, -signal.SIGTERM):  # from outside, as the system does when memory is short
            raise WorkerError(f"the worker process died (exit code {code})")
        raise LimitError(f"ended itself, out of memory or stack (exit code {code})")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # bytes that the dead worker never read
                    pipe.close()
