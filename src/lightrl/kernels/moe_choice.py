"""A router's choice of experts by softmax, and their weights: Triton kernels, each one pass over the logits.

Plain torch, which `models/experts.py` has and tests compare with, makes the scores of all experts in float32, sorts
them, and in the backward pass scatters into zeros [T, E]. Shapes: `T` tokens, `E` experts, `k` experts a token.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


def best_experts(logits: Tensor, top_k: int) -> Tensor:
    """logits [T, E] -> [T, k] int64, the best first; of equals the one of lower number."""
    logits = logits.contiguous()
    tokens, experts = logits.shape
    indices = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    sizes = _sizes(experts)
    if tokens:
        _best[(triton.cdiv(tokens, sizes["ROWS"]),)](logits, indices, tokens, experts, TOP_K=top_k, **sizes)
    return indices


def softmax_weights(logits: Tensor, indices: Tensor, *, renormalize: bool) -> Tensor:
    """The softmax in float32 of logits [T, E] at indices [T, k], over all experts or (`renormalize`) the chosen ones.

    -> [T, k] float32, differentiable in the logits. The indices of a token are distinct.
    """
    weights: Tensor = _Weights.apply(logits.contiguous(), indices.contiguous(), renormalize)
    return weights


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, renormalize: bool) -> Tensor:
        ctx.save_for_backward(logits, indices)
        ctx.renormalize = renormalize
        weights = torch.empty(indices.shape, dtype=torch.float32, device=logits.device)
        _launch(logits, indices, weights, weights, renormalize, backward=False)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, indices = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        _launch(logits, indices, grad.contiguous(), grad_logits, ctx.renormalize, backward=True)
        return grad_logits, None, None


def _launch(logits: Tensor, indices: Tensor, grad: Tensor, out: Tensor, renormalize: bool, *, backward: bool) -> None:
    (tokens, experts), top_k = logits.shape, indices.shape[1]
    sizes = _sizes(experts)
    if tokens:
        _weigh[(triton.cdiv(tokens, sizes["ROWS"]),)](
            logits, indices, grad, out, tokens, experts,
            TOP_K=top_k, RENORMALIZE=renormalize, BACKWARD=backward, **sizes,
        )  # fmt: skip


def _sizes(experts: int) -> dict[str, int]:
    width = triton.next_power_of_2(experts)
    return {"ROWS": max(1, 1024 // width), "EXPERTS": width}


@triton.jit
def _best(logits, indices, tokens, experts, TOP_K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    each = tl.arange(0, EXPERTS)[None, :]
    known = row < tokens
    free = known[:, None] & (each < experts)
    z = tl.load(logits + row.to(tl.int64)[:, None] * experts + each, mask=free, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        left = tl.where(free, z, float("-inf"))
        best = tl.max(left, 1)
        chosen = tl.min(
            tl.where(free & (left == best[:, None]), each, experts - 1), 1
        )  # in range also where all is NaN
        tl.store(indices + row * TOP_K + j, chosen.to(tl.int64), mask=known)
        free = free & (each != chosen[:, None])


@triton.jit
def _weigh(
    logits, indices, grad, out, tokens, experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Forward: out [T, k] are the weights w. Backward: out [T, E] is dz = w (dw - <w, dw>) at the chosen ones; where
    all experts share the softmax, w <w, dw> is taken from every one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < tokens
    each = tl.arange(0, EXPERTS)[None, :]
    mask = known[:, None] & (each < experts)
    start = row.to(tl.int64) * experts
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    z = tl.full([ROWS, EXPERTS], float("-inf"), tl.float32)
    if RENORMALIZE:
        for j in tl.static_range(TOP_K):
            expert = tl.load(indices + row * TOP_K + j, mask=known, other=0)
            top = tl.maximum(top, tl.load(logits + start + expert, mask=known, other=0.0).to(tl.float32))
        for j in tl.static_range(TOP_K):
            expert = tl.load(indices + row * TOP_K + j, mask=known, other=0)
            total += tl.exp(tl.load(logits + start + expert, mask=known, other=0.0).to(tl.float32) - top)
    else:
        z = tl.load(logits + start[:, None] + each, mask=mask, other=float("-inf")).to(tl.float32)
        top = tl.where(known, tl.max(z, 1), 0.0)
        total = tl.sum(tl.exp(z - top[:, None]), 1)
        total = tl.where(known, total, 1.0)

    inner = tl.zeros([ROWS], tl.float32)
    spread = tl.zeros([ROWS, EXPERTS], tl.float32)
    there = tl.zeros([ROWS, EXPERTS], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(indices + row * TOP_K + j, mask=known, other=0)
        weight = tl.exp(tl.load(logits + start + expert, mask=known, other=0.0).to(tl.float32) - top) / total
        if BACKWARD:
            push = weight * tl.load(grad + row * TOP_K + j, mask=known, other=0.0)
            here = each == expert[:, None]
            inner += push
            spread += tl.where(here, push[:, None], 0.0)
            there += tl.where(here, weight[:, None], 0.0)
        else:
            tl.store(out + row * TOP_K + j, weight, mask=known)
    if BACKWARD:
        if not RENORMALIZE:
            there = tl.exp(z - top[:, None]) / total[:, None]
        gradient = spread - there * inner[:, None]
        tl.store(out + start[:, None] + each, gradient.to(out.dtype.element_ty), mask=mask)
