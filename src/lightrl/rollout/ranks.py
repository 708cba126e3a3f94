"""One collection that all ranks make together: filtered, and gone on with when an engine dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

from lightrl.distributed.mesh import World, deal
from lightrl.engine.base import Engine, EngineLostError, Restartable, TellsLoss
from lightrl.rollout.collect import Sampler, Work, run_async
from lightrl.rollout.filters import Filter
from lightrl.rollout.pausable import PausableEngine
from lightrl.rollout.selection import Selection, Verdict
from lightrl.threads import spawn
from lightrl.types import SampleGroup

BEAT = 0.2
"""Seconds between two exchanges of verdicts among ranks: what they may go on generating after enough has passed."""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a rank tells the others."""

    verdicts: dict[int, Verdict]
    """Of groups that were done since the last report."""
    is_idle: bool
    """Nothing is under way: all is done, or its engine is lost."""


@dataclass(kw_only=True, eq=False)
class Collection:
    """This rank's part. Every rank makes one, from an equal `selection`, and calls `run`.

    `judge` says which groups pass (None: all), after `prepare` has changed what it will. With `draw_early` a further
    draw begins as soon as it must come, instead of when all before is done: engines are never idle, but what shares a
    batch then depends on time. `on_group` is called as each of this rank's groups is done, `on_restart` with the number
    of engines that are started anew and why one was lost.
    """

    sampler: Sampler
    selection: Selection
    world: World
    ranks_per_engine: int = 1
    judge: Filter | None = None
    prepare: Callable[[SampleGroup], None] = lambda group: None
    draw_early: bool = False
    on_group: Callable[[SampleGroup], None] = lambda group: None
    on_restart: Callable[[int, str], None] = lambda count, why: None
    run_on: Callable[[Coroutine[Any, Any, None]], None] | None = None
    """Runs what is asynchronous; None: on an event loop of its own (`run_async`)."""
    restart: Callable[[], None] | None = None
    """Restarts this rank's engine; None: `Restartable.restart` alone."""
    _works: list[Work] = field(default_factory=list, init=False)
    _tasks: dict[asyncio.Task[None], Work] = field(default_factory=dict, init=False)
    _told: set[int] = field(default_factory=set, init=False)
    _lost: bool = field(default=False, init=False)
    _why: str = field(default="", init=False)

    def run(self, renew: Callable[[], None]) -> list[SampleGroup]:
        """This rank's selected groups, by their numbers. A collective.

        When an engine dies, all ranks first finish what they can; then its ranks restart it, `renew` gives all engines
        their weights again (a collective too), and only the answers that were lost are sampled anew. Every other error
        is raised on the rank that has it, and cancels the rest there.
        """
        self._deal()
        while True:
            self._run(self._round())
            self._revive(renew)
            if self.selection.end is not None:
                break
        kept = set(self.selection.kept)
        mine = [w.group for w in self._works if w.group is not None and w.group_index in kept]
        return sorted(mine, key=lambda group: group.group_index)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        (self.run_on or run_async)(work)

    def _deal(self) -> None:
        for index, prompt in deal(self.world, self.selection.draw(), self.ranks_per_engine):
            self._works.append(Work(group_index=index, prompt=prompt))

    async def _round(self) -> None:
        """Until the selection is made, or no rank can go on: some engine is lost."""
        tasks = self._tasks
        try:
            while True:
                self._begin(self._works, tasks)
                await self._wait(tasks)
                mine = _Report(verdicts=self._news(), is_idle=self._is_idle)
                reports = await self._exchange(mine)
                for report in reports:
                    self.selection.note(report.verdicts)
                all_idle = all(report.is_idle for report in reports)
                if self.selection.end is not None:
                    break
                if self.selection.needs_draw and (self.draw_early or all_idle):
                    self._deal()
                elif all_idle:
                    break
            await self._drop(tasks)
        finally:
            await self._leave(tasks)

    @property
    def _is_idle(self) -> bool:
        return not self._tasks

    async def _leave(self, tasks: dict[asyncio.Task[None], Work]) -> None:
        """After an error: nothing of it goes on."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()

    def _begin(self, works: Iterable[Work], tasks: dict[asyncio.Task[None], Work]) -> None:
        """Start what is not done and not under way."""
        under_way = set(tasks.values())
        for work in works if not self._lost else ():
            if work.group is None and work not in under_way:
                tasks[asyncio.create_task(self._complete(work))] = work

    def _news(self) -> dict[int, Verdict]:
        """Verdicts that no rank knows yet."""
        new = {
            work.group_index: work.verdict
            for work in self._works
            if work.verdict is not None and work.group_index not in self._told
        }
        self._told.update(new)
        return new

    async def _complete(self, work: Work) -> None:
        try:
            group = await self.sampler.complete(work)
        except EngineLostError as error:
            if not isinstance(self._engine, Restartable):
                raise
            self._lost, self._why = True, error.line
            return
        if group is not None:
            self.prepare(group)
            work.verdict = self._judge(group)
            self._done(group)

    def _done(self, group: SampleGroup) -> None:
        self.on_group(group)

    def _judge(self, group: SampleGroup) -> Verdict:
        keep, reason = (True, "") if self.judge is None else self.judge(group)
        rewards = [float(s.reward) for s in group.scored if s.reward is not None]
        return Verdict(keep=keep, reason=reason, reward_sum=sum(rewards), num_scored=len(rewards))

    @property
    def _engine(self) -> Engine:
        engine = self.sampler.engine
        return engine.inner if isinstance(engine, PausableEngine) else engine

    async def _wait(self, tasks: dict[asyncio.Task[None], Work]) -> None:
        """Until there may be something to decide; the first error is raised. Tasks that are done leave `tasks`."""
        if not tasks:
            return
        alone = self.world.size == 1
        await asyncio.wait(
            tasks,
            timeout=None if alone or self.judge is None else BEAT,
            return_when=asyncio.FIRST_COMPLETED if alone and self.judge is not None else asyncio.FIRST_EXCEPTION,
        )
        self._settle(tasks, [task for task in tasks if task.done()])

    def _settle(self, tasks: dict[asyncio.Task[None], Work], done: Iterable[asyncio.Task[None]]) -> None:
        for task in done:
            tasks.pop(task)
            task.result()

    async def _exchange(self, report: _Report) -> list[_Report]:
        """All ranks' reports. In a thread: this rank's engine goes on meanwhile. On Ctrl-C it is left behind soon, as
        ranks that are busy may not come for long."""
        if self.world.size == 1:
            return [report]
        reports = spawn(self.world.gather, report)
        try:
            return await asyncio.wrap_future(reports)
        except asyncio.CancelledError:
            wait([reports], 5 * BEAT)
            raise

    async def _drop(self, tasks: dict[asyncio.Task[None], Work]) -> None:
        """End what is not needed any more. Generation is aborted and waited for, so that the engine is idle."""
        for task, work in tasks.items():
            if work.is_sampled:
                task.cancel()
            else:
                with contextlib.suppress(EngineLostError):
                    self.sampler.drop(work)
        if tasks:
            await asyncio.wait(tasks)
        self._settle(tasks, [task for task in tasks if not task.cancelled()])

    def _revive(self, renew: Callable[[], None]) -> None:
        """Restart the engines that died, on all ranks together."""
        engine = self._engine
        while True:
            is_lost = self._lost or (isinstance(engine, Restartable) and engine.lost)
            why = self._why or (engine.why_lost if isinstance(engine, TellsLoss) else "")
            reasons: list[str | None] = self.world.gather(why if is_lost else None)
            lost = [why is not None for why in reasons]
            if not any(lost):
                return
            engines = [lost[i : i + self.ranks_per_engine] for i in range(0, self.world.size, self.ranks_per_engine)]
            self.on_restart(sum(any(ranks) for ranks in engines), next(filter(None, reasons), ""))
            if any(engines[self.world.rank // self.ranks_per_engine]):
                assert isinstance(engine, Restartable)
                (self.restart or engine.restart)()
                self._lost, self._why = False, ""
            try:
                renew()
            except EngineLostError as error:  # lost again: the next turn sees it
                self._why = error.line
