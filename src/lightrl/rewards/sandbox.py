"""Python code of a model's, in processes of its own, behind limits; for tools and for rewards that run code.

Each run is a new process (`sandbox_child.py`): empty environment, an empty working folder, no network, limits on time,
memory, files, processes and output. When it returns, nothing that the code started is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightrl.config.schema import SandboxConfig
from lightrl.rewards.calls import in_thread

Kind = Literal["ok", "error", "timeout", "memory", "output", "binary", "killed"]
_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE = 5.0  # seconds after the limit in which the child ends everything by itself; then it is ended


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of a piece of code."""

    kind: Kind
    """`ok`; `error`: it raised, or its exit status was not 0; `timeout`, `memory`, `output`: a limit ended it (memory:
    MemoryError was not caught); `binary`: it wrote bytes that are no text; `killed`: a signal ended it."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """Negative for a signal; None when a limit ended it."""
    seconds: float = 0.0
    isolation: str = ""
    """`namespaces`; `landlock`, `seccomp` or `audit` where the system allows none (docs/agents.md#the-sandbox)."""

    @property
    def ok(self) -> bool:
        """It ran to its end, with exit status 0."""
        return self.kind == "ok"


class Sandbox:
    """Runs Python code, up to `concurrency` pieces at once. `close` ends all that run."""

    def __init__(self, config: SandboxConfig | None = None, *, namespaces: bool = True) -> None:
        self.config = config or SandboxConfig()
        self._namespaces = namespaces
        self._slots = threading.Semaphore(self.config.concurrency)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    async def run(self, code: str, *, stdin: str = "", timeout: float | None = None, echo: bool = False) -> Ran:
        """Run `code` to its end or its limits. `timeout`: seconds, in place of `sandbox.timeout`; waiting for a free
        place does not count. `echo` prints the value of an expression on the last line, as a notebook does.

        It cannot raise for what the code does. OSError where no process can be started.
        """
        return await in_thread(self.run_sync, code, stdin, timeout, echo)

    def run_sync(self, code: str, stdin: str = "", timeout: float | None = None, echo: bool = False) -> Ran:
        """As `run`, in the calling thread."""
        limit = self.config.timeout if timeout is None else min(timeout, self.config.timeout)
        try:
            code.encode()
            stdin.encode()
        except UnicodeEncodeError:
            return Ran(kind="error", stderr="the code holds half a character (a lone surrogate)", exit_code=1)
        with self._slots, tempfile.TemporaryDirectory(prefix="lightrl-", ignore_cleanup_errors=True) as folder:
            os.chmod(folder, 0o777)  # the code may run as another user; nobody else learns the folder's name
            return self._run(code, stdin, limit, echo, folder)

    def close(self) -> None:
        """End all that run; idempotent."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            _kill(process)

    def _run(self, code: str, stdin: str, limit: float, echo: bool, folder: str) -> Ran:
        config, began = self.config, time.monotonic()
        request = {
            "code": code,
            "stdin": stdin,
            "timeout": limit,
            "echo": echo,
            "cwd": folder,
            "memory_mib": config.memory_mib,
            "file_mib": config.file_mib,
            "processes": config.processes,
            "namespaces": self._namespaces,
            "host": os.getpid(),
        }
        read_end, write_end = os.pipe()
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the sandbox is closed")
                process = subprocess.Popen(
                    # no user's folder on the path, no bytecode written, text is UTF-8 whatever the environment
                    [sys.executable, "-I", "-B", "-X", "utf8", str(_CHILD), str(write_end)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(write_end,),
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
                self._running.add(process)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        try:
            with os.fdopen(read_end, "rb") as reports:
                output, flooded, late = _exchange(process, json.dumps(request).encode(), config, limit + _GRACE)
                if flooded or late:
                    _kill(process)
                report = reports.read() if not (flooded or late) else b""
        finally:
            _kill(process)
            with self._lock:
                self._running.discard(process)
        return _told(output, report, flooded, late, time.monotonic() - began, config.output_kib * 1024)


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, config: SandboxConfig, limit: float
) -> tuple[list[bytes], bool, bool]:
    """Hand over the request and read until both streams end: (output and errors, flooded, late)."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    room, end = config.output_kib * 1024, time.monotonic() + limit
    found = [bytearray(), bytearray()]
    waiting = memoryview(request)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ, found[0])
        selector.register(process.stderr, selectors.EVENT_READ, found[1])
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                return [bytes(part) for part in found], False, True
            for key, _ in selector.select(left):
                if key.data is None:
                    try:
                        waiting = waiting[os.write(key.fd, waiting[:65536]) :]
                    except BrokenPipeError:
                        waiting = waiting[:0]
                    if not waiting:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
            if sum(map(len, found)) > room:
                return [bytes(part) for part in found], True, False
    return [bytes(part) for part in found], False, False


def _told(output: list[bytes], report: bytes, flooded: bool, late: bool, seconds: float, room: int) -> Ran:
    kept, left = [], room
    for part in output:
        kept.append(part[:left])
        left -= len(kept[-1])
    texts = [part.decode("utf-8", "replace") for part in kept]
    told: dict[str, Any] = {"kind": "timeout" if late else "killed", "code": None, "isolation": ""}
    with contextlib.suppress(ValueError):
        told |= json.loads(report)
    code: int | None = told["code"]
    kind: Kind = "ok"
    if flooded:
        kind, code = "output", None
    elif told["kind"] in ("timeout", "killed") or code == -signal.SIGXCPU:
        kind, code = ("killed", code) if told["kind"] == "killed" else ("timeout", None)
    elif code:
        last = texts[1].rstrip().rpartition("\n")[2]
        kind = "memory" if last.startswith("MemoryError") else "killed" if code < 0 else "error"
    elif not all(_is_text(part) for part in kept):
        kind = "binary"
    isolation = str(told["isolation"])
    return Ran(kind=kind, stdout=texts[0], stderr=texts[1], exit_code=code, seconds=seconds, isolation=isolation)


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child, which ends what it started, and if it does not, at once. Its pipes are closed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
