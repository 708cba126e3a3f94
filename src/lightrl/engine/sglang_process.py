"""The trainer's end of an engine in a process of its own: started, spoken to, watched, ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightrl.engine import frames
from lightrl.engine.base import EngineLostError
from lightrl.errors import UserError

_TAIL_LINES = 25
_TAIL_BYTES = 1 << 17  # in which signs of what went wrong are looked for
_CAUSE = 300  # most characters of an error in a log that are told
_MARGIN = 0.8  # of the time until a hang is to be known: the rest is for looking now and then


class HostProcess:
    """`lightrl.engine.sglang_host` as a child process. Methods may be called from any thread.

    The child says now and then that it lives, and whether SGLang's processes do. When it says nothing for
    `hang_timeout` seconds, or while starting writes nothing for `start_timeout`, it is ended, and so are all who wait
    for it. `log` takes its whole output; `hint` gets the end of that and may say what to do. When this process ends,
    however it ends, the kernel ends the child.
    """

    def __init__(
        self,
        first: dict[str, Any],
        *,
        log: Path,
        environment: dict[str, str],
        hint: Callable[[str], str | None] = lambda _: None,
        hang_timeout: float = 15.0,
        start_timeout: float = 300.0,
    ) -> None:
        self.log = log
        self._hint = hint
        self._limit, self._start_limit = hang_timeout * _MARGIN, start_timeout
        self._state = threading.Lock()
        self._sending = threading.Lock()
        self._waiting: dict[int, tuple[Future[Any], Callable[[dict[str, Any]], None] | None]] = {}
        self._numbers = 1
        self._error: str | None = None
        self._losing = False
        self._told = threading.Event()
        self._closing = self._gone = self._ready = False
        self._folder: str | None = None
        self._heard = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self._log_size()
        self._started: Future[Any] = Future()
        self._waiting[0] = (self._started, None)
        self._connection, theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes]
        launched: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._serve, args=(launched, theirs, environment), name="lightrl-engine", daemon=True
        )
        self._thread.start()
        launched.result()
        self._folder = _socket_folder()
        self._send(first | {"hang_timeout": hang_timeout, "folder": self._folder})
        threading.Thread(target=self._watch, name="lightrl-engine-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def error(self) -> EngineLostError | None:
        """Why it is lost; None while it works."""
        return None if self._error is None else EngineLostError(self._error)

    def wait_ready(self, timeout: float = 900.0) -> dict[str, Any]:
        """Block until the engine serves; returns what it says of itself."""
        about = dict(self._result(self._started, timeout, "did not start"))
        self._ready = True
        return about

    def submit(
        self, operation: str, *, on_partial: Callable[[dict[str, Any]], None] | None = None, **fields: Any
    ) -> Future[Any]:
        """Ask for an operation. The future raises EngineLostError, RuntimeError, or ValueError for wrong input."""
        future: Future[Any] = Future()
        with self._state:
            if self._error is not None:
                raise EngineLostError(self._error)
            number = self._numbers
            self._numbers += 1
            self._waiting[number] = (future, on_partial)
        self._send({"id": number, "op": operation, **fields})
        return future

    def call(self, operation: str, timeout: float = 120.0, **fields: Any) -> Any:
        """`submit`, and wait; EngineLostError when it takes too long."""
        return self.wait(self.submit(operation, **fields), timeout, operation)

    def wait(self, future: Future[Any], timeout: float, operation: str) -> Any:
        """The result of what was submitted; the engine is given up when it takes too long."""
        return self._result(future, timeout, f"did not end '{operation}'")

    def check(self) -> None:
        """Raise EngineLostError if the process has died or hangs."""
        if self._error is not None:
            raise EngineLostError(self._error)

    def give_up(self, why: str) -> EngineLostError:
        """End a process that does not do its work: all who wait get the error that is returned."""
        self._lose(f"the SGLang engine {why}")
        assert self._error is not None
        return EngineLostError(self._error)

    def stop(self) -> bool:
        """End it and all its children; whether they are gone (one that waits for a driver does not end). Idempotent."""
        if self._gone:
            return True  # its number may be another's by now
        self._closing = True
        if self._process.poll() is None and self._error is None:
            try:
                self.submit("close")
                self._process.wait(timeout=20)
            except (subprocess.TimeoutExpired, OSError, RuntimeError):
                pass
        self._kill_group()
        deadline = time.monotonic() + 20
        while (left := _living(self._process.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(None if not left else 1)
        self._connection.close()
        self._gone = not left
        return self._gone

    # ---- threads

    def _serve(self, launched: Future[None], theirs: socket.socket, environment: dict[str, str]) -> None:
        """Start the process and read from it. In one thread, which ends after it: the kernel ends a child whose parent
        *thread* is gone, and this class may be used in a thread that is not for long."""
        try:
            with self.log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "lightrl.engine.sglang_host", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a group of its own, so that all of it can be ended
                )
        except BaseException as error:
            launched.set_exception(error)
            return
        finally:
            theirs.close()
        self._process = process
        launched.set_result(None)
        while (message := frames.read(self._connection)) is not None:
            self._heard = time.monotonic()
            if "hung" in message:
                self.give_up(message["hung"])
            elif "id" in message:
                self._take(message)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20 if self._closing else 5)
        how = "closed" if self._closing else f"ended (exit code {process.poll()})"
        self._lose(f"the SGLang engine {how}")
        process.wait()

    def _take(self, message: dict[str, Any]) -> None:
        number = message["id"]
        with self._state:
            future, on_partial = self._waiting.get(number, (None, None))
            if "partial" not in message:
                self._waiting.pop(number, None)
        if "partial" in message:
            if future is not None and on_partial is not None and not future.done():
                self._show(message["partial"], number, future, on_partial)
            return
        if future is None or not future.set_running_or_notify_cancel():
            return  # nobody waits any more
        if "result" in message:
            future.set_result(message["result"])
        elif "user_error" in message:
            future.set_exception(UserError(message["user_error"]))
        elif "value_error" in message:
            future.set_exception(ValueError(message["value_error"]))
        else:
            error = self._explain(message["error"])
            future.set_exception(EngineLostError(error) if number == 0 else RuntimeError(error))

    def _show(
        self, output: dict[str, Any], number: int, future: Future[Any], on_partial: Callable[[dict[str, Any]], None]
    ) -> None:
        """What there is so far. An error in looking at it ends the request, and not the thread that reads."""
        try:
            on_partial(output)
        except EngineLostError:
            pass  # whoever waits is told
        except Exception as error:
            with self._state:
                waits = self._waiting.pop(number, None) is not None
            if waits and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _watch(self) -> None:
        """Give the process up when it is silent for too long, or has ended without closing the connection."""
        tick = min(self._limit / 30, 1.0)
        before, size = time.monotonic(), -1
        while self._error is None:
            time.sleep(tick)
            now = time.monotonic()
            if now - before > tick + self._limit / 4:
                self._heard = now  # this process was stopped itself: what came meanwhile is not read yet
            before = now
            if self._process.poll() is not None:
                with contextlib.suppress(OSError):  # a child of its own may hold the other end
                    self._connection.shutdown(socket.SHUT_RD)
                return
            if self._started.done():
                if now - self._heard > self._limit:
                    self.give_up(f"did not answer for {now - self._heard:.0f} s")
                continue
            if (written := self._log_size()) != size:
                size, self._heard = written, now
            if now - self._heard > self._start_limit:
                self.give_up(f"wrote nothing for {now - self._heard:.0f} s while it started")

    def _lose(self, what: str) -> None:
        """It is gone or useless: end the rest of it, tell everyone. The first reason is the one that is told."""
        with self._state:
            is_first, self._losing = not self._losing, True
        if not is_first:  # killing the group looks like another death to the thread that reads
            self._told.wait()
            return
        self._kill_group()  # schedulers whose parent is gone hold GPU memory
        error = self._explain(what)
        with self._state:
            self._error = error
            waiting, self._waiting = list(self._waiting.values()), {}
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # who is sending to a stopped process gets on
        for future, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineLostError(error))
        self._told.set()

    # ---- parts

    def _result(self, future: Future[Any], timeout: float, what: str) -> Any:
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                return future.result()
            raise self.give_up(f"{what} in {timeout:.0f} s") from None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: dict[str, Any]) -> None:
        data = frames.encode(message)
        with self._sending, contextlib.suppress(OSError):  # it is lost: the other threads say so to all who wait
            self._connection.sendall(data)

    def _log_size(self) -> int:
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def _explain(self, what: str) -> str:
        time.sleep(0.05)  # its last lines are on their way to the file
        text = ""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._log_start, self._log_size() - _TAIL_BYTES))  # what an engine before it said is not its
            text = file.read().decode(errors="replace")
        if not self._ready and (cause := _cause(text)) and cause not in what:
            what = f"{what}: {cause}"
        hint = self._hint(f"{what}\n{text}")
        lines = "\n".join(text.splitlines()[-_TAIL_LINES:])
        return f"{what}{f'; {hint}' if hint else ''}. The end of {self.log}:\n{lines}"


def _socket_folder() -> str | None:
    """A folder for the engine's sockets, to be removed with it. None where their paths would be too long for such."""
    if len(tempfile.gettempdir()) > 70:
        return None
    return tempfile.mkdtemp(prefix="lightrl_")


def _cause(log: str) -> str | None:
    """The last error in a log, on one line: processes of SGLang end each other, and their codes say nothing."""
    found = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception): .+)$", log, re.MULTILINE)
    return None if not found else found[-1] if len(found[-1]) <= _CAUSE else found[-1][:_CAUSE] + "…"


def _living(group: int) -> list[int]:
    """Processes of a group that have not ended. Where there is no /proc: none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(path.parent.name))
    return found
