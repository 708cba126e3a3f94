"""Advantages onto samples, and the KL penalty on rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightrl.algorithms.advantages import grpo_advantages
from lightrl.algorithms.losses import kl_divergence
from lightrl.config.schema import AlgorithmConfig
from lightrl.distributed.mesh import World
from lightrl.types import Microbatch, SampleGroup


def set_advantages(groups: Sequence[SampleGroup], *, normalize_std: bool) -> None:
    """Each group's scored samples against each other; failed ones take no part."""
    for group in groups:
        samples = group.scored
        advantages = grpo_advantages([float(s.reward or 0.0) for s in samples], normalize_std=normalize_std)
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            sample.advantage = advantage


def penalize_with_kl(
    groups: Sequence[SampleGroup], batch: Sequence[Sequence[Microbatch]], world: World, config: AlgorithmConfig
) -> None:
    """Advantages again, from rewards less `kl_coef` times the sample's summed KL to the reference.

    The KL is known where a sample is trained, the reward where it was sampled: one number a sample travels each way.
    Rewards on the samples stay as they were scored.
    """
    penalties: dict[tuple[int, int], float] = {}
    for microbatch in (m for minibatch in batch for m in minibatch):
        if not microbatch.sample_keys:
            continue
        assert microbatch.old_logprobs is not None
        assert microbatch.ref_logprobs is not None
        kl = kl_divergence(microbatch.old_logprobs, microbatch.ref_logprobs, config.kl_estimator)
        sums = torch.zeros(len(microbatch.sample_keys)).index_add_(
            0, microbatch.sample_ids, kl.masked_fill(microbatch.loss_mask == 0, 0.0)
        )
        penalties |= dict(zip(microbatch.sample_keys, sums.tolist(), strict=True))
    everywhere: dict[tuple[int, int], float] = {}
    for part in world.gather(penalties):
        for key, kl in part.items():  # a sample may be spread over ranks
            everywhere[key] = everywhere.get(key, 0.0) + kl
    mine: dict[tuple[int, int], float] = {}
    for group in groups:
        samples = group.scored
        rewards = [
            float(s.reward or 0.0) - config.kl_coef * everywhere.get((s.group_index, s.index), 0.0) for s in samples
        ]
        advantages = grpo_advantages(rewards, normalize_std=config.normalize_std)
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            sample.advantage = mine[sample.group_index, sample.index] = advantage
    advantage_of = {key: value for part in world.gather(mine) for key, value in part.items()}
    for microbatch in (m for minibatch in batch for m in minibatch):
        if microbatch.sample_keys:
            values = torch.tensor([advantage_of[key] for key in microbatch.sample_keys])
            microbatch.advantages = values[microbatch.sample_ids]


def whiten_advantages(batch: Sequence[Sequence[Microbatch]], world: World) -> None:
    """Token advantages of all microbatches on all ranks to mean 0 and variance 1, loss tokens counted once each.

    Two passes (mean, then squared deviations), so that large means do not cancel. A rank without loss tokens adds
    nothing, and takes part all the same.
    """
    microbatches = [m for minibatch in batch for m in minibatch]
    values = [m.advantages[m.loss_mask > 0].double() for m in microbatches]
    local = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)
    sums = world.gather((local.numel(), float(local.sum())))
    count = sum(n for n, _ in sums)
    if count == 0:
        return
    mean = sum(total for _, total in sums) / count
    variance = sum(world.gather(float((local - mean).square().sum()))) / count
    for microbatch in microbatches:
        microbatch.advantages = ((microbatch.advantages.double() - mean) / (variance + 1e-8) ** 0.5).float()
