"""Prompts in, scored groups of samples out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from lightrl.engine.base import Completion, Engine, EngineLostError, GenerateRequest, SamplingParams
from lightrl.rollout.hooked import Generate, GenerateTask, HookRun
from lightrl.rollout.seeds import sample_seed
from lightrl.rollout.selection import Verdict
from lightrl.types import Prompt, Sample, SampleGroup, Status

R = TypeVar("R")


class Scores(Protocol):
    """Scores the samples of one group in place (`lightrl.rewards.Scorer`)."""

    async def score(self, samples: list[Sample]) -> None: ...

    def count_failure(self, sample: Sample, error: Exception) -> None:
        """Fail a sample whose environment raised, as one whose reward raised."""


Watch = Callable[[str, int, Sequence[int], float, float], None]
"""Told what was done for a group: (what, group index, numbers of the samples, from, to), by `time.perf_counter`."""


@dataclass(kw_only=True, eq=False)
class Work:
    """A group under way on this rank."""

    group_index: int
    prompt: Prompt
    answers: dict[int, Completion] = field(default_factory=dict)
    """Complete answers by their number. They outlive the engine that gave them."""
    episodes: dict[int, Any] = field(default_factory=dict)
    """The same of episodes, with an agent."""
    group: SampleGroup | None = None
    """Set once all answers are scored."""
    is_sampled: bool = False
    """All answers are there: what is left is their scoring."""
    is_dropped: bool = False
    """Not needed any more: it is not scored."""
    verdict: Verdict | None = None
    """Whether the group passes, once it is there."""
    hook: HookRun | None = None
    """The call of `rollout.generate` that is under way for it."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How prompts become scored groups."""

    engine: Engine
    sampling: SamplingParams
    group_size: int
    scorer: Scores
    decode: Callable[[list[int]], str]
    seed: int
    stream: str = "train"
    """Part of the seeds of samples: two streams draw independently."""
    generate: Generate | None = None
    """Answers prompts in place of one request to the engine for each (`rollout.generate`)."""
    watch: Watch | None = None
    context_length: int = sys.maxsize
    """What a `generate` hook's samples have to fit into, as `vocab_size` their ids."""
    vocab_size: int = sys.maxsize

    async def complete(self, work: Work) -> SampleGroup | None:
        """Sample the answers that are missing and score all; None for work that was dropped meanwhile.

        EngineLostError keeps the answers that were complete: called again, only the others are sampled, each with its
        own seed.
        """
        start = time.perf_counter()
        samples = None if work.is_dropped else await self._samples(work)
        if work.is_dropped or samples is None:
            return None
        work.is_sampled = True
        if self.watch is not None:
            self.watch("generate", work.group_index, [s.index for s in samples], start, time.perf_counter())
        await self._score(samples)
        work.group = SampleGroup(prompt=work.prompt, group_index=work.group_index, samples=self._kept(samples))
        return work.group

    def drop(self, work: Work) -> None:
        """End the generation of a group that is not needed."""
        work.is_dropped = True
        self.engine.abort(self._id(work))
        if work.hook is not None:
            work.hook.drop()

    async def _samples(self, work: Work) -> list[Sample] | None:
        """Unscored; None where the group was dropped before all were there."""
        if self.generate is None:
            await self._answer(work)
            return [
                _sample(work.prompt, work.group_index, i, completion, self.decode)
                for i, completion in sorted(work.answers.items())
            ]
        work.hook = HookRun(
            task=GenerateTask(
                prompt=work.prompt,
                group_index=work.group_index,
                num_samples=self.group_size,
                sampling=self.sampling,
                is_evaluation=self.stream.startswith("eval/"),
                decode=self.decode,
                engine=self.engine,
                seed=self.seed,
                stream=self.stream,
                watch=self.watch,
                context_length=self.context_length,
                vocab_size=self.vocab_size,
            )
        )
        return await work.hook.samples(self.generate)

    async def _answer(self, work: Work) -> None:
        missing = [i for i in range(self.group_size) if i not in work.answers]
        if not missing:
            return
        request = GenerateRequest(
            id=self._id(work),
            tokens=work.prompt.tokens,
            sampling=self.sampling,
            n=len(missing),
            seeds=tuple(sample_seed(self.seed, self.stream, work.group_index, i) for i in missing),
        )
        try:
            completions = await self.engine.generate(request)
        except EngineLostError as lost:
            work.answers |= {missing[place]: completion for place, completion in lost.finished.items()}
            raise
        work.answers |= dict(zip(missing, completions, strict=True))

    async def _score(self, samples: list[Sample]) -> None:
        """Those that have no reward yet."""
        await self.scorer.score([s for s in samples if s.status is not Status.FAILED and s.reward is None])

    def _kept(self, samples: list[Sample]) -> list[Sample]:
        """What of them becomes the group."""
        return samples

    def _id(self, work: Work) -> str:
        return f"{self.stream}/{work.group_index}"


async def collect(
    engine: Engine,
    prompts: Sequence[tuple[int, Prompt]],
    *,
    sampling: SamplingParams,
    group_size: int,
    scorer: Scores,
    decode: Callable[[list[int]], str],
    seed: int,
    stream: str = "train",
    on_group: Callable[[SampleGroup], None] | None = None,
) -> list[SampleGroup]:
    """Sample and score `group_size` answers to each (group index, prompt); groups come back in the order given.

    Everything is in flight at once: the engine batches what it can, and a group is scored while others are still
    generated. `on_group` is called as each is done. The first error cancels the rest. One rank by itself: what all do
    together, with filters and engines that die, is `lightrl.rollout.ranks.Collection`.
    """
    sampler = Sampler(
        engine=engine,
        sampling=sampling,
        group_size=group_size,
        scorer=scorer,
        decode=decode,
        seed=seed,
        stream=stream,
    )

    async def one(group_index: int, prompt: Prompt) -> SampleGroup:
        group = await sampler.complete(Work(group_index=group_index, prompt=prompt))
        assert group is not None
        if on_group is not None:
            on_group(group)
        return group

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(index, prompt)) for index, prompt in prompts]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # one cause; the others were cancelled because of it
    return [task.result() for task in running]


def _sample(
    prompt: Prompt, group_index: int, index: int, completion: Completion, decode: Callable[[list[int]], str]
) -> Sample:
    sample = Sample(
        prompt=prompt,
        group_index=group_index,
        index=index,
        tokens=prompt.tokens + completion.tokens,
        response_length=len(completion.tokens),
        response=decode(completion.tokens),
        rollout_logprobs=list(completion.logprobs),
        rollout_top_ids=completion.top_ids or None,
        rollout_top_logprobs=completion.top_logprobs or None,
        rollout_routing=completion.routing,
        policy_versions=completion.policy_versions,
        version_tokens=completion.version_tokens or None,
        status=completion.status,
    )
    if completion.error is not None:
        sample.metadata["failure"] = completion.error
    return sample


def apply_truncation(groups: Sequence[SampleGroup], policy: str) -> None:
    """What becomes of answers cut by length: `keep` as scored, `mask` out of the loss, `zero_reward` (0 or less)."""
    if policy == "keep":
        return
    for group in groups:
        for sample in group.samples:
            if sample.status is not Status.TRUNCATED:
                continue
            if policy == "mask":
                sample.loss_mask = [0] * sample.response_length
            elif sample.reward is not None:
                sample.reward = min(sample.reward, 0.0)  # a rule such as dapo gives less than 0 to wrong answers


def run_async(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end from plain code, also inside a notebook, whose own event loop is already running."""
    if (
        not _inside_a_loop()
    ):  # no `except` around the work: its own exceptions would be told as consequences of that one
        return asyncio.run(work)
    outcome: Future[R] = Future()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def noted() -> R:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work

    def target() -> None:
        try:
            outcome.set_result(asyncio.run(noted()))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=target, name="lightrl-rollout").start()
    try:
        wait([outcome])  # not `Thread.join`, which after an interrupt takes the thread for ended
    except BaseException:  # the cell was interrupted: so is the work, and the engine is free again
        for loop, task in running:
            with contextlib.suppress(RuntimeError):  # it ended meanwhile
                loop.call_soon_threadsafe(task.cancel)
        wait([outcome])
        raise
    return outcome.result()


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
