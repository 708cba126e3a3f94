"""One optimizer update: losses of a minibatch's microbatches, backward, step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lightrl.algorithms.losses import MAX_LOG_RATIO, LossTokens, PolicyLoss, kl_divergence
from lightrl.distributed.fsdp import set_gradient_sync
from lightrl.observe.metrics import Tally
from lightrl.training.adamw import ShardedAdamW
from lightrl.training.objective import (
    Correction,
    Distillation,
    Objective,
    center,
    correct,
    distill,
    engine_logprobs,
    samples_of,
)
from lightrl.training.optim import optimizer_step
from lightrl.training.policy import Policy, TeacherHead, to_device
from lightrl.training.replay import check_used, replay_of, update_metrics
from lightrl.types import Microbatch


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    grad_norm: float
    stepped: bool
    """False: some gradient was not finite, and every rank skipped the step."""
    lr: float


def update(
    policy: Policy,
    optimizer: ShardedAdamW,
    schedule: LambdaLR,
    minibatch: Sequence[Microbatch],
    objective: Objective,
    *,
    temperature: float,
    max_grad_norm: float,
    tally: Tally,
    teacher: TeacherHead | None = None,
) -> UpdateResult:
    """Add up gradients over microbatches and step once. Ranks reduce only in the last backward."""
    lr, correction = float(optimizer.param_groups[0]["lr"]), objective.correction
    records = []
    for i, batch in enumerate(minibatch):
        set_gradient_sync(policy.module, i == len(minibatch) - 1)
        replay = replay_of(batch, correction, policy.device)
        logprobs, entropy, *more = policy(batch, temperature, replay, teacher=teacher)
        known = to_device(replace(batch, teacher_hidden=None), policy.device)  # which is not moved again
        loss, record = _loss(logprobs, entropy, known, objective, *more)
        loss.backward()
        records.append((record, replay))
        check_used(batch)
    norm, stepped = optimizer_step(optimizer, schedule, policy.parameters(), max_grad_norm)
    for record, replay in records:  # reads numbers off the device, which would otherwise wait for the host in between
        record.write(tally)
        if replay is not None and record.batch.sample_keys:
            update_metrics(replay, record.batch, correction, tally)
    return UpdateResult(grad_norm=norm, stepped=stepped, lr=lr)


def microbatch_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: Microbatch,
    objective: Objective,
    tally: Tally,
    top_logprobs: Tensor | None = None,
    divergence: Tensor | None = None,
) -> Tensor:
    """This microbatch's share of the update's loss, scalar; its metrics go into `tally`."""
    loss, record = _loss(logprobs, entropy, batch, objective, top_logprobs, divergence)
    record.write(tally)
    return loss


def _loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: Microbatch,
    objective: Objective,
    top_logprobs: Tensor | None = None,
    divergence: Tensor | None = None,
) -> tuple[Tensor, _Record]:
    """This microbatch's share of the update's loss, scalar, and what its metrics are made of.

    Without `old_logprobs` the samples are from these very weights: the old policy is the present one, and the ratio is
    1 with its gradient intact. With `correction.use_rollout_logprobs` the old policy is the engine.
    """
    config, samples = objective.algorithm, samples_of(batch)
    if objective.correction.reads_rollout_logprobs:
        engine_logprobs(batch)
    trainer = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    old = trainer
    if objective.correction.use_rollout_logprobs and batch.rollout_logprobs is not None:
        old = torch.where(samples.mask, batch.rollout_logprobs, trainer)
    engine_top, teacher_top = _of_engine_and_teacher(top_logprobs, batch)
    distillation = distill(objective.teacher, batch, old, teacher_top, divergence)
    if distillation is not None and distillation.advantages is not None:
        batch = replace(batch, advantages=batch.advantages + distillation.advantages)
    tokens = LossTokens(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=batch.advantages,
        samples=samples,
        rollout_logprobs=batch.rollout_logprobs,
    )
    policy_loss = objective.policy_loss(tokens)
    correction = correct(objective.correction, batch, logprobs, samples)
    if correction.weights is not None:
        policy_loss.loss = policy_loss.loss * correction.weights
    if objective.correction.score_centering_top_k:
        policy_loss.loss = policy_loss.loss + center(objective.correction, batch, engine_top)
    token_loss = policy_loss.loss
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * entropy
    if distillation is not None and distillation.divergence is not None:
        token_loss = token_loss + objective.teacher.coef * distillation.divergence
    kl = None
    if batch.ref_logprobs is not None:
        kl = kl_divergence(logprobs, batch.ref_logprobs, config.kl_estimator)
        if config.kl_in == "loss":
            token_loss = token_loss + config.kl_coef * (kl * tokens.log_ratio.exp() if config.kl_unbiased else kl)
    counted = samples.mask
    in_loss = counted if correction.keep is None else counted & correction.keep
    # the sum over no token still reaches every parameter, so that all ranks reduce the same gradients
    loss = (token_loss.masked_fill(~in_loss, 0.0) * batch.loss_weights).sum()
    record = _Record(
        batch=batch,
        loss=loss.detach(),
        logprobs=logprobs.detach(),
        old=old,
        entropy=entropy.detach(),
        policy_loss=replace(policy_loss, loss=policy_loss.loss.detach()),
        kl=None if kl is None else kl.detach(),
        distillation=distillation,
        correction=correction,
        counted=counted,
        in_loss=in_loss,
    )
    return loss, record


def _of_engine_and_teacher(top_logprobs: Tensor | None, batch: Microbatch) -> tuple[Tensor | None, Tensor | None]:
    """Log-probs of the engine's likeliest tokens and of the teacher's, which the policy gives side by side."""
    if top_logprobs is None or batch.teacher_top_ids is None:
        return top_logprobs, None
    count = top_logprobs.shape[1] - batch.teacher_top_ids.shape[1]
    return top_logprobs[:, :count], top_logprobs[:, count:]


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What a microbatch's metrics are made of, without its graph. All but the scalar loss are [N]."""

    batch: Microbatch
    loss: Tensor
    logprobs: Tensor
    old: Tensor
    entropy: Tensor
    policy_loss: PolicyLoss
    kl: Tensor | None
    distillation: Distillation | None
    correction: Correction
    counted: Tensor
    in_loss: Tensor

    @torch.no_grad()
    def write(self, tally: Tally) -> None:
        """Losses as they are summed; the rest are token means over the loss mask, whatever the aggregation."""
        if not bool(self.counted.any()):
            return
        batch, policy_loss, counted = self.batch, self.policy_loss, self.counted
        tokens = float(counted.sum())
        means = {
            "loss/entropy": self.entropy,
            "policy/clip_fraction": policy_loss.clipped.float(),
            "policy/ratio_mean": policy_loss.ratio,
            "policy/kl_old": kl_divergence(self.logprobs, self.old, "k3"),
        }
        if self.kl is not None:
            means["loss/kl"] = self.kl
        tally.add("loss/total", float(self.loss), kind="sum")
        tally.add("loss/policy", float((policy_loss.loss * batch.loss_weights)[self.in_loss].sum()), kind="sum")
        for name, values in means.items():
            tally.add(name, float(values[counted].mean()), weight=tokens)
        tally.add("policy/ratio_max", float(policy_loss.ratio[counted].max()), kind="max")
        tally.add("policy/ratio_min", float(policy_loss.ratio[counted].min()), kind="min")
        if batch.old_logprobs is None:
            mismatch_metrics(batch, self.logprobs, tally)
        _record_correction(self.correction, counted, tally)
        _record_distillation(self.distillation, batch, counted, tally)


def _record_distillation(found: Distillation | None, batch: Microbatch, counted: Tensor, tally: Tally) -> None:
    """`batch.advantages` hold the teacher's part."""
    if found is None:
        return
    means = {"distill/reverse_kl": found.reverse_kl}
    if found.divergence is not None:
        means["distill/divergence"] = found.divergence.detach()
    if found.advantages is not None:
        part, rest = found.advantages.abs(), (batch.advantages - found.advantages).abs()
        means["distill/advantage_share"] = part / (part + rest).clamp_min(torch.finfo(part.dtype).tiny)
    for name, values in means.items():
        tally.add(name, float(values[counted].mean()), weight=float(counted.sum()))


def _record_correction(correction: Correction, counted: Tensor, tally: Tally) -> None:
    shares = {
        "correction/weight_mean": correction.weights,
        "correction/bounded_share": correction.bounded,
        "correction/rejected_share": None if correction.keep is None else ~correction.keep,
    }
    for name, values in shares.items():
        if values is not None:
            tally.add(name, float(values[counted].float().mean()), weight=float(counted.sum()))


def mismatch_metrics(batch: Microbatch, logprobs: Tensor, tally: Tally) -> None:
    """How far the engine's log-probs are from the trainer's, for the weights that sampled: 0 if both were exact."""
    if batch.rollout_logprobs is None:
        return
    counted = batch.loss_mask.to(logprobs.device) > 0
    if not bool(counted.any()):
        return
    mine, engine = logprobs[counted].detach(), batch.rollout_logprobs.to(logprobs.device)[counted]
    tokens = float(counted.sum())
    tally.add("mismatch/logprob_abs_diff", float((mine - engine).abs().mean()), weight=tokens)
    tally.add("mismatch/logprob_abs_diff_max", float((mine - engine).abs().max()), kind="max")
    tally.add("mismatch/kl_k3", float(kl_divergence(engine, mine, "k3").mean()), weight=tokens)
    ratio = (mine - engine).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double().exp()
    tally.add("mismatch/ratio_mean", float(ratio.mean()), weight=tokens)
    tally.add("mismatch/ratio_max", float(ratio.max()), kind="max")
    tally.add("mismatch/chi2", float(ratio.square().mean()) - 1.0, weight=tokens)
