"""Small inputs for hooks: samples, groups, and an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lightrl.engine.base import Completion, EngineLostError, GenerateRequest
from lightrl.types import Prompt, Sample, SampleGroup, Status


def made_up_prompt(label: str | None = "4") -> Prompt:
    messages = [{"role": "user", "content": "2 + 2 ="}]
    return Prompt(
        index=0, tokens=[11, 12], text="2 + 2 =", label=label, messages=messages, metadata={}, source="made-up.jsonl:1"
    )


def made_up_sample(response: str, label: str, status: Status = Status.COMPLETED, index: int = 0) -> Sample:
    ids = [20 + index, 21, 22]
    return Sample(
        prompt=made_up_prompt(label),
        group_index=0,
        index=index,
        tokens=[11, 12, *ids],
        response_length=3,
        response=response,
        rollout_logprobs=[-0.1, -1.2, -0.4],
        policy_versions=[0],
        status=status,
    )


def made_up_group(rewards: Sequence[float | None]) -> SampleGroup:
    """A scored group; None is a sample that failed."""
    samples = []
    for index, reward in enumerate(rewards):
        status = Status.FAILED if reward is None else Status.COMPLETED
        sample = made_up_sample(f"answer {index}", "4", status, index)
        sample.reward = reward
        samples.append(sample)
    return SampleGroup(prompt=samples[0].prompt, group_index=0, samples=samples)


class MadeUpEngine:
    """Answers with a few tokens made of the seed, or in a way that runs have to cope with.

    `dies_after` so many requests it is lost; with `hangs` an answer only comes when it is aborted.
    """

    policy_version = 0

    def __init__(
        self, *, status: Status = Status.COMPLETED, dies_after: int | None = None, hangs: bool = False
    ) -> None:
        self.asked: list[tuple[GenerateRequest, list[Completion]]] = []
        self.running: dict[str, asyncio.Event] = {}
        self._status, self._dies_after, self._hangs = status, dies_after, hangs

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self._dies_after is not None and len(self.asked) >= self._dies_after:
            raise EngineLostError("the made-up engine died")
        if not request.tokens or not all(type(token) is int and token >= 0 for token in request.tokens):
            raise ValueError("a request's tokens must be ids, whole numbers from 0 on")
        ended = self.running[request.id] = asyncio.Event()
        try:
            await (ended.wait() if self._hangs else asyncio.sleep(0))
        finally:
            del self.running[request.id]
        status = Status.ABORTED if self._hangs else self._status
        answers = [self._answer(seed, status) for seed in request.seeds or range(request.n)]
        self.asked.append((request, answers))
        return answers

    def abort(self, request_id: str | None = None) -> None:
        for name, ended in self.running.items():
            if request_id in (None, name):
                ended.set()

    @staticmethod
    def _answer(seed: int, status: Status) -> Completion:
        if status is Status.FAILED:
            return Completion(tokens=[], logprobs=[], status=status, policy_versions=[], error="made up to fail")
        tokens = [30 + seed % 7, 40 + seed % 11, 50 + seed % 13][: 1 + seed % 3]
        logprobs = [-(1 + seed % (5 + place)) / 7 for place in range(len(tokens))]
        return Completion(tokens=tokens, logprobs=logprobs, status=status, policy_versions=[0])
