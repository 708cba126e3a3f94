"""Who drives the engine, and when: by itself between two steps, or over their borders (`rollout.schedule`, `partial`).

sync           new weights, begin this step's groups and wait for them; train
one_step_off   wait for what is under way, new weights, begin the next step's groups; train on this step's
async          hold what is under way, new weights, go on, begin those of the last step that may be begun; train
sync, partial  new weights, go on with what was held; hold what is left; train
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from lightrl.config.schema import Config
from lightrl.distributed.mesh import World, use_device
from lightrl.distributed.offload import TrainingState
from lightrl.engine.base import Engine, EngineLostError, Restartable
from lightrl.errors import UserError
from lightrl.observe.metrics import Tally
from lightrl.rollout.background import Background
from lightrl.rollout.carried import CarriedCollection, Carry
from lightrl.rollout.collect import Sampler, run_async
from lightrl.rollout.pausable import PausableEngine
from lightrl.rollout.ranks import Collection
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training.engines import make_room
from lightrl.training.policy import Policy
from lightrl.training.rollout_ranks import num_lost
from lightrl.types import Sample, SampleGroup

R = TypeVar("R")


class Rollouts:
    """One rank's: every step begins and ends with nothing under way. All methods are collectives."""

    carries: ClassVar[bool] = False
    """Groups outlive the step that they were begun in."""

    def __init__(self, config: Config, engine: Engine, world: World, policy: Policy, state: TrainingState) -> None:
        self.engine, self.state = engine, state
        self._config, self._world, self._policy = config, world, policy

    @staticmethod
    def build(config: Config, engine: Engine, world: World, policy: Policy, state: TrainingState) -> Rollouts:
        """As `[rollout]` says."""
        carries = config.rollout.carries and config.debug.rollouts is None
        return (CarriedRollouts if carries else Rollouts)(config, engine, world, policy, state)

    @property
    def asked(self) -> Engine:
        """The engine, as samplers see it."""
        return self.engine

    @property
    def repeats(self) -> bool:
        """What is sampled together does not depend on how long training takes."""
        return True

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """To its end, where the engine works."""
        return run_async(work)

    def settle(self) -> None:
        """What is under way and is to keep its weights is done."""

    def sync(self, version: int) -> None:
        """Give the engine the present weights. One that was lost while it idled is restarted when it is to generate."""
        with contextlib.suppress(EngineLostError):
            self.renew(version)

    def renew(self, version: int) -> None:
        """Give the engine the present weights, whatever it has: it may have been started anew."""
        sync_weights(self._policy, self.engine, version, self.state)

    def release(self) -> None:
        """Weights and training state are in place. They were lent, or away, where a step or an evaluation broke off."""
        release_engine(self._policy, self.engine, self.state)

    def restart(self) -> None:
        """In place of one that was lost. The training state is still on the GPU where that was not while generating."""
        assert isinstance(self.engine, Restartable)
        if not self._config.parallel.rollout_ranks:
            make_room(self._config.engine, self._policy, self.state)
        self.engine.restart()

    def forget(self) -> None:
        """Other weights, or another place in the data: what is under way is of no use."""

    def collection(self, sampler: Callable[..., Sampler], *, steps_left: int, **parts: Any) -> Collection:
        """A step's, with `parts` of `Collection`; `sampler` makes one for an `engine`."""
        return Collection(sampler=sampler(engine=self.asked), **self._with_own(parts))

    def evaluation(self, sampler: Callable[..., Sampler], **parts: Any) -> Collection:
        """One that no step has to do with."""
        return Collection(sampler=sampler(engine=self.asked), **self._with_own(parts) | {"draw_early": False})

    @property
    def ranks_per_engine(self) -> int:
        """Consecutive ranks that share an engine, and its prompts."""
        return 1 if self._config.parallel.rollout_ranks else self._config.engine.tensor_parallel

    def _with_own(self, parts: dict[str, Any]) -> dict[str, Any]:
        return parts | {
            "world": self._world,
            "ranks_per_engine": self.ranks_per_engine,
            "draw_early": self._config.engine.kind != "transformers",  # the embedded engine repeats to the last bit
            "restart": self.restart,
            "run_on": self.run,
            "on_restart": partial(self._tell_restart, parts["on_restart"]),
        }

    def _tell_restart(self, tell: Callable[[int, str], None], count: int, why: str) -> None:
        """`count` is of ranks that miss an engine: of those on ranks that generate, several may miss the same."""
        if self._config.parallel.rollout_ranks:
            # the news may not have come to all; 0: it is restarted already, and lacks its weights
            count = max(self._world.gather(num_lost(self.engine)))
        if count:
            tell(count, why)

    def take_metrics(self) -> dict[str, float]:
        """Since the last call."""
        return {}

    def close(self) -> None:
        """End what is under way; idempotent."""


class CarriedRollouts(Rollouts):
    """The engine works on an event loop in a thread of its own; nothing there waits for other ranks."""

    carries = True

    def __init__(self, config: Config, engine: Engine, world: World, policy: Policy, state: TrainingState) -> None:
        super().__init__(config, engine, world, policy, state)
        self._waits_for_all = config.rollout.schedule == "one_step_off"
        self._beside = config.rollout.schedule != "sync"
        self._held: int | None = None  # version that an engine beside training has
        self._sampler: Sampler | None = None
        self._waited, self._since = 0.0, time.perf_counter()
        self._carry = Carry()
        self._pausable = PausableEngine(engine)
        self._background = Background(partial(use_device, world.device))

    @property
    def asked(self) -> PausableEngine:
        """It can hold their answers."""
        return self._pausable

    @property
    def repeats(self) -> bool:
        return self._waits_for_all or self._config.rollout.staleness == 0

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

    def sync(self, version: int) -> None:
        """Not to an engine beside training that has this version."""
        if not (self._beside and self._held == version):
            super().sync(version)

    def renew(self, version: int) -> None:
        """New weights for the engine; what was held goes on with them."""
        self._held = None
        self.settle()
        self._background.run(self._pausable.pause())
        self._world.barrier()  # servers get their weights from the first rank alone
        try:
            sync_weights(self._policy, self.engine, version, self.state, beside=self._beside)
        finally:  # where an engine is lost, who waits for its answers has to see it
            self._background.run(self._pausable.resume())
        self._held = version

    def release(self) -> None:
        """Memory back to training, where the engine does not work beside it."""
        if self._beside:
            self._policy.reclaim()
            return
        self._background.run(self._pausable.pause())
        release_engine(self._policy, self.engine, self.state)

    def forget(self) -> None:
        """Other weights, or another place in the data: what is under way is of no use."""
        self._held = None
        self._background.run(self._carry.forget())

    def collection(self, sampler: Callable[..., Sampler], *, steps_left: int, **parts: Any) -> CarriedCollection:
        """A step's, with `parts` of `Collection`. The sampler is made once: groups outlive a step."""
        rollout = self._config.rollout
        if self._sampler is None:
            self._sampler = sampler(engine=self.asked)
        return CarriedCollection(
            sampler=self._sampler,
            carry=self._carry,
            num_steps=min(rollout.staleness, steps_left),
            num_begun=min(rollout.staleness, steps_left) if self._beside else 0,
            keep_done=rollout.partial != "mask",
            **self._with_own(parts),
        )

    def take_metrics(self) -> dict[str, float]:
        """Since the last call. A collective."""
        now, busy = time.perf_counter(), self._background.run(self._pausable.take_busy_seconds())
        shares = self._world.gather(busy / max(now - self._since, 1e-9))
        waited, self._waited, self._since = self._waited, 0.0, now
        return {"time/wait_for_rollouts": waited, "engine/idle_share": max(0.0, 1 - sum(shares) / len(shares))}

    def close(self) -> None:
        """End what is under way; idempotent."""
        self._background.close()


def check_staleness(groups: Sequence[SampleGroup], version: int, limit: int, tally: Tally) -> None:
    """Tell how many versions ago the oldest token of each sample, or of its episode, was drawn.

    RuntimeError beyond `limit`.
    """
    oldest: dict[tuple[int, int, bool], int] = {}
    for sample in (s for group in groups for s in group.samples if s.policy_versions):
        key, drawn = _episode(sample), min(sample.policy_versions)
        oldest[key] = min(drawn, oldest.get(key, drawn))
    for sample in (s for group in groups for s in group.scored if s.policy_versions):
        drawn = oldest[_episode(sample)]
        age = version - drawn
        if not 0 <= age <= limit:
            raise RuntimeError(
                f"sample {sample.group_index}/{sample.index} has tokens of policy version {drawn}, the "
                f"present one is {version}, and {limit} is the most that "
                "[rollout] allows between them"
            )
        tally.add("rollout/staleness_mean", age)
        tally.add("rollout/staleness_max", age, kind="max")


def _episode(sample: Sample) -> tuple[int, int, bool]:
    """What a sample's tokens were drawn in: an episode with all its conversations, or an answer by itself."""
    episode = sample.metadata.get("episode")
    if isinstance(episode, int):  # not of a hook's own metadata
        return sample.group_index, episode, True
    return sample.group_index, sample.index, False


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
