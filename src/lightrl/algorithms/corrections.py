"""Corrections for samples that another policy drew than the one that is trained: importance weights and rejection.

Everything starts at the log-ratio of a token, log(trainer / engine), `[N]`. It is taken as it is (`token`), summed
over the sample (`sequence`: the true ratio of the answer) or averaged over it (`geometric`). Names are those of slime's
`mis.yaml`; the theory is told in https://fengyao.notion.site/off-policy-rl (truncated importance sampling) and
https://richardli.xyz/rl-collapse (masks, levels).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.losses import MAX_LOG_RATIO
from lightrl.algorithms.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of the tokens of a microbatch; nothing is differentiated."""

    values: Tensor  # [N] factors of the policy loss
    keep: Tensor  # [N] bool, False: the token is in no term of the loss
    bounded: Tensor  # [N] bool, a bound changed the weight, or rejected the token


def level_ratio(log_ratio: Tensor, samples: Samples, level: str) -> Tensor:
    """[N] log-ratios of tokens -> [N] ratios at `level`, the same for all tokens of a sample but at level `token`."""
    if level == "sequence":
        log_ratio = samples.sum(log_ratio)
    elif level == "geometric":
        log_ratio = samples.mean(log_ratio)
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; known: token, sequence, geometric")
    return log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_weights(
    log_ratio: Tensor, samples: Samples, *, level: str, mode: str, lower: float, upper: float
) -> Weights:
    """Weights w = trainer / engine at `level`, held to the bounds by `mode`.

    `truncate`: min(w, upper), TIS. `clip`: clip(w, lower, upper). `mask`: w, and tokens outside of the bounds leave the
    loss, MIS. `icepop`: w inside of the bounds, else 0 (Ring-1T, arXiv:2510.18855), which leaves the other
    terms of the loss alone.
    """
    ratio = level_ratio(log_ratio, samples, level)
    inside = (ratio >= lower) & (ratio <= upper)
    everything = torch.ones_like(inside)
    if mode == "truncate":
        return Weights(values=ratio.clamp_max(upper), keep=everything, bounded=ratio > upper)
    if mode == "clip":
        return Weights(values=ratio.clamp(lower, upper), keep=everything, bounded=~inside)
    if mode == "mask":
        return Weights(values=ratio, keep=inside, bounded=~inside)
    if mode == "icepop":
        return Weights(values=ratio.masked_fill(~inside, 0.0), keep=everything, bounded=~inside)
    raise ValueError(f"unknown mode {mode!r}; known: truncate, clip, mask, icepop")


def accepted(log_ratio: Tensor, samples: Samples, *, level: str, lower: float, upper: float) -> Tensor:
    """Rejection sampling: [N] bool, whether the ratio at `level` lies in [lower, upper]."""
    ratio = level_ratio(log_ratio, samples, level)
    return (ratio >= lower) & (ratio <= upper)


def not_vetoed(log_ratio: Tensor, samples: Samples, threshold: float) -> Tensor:
    """[N] bool: False for all of a sample in which some counted token has a ratio below `threshold`."""
    return ~samples.any(log_ratio < torch.log(torch.tensor(threshold, dtype=torch.float64)).item())


def not_too_old(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, samples: Samples, delta: float
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): [N] bool.

    False where A < 0 and the sample's mean log(engine / now) exceeds `delta`: bad answers that the policy has left.
    """
    return (advantages >= 0) | (samples.mean(rollout_logprobs - logprobs) <= delta)


MIN_TAIL = 1e-6  # of the probability outside of the likeliest tokens: 1 - sum rounds to 0, or below


def score_centering(
    top_logprobs: Tensor,
    engine_top_logprobs: Tensor,
    *,
    mode: str | None = None,
    lower: float = 0.0,
    upper: float = 0.0,
) -> Tensor:
    """The expected score under the engine, as a term whose gradient it has (arXiv:2609.20807 eq. 14): [N, k] -> [N].

    With p the trainer's probabilities now and q the engine's, sum_v q_v w_v ∇log p_v drags the policy towards the
    engine, whatever the rewards are. Times the advantage and added to -A w ∇log p, this takes it off. Its sum runs over
    the engine's k likeliest tokens; of the others q is taken for rho p, with what is left of both. Weights w = p / q
    are those of token-level importance sampling by `mode` and its bounds; None: 1.
    """
    p, q = top_logprobs.detach().exp(), engine_top_logprobs.exp()
    tail = (1.0 - q.sum(-1)).clamp_min(MIN_TAIL) / (1.0 - p.sum(-1)).clamp_min(MIN_TAIL)
    if mode is None:
        mass, alpha = q, tail
    elif mode == "truncate":  # q min(p / q, u), finite where q is 0
        mass, alpha = torch.minimum(p, upper * q), (upper * tail).clamp_max(1.0)
    elif mode == "clip":
        mass = torch.minimum(torch.maximum(p, lower * q), upper * q)
        alpha = torch.minimum((lower * tail).clamp_min(1.0), upper * tail)
    elif mode == "icepop":
        mass = p.masked_fill((p < lower * q) | (p > upper * q), 0.0)
        alpha = ((lower * tail <= 1.0) & (upper * tail >= 1.0)).to(p.dtype)
    else:
        raise ValueError(f"unknown mode {mode!r}; known: truncate, clip, icepop")
    return ((mass - alpha[:, None] * p) * top_logprobs).sum(-1)
