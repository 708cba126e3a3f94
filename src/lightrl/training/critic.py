"""The critic: a second sharded model, with a value head, on the ranks and GPUs of the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lightrl.algorithms.values import value_loss
from lightrl.config.schema import Config, CriticConfig, ModelConfig, OptimConfig
from lightrl.distributed import fsdp
from lightrl.distributed.mesh import World
from lightrl.observe.metrics import Tally
from lightrl.training.adamw import ShardedAdamW
from lightrl.training.optim import advance, apply_settings, build_optimizer, build_schedule, optimizer_step
from lightrl.training.policy import to_device
from lightrl.training.run_folder import export_model
from lightrl.training.value_model import ValueModel, ValueModule
from lightrl.types import Microbatch

Batch = Sequence[Sequence[Microbatch]]


@dataclass(kw_only=True)
class Critic:
    """A critic on this rank, with its optimizer."""

    model: ValueModel
    world: World
    config: CriticConfig
    optim: OptimConfig
    optimizer: ShardedAdamW
    schedule: LambdaLR
    total_updates: int

    @classmethod
    def build(cls, config: Config, world: World) -> Critic | None:
        """What `[critic]` and `[critic_optim]` say; None where `algorithm.advantage` needs none."""
        if not config.algorithm.estimator.critic:
            return None
        model = ValueModel.load(critic_model(config), world, key="critic.path")
        updates = config.run.steps * config.algorithm.minibatches_per_step
        optimizer = build_optimizer(model.parameters(), config.critic_optim)
        return cls(
            model=model,
            world=world,
            config=config.critic,
            optim=config.critic_optim,
            optimizer=optimizer,
            schedule=build_schedule(optimizer, config.critic_optim, updates),
            total_updates=updates,
        )

    @property
    def module(self) -> ValueModule:
        """Root of its FSDP tree."""
        return self.model.module

    def __call__(self, batch: Microbatch) -> Tensor:
        """Values [N], with gradients where enabled. Every rank must call it as often."""
        return self.model(batch)

    def policy_waits(self, steps_done: int) -> bool:
        """Does the next step train the critic alone?"""
        return steps_done < self.config.pretrain_steps

    @torch.no_grad()
    def add_values(self, batch: Batch) -> None:
        """What it expects of every token, before the step's updates."""
        for microbatch in (m for minibatch in batch for m in minibatch):
            microbatch.values = self(microbatch).cpu()

    def update(self, minibatch: Sequence[Microbatch], tally: Tally) -> None:
        """One optimizer update towards the returns. Ranks reduce only in the last backward."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        for i, batch in enumerate(minibatch):
            fsdp.set_gradient_sync(self.module, i == len(minibatch) - 1)
            value_microbatch_loss(self(batch), to_device(batch, self.world.device), self.config, tally).backward()
        norm, stepped = optimizer_step(self.optimizer, self.schedule, self.model.parameters(), self.optim.max_grad_norm)
        tally.add("critic/grad_norm", norm)
        tally.add("critic/lr", lr, kind="max")
        tally.add("critic/skipped_updates", float(not stepped) / self.world.size, kind="sum")

    def settle(self, updates_done: int) -> None:
        """The step's updates are made; whole parameters that a forward left behind are freed."""
        advance(self.schedule, updates_done)
        self.model.reclaim()

    def resumed(self, updates_done: int) -> None:
        """Weights and optimizer state are a checkpoint's; settings are this run's own."""
        apply_settings(self.optimizer, self.optim)
        self.schedule = build_schedule(self.optimizer, self.optim, self.total_updates, updates_done)

    def export(self, folder: Path, *, replace: bool = False) -> None:
        """A sequence classifier of one label, in Hugging Face format, which `critic.path` takes again."""
        export_model(self.model, folder, self.world, replace=replace)


def critic_model(config: Config) -> ModelConfig:
    """The policy's `[model]`, of the checkpoint that the critic starts from."""
    if config.critic.path is None:
        return config.model
    return replace(config.model, path=config.critic.path, revision=None)


def value_microbatch_loss(values: Tensor, batch: Microbatch, config: CriticConfig, tally: Tally) -> Tensor:
    """This microbatch's share of the update's loss, scalar, weighed as the policy's tokens are."""
    old, returns = batch.values, batch.returns
    if not batch.sample_keys:  # a rank without work takes part in the reduction all the same
        return values.sum() * 0.0
    assert old is not None
    assert returns is not None
    counted = batch.loss_mask > 0
    mine, target = values[counted], returns[counted]  # what else is in the row has no part in any gradient
    found = value_loss(mine, old[counted], target, clip=config.value_clip)
    loss = (found.loss * batch.loss_weights[counted]).sum()
    if tokens := float(counted.sum()):
        tally.add("critic/loss", float(loss.detach()), kind="sum")
        tally.add("critic/clip_fraction", float(found.clipped.float().mean()), weight=tokens)
        tally.add("critic/value_mean", float(mine.detach().mean()), weight=tokens)
        tally.add("critic/return_mean", float(target.mean()), weight=tokens)
    return loss


def explained_variance(batch: Batch, world: World) -> float | None:
    """1 - var(R - V) / var(R) over all loss tokens of the step, on all ranks, V from before its updates. A collective.

    1: the critic knew all returns; 0: a constant would have done as well. None where all returns are equal.
    """
    pairs = [
        torch.stack([m.returns, m.returns - m.values]).double()[:, m.loss_mask > 0]
        for minibatch in batch
        for m in minibatch
        if m.returns is not None and m.values is not None
    ]
    local = torch.cat(pairs, -1) if pairs else torch.zeros(2, 0, dtype=torch.float64)
    sums = world.gather((local.shape[1], local.sum(-1).tolist()))
    count = sum(n for n, _ in sums)
    if count == 0:
        return None
    means = torch.tensor([sum(s[i] for _, s in sums) / count for i in range(2)], dtype=torch.float64)
    squares = world.gather((local - means[:, None]).square().sum(-1).tolist())
    returns, rest = (sum(s[i] for s in squares) / count for i in range(2))
    return None if math.sqrt(returns) <= 1e-7 * max(1.0, abs(float(means[0]))) else 1.0 - rest / returns
