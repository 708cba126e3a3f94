"""Collections whose groups outlive them: begun ahead of their step, or held in the middle of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightrl.rollout.collect import Work
from lightrl.rollout.ranks import BEAT, Collection
from lightrl.rollout.selection import Verdict
from lightrl.types import Prompt, SampleGroup


@dataclass(kw_only=True, eq=False)
class Carry:
    """This rank's groups that are begun and that no step has taken, by their number. Touched on one event loop."""

    works: dict[int, Work] = field(default_factory=dict)
    tasks: dict[asyncio.Task[None], Work] = field(default_factory=dict)

    async def settle(self) -> None:
        """All that is under way has ended by itself. The first error is raised."""
        if self.tasks:
            done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()

    async def forget(self) -> None:
        """Nothing is under way any more."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.works.clear()
        self.tasks.clear()


@dataclass(kw_only=True, eq=False)
class CarriedCollection(Collection):
    """Groups that the selection does not need stay under way for later steps, which take them by their numbers.

    Each step uses up at least as many groups as it wants, W. What is kept has numbers less than `num_steps` x W behind
    the selection's end, so it is used up within as many steps: no sample becomes older, whatever is filtered out. With
    `num_begun` the groups of so many steps to come are begun too. A group stays with its rank: number modulo ranks.

    Without `keep_done` groups whose answers are all there are sampled anew in their step.
    """

    carry: Carry
    num_steps: int
    num_begun: int
    keep_done: bool = True
    _next: list[Work] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._tasks = self.carry.tasks

    def _deal(self) -> None:
        drawn = self._mine(self.selection.draw())
        if self.selection.num_draws == 1:
            end = self.selection.start + (self.num_begun + 1) * self.selection.wanted
            self._next = self._mine(self.selection.ahead(end))
        self._works += drawn

    def _mine(self, numbered: Iterable[tuple[int, Prompt]]) -> list[Work]:
        engines = self.world.size // self.ranks_per_engine
        return [
            self._work(number, prompt)
            for number, prompt in numbered
            if (number % engines) * self.ranks_per_engine == self.world.rank
        ]

    def _work(self, number: int, prompt: Prompt) -> Work:
        work = self.carry.works.setdefault(number, Work(group_index=number, prompt=prompt))
        if work.prompt.index != prompt.index:
            raise RuntimeError(
                f"group {number} is under way for prompt {work.prompt.index}, and not for {prompt.index}: the prompts "
                "of a step are not those that follow the last one's"
            )
        return work

    def _begin(self, works: Iterable[Work], tasks: dict[asyncio.Task[None], Work]) -> None:
        before = set(tasks)
        super()._begin(dict.fromkeys([*works, *self._next]), tasks)
        for task in tasks.keys() - before:
            task.add_done_callback(_look_at)

    @property
    def _is_idle(self) -> bool:
        wanted = set(self._works)
        return not any(work in wanted for work in self._tasks.values())

    async def _wait(self, tasks: dict[asyncio.Task[None], Work]) -> None:
        self._settle(tasks, [task for task in tasks if task.done()])
        if self._is_idle:
            return
        timeout = None if self.world.size == 1 else BEAT
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self._settle(tasks, done)

    def _done(self, group: SampleGroup) -> None:
        """It may be done long after this collection: `_news` tells of it."""

    def _news(self) -> dict[int, Verdict]:
        news = super()._news()
        for work in self._works:
            if work.group_index in news and work.group is not None:
                self.on_group(work.group)
        return news

    async def _drop(self, tasks: dict[asyncio.Task[None], Work]) -> None:
        """End what is too far ahead, and forget what is used up. Nothing, where an engine is lost: its step goes on."""
        if self.selection.end is None:
            return
        end = self.selection.start + self.selection.end
        for number in [n for n in self.carry.works if n < end]:
            self.carry.works.pop(number)
        stale = [work for work in self.carry.works.values() if not self._is_kept(work, end)]
        for work in stale:
            self.carry.works.pop(work.group_index)
        leaving = {task: work for task, work in tasks.items() if work.group_index not in self.carry.works}
        for task in leaving:
            tasks.pop(task)
        await super()._drop(leaving)

    def _is_kept(self, work: Work, end: int) -> bool:
        return work.group_index < end + self.num_steps * self.selection.wanted and (
            self.keep_done or not work.is_sampled
        )

    async def _leave(self, tasks: dict[asyncio.Task[None], Work]) -> None:
        """What is under way goes on."""


def _look_at(task: asyncio.Task[None]) -> None:
    """The first error ends the run with its reason: asyncio need not complain of others that nobody asked for."""
    if not task.cancelled():
        task.exception()
