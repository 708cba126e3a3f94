"""Sums and means within samples, over packed token tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Which of a microbatch's `N` response tokens belongs to which of its `M` samples. Samples lie in it whole."""

    mask: Tensor  # [N] bool, False for tokens that no loss counts (tool output): what stands there is never read
    ids: Tensor  # [N] int64, 0..M-1
    count: int  # M

    def sums(self, values: Tensor) -> Tensor:
        """[N] -> [M]: over each sample's counted tokens, added up in float64. Not differentiable."""
        counted = values.detach().double().masked_fill(~self.mask, 0.0)
        return torch.zeros(self.count, dtype=torch.float64, device=values.device).index_add_(0, self.ids, counted)

    @property
    def lengths(self) -> Tensor:
        """[M] float64: counted tokens of each sample."""
        return self.sums(torch.ones_like(self.ids, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        """[N] -> [N]: each token its sample's sum."""
        return self.sums(values)[self.ids].to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """[N] -> [N]: each token its sample's mean; 0 in a sample without a counted token."""
        return (self.sums(values) / self.lengths.clamp_min(1.0))[self.ids].to(values.dtype)

    def any(self, flags: Tensor) -> Tensor:
        """[N] bool -> [N] bool: whether it holds for some counted token of the sample."""
        return self.sums(flags)[self.ids] > 0
