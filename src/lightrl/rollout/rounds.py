"""Who generates when: turns of many episodes, one request at a time each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from lightrl.engine.base import Completion, Engine, GenerateRequest, SamplingParams
from lightrl.types import Status

Party = tuple[int, int]
"""(group_index, episode): who waits for whom."""


@dataclass(eq=False, kw_only=True)
class Ask:
    """One turn to be sampled."""

    party: Party
    place: tuple[int, ...]
    """(conversation, turn) within the episode."""
    tokens: list[int]
    sampling: SamplingParams
    seed: int
    future: asyncio.Future[Completion] | None = None
    job: _Job | None = None


@dataclass(eq=False)
class _Job:
    """Requests of a group with the same tokens travel as one, whose prompt is computed once."""

    id: str
    asks: list[Ask]
    task: asyncio.Task[None] | None = None


@dataclass(eq=False, kw_only=True)
class Rounds:
    """With `together`, turns are sampled in rounds: the next begins when every episode under way waits for one.

    What shares a batch, and with it the last bits of logits, then does not depend on how long a tool took, and a run
    repeats bit for bit on the embedded engine. Without, each turn is sampled as soon as it is asked for.
    """

    engine: Engine
    stream: str
    together: bool
    _parties: set[Party] = field(default_factory=set)
    _waiting: list[Ask] = field(default_factory=list)
    _jobs: list[_Job] = field(default_factory=list)
    _number: int = 0

    def enter(self, party: Party) -> None:
        """An episode is under way. All that begin together enter before any of them waits."""
        self._parties.add(party)

    def leave(self, party: Party) -> None:
        self._parties.discard(party)
        self._look()

    async def generate(self, ask: Ask) -> Completion:
        """One answer. What `Engine.generate` raises is raised here; a caller that is cancelled ends its request."""
        loop = asyncio.get_running_loop()
        ask.future = loop.create_future()
        if self.together:
            self._waiting.append(ask)
            self._look()
        else:
            self._start([ask])
        try:
            return await ask.future
        finally:
            if ask in self._waiting:
                self._waiting.remove(ask)
            job = ask.job
            if job is not None and job.task is not None and all(a.future is None or a.future.done() for a in job.asks):
                job.task.cancel()
                await asyncio.wait([job.task])  # the engine is idle when all callers are gone

    def abort(self, ask: Ask) -> None:
        """End a request: what was sampled so far is its answer."""
        if ask.job is not None:
            self.engine.abort(ask.job.id)
        elif ask.future is not None and not ask.future.done():
            ask.future.set_result(Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[]))

    def _look(self) -> None:
        """Begin a round, once all that can happen at this moment has happened."""
        if self.together and self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        waiting = [ask for ask in self._waiting if ask.future is not None and not ask.future.done()]
        if not waiting or self._jobs or self._parties - {ask.party for ask in waiting}:
            return
        self._waiting.clear()
        same: dict[tuple[int, tuple[int, ...], SamplingParams], list[Ask]] = {}
        for ask in sorted(waiting, key=lambda ask: (ask.party, ask.place)):
            same.setdefault((ask.party[0], tuple(ask.tokens), ask.sampling), []).append(ask)
        for asks in same.values():
            self._start(asks)

    def _start(self, asks: list[Ask]) -> None:
        self._number += 1
        job = _Job(f"{self.stream}/{asks[0].party[0]}/{self._number}", asks)
        for ask in asks:
            ask.job = job
        self._jobs.append(job)
        job.task = asyncio.get_running_loop().create_task(self._serve(job))

    async def _serve(self, job: _Job) -> None:
        first = job.asks[0]
        request = GenerateRequest(
            id=job.id,
            tokens=first.tokens,
            sampling=first.sampling,
            n=len(job.asks),
            seeds=tuple(ask.seed for ask in job.asks),
        )
        try:
            completions = await self.engine.generate(request)
        except Exception as error:
            for ask in job.asks:
                if ask.future is not None and not ask.future.done():
                    ask.future.set_exception(error)
        else:
            for ask, completion in zip(job.asks, completions, strict=True):
                if ask.future is not None and not ask.future.done():
                    ask.future.set_result(completion)
        finally:
            self._jobs.remove(job)
            self._look()
