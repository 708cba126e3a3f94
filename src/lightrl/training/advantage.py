"""Advantages onto samples, where they were sampled, and onto tokens, where they are trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrl import hooks
from lightrl.algorithms.advantages import GroupRewards, TokenRewards, overlong_penalty
from lightrl.algorithms.losses import kl_divergence
from lightrl.config.estimators import ESTIMATORS
from lightrl.config.schema import AlgorithmConfig
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.observe.metrics import Tally
from lightrl.types import Microbatch, Sample, SampleGroup

LARGEST = torch.finfo(torch.float32).max

Key = tuple[int, int]  # (group_index, index) of a sample
Batch = Sequence[Sequence[Microbatch]]


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The estimator that `algorithm.advantage` names, with its keys."""

    config: AlgorithmConfig
    function: Callable[..., Any]
    max_response_tokens: int
    """Where answers are cut off."""

    @classmethod
    def load(cls, config: AlgorithmConfig, max_response_tokens: int) -> Advantages:
        """UserError for a function that cannot be loaded."""
        function = hooks.load(config.estimator.function, "algorithm.advantage")
        return cls(config=config, function=function, max_response_tokens=max_response_tokens)

    @property
    def of_tokens(self) -> bool:
        """Does each token get its own from its own answer's rewards, once that answer's log-probs are known?"""
        return self.config.estimator.kind == "tokens"

    def shaped(self, sample: Sample) -> float:
        """The reward as scored, less the punishment for an answer that is nearly too long."""
        return float(sample.reward or 0.0) - self.overlong(sample)

    def overlong(self, sample: Sample) -> float:
        """What the answer's length costs; never below 0."""
        buffer, penalty = self.config.overlong_buffer, self.config.overlong_penalty
        if buffer is None:
            return 0.0
        return overlong_penalty(sample.response_length, limit=self.max_response_tokens, buffer=buffer, penalty=penalty)

    def __call__(self, rewards: GroupRewards | TokenRewards) -> Any:
        options: dict[str, Any] = {key: getattr(self.config, key) for key in self.config.estimator.keys}
        if self.config.advantage not in ESTIMATORS:
            return hooks.call(self.function, rewards, self.config.advantage, "algorithm.advantage")
        return self.function(rewards, **options)


def set_advantages(
    groups: Sequence[SampleGroup], advantages: Advantages, kl: Mapping[Key, float] | None = None
) -> None:
    """Each group's scored samples against each other; failed ones take no part.

    `kl`: what each sample's reward loses to the reference. Estimators of tokens find the reward they start from.
    """
    kl = kl or {}
    for samples in (part for group in groups for part in group.compared):
        rewards = [advantages.shaped(s) - kl.get((s.group_index, s.index), 0.0) for s in samples]
        found: list[Any] = rewards
        if samples and not advantages.of_tokens:
            answer = advantages(GroupRewards(rewards=torch.tensor(rewards, dtype=torch.float64), samples=samples))
            found = _checked(answer, samples, advantages.config.advantage)
        for sample, value in zip(samples, found, strict=True):
            sample.advantage = value


def _checked(answer: Any, samples: Sequence[Sample], name: str) -> list[float | list[float]]:
    """What a function returned as numbers that float32 holds: one a sample, or a list of one a response token."""

    def fault(text: str) -> UserError:
        return UserError(f"algorithm.advantage = {name!r}: it returned {text}")

    if isinstance(answer, Tensor):
        answer = answer.float().tolist()
    if not hasattr(answer, "__len__") or isinstance(answer, str | dict) or len(answer) != len(samples):
        found = f"{len(answer)} of them" if hasattr(answer, "__len__") else f"{answer!r:.80}"
        raise fault(f"{found}: return an advantage for each of the {len(samples)} samples of the group")
    values: list[float | list[float]] = []
    for sample, item in zip(samples, answer, strict=True):
        try:
            value = [float(x) for x in item] if getattr(item, "ndim", 1) and hasattr(item, "__len__") else float(item)
        except (TypeError, ValueError):
            raise fault(f"{item!r:.80} for a sample: return a number, or one for each token of its response") from None
        if isinstance(value, list) and len(value) != sample.response_length:
            raise fault(f"{len(value)} numbers for a response of {sample.response_length} tokens: return one for each")
        worst = next((x for x in (value if isinstance(value, list) else [value]) if not abs(x) < LARGEST), None)
        if worst is not None:
            raise fault(f"{worst:g} for a sample: return finite numbers that float32 holds")
        values.append(value)
    return values


def finish_advantages(groups: Sequence[SampleGroup], batch: Batch, advantages: Advantages, world: World) -> None:
    """What needs log-probs or all ranks: the KL in the reward, advantages of tokens, whitening."""
    config = advantages.config
    if advantages.of_tokens:
        set_token_advantages(batch, advantages)
        for sample in (s for g in groups for s in g.samples):
            sample.advantage = None  # it held the reward that they start from
    elif config.kl_coef and config.kl_in == "reward":
        penalize_with_kl(groups, batch, advantages, world)
    if config.whitening != "none":
        whiten_advantages(batch, world, within_groups=config.whitening == "group")
    for microbatch in _of_samples(batch):
        microbatch.advantages = microbatch.advantages.float()


def penalize_with_kl(groups: Sequence[SampleGroup], batch: Batch, advantages: Advantages, world: World) -> None:
    """Advantages again, from rewards less `kl_coef` times the sample's summed KL to the reference.

    The KL is known where a sample is trained, the reward where it was sampled: one number a sample travels each way
    (one a token, from a function that gives each token its own). Rewards on the samples stay as they were scored.
    """
    sums: dict[Key, float] = {}
    for microbatch in _of_samples(batch):
        kl = _token_kl(microbatch, advantages.config).masked_fill(microbatch.loss_mask == 0, 0.0)
        totals = torch.zeros(len(microbatch.sample_keys)).index_add_(0, microbatch.sample_ids, kl)
        sums |= dict(zip(microbatch.sample_keys, totals.tolist(), strict=True))
    weight = advantages.config.kl_coef
    penalties: dict[Key, float] = {}
    for part in world.gather(sums):
        for key, kl in part.items():  # a sample's rows may be spread over ranks (parallel.context_parallel)
            penalties[key] = penalties.get(key, 0.0) + weight * kl
    set_advantages(groups, advantages, penalties)
    mine = {(s.group_index, s.index): s.advantage for g in groups for s in g.scored}
    advantage_of = {key: value for part in world.gather(mine) for key, value in part.items()}
    for microbatch in _of_samples(batch):
        lengths = microbatch.sample_ids.bincount(minlength=len(microbatch.sample_keys)).tolist()
        values: list[float] = []
        for key, length in zip(microbatch.sample_keys, lengths, strict=True):
            value = advantage_of[key]
            values += value if isinstance(value, list) else [value] * length
        microbatch.advantages = torch.tensor(values, dtype=torch.float32)


def set_token_advantages(batch: Batch, advantages: Advantages) -> None:
    """Advantages of an estimator of tokens, float64, in place of each sample's reward; 0 on tokens that were given.

    Each token's reward is minus its weighted KL, with the KL in the reward; the sample's own comes on its last loss
    token. Tokens in between that carry no loss are passed over, as if they were not there.
    """
    config = advantages.config
    for microbatch in _of_samples(batch):
        (counted,) = (microbatch.loss_mask > 0).nonzero(as_tuple=True)
        owners = microbatch.sample_ids[counted]
        ends = torch.ones_like(owners, dtype=torch.bool)
        ends[:-1] = owners[1:] != owners[:-1]
        rewards = torch.zeros(len(counted), dtype=torch.float64)
        if config.kl_coef and config.kl_in == "reward":
            rewards -= config.kl_coef * _token_kl(microbatch, config)[counted].double()
        rewards[ends] += microbatch.advantages[counted][ends].double()
        values = None if microbatch.values is None else microbatch.values[counted].double()
        found = advantages(TokenRewards(rewards=rewards, ends=ends, values=values))
        microbatch.advantages = torch.zeros(len(microbatch.targets), dtype=torch.float64)
        microbatch.advantages[counted] = found
        if values is not None:
            microbatch.returns = torch.zeros(len(microbatch.targets))
            microbatch.returns[counted] = (found + values).float()


def _of_samples(batch: Batch) -> Iterator[Microbatch]:
    """The microbatches that hold any sample."""
    return (m for minibatch in batch for m in minibatch if m.sample_keys)


def _token_kl(microbatch: Microbatch, config: AlgorithmConfig) -> Tensor:
    """KL of the policy before the step's updates to the reference, [N]; no gradient is taken of it."""
    assert microbatch.old_logprobs is not None
    assert microbatch.ref_logprobs is not None
    return kl_divergence(microbatch.old_logprobs, microbatch.ref_logprobs, config.kl_estimator)


def whiten_advantages(batch: Batch, world: World, *, within_groups: bool = False) -> None:
    """Token advantages of all microbatches on all ranks to mean 0 and variance 1, loss tokens counted once each.

    `within_groups`: those of each group by themselves, wherever its samples are trained. Two passes (mean, then squared
    deviations), so that large means do not cancel. A rank without loss tokens adds nothing, and takes part all the
    same.
    """
    microbatches = [m for minibatch in batch for m in minibatch]
    values, owners = [], []
    for microbatch in microbatches:
        groups = torch.tensor([group for group, _ in microbatch.sample_keys], dtype=torch.int64)
        counted = microbatch.loss_mask > 0
        values.append(microbatch.advantages[counted].double())
        owners.append(groups[microbatch.sample_ids[counted]] * within_groups)
    local = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)
    owner = torch.cat(owners) if owners else torch.zeros(0, dtype=torch.int64)
    parts = {int(key): local[owner == key] for key in owner.unique()}
    sums = _over_ranks({key: (part.numel(), float(part.sum())) for key, part in parts.items()}, world)
    means = {key: total / count for key, (count, total) in sums.items()}
    squares = _over_ranks({key: (float((part - means[key]).square().sum()),) for key, part in parts.items()}, world)
    deviations = {key: math.sqrt(square / sums[key][0] + 1e-8) for key, (square,) in squares.items()}
    for microbatch in _of_samples(batch):
        keys = [group * within_groups for group, _ in microbatch.sample_keys]  # one without a loss token has no mean
        mean = torch.tensor([means.get(key, 0.0) for key in keys], dtype=torch.float64)[microbatch.sample_ids]
        deviation = torch.tensor([deviations.get(key, 1.0) for key in keys], dtype=torch.float64)[microbatch.sample_ids]
        microbatch.advantages = ((microbatch.advantages.double() - mean) / deviation).float()


def _over_ranks(mine: Mapping[int, tuple[float, ...]], world: World) -> dict[int, tuple[float, ...]]:
    """Sums by key over all ranks, added up in the order of ranks."""
    found: dict[int, tuple[float, ...]] = {}
    for part in world.gather(dict(mine)):
        for key, numbers in part.items():
            before = found.get(key)
            found[key] = numbers if before is None else tuple(a + b for a, b in zip(before, numbers, strict=True))
    return found


def overlong_metrics(groups: Sequence[SampleGroup], advantages: Advantages) -> Tally:
    """What lengths cost this rank's scored samples, on average; empty without `algorithm.overlong_buffer`."""
    tally = Tally()
    if advantages.config.overlong_buffer is not None:
        tally.extend("reward/overlong_penalty", [advantages.overlong(s) for g in groups for s in g.scored])
    return tally
