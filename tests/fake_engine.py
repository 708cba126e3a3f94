"""Engines that die at chosen moments: a scripted one without a model, and the embedded one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from lightrl.engine.base import Completion, EngineLostError, GenerateRequest
from lightrl.engine.transformers import TransformersEngine
from lightrl.types import Sample, Status


class FakeEngine:
    """Answers with one token made of the seed, `ticks(seed)` turns of the event loop later.

    It dies when it has finished `deaths[life]` answers since it was started, `life` being 0, 1 …
    """

    def __init__(self, deaths: Sequence[int] = (), ticks: Callable[[int], int] = lambda seed: 1 + seed % 7) -> None:
        self.policy_version = 0
        self.lost = False
        self.life = 0
        self.asked: list[int] = []
        """Seeds of all answers that were asked for."""
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self._deaths = deaths
        self._ticks = ticks
        self._finished = 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        assert request.id not in self.running
        assert request.seeds is not None
        assert len(request.seeds) == request.n
        self.asked += request.seeds
        self.running.add(request.id)
        finished: dict[int, Completion] = {}
        try:
            tick = 0
            while len(finished) < request.n and request.id not in self.aborted:
                self._check_alive(finished)
                await asyncio.sleep(0)
                self._check_alive(finished)
                tick += 1
                for place, seed in enumerate(request.seeds):
                    if place not in finished and tick >= self._ticks(seed):
                        finished[place] = answer(seed)
                        self._finished += 1
                        self.lost |= self._finished == dict(enumerate(self._deaths)).get(self.life)
                    if self.lost:
                        break
        finally:
            self.running.remove(request.id)
        cut = Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[])
        return [finished.get(place, cut) for place in range(request.n)]

    def _check_alive(self, finished: dict[int, Completion]) -> None:
        if self.lost:
            raise EngineLostError("the engine died", dict(finished))
        assert self.policy_version >= 0, "no weights since it was started"

    def abort(self, request_id: str | None = None) -> None:
        self.aborted.update(self.running if request_id is None else {request_id})

    def restart(self) -> None:
        assert not self.running
        self.lost, self.policy_version, self._finished = False, -1, 0
        self.life += 1


def answer(seed: int) -> Completion:
    return Completion(tokens=[seed % 97], logprobs=[-1.0], status=Status.COMPLETED, policy_versions=[0])


class FakeScorer:
    """Groups in `same` get equal rewards, the others 0 and 1 in turn."""

    def __init__(self, same: Iterable[int] = ()) -> None:
        self.same = set(same)
        self.scored: list[int] = []

    async def score(self, samples: list[Sample]) -> None:
        await asyncio.sleep(0)
        for sample in samples:
            assert sample.status is Status.COMPLETED
            sample.reward = 1.0 if sample.group_index in self.same else float(sample.index % 2)
        self.scored.append(samples[0].group_index)


class MortalEngine(TransformersEngine):
    """The embedded engine, dying in its steps `deaths`; steps are counted through all its lives."""

    deaths: tuple[int, ...] = ()
    lost = False
    num_steps = 0
    num_restarts = 0
    num_kept = 0
    """Answers that were complete when it died and that a request still waited for."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self.lost:
            raise EngineLostError("the engine died")
        return await super().generate(request)

    def _step(self) -> None:
        super()._step()
        self.num_steps += 1
        if self.num_steps in self.deaths:
            self.lost = True
            jobs = list(self._jobs.values())
            self._reset()
            for job in jobs:
                self.num_kept += len(job.results)
                job.future.set_exception(EngineLostError("the engine died", dict(job.results)))

    def restart(self) -> None:
        assert not self._jobs
        self._model.drop()
        self.lost, self.policy_version = False, -1
        self.num_restarts += 1
