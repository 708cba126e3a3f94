"""Policy losses of tokens, and the KL to a reference: pure functions on packed tensors.

All take `[N]` and give `[N]`: aggregation is a weighted sum by `Microbatch.loss_weights`. A policy loss is a function
of `LossTokens`, with its settings as keyword arguments named as in `[algorithm]`. Their names are in
`lightrl.config.losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.samples import Samples

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside any clip range, and finite


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """What a loss knows of the response tokens of a microbatch, whose samples are whole."""

    logprobs: Tensor  # [N] now, with gradient
    old_logprobs: Tensor  # [N] constant: from before the step's updates
    """With `correction.use_rollout_logprobs` the engine's."""
    advantages: Tensor  # [N]
    samples: Samples
    rollout_logprobs: Tensor | None = None  # [N] the engine's

    @property
    def log_ratio(self) -> Tensor:
        """[N] log(now / old), with gradient, within ±20."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(kw_only=True)
class PolicyLoss:
    """What a policy loss makes of tokens; the sum of `loss`, weighted, is minimised, the rest is for metrics."""

    loss: Tensor  # [N]
    ratio: Tensor  # [N] detached
    clipped: Tensor  # [N] bool, the clipped branch was taken


def ppo_loss(
    tokens: LossTokens, *, clip_low: float = 0.2, clip_high: float | None = None, dual_clip: float | None = None
) -> PolicyLoss:
    """PPO's clipped surrogate, with separate bounds (PPO arXiv:1707.06347 eq. 7, DAPO arXiv:2503.14476).

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = now / old; `clip_high` is `clip_low` unless given.
    With `dual_clip` c > 1 the loss of a negative advantage is at most -c A (arXiv:1912.09729).
    """
    return _clipped(tokens.log_ratio.exp(), tokens.advantages, clip_low, clip_high, dual_clip)


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float | None, dual_clip: float | None = None
) -> PolicyLoss:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + (clip_low if clip_high is None else clip_high))
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is not None:
        limit = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > limit)
        loss, clipped = torch.where(beyond, limit, loss), clipped | beyond
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=clipped.detach())


def gspo_loss(tokens: LossTokens, *, clip_low: float = 3e-4, clip_high: float | None = 4e-4) -> PolicyLoss:
    """PPO's surrogate with the sequence's ratio (GSPO, arXiv:2507.18071 eq. 5 and 7; in the token form, eq. 13-14).

    s = exp(mean over the sample's tokens of log(now / old)). Token t has the value s and the gradient s ∇log now_t;
    with one advantage a sample and weights that are equal within it, that adds up to GSPO's gradient.
    """
    log_ratio = tokens.samples.mean(tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = (tokens.logprobs - tokens.logprobs.detach() + log_ratio).exp()
    return _clipped(ratio, tokens.advantages, clip_low, clip_high)


def cispo_loss(tokens: LossTokens, *, clip_low: float = 1.0, clip_high: float | None = 4.0) -> PolicyLoss:
    """REINFORCE weighted by a clipped ratio that is not differentiated (CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4-5).

    loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log now: a clipped token keeps its gradient. `clip_low` 1: no
    lower bound.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + (clip_low if clip_high is None else clip_high))
    return _weighted(tokens, weight, ratio)


def _weighted(tokens: LossTokens, weight: Tensor, ratio: Tensor) -> PolicyLoss:
    loss = -weight * tokens.advantages * tokens.logprobs
    return PolicyLoss(loss=loss, ratio=ratio, clipped=weight != ratio)


def sapo_loss(tokens: LossTokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> PolicyLoss:
    """A smooth gate in the place of clipping (SAPO, arXiv:2511.20347).

    loss = -4 / tau * sigmoid(tau (r - 1)) A, tau = `tau_pos` where A > 0, else `tau_neg`: at r = 1 the gradient is that
    of -r A, and it fades on both sides.
    """
    ratio = tokens.log_ratio.exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill(tokens.advantages > 0, tau_pos)
    gate = (tau * (ratio - 1.0)).sigmoid() * (4.0 / tau)
    return PolicyLoss(
        loss=-gate * tokens.advantages, ratio=ratio.detach(), clipped=torch.zeros_like(ratio, dtype=torch.bool)
    )


def reinforce_loss(tokens: LossTokens) -> PolicyLoss:
    """-A log now (Williams 1992): no ratio, no trust region."""
    ratio = tokens.log_ratio.detach().exp()
    return PolicyLoss(
        loss=-tokens.advantages * tokens.logprobs, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool)
    )


def dppo_tv_loss(
    tokens: LossTokens, *, clip_low: float = 0.15, clip_high: float | None = None, ratio_cap: float = 20.0
) -> PolicyLoss:
    """A mask by how far the token's probability has moved (DPPO with binary TV, arXiv:2602.04879 eq. 12-13).

    loss = -sg(m min(r, ratio_cap)) A log now. m = 0 where the update would lead further away (A > 0 and r > 1, or A < 0
    and r < 1) and |now - old| of the probabilities exceeds `clip_high`, or for A < 0 `clip_low`.
    """
    now, old = tokens.logprobs.detach().exp(), tokens.old_logprobs.exp()
    return _masked(tokens, (now - old).abs(), clip_low, clip_high, ratio_cap)


def dppo_kl_loss(
    tokens: LossTokens, *, clip_low: float = 0.05, clip_high: float | None = None, ratio_cap: float = 20.0
) -> PolicyLoss:
    """As `dppo_tv_loss`, by the KL between "this token" and "another" under old and now (arXiv:2602.04879 eq. 14)."""
    now, old = tokens.logprobs.detach(), tokens.old_logprobs
    divergence = old.exp() * (old - now) + (1.0 - old.exp()) * (_log_rest(old) - _log_rest(now))
    return _masked(tokens, divergence, clip_low, clip_high, ratio_cap)


def _log_rest(logprobs: Tensor) -> Tensor:
    """log(1 - p), finite: the other tokens never have less than 1e-8 together."""
    return (-torch.expm1(logprobs)).clamp_min(1e-8).log()


def _masked(
    tokens: LossTokens, divergence: Tensor, clip_low: float, clip_high: float | None, ratio_cap: float
) -> PolicyLoss:
    ratio, rising = tokens.log_ratio.detach().exp(), tokens.advantages > 0
    limit = torch.full_like(ratio, clip_low).masked_fill(rising, clip_low if clip_high is None else clip_high)
    away = torch.where(rising, ratio > 1.0, ratio < 1.0)
    weight = ratio.clamp_max(ratio_cap).masked_fill(away & (divergence > limit), 0.0)
    return _weighted(tokens, weight, ratio)


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) per sampled token, http://joschu.net/blog/kl-approx.html, with d = log ref - log policy.

    k1 = -d (unbiased, can be negative); k2 = d² / 2; k3 = exp(d) - 1 - d (unbiased, never negative; GRPO's).
    """
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3")
