"""A product with an activated gate: SwiGLU's `silu(gate) * x` (arXiv:2002.05202) and gated attention's
`sigmoid(gate) * x`, each tensor read once and written once. Arithmetic is float32 with one rounding at the end."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "sigmoid"]


def gated(gate: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """gate and x [..., D] of one shape -> activation(gate) * x, contiguous, in x's dtype."""
    if not x.is_cuda:
        return gated_reference(gate, x, activation)
    out: Tensor = _Gated.apply(gate, x, activation)
    return out


def gated_reference(gate: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """What the kernels compute."""
    activate = F.silu if activation == "silu" else torch.sigmoid
    return (activate(gate.float()) * x.float()).to(x.dtype)


class _Gated(torch.autograd.Function):
    """Keeps its inputs; the activation is computed again backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor, activation: Activation) -> Tensor:
        from lightrl.kernels.gate_triton import forward

        ctx.save_for_backward(gate, x)
        ctx.activation = activation
        return forward(gate, x, activation == "silu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from lightrl.kernels.gate_triton import backward

        gate, x = ctx.saved_tensors
        return *backward(grad, gate, x, ctx.activation == "silu"), None
