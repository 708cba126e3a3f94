"""RMSNorm and an activated gate in one pass, `w x / sqrt(mean(x^2) + eps) * silu(z)`: what follows a gated delta rule.

Arithmetic is float32 with one rounding at the end; backward computes all again from x and z.

Shapes: `N` rows (a head of a token each), `D` columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x and gate [N, D], weight [D] -> [N, D] in the type of x."""
    if not x.is_cuda:
        return gated_norm_reference(x, gate, weight, eps)
    out: Tensor = _GatedNorm.apply(x, gate, weight, eps)
    return out


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What the kernels compute."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, z = x.to(wide), gate.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(wide) * F.silu(z)
    return y.to(x.dtype)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        from lightrl.kernels.gated_norm_triton import forward

        x, gate = _rows(x), _rows(gate)
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return forward(x, gate, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from lightrl.kernels.gated_norm_triton import backward

        x, gate, weight = ctx.saved_tensors
        return *backward(_rows(grad), x, gate, weight, ctx.eps), None


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
