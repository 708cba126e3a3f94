"""The loss of an update, from the sections that name it: policy loss, corrections, KL and entropy terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightrl import hooks
from lightrl.algorithms.corrections import (
    Weights,
    accepted,
    importance_weights,
    not_too_old,
    not_vetoed,
    score_centering,
)
from lightrl.algorithms.distillation import reverse_kl, top_k_divergence
from lightrl.algorithms.losses import LossTokens, PolicyLoss, reinforce_loss
from lightrl.algorithms.samples import Samples
from lightrl.config.losses import LOSSES
from lightrl.config.schema import AlgorithmConfig, CorrectionConfig, TeacherConfig
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.types import Microbatch


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised. Made once a run: a loss of the user's own is imported here."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    policy_loss: Callable[[LossTokens], PolicyLoss]

    @classmethod
    def of(
        cls,
        algorithm: AlgorithmConfig,
        correction: CorrectionConfig | None = None,
        teacher: TeacherConfig | None = None,
    ) -> Objective:
        """UserError for a function that cannot be loaded."""
        return cls(
            algorithm=algorithm,
            correction=correction or CorrectionConfig(),
            teacher=teacher or TeacherConfig(),
            policy_loss=load_policy_loss(algorithm),
        )

    @property
    def may_skip_zero_advantage(self) -> bool:
        """Is a sample without advantage one without gradient, and without say in what others are divided by?"""
        a = self.algorithm
        final = a.estimator.kind == "group" and a.whitening == "none"  # known before samples are packed
        others = a.kl_coef or a.entropy_coef or self.correction.tis_batch_normalize or a.loss not in LOSSES
        return a.skip_zero_advantage and final and not others and not self.teacher.enabled

    def needs_old_logprobs(self, updates: int) -> bool:
        """Does the trainer have to compute log-probs before the first of the step's `updates`?

        A single update is made on the very weights that these would be of. With the engine's as the old ones nobody
        asks for them.
        """
        return self.correction.tis_batch_normalize or (updates > 1 and not self.correction.use_rollout_logprobs)


def load_policy_loss(config: AlgorithmConfig) -> Callable[[LossTokens], PolicyLoss]:
    """The function that `algorithm.loss` names, with the keys that are set; the others have its defaults."""
    known = LOSSES.get(config.loss)
    function = hooks.load(config.loss if known is None else known.function, "algorithm.loss")
    if known is None:
        return lambda tokens: _own_loss(function, tokens, config.loss)
    return partial(function, **{key: v for key in known.keys if (v := getattr(config, key)) is not None})


def _own_loss(function: Callable[..., Any], tokens: LossTokens, name: str) -> PolicyLoss:
    """What a function of the user's own makes of them; it is not asked about none, as on a rank without work."""
    if not tokens.logprobs.numel():
        return reinforce_loss(tokens)
    return _checked(hooks.call(function, tokens, name, "algorithm.loss"), tokens, name)


def _checked(answer: Any, tokens: LossTokens, name: str) -> PolicyLoss:
    """What it returned: a loss a token, or a `PolicyLoss`."""
    loss = answer.loss if isinstance(answer, PolicyLoss) else answer
    if not isinstance(loss, Tensor) or loss.shape != tokens.logprobs.shape:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        wanted = f"a tensor of shape {list(tokens.logprobs.shape)}, a loss a token"
        raise UserError(f"algorithm.loss = {name!r}: it returned {what}: return {wanted}")
    if tokens.logprobs.requires_grad and not loss.requires_grad:
        raise UserError(
            f"algorithm.loss = {name!r}: it returned a loss without a gradient: compute it from tokens.logprobs, "
            "undetached"
        )
    if isinstance(answer, PolicyLoss):
        for part in ("ratio", "clipped"):
            if (found := getattr(answer, part)).shape != loss.shape:
                shapes = f"{list(found.shape)}, not {list(loss.shape)}"
                raise UserError(f"algorithm.loss = {name!r}: `{part}` of the PolicyLoss it returned has shape {shapes}")
        return answer
    ratio = tokens.log_ratio.detach().exp()
    return PolicyLoss(loss=loss, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What the corrections make of a microbatch."""

    weights: Tensor | None = None  # [N] factors of the policy loss
    keep: Tensor | None = None  # [N] bool, False: in no term of the loss
    bounded: Tensor | None = None  # [N] bool, a bound changed the weight


def samples_of(batch: Microbatch) -> Samples:
    """Which tokens are in the loss, and whose they are."""
    return Samples(mask=batch.loss_mask > 0, ids=batch.sample_ids, count=len(batch.sample_keys))


def engine_logprobs(batch: Microbatch) -> Tensor:
    """[N]; UserError where an engine gave none, which corrections are made of."""
    if batch.rollout_logprobs is None:
        raise UserError(
            "correction: an engine gave answers without log-probs, which the loss needs: remove [correction]"
        )
    return batch.rollout_logprobs


def correct(config: CorrectionConfig, batch: Microbatch, logprobs: Tensor, samples: Samples) -> Correction:
    """Weights and rejections of a microbatch, by the trainer's log-probs before the step's updates.

    Where there are none, `logprobs` are they: the present ones, in the single update of a step.
    """
    if not config.reads_rollout_logprobs:
        return Correction()
    now, engine = logprobs.detach(), engine_logprobs(batch)
    log_ratio = (now if batch.old_logprobs is None else batch.old_logprobs) - engine
    log_ratio = log_ratio.masked_fill(~samples.mask, 0.0)  # an engine may know no log-prob of tokens that it was given
    weights = bounded = None
    keep = torch.ones_like(samples.mask)
    if config.use_tis:
        found = _tis_weights(config, log_ratio, samples)
        weights, bounded, keep = found.values / batch.weight_mean, found.bounded, found.keep
    if config.use_rs:
        low, high = config.rs_bounds
        keep = keep & accepted(log_ratio, samples, level=config.rs_level, lower=low, upper=high)
    if config.rs_veto_threshold is not None:
        keep = keep & not_vetoed(log_ratio, samples, config.rs_veto_threshold)
    if config.opsm_delta is not None:
        fresh = not_too_old(now, engine, batch.advantages, samples, config.opsm_delta).to(log_ratio.dtype)
        weights = fresh if weights is None else weights * fresh
    return Correction(weights=weights, keep=keep if config.rejects else None, bounded=bounded)


def center(config: CorrectionConfig, batch: Microbatch, top_logprobs: Tensor | None) -> Tensor:
    """Score centering's term of the policy loss, [N]. `top_logprobs` [N, k]: now, with gradient."""
    if not batch.sample_keys:
        return torch.zeros_like(batch.advantages)
    if top_logprobs is None or batch.rollout_top_logprobs is None:
        raise UserError("correction.score_centering_top_k: the engine did not say which tokens were the likeliest")
    low, high = config.tis_bounds
    mode = config.tis_mode if config.use_tis else None
    engine = batch.rollout_top_logprobs.masked_fill(batch.loss_mask[:, None] == 0, 0.0)  # any number will do there
    term = score_centering(top_logprobs, engine, mode=mode, lower=low, upper=high)
    return batch.advantages * term / batch.weight_mean


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What a teacher makes of a microbatch's tokens."""

    reverse_kl: Tensor  # [N] log policy - log teacher of the sampled tokens, 0 on others
    advantages: Tensor | None = None  # [N] to be added to the tokens' own
    divergence: Tensor | None = None  # [N] with gradient, times the coefficient to be added to their losses


def distill(
    config: TeacherConfig,
    batch: Microbatch,
    old: Tensor,
    top_logprobs: Tensor | None = None,
    divergence: Tensor | None = None,
) -> Distillation | None:
    """The term of `[teacher]`; None without one.

    `old` [N] are the log-probs before the step's updates; of the present policy, with gradient, `top_logprobs` [N, k]
    are those of `batch.teacher_top_ids`, and `divergence` [N] is that from the whole of the teacher's distribution.
    """
    if not config.enabled or not batch.sample_keys:
        return None
    counted = batch.loss_mask > 0
    assert batch.teacher_logprobs is not None, "a teacher has said nothing of these tokens"
    found = reverse_kl(old.detach(), batch.teacher_logprobs).masked_fill(~counted, 0.0)
    if config.form == "sampled":
        return Distillation(reverse_kl=found, advantages=-config.coef * found)
    if config.form == "top_k":
        assert top_logprobs is not None
        assert batch.teacher_top_logprobs is not None
        theirs = batch.teacher_top_logprobs.masked_fill(~counted[:, None], 0.0)  # any number will do there
        divergence = top_k_divergence(top_logprobs, theirs, config.kind, config.beta)
    assert divergence is not None
    return Distillation(reverse_kl=found, divergence=divergence)


def _tis_weights(config: CorrectionConfig, log_ratio: Tensor, samples: Samples) -> Weights:
    low, high = config.tis_bounds
    return importance_weights(log_ratio, samples, level=config.tis_level, mode=config.tis_mode, lower=low, upper=high)


def normalize_weights(batch: Sequence[Sequence[Microbatch]], world: World, config: CorrectionConfig) -> None:
    """Set the mean that the step's importance weights are divided by, if they are: the same on all ranks, a collective.

    Over loss tokens at level `token`, else over samples that have any. Rejected ones count with their weights, as if
    they had been kept. A mean of 0 divides nothing.
    """
    if not config.tis_batch_normalize:
        return
    total = count = 0.0
    microbatches = [m for minibatch in batch for m in minibatch]
    for microbatch in (m for m in microbatches if m.sample_keys):
        assert microbatch.old_logprobs is not None
        samples = samples_of(microbatch)
        values = _tis_weights(config, microbatch.old_logprobs - engine_logprobs(microbatch), samples).values
        if config.tis_level == "token":
            total += float(samples.sums(values).sum())
            count += float(samples.lengths.sum())
        else:
            total += float((samples.sums(values) / samples.lengths.clamp_min(1.0)).sum())
            count += float((samples.lengths > 0).sum())
    sums = world.gather((total, count))
    mean = sum(t for t, _ in sums) / max(sum(c for _, c in sums), 1.0)
    for microbatch in microbatches:
        microbatch.weight_mean = mean or 1.0
