"""Advantage estimators. Rewards of one group in, one advantage a sample out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6


def grpo_advantages(rewards: Sequence[float] | Tensor, *, normalize_std: bool = True) -> Tensor:
    """Group-relative advantages, rewards [G] -> [G] float32.

    (r - mean(r)) / (std(r) + 1e-6) with the unbiased standard deviation (DeepSeekMath, arXiv:2402.03300, eq. 3);
    without `normalize_std` only centred (Dr.GRPO, arXiv:2503.20783). A group of one has advantage 0, and so have equal
    rewards.

    >>> grpo_advantages([1.0, 0.0, 0.0, 1.0], normalize_std=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    r = torch.as_tensor(rewards, dtype=torch.float64)
    if r.numel() < 2 or bool((r == r[0]).all()):  # equal rewards: rounding of the mean must not be blown up by 1/eps
        return torch.zeros(r.shape, dtype=torch.float32)
    centred = r - r.mean()
    if normalize_std:
        centred = centred / (r.std(unbiased=True) + EPSILON)
    return centred.float()
