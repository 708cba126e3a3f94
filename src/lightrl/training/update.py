"""One optimizer update: losses of a minibatch's microbatches, backward, step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lightrl.algorithms.losses import PolicyLoss, clipped_policy_loss, kl_divergence
from lightrl.config.schema import AlgorithmConfig
from lightrl.distributed.fsdp import set_gradient_sync
from lightrl.observe.metrics import Tally
from lightrl.training.optim import optimizer_step
from lightrl.training.policy import Policy, to_device
from lightrl.types import Microbatch


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    grad_norm: float
    stepped: bool
    """False: some gradient was not finite, and every rank skipped the step."""
    lr: float


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    minibatch: Sequence[Microbatch],
    config: AlgorithmConfig,
    *,
    temperature: float,
    max_grad_norm: float,
    tally: Tally,
) -> UpdateResult:
    """Add up gradients over microbatches and step once. Ranks reduce only in the last backward."""
    lr = float(optimizer.param_groups[0]["lr"])
    records = []
    for i, batch in enumerate(minibatch):
        set_gradient_sync(policy.module, i == len(minibatch) - 1)
        logprobs, entropy = policy(batch, temperature)
        loss, record = _loss(logprobs, entropy, to_device(batch, policy.device), config)
        loss.backward()
        records.append(record)
    norm, stepped = optimizer_step(optimizer, schedule, policy.parameters(), max_grad_norm)
    for record in records:  # reads numbers off the device, which would otherwise wait for the host in between
        record(tally)
    return UpdateResult(grad_norm=norm, stepped=stepped, lr=lr)


def microbatch_loss(
    logprobs: Tensor, entropy: Tensor, batch: Microbatch, config: AlgorithmConfig, tally: Tally
) -> Tensor:
    """This microbatch's share of the update's loss, scalar; its metrics go into `tally`."""
    loss, record = _loss(logprobs, entropy, batch, config)
    record(tally)
    return loss


def _loss(
    logprobs: Tensor, entropy: Tensor, batch: Microbatch, config: AlgorithmConfig
) -> tuple[Tensor, Callable[[Tally], None]]:
    """This microbatch's share of the update's loss, scalar, and what writes down its metrics.

    Without `old_logprobs` the samples are from these very weights: the old policy is the present one, and the ratio is
    1 with its gradient intact.
    """
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    policy_loss = clipped_policy_loss(
        logprobs,
        old,
        batch.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_low if config.clip_high is None else config.clip_high,
    )
    token_loss = policy_loss.loss
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * entropy
    kl = None
    if batch.ref_logprobs is not None:
        kl = kl_divergence(logprobs, batch.ref_logprobs, config.kl_estimator)
        if config.kl_in == "loss":
            token_loss = token_loss + config.kl_coef * kl
    counted = batch.loss_mask > 0
    token_loss = token_loss.masked_fill(~counted, 0.0)
    # the sum over no token still reaches every parameter, so that all ranks reduce the same gradients
    loss = (token_loss * batch.loss_weights).sum()
    shown = replace(policy_loss, loss=policy_loss.loss.detach())
    numbers = (loss.detach(), logprobs.detach(), old, entropy.detach(), shown, None if kl is None else kl.detach())
    return loss, partial(_record, batch, *numbers, counted)


@torch.no_grad()
def _record(
    batch: Microbatch,
    loss: Tensor,
    logprobs: Tensor,
    old: Tensor,
    entropy: Tensor,
    policy_loss: PolicyLoss,
    kl: Tensor | None,
    counted: Tensor,
    tally: Tally,
) -> None:
    """Losses as they are summed; the rest are token means over the loss mask, whatever the aggregation."""
    if not bool(counted.any()):
        return
    tokens = float(counted.sum())
    means = {
        "loss/entropy": entropy,
        "policy/clip_fraction": policy_loss.clipped.float(),
        "policy/ratio_mean": policy_loss.ratio,
        "policy/kl_old": kl_divergence(logprobs, old, "k3"),
    }
    if kl is not None:
        means["loss/kl"] = kl
    tally.add("loss/total", float(loss), kind="sum")
    tally.add("loss/policy", float((policy_loss.loss * batch.loss_weights)[counted].sum()), kind="sum")
    for name, values in means.items():
        tally.add(name, float(values[counted].mean()), weight=tokens)
    tally.add("policy/ratio_max", float(policy_loss.ratio[counted].max()), kind="max")
    tally.add("policy/ratio_min", float(policy_loss.ratio[counted].min()), kind="min")
    if batch.old_logprobs is None:
        mismatch_metrics(batch, logprobs, tally)


def mismatch_metrics(batch: Microbatch, logprobs: Tensor, tally: Tally) -> None:
    """How far the engine's log-probs are from the trainer's, for the weights that sampled: 0 if both were exact."""
    if batch.rollout_logprobs is None:
        return
    counted = batch.loss_mask.to(logprobs.device) > 0
    if not bool(counted.any()):
        return
    mine, engine = logprobs[counted], batch.rollout_logprobs.to(logprobs.device)[counted]
    tokens = float(counted.sum())
    tally.add("mismatch/logprob_abs_diff", float((mine - engine).abs().mean()), weight=tokens)
    tally.add("mismatch/logprob_abs_diff_max", float((mine - engine).abs().max()), kind="max")
    tally.add("mismatch/kl_k3", float(kl_divergence(engine, mine, "k3").mean()), weight=tokens)
