"""Triton kernels of `norm.py`: tiles of whole rows, a row being one head of one token.

A row is held in up to three parts, so that the two columns of a rotation meet without a shuffle: the first and the
second half of what is rotated, and the rest.

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
    half = 0 if cos is None else cos.shape[-1] // 2
    cols = triton.next_power_of_2(width)
    rows = max(1, _TILE // cols)
    return {
        "num_rows": tokens * heads,
        "heads": heads,
        "stride_token": x.stride(0),
        "stride_head": x.stride(1),
        "HALF": half,
        "REST": width - 2 * half,
        "NORM": weight is not None,
        "ROWS": rows,
        "HALF_COLS": triton.next_power_of_2(max(1, half)),
        "REST_COLS": triton.next_power_of_2(max(1, width - 2 * half)),
        "num_warps": min(16, max(4, rows * cols // 512)),
    }


@triton.jit
def _places(tile, num_rows, heads, stride_token, stride_head, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile's rows [ROWS, 1]: the token, where they start in the input and in a contiguous tensor, which exist."""
    row = tile * ROWS + tl.arange(0, ROWS)
    token = (row // heads).to(tl.int64)
    start = token * stride_token + (row % heads).to(tl.int64) * stride_head
    return token[:, None], start[:, None], (row.to(tl.int64) * WIDTH)[:, None], (row < num_rows)[:, None]


@triton.jit
def _float32(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    x, weight, cos, sin, out,
    num_rows, heads, stride_token, stride_head, eps, offset,
    HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, HALF_COLS: tl.constexpr, REST_COLS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF + REST
    i, j = tl.arange(0, HALF_COLS)[None, :], 2 * HALF + tl.arange(0, REST_COLS)[None, :]
    token, start, place, rows = _places(tl.program_id(0), num_rows, heads, stride_token, stride_head, WIDTH, ROWS)
    turned, rest = rows & (i < HALF), rows & (j < WIDTH)
    squares = tl.zeros((ROWS, 1), tl.float32)
    if HALF > 0:
        a = _float32(x + start + i, turned)
        b = _float32(x + start + HALF + i, turned)
        squares += tl.sum(a * a + b * b, axis=1, keep_dims=True)
    if REST > 0:
        c = _float32(x + start + j, rest)
        squares += tl.sum(c * c, axis=1, keep_dims=True)
    if NORM:
        scale = tl.rsqrt(squares / WIDTH + eps)
        if HALF > 0:
            a *= scale * (_float32(weight + i, i < HALF) + offset)
            b *= scale * (_float32(weight + HALF + i, i < HALF) + offset)
        if REST > 0:
            c *= scale * (_float32(weight + j, j < WIDTH) + offset)
    if HALF > 0:
        angle = token * (2 * HALF) + i
        first = a * _float32(cos + angle, turned) - b * _float32(sin + angle, turned)
        second = b * _float32(cos + angle + HALF, turned) + a * _float32(sin + angle + HALF, turned)
        tl.store(out + place + i, first.to(out.dtype.element_ty), mask=turned)
        tl.store(out + place + HALF + i, second.to(out.dtype.element_ty), mask=turned)
    if REST > 0:
        tl.store(out + place + j, c.to(out.dtype.element_ty), mask=rest)


@triton.jit
def _backward(
    grad, x, weight, cos, sin, grad_x, partial,
    num_rows, heads, stride_token, stride_head, eps, offset,
    HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, HALF_COLS: tl.constexpr, REST_COLS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF + REST
    i, j = tl.arange(0, HALF_COLS)[None, :], 2 * HALF + tl.arange(0, REST_COLS)[None, :]
    if NORM:
        w_a, w_b = _float32(weight + i, i < HALF) + offset, _float32(weight + HALF + i, i < HALF) + offset
        w_c = _float32(weight + j, j < WIDTH) + offset
        sum_a, sum_b = tl.zeros((ROWS, HALF_COLS), tl.float32), tl.zeros((ROWS, HALF_COLS), tl.float32)
        sum_c = tl.zeros((ROWS, REST_COLS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        token, start, place, rows = _places(tile, num_rows, heads, stride_token, stride_head, WIDTH, ROWS)
        turned, rest = rows & (i < HALF), rows & (j < WIDTH)
        squares, product = tl.zeros((ROWS, 1), tl.float32), tl.zeros((ROWS, 1), tl.float32)
        if HALF > 0:  # the transposed rotation
            angle = token * (2 * HALF) + i
            g_a, g_b = _float32(grad + place + i, turned), _float32(grad + place + HALF + i, turned)
            a = g_a * _float32(cos + angle, turned) + g_b * _float32(sin + angle + HALF, turned)
            b = g_b * _float32(cos + angle + HALF, turned) - g_a * _float32(sin + angle, turned)
        if REST > 0:
            c = _float32(grad + place + j, rest)
        if NORM:
            if HALF > 0:
                n_a, n_b = _float32(x + start + i, turned), _float32(x + start + HALF + i, turned)
                squares += tl.sum(n_a * n_a + n_b * n_b, axis=1, keep_dims=True)
            if REST > 0:
                n_c = _float32(x + start + j, rest)
                squares += tl.sum(n_c * n_c, axis=1, keep_dims=True)
            scale = tl.rsqrt(squares / WIDTH + eps)
            if HALF > 0:
                n_a *= scale
                n_b *= scale
                sum_a += a * n_a
                sum_b += b * n_b
                a *= w_a
                b *= w_b
                product += tl.sum(a * n_a + b * n_b, axis=1, keep_dims=True)
            if REST > 0:
                n_c *= scale
                sum_c += c * n_c
                c *= w_c
                product += tl.sum(c * n_c, axis=1, keep_dims=True)
            product /= WIDTH
            if HALF > 0:
                a = (a - n_a * product) * scale
                b = (b - n_b * product) * scale
            if REST > 0:
                c = (c - n_c * product) * scale
        if HALF > 0:
            tl.store(grad_x + place + i, a.to(grad_x.dtype.element_ty), mask=turned)
            tl.store(grad_x + place + HALF + i, b.to(grad_x.dtype.element_ty), mask=turned)
        if REST > 0:
            tl.store(grad_x + place + j, c.to(grad_x.dtype.element_ty), mask=rest)
    if NORM:
        mine = partial + tl.program_id(0) * WIDTH
        if HALF > 0:
            tl.store(mine + i, tl.sum(sum_a, axis=0, keep_dims=True), mask=i < HALF)
            tl.store(mine + HALF + i, tl.sum(sum_b, axis=0, keep_dims=True), mask=i < HALF)
        if REST > 0:
            tl.store(mine + j, tl.sum(sum_c, axis=0, keep_dims=True), mask=j < WIDTH)
