"""A critic's loss, and how much of the returns it explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Of N tokens."""

    loss: Tensor  # [N]
    clipped: Tensor  # [N] bool, the clipped branch was taken


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> ValueLoss:
    """Half the squared error of each token, [N]; with `clip` the larger of that and the one of the clipped value.

    loss = max((V - R)², (V_old + clip(V - V_old, -clip, clip) - R)²) / 2: a value that has moved further than `clip`
    since before the step's updates, and towards its return, has no gradient (PPO's reference code; arXiv:2005.12729).
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return ValueLoss(loss=plain, clipped=torch.zeros_like(plain, dtype=torch.bool))
    held = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (held - returns).square() / 2
    return ValueLoss(loss=torch.maximum(plain, bounded), clipped=(bounded > plain).detach())
