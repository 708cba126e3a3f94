"""Prompts in, scored groups of samples out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from lightrl.engine.base import Completion, Engine, GenerateRequest, SamplingParams
from lightrl.types import Prompt, Sample, SampleGroup, Status

R = TypeVar("R")


class Scores(Protocol):
    """Scores the samples of one group in place (`lightrl.rewards.Scorer`)."""

    async def score(self, samples: list[Sample]) -> None: ...


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
    generated. `on_group` is called as each is done. The first error cancels the rest.
    """

    async def one(group_index: int, prompt: Prompt) -> SampleGroup:
        request = GenerateRequest(
            id=f"{stream}/{group_index}",
            tokens=prompt.tokens,
            sampling=sampling,
            n=group_size,
            seeds=tuple(sample_seed(seed, stream, group_index, i) for i in range(group_size)),
        )
        completions = await engine.generate(request)
        samples = [_sample(prompt, group_index, i, c, decode) for i, c in enumerate(completions)]
        await scorer.score([s for s in samples if s.status is not Status.FAILED])
        group = SampleGroup(prompt=prompt, group_index=group_index, samples=samples)
        if on_group is not None:
            on_group(group)
        return group

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(index, prompt)) for index, prompt in prompts]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # one cause; the others were cancelled because of it
    return [task.result() for task in running]


def sample_seed(seed: int, stream: str, group_index: int, index: int) -> int:
    """Seed of one sample's random draws: the same on any number of ranks and after any restart."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{group_index}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
        rollout_logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
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
