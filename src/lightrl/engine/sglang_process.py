"""The trainer's end of an engine in a process of its own: started, spoken to, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightrl.engine import sglang_frames as frames
from lightrl.errors import UserError

_TAIL_LINES = 25
_MEMORY_SIGNS = ("out of memory", "outofmemoryerror", "not enough memory", "cuda error: out of memory")


class EngineDiedError(RuntimeError):
    """The engine's process ended by itself; the message holds the end of its log."""


class HostProcess:
    """`lightrl.engine.sglang_host` as a child process. Methods may be called from any thread.

    `log` takes its whole output. `hint` is added to the error when the log speaks of memory. When this process ends,
    however it ends, the kernel ends the child.
    """

    def __init__(self, first: dict[str, Any], *, log: Path, environment: dict[str, str], hint: str = "") -> None:
        self.log = log
        self._hint = hint
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[Any], Callable[[dict[str, Any]], None] | None]] = {}
        self._numbers = 1
        self._error: EngineDiedError | None = None
        self._closing = False
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        self._connection = ours
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lightrl.engine.sglang_host", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a group of its own, so that all of it can be ended
            )
        theirs.close()
        self._started: Future[Any] = Future()
        self._waiting[0] = (self._started, None)
        self._send(first)
        threading.Thread(target=self._read, name="lightrl-engine", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout: float = 900.0) -> dict[str, Any]:
        """Block until the engine serves; returns what it says of itself."""
        return dict(self._started.result(timeout))

    def submit(
        self, operation: str, *, on_partial: Callable[[dict[str, Any]], None] | None = None, **fields: Any
    ) -> Future[Any]:
        """Ask for an operation. The future raises EngineDiedError, RuntimeError, or ValueError for wrong input."""
        future: Future[Any] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            number = self._numbers
            self._numbers += 1
            self._waiting[number] = (future, on_partial)
        self._send({"id": number, "op": operation, **fields})
        return future

    def call(self, operation: str, timeout: float = 120.0, **fields: Any) -> Any:
        """`submit`, and wait."""
        return self.submit(operation, **fields).result(timeout)

    def check(self) -> None:
        """Raise EngineDiedError if the process has died."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End it and all its children; idempotent."""
        self._closing = True
        if self._process.poll() is None and self._error is None:
            try:
                self.submit("close")
                self._process.wait(timeout=20)
            except (subprocess.TimeoutExpired, OSError, RuntimeError):
                pass
        self._kill_group()
        self._process.wait()
        self._connection.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        data = frames.encode(message)
        with self._lock, contextlib.suppress(OSError):  # it has died: the reading thread says so to all who wait
            self._connection.sendall(data)

    def _read(self) -> None:
        while (message := frames.read(self._connection)) is not None:
            number = message["id"]
            with self._lock:
                future, on_partial = self._waiting[number]
                if "partial" not in message:
                    del self._waiting[number]
            if "partial" in message:
                if on_partial is not None:
                    on_partial(message["partial"])
                continue
            if not future.set_running_or_notify_cancel():
                continue  # nobody waits any more
            if "result" in message:
                future.set_result(message["result"])
            elif "user_error" in message:
                future.set_exception(UserError(message["user_error"]))
            elif "value_error" in message:
                future.set_exception(ValueError(message["value_error"]))
            else:
                future.set_exception(self._explain(message["error"]))
        self._died()

    def _died(self) -> None:
        """The connection is gone, so the process is, or is about to be."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.poll()
        self._kill_group()  # schedulers whose parent is gone hold GPU memory
        how = "closed" if self._closing else f"ended (exit code {code})"
        error = self._explain(f"the SGLang engine {how}")
        with self._lock:
            self._error = error
            waiting, self._waiting = list(self._waiting.values()), {}
        for future, _ in waiting:
            if not future.done():
                future.set_exception(error)

    def _explain(self, what: str) -> EngineDiedError:
        time.sleep(0.05)  # its last lines are on their way to the file
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        text = "\n".join(lines)
        hint = f"; {self._hint}" if any(sign in (what + text).lower() for sign in _MEMORY_SIGNS) else ""
        return EngineDiedError(f"{what}{hint}. The end of {self.log}:\n{text}")
