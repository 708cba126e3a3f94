"""On a rank that generates: an engine that the training ranks ask, and that gets its weights from the first of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from lightrl.engine.base import Completion, Engine, EngineLostError, GroupLoader, Restartable, TellsLoss
from lightrl.engine.remote.channel import Channel, Listener
from lightrl.engine.remote.messages import pack_completion, pack_error, unpack_request
from lightrl.errors import LostError
from lightrl.sync.ranks import Receiver, leave
from lightrl.threads import spawn
from lightrl.types import Status

T = TypeVar("T")

_GRACE = 5.0
"""Seconds after a training rank is gone: whoever started the ranks ends this one meanwhile, and tells that rank's error
instead of ours."""
_LOOK = 0.25  # seconds between looks whether the engine is lost
_CLOSE = 30.0  # seconds for an engine to end


class RolloutService:
    """Serves the training ranks, by their rank in `channels`, until all have said goodbye.

    `start` gets what the first says of the policy, and makes the engine; `join` makes the group in which its weights
    come, of a name that it gets. The engine generates on the event loop of `run`; all else it does in threads. It says
    every `beat` seconds that this process lives.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        *,
        start: Callable[[dict[str, Any]], Engine],
        join: Callable[[str], Any],
        device: torch.device,
        beat: float,
    ) -> None:
        self._channels = dict(channels)
        self._start_engine, self._join, self._device, self._beat = start, join, device, beat
        self._engine: Engine | None = None
        self._receiver: Receiver | None = None
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()
        self._aborted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._restart: asyncio.Task[None] | None = None
        self._incarnation = 0
        self._told_lost = self._is_bare = False
        self._num_passes = 0
        self._staying = set(self._channels)
        self._over = threading.Event()

    async def run(self) -> None:
        """To the end of the run. LostError when a training rank is gone without a goodbye."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        for rank, channel in self._channels.items():
            channel.read(partial(self._post, self._take, rank), partial(self._post, self._gone, rank))
        threading.Thread(target=self._pulse, name="lightrl-pulse", daemon=True).start()
        try:
            await self._end
        finally:
            left = [*self._tasks, *self._answers.values()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if self._engine is not None:
                closing = spawn(self._here, self._engine.close)
                await asyncio.wait([asyncio.wrap_future(closing)], timeout=_CLOSE)
            self._over.set()
            if self._receiver is not None:
                is_broken = self._end.cancelled() or not self._end.done() or self._end.exception() is not None
                await self._in_thread(partial(leave, self._receiver.group, is_broken=is_broken))
            for channel in self._channels.values():
                channel.close()

    # ---- messages

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        """From a thread that reads."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for an answer
            self._loop.call_soon_threadsafe(function, *arguments)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        operation: Callable[[int, dict[str, Any]], None] = getattr(self, f"_on_{message['op']}")
        operation(rank, message)

    def _tell(self, event: str, **fields: Any) -> None:
        for channel in self._channels.values():
            channel.send({"event": event, **fields})

    def _pulse(self) -> None:
        while not self._over.wait(self._beat):
            self._tell("beat")

    def _gone(self, rank: int) -> None:
        if rank in self._staying and not self._end.done():
            error = LostError(f"training rank {rank} left the job: its own error says why")
            self._loop.call_later(_GRACE, self._finish, error)

    def _finish(self, error: BaseException | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _do(self, work: Any) -> None:
        """A coroutine; an error that it does not tell by itself ends this rank, which the others see."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell("fatal", error=pack_error(error))
            self._finish(error)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(spawn(self._here, work, *arguments))

    def _here(self, work: Callable[..., T], *arguments: Any) -> T:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread's own
        return work(*arguments)

    async def _reply(self, rank: int, number: int, work: Any) -> None:
        """The result of a coroutine, or its error, to who asked."""
        try:
            answer = {"result": await work}
        except Exception as error:
            if isinstance(error, EngineLostError):
                self._look()
            answer = {"error": pack_error(error)}
        self._channels[rank].send({"id": number, **answer})

    # ---- operations

    def _on_bye(self, rank: int, _: dict[str, Any]) -> None:
        self._staying.discard(rank)
        if not self._staying:
            self._finish(None)

    def _on_about(self, _: int, message: dict[str, Any]) -> None:
        self._do(self._begin(message))

    async def _begin(self, message: dict[str, Any]) -> None:
        group = await self._in_thread(self._join, message["group"])
        self._receiver = Receiver(group=group, device=self._device, begin=self._next_pass, check=self._check)
        self._engine = await self._in_thread(self._start_engine, message["about"])
        self._tell("ready")
        if isinstance(self._engine, Restartable):
            self._do(self._watch())

    def _check(self) -> None:
        if self._over.is_set():
            raise LostError("the training ranks are gone")

    def _on_ask(self, rank: int, message: dict[str, Any]) -> None:
        """Several requests at once: the embedded engine has them all in one batch, as it would in the trainer."""
        for asked in message["requests"]:
            key = f"{rank}/{asked['request']['id']}"
            work = self._reply(rank, asked["id"], self._generate(key, asked["request"]))
            task = self._answers[key] = asyncio.ensure_future(work)
            task.add_done_callback(partial(self._answered, key))

    def _answered(self, key: str, task: asyncio.Task[None]) -> None:
        self._answers.pop(key, None)
        self._begun.discard(key)
        self._aborted.discard(key)
        if not task.cancelled():
            task.exception()

    async def _generate(self, key: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._engine is not None
        request = replace(unpack_request(fields), id=key)
        if key in self._aborted:
            nothing = Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[])
            return [pack_completion(nothing)] * request.n
        if self._is_bare:  # of a rank that does not know of the loss yet
            raise EngineLostError("the engine was lost, and the new one has no weights yet")
        self._begun.add(key)
        return [pack_completion(completion) for completion in await self._engine.generate(request)]

    def _on_abort(self, rank: int, message: dict[str, Any]) -> None:
        for key in (f"{rank}/{name}" for name in message["requests"]):
            if key in self._begun:
                assert self._engine is not None
                self._engine.abort(key)
            elif key in self._answers:
                self._aborted.add(key)

    def _on_cancel(self, rank: int, message: dict[str, Any]) -> None:
        if (task := self._answers.get(f"{rank}/{message['request']}")) is not None:
            task.cancel()

    def _on_flush(self, rank: int, message: dict[str, Any]) -> None:
        assert self._engine is not None
        self._do(self._reply(rank, message["id"], self._in_thread(self._engine.flush_cache)))

    # ---- weights

    def _on_load(self, rank: int, message: dict[str, Any]) -> None:
        self._num_passes = 0
        self._do(self._reply(rank, message["id"], self._in_thread(self._load, message["version"])))

    def _load(self, version: int) -> None:
        assert self._engine is not None
        assert self._receiver is not None
        if isinstance(self._engine, GroupLoader):
            self._engine.load_groups(self._receiver, version)
        else:
            named = (entry for group in self._receiver for entry in group)
            self._engine.load_weights(named, version)
        self._is_bare = False

    def _next_pass(self) -> None:
        self._num_passes += 1
        self._channels[0].send({"event": "pass", "number": self._num_passes})

    def _on_contents(self, _: int, message: dict[str, Any]) -> None:
        assert self._receiver is not None
        self._receiver.announced.put(message["contents"])

    # ---- losses

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            self._look()

    def _look(self) -> None:
        """Tell of an engine that is lost, once."""
        if isinstance(self._engine, Restartable) and self._engine.lost and not self._told_lost:
            self._told_lost = True
            why = self._engine.why_lost if isinstance(self._engine, TellsLoss) else ""
            self._tell("lost", incarnation=self._incarnation, why=why)

    def _on_restart(self, rank: int, message: dict[str, Any]) -> None:
        """Once for all who ask for another engine than the `incarnation` that they found lost."""
        if message["incarnation"] == self._incarnation and self._restart is None:
            self._restart = asyncio.ensure_future(self._renew())
        self._do(self._reply(rank, message["id"], self._restarted()))

    async def _restarted(self) -> None:
        if self._restart is not None:
            await asyncio.shield(self._restart)

    async def _renew(self) -> None:
        assert isinstance(self._engine, Restartable)
        try:
            await self._in_thread(self._engine.restart)
        finally:
            self._restart = None
        self._incarnation += 1
        self._told_lost, self._is_bare = False, True
        self._tell("back", incarnation=self._incarnation, why="")


def accept_all(listener: Listener, count: int, timeout: float) -> dict[int, Channel]:
    """The channels of `count` training ranks, by their rank. LostError where one does not come."""
    channels: dict[int, Channel] = {}
    deadline = time.monotonic() + timeout
    while len(channels) < count:
        try:
            channel = listener.accept(max(deadline - time.monotonic(), 0.01))
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(count) if rank not in channels)
            raise LostError(
                f"parallel.timeout: training ranks {missing} did not come to those that generate, for {timeout:.0f} s"
            ) from None
        channels[int(channel.receive()["rank"])] = channel
    return channels
