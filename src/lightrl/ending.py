"""How a command ends: what a mistake prints, what torchrun is told of it, and what an interrupted run says."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar, cast

from lightrl.errors import LostError, UserError

T = TypeVar("T")
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_FULL = (errno.ENOSPC, errno.EDQUOT)


def speaks() -> bool:
    """One process a machine prints: under torchrun the others would say the same."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def under_torchrun() -> bool:
    """Or another launcher that sets its variables."""
    return "RANK" in os.environ


def mistake(error: UserError | LostError) -> NoReturn:
    """End with status 2 (1 for a loss) and a line for each problem. Notes of the error, such as the user's own frames,
    and the end of a log come before.

    What may have gone wrong on this rank alone, once the run has begun, is in torchrun's report; under a launcher that
    has none, every rank prints.
    """
    problems: Sequence[str] | None = getattr(error, "problems", None)  # of the config, which is the same on all ranks
    prints = speaks() or (problems is None and not os.environ.get(_ERROR_FILE))
    for note in getattr(error, "__notes__", ()) if prints else ():
        print(note, file=sys.stderr)
    log: list[str] = []
    if isinstance(error, LostError):
        problems, log = [error.line], str(error).splitlines()[1:]
    status = 2 if isinstance(error, UserError) else 1
    _leave([*log, *(f"error: {problem}" for problem in problems or [str(error)])], status, prints)


def leave(lines: Sequence[str], *, status: int) -> NoReturn:
    """Print the lines on stderr, in one process a machine, and end.

    torchrun shows them too: at the end of its report, where it would show a traceback.
    """
    _leave(lines, status, speaks())


def _leave(lines: Sequence[str], status: int, prints: bool) -> NoReturn:
    if prints:
        print("\n".join(lines), file=sys.stderr, flush=True)
    tell_torchrun("\n".join(lines))
    sys.exit(status)


def tell_torchrun(text: str) -> None:
    """Why this process fails, in the file that torchrun reads it from."""
    name = os.environ.get(_ERROR_FILE)
    if not under_torchrun() or not name:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def recorded(run: Callable[[], T]) -> T:
    """Run it; under torchrun, the traceback of an unexpected exception goes into its report, with this rank's number.

    A mistake of the user's has no traceback: `mistake` says it in a line.
    """
    if not under_torchrun():
        return run()
    from torch.distributed.elastic.multiprocessing.errors import record

    mistakes: list[UserError | LostError] = []

    def guarded() -> T | None:
        try:
            return run()
        except (UserError, LostError) as error:
            mistakes.append(error)
            return None

    result = record(guarded)()
    if mistakes:
        raise mistakes[0]
    return cast(T, result)


@contextlib.contextmanager
def full_disk_told() -> Iterator[None]:
    """A disk that is full is told in a line, from wherever it was met: no traceback makes room."""
    try:
        yield
    except Exception as error:
        if not _is_full_disk(error):
            raise
        text = " ".join(str(error).split())
        raise UserError(
            f"a disk is full: {text}; make room: the same command goes on from the newest checkpoint"
        ) from error


def _is_full_disk(error: BaseException) -> bool:
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(f"(os error {number})" in str(error) for number in _FULL):  # of safetensors, which is written in Rust
            return True
        waiting += [cause for cause in (error.__cause__, error.__context__) if cause is not None]
        failures = getattr(error, "failures", None)  # torch's CheckpointException: rank -> (exception, traceback)
        for failure in failures.values() if isinstance(failures, dict) else ():
            waiting += [part for part in failure if isinstance(part, BaseException)]
    return False


@contextlib.contextmanager
def told_when_stopped(where: Callable[[], str]) -> Iterator[None]:
    """Within the block, Ctrl-C ends with status 130 and SIGTERM with 143, and the first rank prints `where()`, as it
    does for a loss.

    SIGTERM ends at once, without the block's `finally`: a thread of its own sees it, for the main thread may wait in a
    collective for a rank that is gone. What a run leaves behind it must survive a kill anyway.
    """
    try:
        with _terminated(where) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
            yield
    except LostError as error:
        if not isinstance(error, UserError):  # the run had begun
            _say(where)
        raise
    except KeyboardInterrupt:
        _say(where)
        if under_torchrun():  # a thread that waits for other ranks may be left, which must not come back meanwhile
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(128 + signal.SIGINT)
        sys.exit(128 + signal.SIGINT)


@contextlib.contextmanager
def _terminated(where: Callable[[], str]) -> Iterator[None]:
    """SIGTERM prints `where()` and ends the process. Only the main thread may ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    incoming, outgoing = os.pipe()
    os.set_blocking(outgoing, False)

    def watch() -> None:
        while number := os.read(incoming, 1):  # the number of every signal that has a handler; b"": the block is over
            if number[0] == signal.SIGTERM:
                _say(where)
                os._exit(128 + signal.SIGTERM)

    def handler(number: int, frame: FrameType | None) -> None:
        """Nothing: that there is one makes Python write the number into the pipe."""

    watcher = threading.Thread(target=watch, name="lightrl-sigterm", daemon=True)
    watcher.start()
    old_pipe = signal.set_wakeup_fd(outgoing, warn_on_full_buffer=False)
    old_handler = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        signal.set_wakeup_fd(old_pipe)
        os.close(outgoing)
        watcher.join()
        os.close(incoming)


def _say(where: Callable[[], str]) -> None:
    if os.environ.get("RANK", "0") == "0" and (text := where()):
        print(f"\n{text}", file=sys.stderr, flush=True)
