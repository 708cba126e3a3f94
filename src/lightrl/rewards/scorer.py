"""Scoring groups of samples: finding the reward of each, calling it under a limit, recording what failed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightrl import hooks
from lightrl.config.schema import RewardConfig
from lightrl.errors import UserError
from lightrl.rewards.answer import Answer
from lightrl.rewards.box import last_box
from lightrl.rewards.calls import Caller, in_thread, own_traceback
from lightrl.rewards.pool import LimitError, WorkerError, WorkerPool
from lightrl.rewards.registry import find_rule, function_of
from lightrl.rewards.values import BadReward, Guard, list_of, reward_of
from lightrl.types import Prompt, Sample, Status

_THINK, _END_THINK, _RESPONSE = "<think>", "</think>", "###Response"


class RewardFailure(UserError):
    """More reward calls failed than `reward.max_failure_rate` allows. The user's own frames are a note of it."""


@dataclass(frozen=True, kw_only=True)
class RewardStats:
    """What was scored since the last `take_stats`, on one rank."""

    total: int = 0
    failures: int = 0
    missing_think: int = 0
    first_failure: str | None = None
    """Source of the prompt, and the reason, in a line."""
    first_traceback: str = ""
    """Of what the user's function raised, from its own first frame."""


class Scorer:
    """Gives samples their reward. `custom`, a function of one `Sample` (of a list with `reward.batched`), stands in for
    everything the config and the rows name.

    Raises UserError for an unknown rule or a function that cannot be imported. Workers start when first needed. With
    `shared`, another scorer, its workers and event loop are used: what an async function keeps (a client session)
    belongs to one loop.
    """

    def __init__(
        self, config: RewardConfig, custom: Callable[..., Any] | None = None, *, shared: Scorer | None = None
    ) -> None:
        self.config = config
        self._custom_wins = custom is not None
        self._custom = custom
        if custom is not None and not callable(custom):
            raise UserError(
                f"reward= takes a function, not a {type(custom).__name__}; one that is named goes into reward.type"
            )
        if custom is not None and (fault := hooks.call_fault(custom)) is not None:
            raise UserError(f"reward=: {fault}")
        if custom is None and ":" in config.type:
            self._custom = hooks.load(config.type, "reward.type")
        elif custom is None and config.type:
            find_rule(config.type)
        if config.batched and self._custom is None:
            raise UserError(f"reward.batched is for functions of your own: reward.type = {config.type!r} is a rule")
        self._caller: Caller = Caller() if shared is None else shared._caller
        self._pool: WorkerPool = WorkerPool(pool_size(config.concurrency)) if shared is None else shared._pool
        self.watch: Callable[[str, int, Sequence[int], float, float], None] | None = None
        """Told of each call: ("reward", group index, numbers of its samples, from, to), by `time.perf_counter`."""
        self._limiter: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._stats = RewardStats()

    async def score(self, samples: list[Sample]) -> None:
        """Score the samples of a group in place; those that generation already failed are left alone.

        Sets `reward`, and puts other entries of a dict reward into `metadata["reward"]`. A call that raises, hangs, or
        returns no finite number fails its sample: status FAILED, reward None, the reason in `metadata["failure"]`. But
        a rule that runs into its limits gives its worst, with the reason in `metadata["grading_limit"]`: its code and
        the label are known to be good, and what the model wrote must not escape by being too much for it.
        """
        graded = [s for s in samples if s.status is not Status.FAILED]
        custom, ruled = [], []
        for sample in graded:
            name = self._rule_name(sample.prompt)
            self._mark_missing_think(sample, name)
            if sample.metadata.get("missing_think") and self.config.missing_think == "zero":
                sample.reward = find_rule(name)[0].worst if name else 0.0
            elif name is None:
                custom.append(sample)
            else:
                ruled.append((sample, name))
        async with asyncio.TaskGroup() as tasks:
            for sample, name in ruled:
                tasks.create_task(self._score([sample], self._apply_rule(sample, name)))
            if self.config.batched and custom:
                tasks.create_task(self._score(custom, self._apply_batch(custom)))
            else:
                for sample in custom:
                    tasks.create_task(self._score([sample], self._apply_custom(sample)))
        for sample in graded:
            if sample.reward is None and sample.status is not Status.FAILED:  # the function cancelled its own task
                self._fail(sample, RuntimeError("the reward call was cancelled"))
        self._count(total=len(graded), missing_think=sum(bool(s.metadata.get("missing_think")) for s in graded))

    def count_failure(self, sample: Sample, error: Exception) -> None:
        """Fail a sample whose environment raised, as one whose reward raised."""
        self._fail(sample, error, "environment")
        self._count(total=1, missing_think=0)

    def take_stats(self) -> RewardStats:
        """Counts since the last call, for `check_failures` after a gather over ranks."""
        stats, self._stats = self._stats, RewardStats()
        return stats

    def check_failures(self, stats: RewardStats | Sequence[RewardStats]) -> None:
        """Raises RewardFailure with the first reason when all ranks together failed too often."""
        stats = [stats] if isinstance(stats, RewardStats) else stats
        failures, total = sum(s.failures for s in stats), sum(s.total for s in stats)
        if not failures or failures <= self.config.max_failure_rate * total:
            return
        first = next(s for s in stats if s.first_failure is not None)
        failure = RewardFailure(
            f"{failures} of {total} samples could not be scored, more than reward.max_failure_rate = "
            f"{self.config.max_failure_rate:g} allows; the first: {first.first_failure}"
        )
        if first.first_traceback:
            failure.add_note(first.first_traceback)
        raise failure

    def close(self) -> None:
        """End worker processes and the loop of async functions; idempotent."""
        self._pool.close()
        self._caller.close()

    def _rule_name(self, prompt: Prompt) -> str | None:
        """Rule of a row; None for the custom function."""
        return None if self._custom_wins else rule_name(prompt, self.config)

    def _mark_missing_think(self, sample: Sample, name: str | None) -> None:
        """A thinking block that was opened and not closed; `deepscaler` expects one, or `###Response`."""
        response = sample.graded
        expected = sample.prompt.text.rstrip().endswith(_THINK) or (name == "deepscaler" and _RESPONSE not in response)
        if response.rfind(_THINK) > response.rfind(_END_THINK) or (expected and _END_THINK not in response):
            sample.metadata["missing_think"] = True

    async def _score(self, samples: list[Sample], work: Any) -> None:
        """Await the rewards of `samples` and write them; a failure of the call fails all of them."""
        try:
            async with self._slot():
                start = time.perf_counter()
                try:
                    values = await work
                finally:
                    if self.watch is not None:
                        numbers = [s.index for s in samples]
                        self.watch("reward", samples[0].group_index, numbers, start, time.perf_counter())
        except Exception as error:
            for sample in samples:
                self._fail(sample, error)
            return
        finally:
            work.close()
        for sample, value in zip(samples, values, strict=True):
            try:
                sample.reward, extras = reward_of(value, self._key(sample))
            except Exception as error:
                self._fail(sample, error)
            else:
                if extras:
                    sample.metadata["reward"] = extras

    def _key(self, sample: Sample) -> str | None:
        """`reward.key` is about the configured reward; rules that return dicts call their number `score`."""
        return self.config.key if self._rule_name(sample.prompt) in (None, self.config.type) else None

    async def _apply_rule(self, sample: Sample, name: str) -> list[Any]:
        rule, boxed = find_rule(name)
        response: str | None = sample.graded
        if boxed and (response := last_box(sample.graded)) is None:
            return [rule.worst]
        answer = answer_of(sample, response or "", boxed)
        try:
            if rule.isolated:
                return [await in_thread(self._pool.call, rule.grade, answer, self.config.timeout)]
            return [await self._caller.call(function_of(rule.grade), answer, self.config.timeout)]
        except (LimitError, TimeoutError) as error:
            sample.metadata["grading_limit"] = str(error)
            return [rule.worst]

    async def _apply_custom(self, sample: Sample) -> list[Any]:
        assert self._custom is not None
        guard = Guard(sample)
        try:
            value = await self._caller.call(self._custom, sample, self.config.timeout)
        except BaseException:
            guard.restore()
            raise
        guard.check()
        return [value]

    async def _apply_batch(self, samples: list[Sample]) -> list[Any]:
        assert self._custom is not None
        guards = [Guard(sample) for sample in samples]
        try:
            values = list_of(await self._caller.call(self._custom, list(samples), self.config.timeout), len(samples))
        except BaseException:
            for guard in guards:
                guard.restore()
            raise
        for guard in guards:
            guard.check()
        return values

    def _slot(self) -> asyncio.Semaphore:
        """`reward.concurrency` calls at once; each step may run on an event loop of its own."""
        loop = asyncio.get_running_loop()
        if self._limiter is None or self._limiter[0] is not loop:
            self._limiter = (loop, asyncio.Semaphore(self.config.concurrency))
        return self._limiter[1]

    def _fail(self, sample: Sample, error: BaseException, what: str = "reward") -> None:
        sample.status, sample.reward = Status.FAILED, None
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        sample.metadata["failure"] = f"{what}: {reason}"
        stats = replace(self._stats, failures=self._stats.failures + 1)
        if stats.first_failure is None:
            shown = " ".join(str(error).split())[:500] if isinstance(error, BadReward | WorkerError) else reason
            stats = replace(
                stats,
                first_failure=f"{sample.prompt.source or f'prompt {sample.prompt.index}'}: {shown}",
                first_traceback=getattr(error, "remote_traceback", "").rstrip() or own_traceback(error),
            )
        self._stats = stats

    def _count(self, *, total: int, missing_think: int) -> None:
        old = self._stats
        self._stats = replace(old, total=old.total + total, missing_think=old.missing_think + missing_think)


def rule_name(prompt: Prompt, config: RewardConfig) -> str | None:
    """Rule that grades a row: its `metadata.rm_type`, else `reward.type`; None when that is a function.

    Raises UserError when neither names any. A row cannot name a function: data does not choose what code runs.
    """
    own = prompt.metadata.get("rm_type")
    name = str(own).strip() if own else config.type.strip()
    if not name:
        raise UserError(f"{prompt.source}: no reward: set reward.type, or metadata.rm_type in each row")
    if own:
        return name
    return None if ":" in name else name


def answer_of(sample: Sample, response: str, boxed: bool) -> Answer:
    """What a rule is given of a sample."""
    return Answer(
        response=response,
        label=sample.prompt.label,
        metadata=sample.prompt.metadata,
        status=sample.status.value,
        boxed=boxed,
        key=f"{sample.group_index}/{sample.index}",
    )


def pool_size(concurrency: int) -> int:
    """Worker processes of a rank: more than a few are idle memory, for sympy takes milliseconds an answer."""
    return max(1, min(concurrency, (os.cpu_count() or 1) // 2, 4))
