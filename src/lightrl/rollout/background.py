"""An event loop in a thread of its own, where generation goes on while training computes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

R = TypeVar("R")

_LOOK = 1.0  # seconds between looks whether the thread is still there
_LEAVE = 10.0  # seconds for what is under way to end


class Background:
    """`run` waits for a coroutine there; tasks that it starts stay. `begin` is called first in the thread.

    The thread does not keep the process alive, and `close` ends what is under way in it.
    """

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._loop = asyncio.new_event_loop()
        self._ended: Future[None] = Future()
        self._begin = begin
        self._thread = threading.Thread(target=self._work, name="lightrl-rollouts", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._begin()
            self._loop.run_forever()
            self._ended.set_result(None)
        except BaseException as error:  # told to whoever waits for the thread
            self._ended.set_exception(error)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Its result, or its error. An interrupt of the waiting thread cancels it. RuntimeError for a dead thread."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise
        try:
            while not wait([future], _LOOK).done:
                if self._ended.done():
                    work.close()
                    cause = self._ended.exception()
                    raise RuntimeError(f"the thread that generates has ended: {cause!r}") from cause
            return future.result()
        except CancelledError:
            raise RuntimeError("what was generated was cancelled") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all tasks and end the thread; idempotent."""
        if self._loop.is_closed():
            return
        if not self._ended.done():
            ending = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
            wait([ending, self._ended], _LEAVE, return_when="FIRST_COMPLETED")
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_LEAVE)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
