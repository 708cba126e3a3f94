"""Threads: how OpenMP's wait for work, and some that may be left behind. Imports no torch, as it has to come first."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def sleep_while_waiting() -> None:
    """Let threads without work sleep (`OMP_WAIT_POLICY=passive`), unless the user has chosen.

    Threads that spin take the cores from other processes: steps on a shared CPU are up to three times slower. OpenMP
    reads the variable once, when torch loads it: afterwards this does nothing.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def spawn(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run in a thread that does not keep the process alive: one that hangs must not outlive its error."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"lightrl-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return future
