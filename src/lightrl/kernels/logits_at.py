"""Logits of a few chosen tokens a row, without the `[N, V]` logits in memory.

Shapes: `N` rows, `K` tokens each, `H` hidden, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 256 << 20  # of the gathered rows of the head, float32


def logits_at_reference(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `logits_at` computes, with all logits in memory."""
    logits = hidden.float() @ weight.float().T
    return (logits if bias is None else logits + bias.float()).gather(-1, ids)


def logits_at(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
    """`(hidden @ weight.T + bias)[n, ids[n, k]]`, float32 `[N, K]`.

    hidden [N, H], weight [V, H], ids [N, K] int64, bias [V]. Differentiable in hidden, weight and bias. Rows of the
    head are gathered a chunk at a time, in the backward pass again.
    """
    logits: Tensor = _LogitsAt.apply(hidden, weight, ids)
    return logits if bias is None else logits + bias.float()[ids]


class _LogitsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, ids)
        ctx.chunk = max(1, _CHUNK_BYTES // (4 * max(1, ids.shape[1]) * hidden.shape[1]))
        out = hidden.new_empty(ids.shape, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            out[rows] = torch.bmm(weight[ids[rows]].float(), hidden[rows].float()[:, :, None])[:, :, 0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        hidden, weight, ids = ctx.saved_tensors
        need_hidden, need_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            if grad_hidden is not None:
                grad_hidden[rows] = torch.bmm(grad[rows, None], weight[ids[rows]].float())[:, 0].to(hidden.dtype)
            if grad_weight is not None:
                outer = grad[rows, :, None] * hidden[rows, None].float()
                grad_weight.index_add_(0, ids[rows].flatten(), outer.flatten(0, 1))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None
