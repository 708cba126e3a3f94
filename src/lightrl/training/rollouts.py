"""Rollouts that go on over the borders of steps: `rollout.schedule`, `rollout.partial`.

one_step_off   wait for what is under way, new weights, begin the next step's groups; train on this step's
async          hold what is under way, new weights, go on, begin those of the last step that may be begun; train
sync, partial  new weights, go on with what was held; hold what is left; train
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from lightrl.config.schema import Config
from lightrl.distributed.mesh import World
from lightrl.distributed.offload import TrainingState
from lightrl.engine.base import Engine
from lightrl.errors import UserError
from lightrl.observe.metrics import Tally
from lightrl.rollout.background import Background
from lightrl.rollout.carried import CarriedCollection, Carry
from lightrl.rollout.collect import Sampler
from lightrl.rollout.pausable import PausableEngine
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training.policy import Policy
from lightrl.types import Sample, SampleGroup

R = TypeVar("R")


class CarriedRollouts:
    """One rank's. Its engine works on an event loop in a thread of its own; nothing there waits for other ranks.

    `sync` and `release` stand in for `sync_weights` and `release_engine`. All are collectives.
    """

    def __init__(self, config: Config, engine: Engine, world: World, policy: Policy, state: TrainingState) -> None:
        self._config, self._world, self._policy, self._state = config, world, policy, state
        self._waits_for_all = config.rollout.schedule == "one_step_off"
        self._beside = config.rollout.schedule != "sync"
        self._held: int | None = None  # version that an engine beside training has
        self._sampler: Sampler | None = None
        self._waited, self._since = 0.0, time.perf_counter()
        self._carry = Carry()
        self.engine = PausableEngine(engine)
        self._background = Background(partial(_use, world.device))

    @classmethod
    def build(
        cls, config: Config, engine: Engine, world: World, policy: Policy, state: TrainingState
    ) -> CarriedRollouts | None:
        """None where every step begins and ends with nothing under way."""
        carries = config.rollout.carries and config.debug.rollouts is None
        return cls(config, engine, world, policy, state) if carries else None

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """To its end, where the engine works. The time counts as waited for."""
        start = time.perf_counter()
        try:
            return self._background.run(work)
        finally:
            self._waited += time.perf_counter() - start

    def settle(self) -> None:
        """`one_step_off`: the groups under way are done with the weights that they were begun with."""
        if self._waits_for_all:
            self.run(self._carry.settle())

    def sync(self, version: int, *, again: bool = False) -> None:
        """New weights for the engine; what was held goes on with them. With `again` also of a version that it has."""
        if self._beside and self._held == version and not again:
            return
        self._held = None
        self.settle()
        self._background.run(self.engine.pause())
        self._world.barrier()  # servers get their weights from the first rank alone
        try:
            sync_weights(self._policy, self.engine.inner, version, self._state, beside=self._beside)
        finally:  # where an engine is lost, who waits for its answers has to see it
            self._background.run(self.engine.resume())
        self._held = version

    def release(self) -> None:
        """Memory back to training, where the engine does not work beside it."""
        if self._beside:
            self._policy.reclaim()
            return
        self._background.run(self.engine.pause())
        release_engine(self._policy, self.engine.inner, self._state)

    def forget(self) -> None:
        """Other weights, or another place in the data: what is under way is of no use."""
        self._held = None
        self._background.run(self._carry.forget())

    def collection(self, sampler: Callable[[Engine], Sampler], *, steps_left: int, **parts: Any) -> CarriedCollection:
        """A step's, with `parts` of `Collection`. The sampler is made once: groups outlive a step."""
        rollout = self._config.rollout
        if self._sampler is None:
            self._sampler = sampler(self.engine)
        return CarriedCollection(
            sampler=self._sampler,
            carry=self._carry,
            num_steps=min(rollout.staleness, steps_left),
            num_begun=min(rollout.staleness, steps_left) if self._beside else 0,
            keep_done=rollout.partial != "mask",
            run_on=self.run,
            **parts,
        )

    def take_metrics(self) -> dict[str, float]:
        """Since the last call. A collective."""
        now, busy = time.perf_counter(), self._background.run(self.engine.take_busy_seconds())
        shares = self._world.gather(busy / max(now - self._since, 1e-9))
        waited, self._waited, self._since = self._waited, 0.0, now
        return {"time/wait_for_rollouts": waited, "engine/idle_share": max(0.0, 1 - sum(shares) / len(shares))}

    def close(self) -> None:
        """End what is under way; idempotent."""
        self._background.close()


def check_staleness(groups: Sequence[SampleGroup], version: int, limit: int, tally: Tally) -> None:
    """Tell how many versions ago each sample's oldest token was drawn. RuntimeError beyond `limit`."""
    for sample in (s for group in groups for s in group.scored if s.policy_versions):
        age = version - min(sample.policy_versions)
        if not 0 <= age <= limit:
            raise RuntimeError(
                f"sample {sample.group_index}/{sample.index} has tokens of policy version "
                f"{min(sample.policy_versions)}, the present one is {version}, and {limit} is the most that "
                "[rollout] allows between them"
            )
        tally.add("rollout/staleness_mean", age)
        tally.add("rollout/staleness_max", age, kind="max")


def mask_older(groups: Sequence[SampleGroup], version: int) -> None:
    """`rollout.partial = "mask"`: tokens that older weights drew leave the loss; their sample stays in the baseline."""
    for sample in (s for group in groups for s in group.scored):
        versions = versions_of(sample)
        if any(v != version for v in versions):
            sample.loss_mask = [int(m and v == version) for m, v in zip(sample.mask, versions, strict=True)]


def versions_of(sample: Sample) -> list[int]:
    """Of each token of the response. UserError for a sample, of a hook, that does not say."""
    counts = sample.version_tokens or [sample.response_length] * len(sample.policy_versions)
    if len(counts) != len(sample.policy_versions) or sum(counts) != sample.response_length:
        raise UserError(
            f"rollout.generate: sample {sample.group_index}/{sample.index} has policy_versions "
            f"{sample.policy_versions} and version_tokens {sample.version_tokens} for {sample.response_length} tokens: "
            "say how many each version gave, as task.sample does"
        )
    return [v for v, count in zip(sample.policy_versions, counts, strict=True) for _ in range(count)]


def _use(device: torch.device) -> None:
    """The present GPU is a thread's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
