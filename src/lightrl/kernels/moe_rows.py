"""Triton kernels around the products of a mixture's experts: sorting by expert, copies and sums of rows, SwiGLU.

Each is bound by memory. Bytes at bfloat16 for Qwen3-30B-A3B (`H` 2048, `I` 768, `k` 8) and 32k tokens, where one
[S, H] is 1.07 GB; an H200 copies 4.2 TB/s, read and written together:

| kernel | reads + writes, elements | ms |
|---|---|---|
| `spread`: a token's row is read once, written k times | T H + S H | 0.29 |
| `combine`: a token's k rows are read, their sum written | S H + T H | 0.29 |
| `swiglu` | 2 S I + S I | 0.29 |
| `swiglu_backward` | 3 S I + 3 S I | 0.57 |

None adds atomically. Shapes as in `moe.py`, which holds the reference.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128  # pairs that one program sorts, by comparing each with each


class Order(NamedTuple):
    """The S = T * k pairs of a token and one of its experts, sorted by expert; pairs of an expert keep their order."""

    place: Tensor  # [T, k] int32: where each pair stands after sorting
    source: Tensor  # [S] int32: which pair stands here
    token: Tensor  # [S] int32: its token, source // k
    ends: Tensor  # [E] int32: where each expert's rows end


def sort_by_expert(indices: Tensor, num_experts: int) -> Order:
    """indices [T, k] int64, each below `num_experts`. A counting sort; the host waits for nothing."""
    indices = indices.contiguous()
    num_blocks = triton.cdiv(indices.numel(), _BLOCK)
    counts = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=indices.device)
    shapes = (indices.shape, indices.numel(), indices.numel(), num_experts)
    order = Order(*(torch.empty(shape, dtype=torch.int32, device=indices.device) for shape in shapes))
    size = (indices.numel(), num_experts, num_blocks)
    _count[(num_blocks,)](indices, counts, *size, BLOCK=_BLOCK, EXPERTS=64)
    sums = counts.flatten().cumsum(0, dtype=torch.int32)
    _arrange[(num_blocks,)](
        indices, counts, sums, *order, *size, TOP_K=indices.shape[1], BLOCK=_BLOCK, EXPERTS=64
    )  # fmt: skip
    return order


def spread(x: Tensor, order: Order) -> Tensor:
    """A token's row to each of its experts: x [T, H] -> [S, H]."""
    x = x.contiguous()
    (tokens, width), top_k = x.shape, order.place.shape[1]
    out = x.new_empty(tokens * top_k, width)
    block = min(2048, triton.next_power_of_2(width))
    _spread[(tokens, triton.cdiv(width, block))](x, order.place, out, width, TOP_K=top_k, BLOCK=block)
    return out


def combine(rows: Tensor, order: Order) -> Tensor:
    """The sum of a token's rows, in float32 and the order of its experts: rows [S, H] -> [T, H]."""
    (tokens, top_k), width = order.place.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, block))](rows, order.place, out, width, TOP_K=top_k, BLOCK=block)
    return out


def swiglu(gate_up: Tensor, weights: Tensor, order: Order) -> Tensor:
    """silu(gate) * up * weight in float32, rounded once: gate_up [S, 2I], weights [T, k] -> [S, I]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    act = gate_up.new_empty(num_rows, width)
    cols = min(256, triton.next_power_of_2(width))
    grid = (triton.cdiv(num_rows, 8), triton.cdiv(width, cols))
    _swiglu[grid](gate_up, weights, order.source, act, num_rows, width, ROWS=8, COLS=cols)
    return act


def swiglu_backward(
    gate_up: Tensor, grad_act: Tensor, weights: Tensor, order: Order, *, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate_up [S, 2I], the activation once more [S, I], gradient of weights [T, k] float32).

    The activation takes the place of `grad_act`; with `overwrite` the gradient takes that of `gate_up`.
    """
    num_rows, width = grad_act.shape
    grad_gate_up = gate_up if overwrite else torch.empty_like(gate_up)
    grad_weights = torch.empty(order.place.shape, dtype=torch.float32, device=weights.device)
    cols = min(256, triton.next_power_of_2(width))
    tensors = (gate_up, grad_act, weights, order.source, grad_gate_up, grad_act, grad_weights)
    _swiglu_backward[(triton.cdiv(num_rows, 4),)](*tensors, num_rows, width, ROWS=4, COLS=cols)
    return grad_gate_up, grad_act, grad_weights


@triton.jit
def _count(indices, counts, num_pairs, num_experts, num_blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """counts [E, num_blocks] of each block's pairs."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(indices + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    for first in range(0, num_experts, EXPERTS):
        each = first + tl.arange(0, EXPERTS)
        count = tl.sum((expert[:, None] == each[None, :]).to(tl.int32), 0)
        tl.store(counts + each * num_blocks + block, count, mask=each < num_experts)


@triton.jit
def _arrange(
    indices, counts, sums, place, source, token, ends, num_pairs, num_experts, num_blocks,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A pair stands behind those of lower experts, of earlier blocks, and earlier ones of its block (`sums` of all)."""
    block = tl.program_id(0)
    here = tl.arange(0, BLOCK)
    pair = block * BLOCK + here
    known = pair < num_pairs
    expert = tl.load(indices + pair, mask=known, other=-1).to(tl.int32)
    earlier = (expert[:, None] == expert[None, :]) & (here[None, :] < here[:, None])
    cell = expert * num_blocks + block
    before = tl.load(sums + cell, mask=known, other=0) - tl.load(counts + cell, mask=known, other=0)
    to = before + tl.sum(earlier.to(tl.int32), 1)
    tl.store(place + pair, to, mask=known)
    tl.store(source + to, pair, mask=known)
    tl.store(token + to, pair // TOP_K, mask=known)
    if block == 0:
        for first in range(0, num_experts, EXPERTS):
            each = first + tl.arange(0, EXPERTS)
            inside = each < num_experts
            tl.store(ends + each, tl.load(sums + (each + 1) * num_blocks - 1, mask=inside, other=0), mask=inside)


@triton.jit
def _spread(x, place, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    row = tl.load(x + token * width + col, mask=inside)
    for j in tl.static_range(TOP_K):
        to = tl.load(place + token * TOP_K + j).to(tl.int64)
        tl.store(out + to * width + col, row, mask=inside)


@triton.jit
def _combine(rows, place, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        at = tl.load(place + token * TOP_K + j).to(tl.int64)
        total += tl.load(rows + at * width + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + col, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate_up, weights, source, act, num_rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    known = row < num_rows
    mask = known[:, None] & (col < width)[None, :]
    share = tl.load(weights + tl.load(source + row, mask=known, other=0), mask=known, other=0.0).to(tl.float32)
    start = row.to(tl.int64)[:, None] * width
    gate = tl.load(gate_up + 2 * start + col[None, :], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * start + width + col[None, :], mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up * share[:, None]
    tl.store(act + start + col[None, :], out.to(act.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_gradients(gate, up, grad, share):
    """(of gate, of up, the activation before its weight, the activation): float32 tiles; share is a row's weight."""
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    plain = silu * up
    pushed = grad * share[:, None]
    return pushed * up * (sigmoid + silu * (1 - sigmoid)), pushed * silu, plain, plain * share[:, None]


@triton.jit
def _swiglu_backward(
    gate_up, grad_act, weights, source, grad_gate_up, act, grad_weights, num_rows, width,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < num_rows
    pair = tl.load(source + row, mask=known, other=0)
    share = tl.load(weights + pair, mask=known, other=0.0).to(tl.float32)
    start = row.to(tl.int64)[:, None] * width
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, width, COLS):
        col = first + tl.arange(0, COLS)[None, :]
        mask = known[:, None] & (col < width)
        gate = tl.load(gate_up + 2 * start + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + 2 * start + width + col, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_act + start + col, mask=mask, other=0.0).to(tl.float32)
        grad_gate, grad_up, plain, out = swiglu_gradients(gate, up, grad, share)
        total += grad * plain
        tl.store(grad_gate_up + 2 * start + col, grad_gate.to(grad_gate_up.dtype.element_ty), mask=mask)
        tl.store(grad_gate_up + 2 * start + width + col, grad_up.to(grad_gate_up.dtype.element_ty), mask=mask)
        tl.store(act + start + col, out.to(act.dtype.element_ty), mask=mask)
    tl.store(grad_weights + pair, tl.sum(total, 1), mask=known)
