"""Calling a function of the user's under a time limit, whatever it does."""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

_AROUND = (str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parent), threading.__file__)


class Caller:
    """Runs sync functions in threads of their own and async ones on one background event loop.

    The loop outlives the steps, so that a client session the function keeps stays usable; and neither kind can block
    the loop that generates. A thread cannot be killed: after its time it is left behind as a daemon.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, function: Callable[..., Any], argument: Any, timeout: float) -> Any:
        """The function's result. Raises TimeoutError after `timeout` seconds, and what the function raises."""
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                    return await self._on_loop(function(argument))
                result = await in_thread(function, argument)
                if inspect.isawaitable(result):  # a plain function that returns a coroutine, such as a partial
                    result = await self._on_loop(result)
                return result
        except TimeoutError:
            if limit.expired():  # ours: a function may raise its own
                raise TimeoutError(f"took longer than {timeout:g} s") from None
            raise

    def close(self) -> None:
        """Stop the loop; idempotent."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def _on_loop(self, awaitable: Awaitable[Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name="lightrl-reward-loop", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_guarded(awaitable), self._loop))


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a new daemon thread: unlike an executor's, it never keeps the interpreter from exiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: Exception | None) -> None:
        if future.done():  # timed out or cancelled meanwhile
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def target() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function(*args)
        except BaseException as caught:
            error = _as_exception(caught)
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=target, name="lightrl-reward", daemon=True).start()
    return await future


def own_traceback(error: BaseException) -> str:
    """The error's traceback from the first frame of the function that was called; "" if it was not raised in there."""
    told = traceback.TracebackException.from_exception(error)
    _trim(told)
    return "".join(told.format()).rstrip() if told.stack or told.__cause__ or told.__context__ else ""


def _trim(told: traceback.TracebackException) -> None:
    """Take away the frames that lead to the function, of this error and of those it was raised from."""
    frames = list(told.stack)
    while frames and frames[0].filename.startswith(_AROUND):
        frames.pop(0)
    told.stack = traceback.StackSummary.from_list(frames)
    for name in ("__cause__", "__context__"):
        before = getattr(told, name)
        if before is not None:
            _trim(before)
            if not (before.stack or before.__cause__ or before.__context__):
                setattr(told, name, None)


async def _guarded(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # would end the loop
        raise _as_exception(error) from error


def _as_exception(error: BaseException) -> Exception:
    """`sys.exit()` in a reward function fails its sample, not the run; a future refuses StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=5.0))
    loop.close()
