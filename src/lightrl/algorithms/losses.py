"""Token losses, all float32 `[N]` in and `[N]` out: aggregation is a weighted sum by `Microbatch.loss_weights`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside any clip range, and finite


@dataclass(kw_only=True)
class PolicyLoss:
    loss: Tensor  # [N]
    ratio: Tensor  # [N] detached
    clipped: Tensor  # [N] bool, the clipped branch was taken


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """PPO's clipped surrogate per token, with separate bounds (PPO arXiv:1707.06347 eq. 7, DAPO arXiv:2503.14476).

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old_logprobs).
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(loss=torch.maximum(plain, bounded), ratio=ratio.detach(), clipped=(bounded > plain).detach())


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
