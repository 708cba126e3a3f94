"""On a training rank: the ranks that generate, as one engine.

Every training rank asks them for its own share of answers; the first alone passes weights on and tells the others how
that went. Between steps nothing is released: those ranks' GPUs are theirs.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightrl.engine.base import TAGS, Completion, EngineLostError, GenerateRequest, check_tags
from lightrl.engine.remote.channel import Channel
from lightrl.engine.remote.messages import pack_error, pack_request, unpack_completion, unpack_error
from lightrl.errors import LostError
from lightrl.sync.peers import Groups
from lightrl.sync.ranks import Contents, Sender, leave
from lightrl.threads import spawn

_LOOK = 0.5  # seconds between looks whether a rank is lost


class Ranks(Protocol):
    """The training ranks (`distributed.mesh.World`)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, record: Any) -> list[Any]: ...


class RolloutRank:
    """One rank that generates, of which training rank `rank` asks.

    It is lost when its connection ends, or nothing comes for `hang_timeout` seconds.
    """

    def __init__(self, channel: Channel, *, name: str, hang_timeout: float, rank: int) -> None:
        self.name = name
        self.is_lost_engine = False
        self.why_lost = ""
        self.incarnation = 0
        self.num_passes = 0
        self.ready: Future[None] = Future()
        self._channel = channel
        self._limit = hang_timeout
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._count = 0
        self._error: dict[str, Any] | None = None
        self._leaving = False
        self._heard: float | None = None  # nothing yet: it speaks once all have come
        channel.send({"rank": rank})
        channel.read(self._take, self._gone)
        threading.Thread(target=self._watch, name="lightrl-rank-watch", daemon=True).start()

    def submit(self, operation: str, **fields: Any) -> Future[Any]:
        """Ask for an operation; the future has its result, or the error."""
        number, future = self._expect()
        self.send(operation, id=number, **fields)
        return future

    def ask(self, requests: Sequence[GenerateRequest]) -> list[Future[Any]]:
        """Answers to several requests, which arrive together."""
        expected = [self._expect() for _ in requests]
        asked = [
            {"id": number, "request": pack_request(request)}
            for (number, _), request in zip(expected, requests, strict=True)
        ]
        self.send("ask", requests=asked)
        return [future for _, future in expected]

    def send(self, operation: str, **fields: Any) -> None:
        """Tell something that is not answered."""
        self._channel.send({"op": operation, **fields})

    def check(self) -> None:
        """Raise what ended this rank."""
        if self._error is not None:
            raise unpack_error(self._error)

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    def wait(self, future: Future[Any]) -> Any:
        """The result, or why it does not come."""
        while not wait([future], _LOOK).done:
            self.check()
        return future.result()

    def close(self) -> None:
        """Say goodbye; idempotent."""
        if not self._leaving:
            self._leaving = True
            self.send("bye")
            self._channel.close()

    def _expect(self) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._lock:
            self.check()
            self._count += 1
            self._waiting[self._count] = future
            return self._count, future

    # ---- the thread that reads, and the one that watches

    def _take(self, message: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        if "id" in message:
            with self._lock:
                future = self._waiting.pop(message["id"], None)
            if future is None or not future.set_running_or_notify_cancel():
                return
            if "error" in message:
                future.set_exception(unpack_error(message["error"]))
            else:
                future.set_result(message["result"])
            return
        event = message["event"]
        if event == "ready":
            self.ready.set_result(None)
        elif event == "pass":
            self.num_passes = message["number"]
        elif event in ("lost", "back"):
            self.incarnation, self.is_lost_engine = message["incarnation"], event == "lost"
            self.why_lost = message["why"]
        elif event == "fatal":
            self._fail(message["error"])

    def _gone(self) -> None:
        if not self._leaving:
            self._fail(pack_error(LostError(f"{self.name} left the job: its own error says why")))

    def _watch(self) -> None:
        tick = min(self._limit / 30, 1.0)
        before = since = time.monotonic()
        while self._error is None and not self._leaving:
            time.sleep(tick)
            now = time.monotonic()
            if self._heard is None or now - before > tick + self._limit / 4:  # or this process was stopped itself
                since = now
            else:
                since = max(since, self._heard)
            before = now
            if now - since > 0.8 * self._limit:
                silent = f"{self.name} gave no sign of life for {now - since:.0f} s (engine.hang_timeout)"
                self._fail(pack_error(LostError(silent)))

    def _fail(self, error: dict[str, Any]) -> None:
        """The first reason is the one that is told."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            waiting, self._waiting = [*self._waiting.values(), self.ready], {}
        for future in waiting:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(unpack_error(error))


class RemoteEngine:
    """Implements `Engine` and `Restartable` of `lightrl.engine.base`, on every training rank alike.

    Each `tensor_parallel` consecutive of `ranks` share an engine, of which the first is asked. `about` is what the
    others need to know of the policy; `join` makes the group with them in which weights travel, of a name. With it the
    first training rank is rank 0. LostError where a rank is lost, which ends the run: only engines are started anew.
    """

    def __init__(
        self,
        ranks: Sequence[RolloutRank],
        *,
        about: dict[str, Any],
        join: Callable[[str], Any],
        world: Ranks,
        device: torch.device,
        bucket_bytes: int,
        tensor_parallel: int = 1,
        dtypes: dict[str, torch.dtype] | None = None,
    ) -> None:
        self.policy_version = -1
        self._ranks, self._world, self._join = list(ranks), world, join
        self._engines = [self._ranks[i : i + tensor_parallel] for i in range(0, len(self._ranks), tensor_parallel)]
        self._load = [0] * len(self._engines)
        self._live: dict[str, int] = {}  # by request: the engine that was asked
        self._asking: tuple[asyncio.AbstractEventLoop, list[tuple[int, GenerateRequest, asyncio.Future[Any]]]] | None
        self._asking = None
        self._sender: Sender | None = None
        self._closed = self._is_broken = False
        self._together(lambda: self._meet(about, device, bucket_bytes, dtypes or {}))
        for rank in self._ranks:
            rank.wait(rank.ready)

    def _meet(self, about: dict[str, Any], device: torch.device, size: int, dtypes: dict[str, torch.dtype]) -> None:
        if self._world.rank:
            return
        name = uuid.uuid4().hex
        for rank in self._ranks:
            rank.send("about", about=about, group=name)
        joining = spawn(self._join, name)
        for rank in self._ranks:
            rank.wait(joining)
        self._sender = Sender(
            group=joining.result(),
            device=device,
            bucket_bytes=size,
            announce=self._announce,
            check=self._check,
            dtypes=dtypes,
        )

    def _check(self) -> None:
        for rank in self._ranks:
            rank.check()

    # ---- generation

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """All `n` answers of one request, in order, by one engine; ValueError for one that can never be served."""
        if self.policy_version < 0:
            if self.lost:
                raise EngineLostError("an engine was lost before it had weights")
            raise RuntimeError("the engine has no weights: call load_weights before generate")
        if request.id in self._live:
            raise ValueError(f"request {request.id!r} is under way already: ids must differ")
        number = self._pick()
        self._load[number] += request.n
        self._live[request.id] = number
        try:
            return [unpack_completion(fields) for fields in await self._ask(number, request)]
        except asyncio.CancelledError:
            self._flush()
            self._engines[number][0].send("cancel", request=request.id)
            raise
        finally:
            self._load[number] -= request.n
            del self._live[request.id]

    def _pick(self) -> int:
        """The engine with the fewest answers of this rank under way; ranks begin with different ones."""
        count = len(self._engines)
        order = [(self._world.rank + i) % count for i in range(count)]
        return min(order, key=lambda number: self._load[number])

    def _ask(self, number: int, request: GenerateRequest) -> asyncio.Future[Any]:
        """What is asked before the event loop turns goes as one message."""
        loop = asyncio.get_running_loop()
        if self._asking is None or self._asking[0] is not loop:
            self._asking = (loop, [])
            loop.call_soon(self._flush)
        answer = loop.create_future()
        self._asking[1].append((number, request, answer))
        return answer

    def _flush(self) -> None:
        if self._asking is None:
            return
        (loop, asked), self._asking = self._asking, None
        for number, engine in enumerate(self._engines):
            mine = [(request, answer) for place, request, answer in asked if place == number and not answer.done()]
            if not mine:
                continue
            try:
                futures = engine[0].ask([request for request, _ in mine])
            except Exception as error:
                for _, answer in mine:
                    answer.set_exception(error)
                continue
            for (_, answer), future in zip(mine, futures, strict=True):
                future.add_done_callback(partial(_hand_over, loop, answer))

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all: what was sampled so far returns with `Status.ABORTED`."""
        self._flush()
        names = list(self._live) if request_id is None else [request_id]
        for number, engine in enumerate(self._engines):
            if mine := [name for name in names if self._live.get(name) == number]:
                engine[0].send("abort", requests=mine)

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, share: bool = False) -> None:
        """Every training rank calls it. The engines have copies, whatever `share` says."""
        self._load_passes([list(weights)], version)

    def _load_passes(self, groups: Groups, version: int) -> None:
        """Give all engines these weights; all training ranks raise if they did not arrive.

        The engines ask for as many passes as they need, to compare what they hold. EngineLostError comes after them.
        """
        self._world.gather(None)  # nobody has anything under way
        loads: list[Future[Any]] = []
        number = 0
        while self._together(partial(self._is_wanted, loads, number, version))[0]:
            number += 1
            walk = iter(groups)
            self._together(partial(self._send, walk), walk)
        self.policy_version = version

    def _is_wanted(self, loads: list[Future[Any]], number: int, version: int) -> bool:
        """Whether all engines have begun another pass; False when all have loaded the weights."""
        if self._world.rank:
            return False
        if not loads:
            for rank in self._ranks:
                rank.num_passes = 0
            loads += [rank.submit("load", version=version) for rank in self._ranks]
        while not all(load.done() for load in loads):
            if all(rank.num_passes > number for rank in self._ranks):
                return True
            self._check()
            if any(load.done() and load.exception() for load in loads):
                wait(loads, _LOOK)  # perhaps all end so
                break
            time.sleep(0.0005)
        errors = [error for load in loads if load.done() and (error := load.exception()) is not None]
        if errors:  # of those, first what no new engine mends
            raise min(errors, key=lambda error: isinstance(error, EngineLostError))
        return False

    def _send(self, groups: Groups) -> None:
        if self._sender is not None:
            self._is_broken = True  # up to its end
            self._sender.send(groups)
            self._is_broken = False

    def _announce(self, contents: Contents | None) -> None:
        for rank in self._ranks:
            rank.send("contents", contents=contents)

    def flush_cache(self) -> None:
        """Forget cached prefixes."""
        for engine in self._engines:
            engine[0].wait(engine[0].submit("flush"))

    # ---- memory is the engines' own

    def offload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Nothing is released, but nothing of this rank may be under way."""
        check_tags(tags)
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are under way: await or abort them before offload")

    def onload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Nothing: the engines never let go of their memory."""
        check_tags(tags)

    # ---- losses

    @property
    def lost(self) -> bool:
        """Whether an engine is known to be lost."""
        return self.num_lost > 0

    @property
    def num_lost(self) -> int:
        """Engines that are known to be lost."""
        return sum(engine[0].is_lost_engine for engine in self._engines)

    @property
    def why_lost(self) -> str:
        """In one line, of one of them."""
        return next((engine[0].why_lost for engine in self._engines if engine[0].is_lost_engine), "")

    def restart(self) -> None:
        """New engines in the place of those that are lost, on their own ranks. Once, whoever else asks for it."""
        waiting = [
            (rank, rank.submit("restart", incarnation=engine[0].incarnation))
            for engine in self._engines
            if engine[0].is_lost_engine
            for rank in engine
        ]
        for rank, future in waiting:
            rank.wait(future)

    def close(self) -> None:
        """Let the ranks go, which end their engines; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.abort()
        for rank in self._ranks:
            rank.close()
        if self._sender is not None:
            leave(self._sender.group, is_broken=self._is_broken or any(rank.is_lost for rank in self._ranks))

    # ---- the training ranks

    def _together(self, work: Callable[[], Any], rest: Iterable[Any] = ()) -> list[Any]:
        """Results of `work` on all training ranks. Where it failed on one, all raise the same kind of error.

        What it left of `rest` is gone through first: the other ranks gather weights with this one.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        for _ in rest:
            pass
        found = self._world.gather((result, None if error is None else pack_error(error)))
        if error is not None:
            raise error
        for _, failure in found:
            if failure is not None:
                raise unpack_error(failure)
        return [record for record, _ in found]


class RemoteGroupEngine(RemoteEngine):
    """The same over engines that take weights a group at a time (`GroupLoader`), as SGLang does."""

    def load_groups(self, groups: Groups, version: int) -> None:
        """As `load_weights`, of tensors of which only a group's exist at a time."""
        self._load_passes(groups, version)


def _hand_over(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any], future: Future[Any]) -> None:
    """From the thread that reads to who awaits."""

    def settle() -> None:
        if answer.done():
            return
        if (error := future.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(future.result())

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
