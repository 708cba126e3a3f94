"""Triton kernels of `norm.py`: tiles of whole rows, a row being one head of one token.

A rotation needs each column's partner half a rotation away. It is loaded a second time, from the cache, which is
simpler than cutting the tile, and works for any share of the columns.

Backward, with `y = R(n w)`, `n = x r`, `r = 1 / sqrt(mean(x^2) + eps)`: turn the gradient back, `dn = w dy`,
`dx = r (dn - n mean(n dn))`, `dw = sum over rows of n dy`. Each program adds up its rows' share of `dw` in float32; the
shares are added in a fixed order, so that results repeat bit by bit.
"""

# Kernels are written in Triton's language, not in Python's types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements a program holds of each tensor
_PROGRAMS = 1024  # at most, in the backward pass: each has a row of `dw`


def forward(
    x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, offset: float
) -> Tensor:
    """[T, H, D] -> [T, H, D], contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        shape = _shape(x, weight, cos)
        grid = (triton.cdiv(shape["num_rows"], shape["ROWS"]),)
        _forward[grid](x, weight, cos, sin, out, eps=eps, offset=offset, **shape)
    return out


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight, in their types."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return grad_x, None if weight is None else torch.zeros_like(weight)
    shape = _shape(x, weight, cos)
    programs = min(_PROGRAMS, triton.cdiv(shape["num_rows"], shape["ROWS"]))
    partial = None
    if weight is not None:
        partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    _backward[(programs,)](grad, x, weight, cos, sin, grad_x, partial, eps=eps, offset=offset, **shape)
    return grad_x, None if weight is None or partial is None else partial.sum(0).to(weight.dtype)


def _shape(x: Tensor, weight: Tensor | None, cos: Tensor | None) -> dict[str, Any]:
    tokens, heads, width = x.shape
    cols = triton.next_power_of_2(width)
    rows = max(1, _TILE // cols)
    return {
        "num_rows": tokens * heads,
        "heads": heads,
        "stride_token": x.stride(0),
        "stride_head": x.stride(1),
        "WIDTH": width,
        "ROTARY": 0 if cos is None else cos.shape[-1],
        "NORM": weight is not None,
        "ROWS": rows,
        "COLS": cols,
        "num_warps": min(16, max(4, rows * cols // 512)),
    }


@triton.jit
def _tile(
    tile, num_rows, heads, stride_token, stride_head, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Of one tile: its tokens, where its rows start in the input and in a contiguous tensor, and what is inside."""
    row = tile * ROWS + tl.arange(0, ROWS)
    token = (row // heads).to(tl.int64)
    start = token * stride_token + (row % heads).to(tl.int64) * stride_head
    inside = (row < num_rows)[:, None] & (tl.arange(0, COLS) < WIDTH)[None, :]
    return token, start, row.to(tl.int64) * WIDTH, inside


@triton.jit
def _forward(
    x, weight, cos, sin, out,
    num_rows, heads, stride_token, stride_head, eps, offset,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token, start, place, inside = _tile(tl.program_id(0), num_rows, heads, stride_token, stride_head, WIDTH, ROWS, COLS)
    col = tl.arange(0, COLS)
    y = tl.load(x + start[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(y * y, axis=1) / WIDTH + eps)
        y *= scale[:, None]
        y *= tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)[None, :] + offset
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        partner = tl.where(col < half, col + half, tl.where(col < ROTARY, col - half, col))
        turned = inside & (col < ROTARY)[None, :]
        z = tl.load(x + start[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        if NORM:
            z *= scale[:, None]
            z *= tl.load(weight + partner, mask=col < ROTARY, other=0.0).to(tl.float32)[None, :] + offset
        angle = token[:, None] * ROTARY + col[None, :]
        c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
        y = y * c + tl.where(col < half, -1.0, 1.0)[None, :] * z * s
    tl.store(out + place[:, None] + col[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, x, weight, cos, sin, grad_x, partial,
    num_rows, heads, stride_token, stride_head, eps, offset,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, COLS)
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(col < half, col + half, tl.where(col < ROTARY, col - half, col))
    if NORM:
        w = tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32) + offset
        grad_w = tl.zeros((COLS,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        token, start, place, inside = _tile(tile, num_rows, heads, stride_token, stride_head, WIDTH, ROWS, COLS)
        dy = tl.load(grad + place[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if ROTARY > 0:  # the transposed rotation
            turned = inside & (col < ROTARY)[None, :]
            dz = tl.load(grad + place[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
            c = tl.load(cos + token[:, None] * ROTARY + col[None, :], mask=turned, other=1.0).to(tl.float32)
            s = tl.load(sin + token[:, None] * ROTARY + partner[None, :], mask=turned, other=0.0).to(tl.float32)
            dy = dy * c + tl.where(col < half, 1.0, -1.0)[None, :] * dz * s
        if NORM:
            n = tl.load(x + start[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(n * n, axis=1) / WIDTH + eps)
            n *= scale[:, None]
            grad_w += tl.sum(dy * n, axis=0)
            dn = dy * w[None, :]
            dy = (dn - n * (tl.sum(dn * n, axis=1) / WIDTH)[:, None]) * scale[:, None]
        tl.store(grad_x + place[:, None] + col[None, :], dy.to(grad_x.dtype.element_ty), mask=inside)
    if NORM:
        tl.store(partial + tl.program_id(0) * WIDTH + col, grad_w, mask=col < WIDTH)
