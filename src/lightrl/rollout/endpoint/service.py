"""Sessions that clients open by themselves, without a run: what `lightrl serve` answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightrl.config.schema import AgentConfig, EndpointConfig
from lightrl.rollout.agent import AgentSampler
from lightrl.rollout.collect import Work
from lightrl.rollout.conversation import ChatTemplate
from lightrl.rollout.endpoint.protocol import ApiError, ChatRequest
from lightrl.rollout.endpoint.server import Endpoint
from lightrl.rollout.endpoint.session import Session
from lightrl.rollout.episode import Episode
from lightrl.rollout.tools import load_parser
from lightrl.types import Prompt, Sample, SampleGroup, Status

_NAME = re.compile(r"[\w.-]{1,64}")
_UNNAMED = "~"  # no client can choose it
_MOST_UNNAMED = 1000


class Unscored:
    """Implements `rollout.collect.Scores`: a session has the reward that its client gave, or none."""

    async def score(self, samples: list[Sample]) -> None:
        return

    def count_failure(self, sample: Sample, error: Exception) -> None:
        sample.status, sample.reward = Status.FAILED, None
        sample.metadata["failure"] = str(error)


@dataclass(eq=False, kw_only=True)
class _Open:
    """A session, once it has begun, and the task that plays it."""

    begun: asyncio.Future[Session]
    task: asyncio.Task[None] | None = None


class Service(Endpoint):
    """An endpoint whose sessions begin with their first request; `Sessions` plays them.

    A request to `/v1/sessions/NAME/…`, or with the header `lightrl-session: NAME`, belongs to that session. Any other
    belongs to the one whose answer it goes on from, or begins one without a name. Sessions end when they are told to,
    when nothing was asked for `idle` seconds, and at the end of `serve`; `record` then gets what each has become, as a
    group of samples.

    Answers 503 until `serve`. UserError where the address cannot be listened on.
    """

    def __init__(
        self,
        config: EndpointConfig,
        agent: AgentConfig,
        template: ChatTemplate,
        *,
        model: str,
        idle: float,
        key: str | None = None,
        record: Callable[[SampleGroup], None] = lambda group: None,
    ) -> None:
        self._agent, self._idle, self._record = agent, idle, record
        self._follows = config.foreign_sampling != "ignore"
        self._open: dict[str, _Open] = {}
        self._names: dict[int, str] = {}  # by the number of their group
        self._opened = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sampler: AgentSampler | None = None
        self._over: asyncio.Future[None] | None = None
        super().__init__(config, template, model=model, key=key)

    @property
    def key(self) -> str:
        """Opens all sessions."""
        return self._key

    # ---- the loop that generates

    async def serve(self, sampler: AgentSampler) -> None:
        """Until `stop`. Raises what ended it otherwise, such as EngineLostError; sessions are ended first."""
        self._sampler, self._loop = sampler, asyncio.get_running_loop()
        self._over = self._loop.create_future()
        try:
            await self._over
        finally:
            self._loop = None  # no more begin
            open_ = list(self._open.values())
            for entry in open_:
                if entry.begun.done() and not entry.begun.cancelled() and entry.begun.exception() is None:
                    entry.begun.result().over.set()
            tasks = [entry.task for entry in open_ if entry.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """End `serve`. On its loop."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._over is None or self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    async def _session_of(self, name: str | None, request: ChatRequest | None) -> Session:
        if name is None:
            assert request is not None
            name = next((n for n, s in reversed(self._unnamed()) if s.continues(request)), f"{_UNNAMED}{self._opened}")
        while (entry := self._open.get(name)) is not None:
            session = await asyncio.shield(entry.begun)
            if not session.over.is_set() or request is None:
                break
            assert entry.task is not None
            await asyncio.wait({entry.task})  # until it is written down; then there is a new one of its name
        else:
            if request is None:
                return await super()._find(name)  # raises
            self._make_room()
            session = await self._begin(name)
        session.used = time.monotonic()
        return session

    def _unnamed(self) -> list[tuple[str, Session]]:
        """Sessions of clients that named none, the oldest first."""
        found = [(name, entry.begun) for name, entry in self._open.items() if name.startswith(_UNNAMED)]
        begun = [(n, f.result()) for n, f in found if f.done() and not f.cancelled() and f.exception() is None]
        return [(name, session) for name, session in begun if not session.over.is_set()]

    def _make_room(self) -> None:
        """Of too many sessions without a name, the longest unused ends."""
        idle = [session for _, session in self._unnamed() if not session.is_busy]
        if len(idle) >= _MOST_UNNAMED:
            min(idle, key=lambda session: session.used).over.set()

    async def _begin(self, name: str) -> Session:
        number, self._opened = self._opened, self._opened + 1
        self._names[number] = name
        entry = self._open[name] = _Open(begun=asyncio.get_running_loop().create_future())
        work = Work(group_index=number, prompt=Prompt(index=number, tokens=[], text=""))
        entry.task = asyncio.get_running_loop().create_task(self._play(work, name, entry))
        return await asyncio.shield(entry.begun)

    async def _play(self, work: Work, name: str, entry: _Open) -> None:
        """A session from its beginning to what it has become. An error ends the service with its reason."""
        assert self._sampler is not None
        try:
            group = await self._sampler.complete(work)
            if group is not None and any(sample.response_length for sample in group.samples):
                self._record(group)
        except Exception as error:
            self._end(error)
        finally:
            self._open.pop(name, None)
            self._names.pop(work.group_index, None)
            if not entry.begun.done():
                entry.begun.set_exception(ApiError(503, "the session could not begin", code="unavailable"))
                entry.begun.exception()  # whether anybody waits for it or not

    async def play(self, episode: Episode) -> None:
        """The session of an episode is there until it is over, or nobody asks any more."""
        name = self._names[episode.group_index]
        session = Session(
            episode,
            parser_of=lambda tools: load_parser(self._agent, tools),
            tool_role=self._agent.tool_role,
            foreign="follow" if self._follows else "ignore",
        )
        session.info["session"] = name
        access = self.open(session, name)
        self._open[name].begun.set_result(session)
        try:
            while self._loop is not None and not session.over.is_set():
                left = session.used + self._idle - time.monotonic()
                if left <= 0 and not session.is_busy:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(session.over.wait(), max(left, 1.0))
        finally:
            self.drop(access)
            await session.close()
            session.finish(graded=True)

    # ---- requests, on the server's thread

    def _check_session(self, name: str | None, action: str) -> None:
        if name is None and action in ("models", "chat/completions"):
            return
        if name is not None and action == "chat/completions":
            if _NAME.fullmatch(name) is None:
                text = "a session's name is of up to 64 letters, digits, '_', '-' and '.'"
                raise ApiError(400, text, code="invalid_value")
            return
        super()._check_session(name, action)

    async def _find(self, name: str | None, request: ChatRequest | None = None) -> Session:
        loop = self._loop
        if loop is None:
            raise ApiError(503, "nothing is served yet, or any more", code="unavailable")
        work: Any = self._session_of(name, request)
        try:
            future = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # that loop is closed
            work.close()
            raise ApiError(503, "nothing is served any more", code="unavailable") from None
        return await asyncio.wrap_future(future)


@dataclass(frozen=True)
class Sessions:
    """The environment of a service's episodes: its class and its instances in one."""

    service: Service

    def __call__(self) -> Sessions:
        return self

    async def run(self, episode: Episode) -> None:
        await self.service.play(episode)
