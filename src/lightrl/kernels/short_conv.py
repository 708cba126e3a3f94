"""The short causal convolution before a gated delta rule, with SiLU, over packed segments: one kernel forward.

Row t of a channel: y = silu(b + sum over d of w[taps - 1 - d] x[t - d]), where t - d is counted back in t's sample:
from an answer's first rows into the prompt that it continues. Nothing but the inputs is kept for the backward pass.
`gated_delta.short_convolution` is the same in plain torch.

Shapes: `T` rows, `C` channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.kernels.gated_delta import Chains


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, chains: Chains) -> Tensor:
    """x [T, C], weight [C, taps] (the last one for the row itself), bias [C] -> [T, C] in the type of x."""
    out: Tensor = _Convolution.apply(x, weight, bias, chains)
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, chains: Chains) -> Tensor:
        from lightrl.kernels.short_conv_triton import forward

        x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.chains = chains
        return forward(x, weight.contiguous(), bias, _history(chains, weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        from lightrl.kernels.short_conv_triton import backward

        x, weight, bias = ctx.saved_tensors
        history, tails = _history(ctx.chains, weight), ctx.chains.tails(weight.shape[1])
        return *backward(grad.contiguous(), x, weight.contiguous(), bias, history, tails), None


def _history(chains: Chains, weight: Tensor) -> Tensor:
    """[taps - 1, T] int64: the row so many places before each; T for none."""
    return chains.stacked_history(weight.shape[1] - 1)
