"""RMSNorm (Zhang & Sennrich, arXiv:1910.07467) and rotary positions (Su et al., arXiv:2104.09864) in one pass.

Between two matrix products a block does little arithmetic and much reading and writing. Written out in torch, a norm
reads and writes its rows nine times and a rotation five; here each row is read once and written once, forward, and read
twice and written once, backward. All arithmetic is float32 with a single rounding at the end.

Shapes: `T` tokens, `H` heads, `D` width of what is normed, `R <= D` its rotated part (even).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Norm:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension."""

    weight: Tensor  # [D]
    eps: float
    offset: float = 0.0
    """1 for families whose stored weight is centred on zero."""


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x [..., D] -> the same shape and dtype."""
    if not x.is_cuda:
        return norm_rotate_reference(x, norm)
    rows = x.reshape(-1, 1, x.shape[-1])
    return _NormRotate.apply(rows, norm.weight, None, None, norm.eps, norm.offset).view(x.shape)


def norm_rotate(x: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D], cos and sin [T, R] -> [T, H, D]: each head's norm, if there is one, then its rotation.

    Column `i < R / 2` of a head is turned with column `i + R / 2` (Llama's halves, not GPT-J's pairs); what is beyond
    `R` is only normed. cos and sin get no gradient.
    """
    if not x.is_cuda:
        return norm_rotate_reference(x, norm, cos, sin)
    weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
    out: Tensor = _NormRotate.apply(x, weight, cos, sin, eps, offset)
    return out


def norm_rotate_reference(x: Tensor, norm: Norm | None, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
    """What the kernels compute."""
    y = x.float()
    if norm is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps) * (norm.offset + norm.weight.float())
    if cos is not None and sin is not None:
        turned, rest = y[..., : cos.shape[-1]], y[..., cos.shape[-1] :]
        first, second = turned.chunk(2, -1)
        partner = torch.cat([-second, first], -1)
        y = torch.cat([turned * cos[:, None].float() + partner * sin[:, None].float(), rest], -1)
    return y.to(x.dtype)


class _NormRotate(torch.autograd.Function):
    """x [T, H, D] (last dimension contiguous), weight [D] or None, cos and sin [T, R] or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, offset: float
    ) -> Tensor:
        from lightrl.kernels.norm_triton import forward

        x = x if x.stride(-1) == 1 else x.contiguous()
        cos, sin = (None if t is None else t.contiguous() for t in (cos, sin))
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps, ctx.offset = eps, offset
        return forward(x, weight, cos, sin, eps, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from lightrl.kernels.norm_triton import backward

        x, weight, cos, sin = ctx.saved_tensors
        grad_x, grad_weight = backward(grad.contiguous(), x, weight, cos, sin, ctx.eps, ctx.offset)
        return grad_x, grad_weight, None, None, None, None
