"""Triton kernels of `short_conv.py`: tiles of rows and channels; a row's predecessors are looked up.

Backward, with z the sum before SiLU and s = sigmoid(z): dz = dy s (1 + z (1 - s)) for all rows (`_inner`), with each
program's share of the weight's gradient, which are added in a fixed order; then dx[t] = sum of w_d dz[t + d] over rows
of the same segment (`_outer`), and, again and whole, for the few rows that are read from several segments (`_tails`).
"""

# Kernels are written in Triton's language, not in Python's types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightrl.kernels.delta_blocks import Tails

_ROWS, _COLS = 16, 128
_PROGRAMS = 64  # over rows at most, in the backward pass: each has a row of the weight's gradient


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor) -> Tensor:
    """[T, C] -> [T, C]."""
    rows, channels = x.shape
    out = torch.empty_like(x)
    grid = (triton.cdiv(channels, _COLS), triton.cdiv(rows, _ROWS))
    _forward[grid](x, weight, bias, history, out, rows, **_shape(weight, bias))
    return out


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, tails: Tails
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and bias."""
    (rows, channels), shape = x.shape, _shape(weight, bias)
    taps, blocks = weight.shape[1], triton.cdiv(channels, _COLS)
    programs = min(_PROGRAMS, triton.cdiv(rows, _ROWS))
    inner, out = torch.empty_like(x), torch.empty_like(x)
    partial = torch.empty(programs, taps + 1, channels, dtype=torch.float32, device=x.device)
    _inner[(blocks, programs)](grad, x, weight, bias, history, inner, partial, rows, **shape)
    _outer[(blocks, triton.cdiv(rows, _ROWS))](inner, weight, history, out, rows, **shape)
    if len(tails.rows):
        _tails[(blocks, len(tails.rows))](
            inner, weight, tails.rows, tails.offsets, tails.successors, tails.distances, out,
            C=channels, TAPS=taps, COLS=_COLS,
        )  # fmt: skip
    total = partial.sum(0)
    d_bias = None if bias is None else total[taps].to(bias.dtype)
    return out, total[:taps].T.to(weight.dtype).contiguous(), d_bias


def _shape(weight: Tensor, bias: Tensor | None) -> dict[str, int]:
    return {"C": weight.shape[0], "TAPS": weight.shape[1], "BIAS": bias is not None, "ROWS": _ROWS, "COLS": _COLS}


@triton.jit
def _sum(
    x, weight, bias, history, row, rows, col,
    C: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """z [ROWS, COLS], float32."""
    channels = col < C
    z = tl.zeros((ROWS, COLS), tl.float32)
    if BIAS:
        z += tl.load(bias + col, mask=channels, other=0.0).to(tl.float32)[None, :]
    for distance in tl.static_range(TAPS):
        w = tl.load(weight + col * TAPS + (TAPS - 1 - distance), mask=channels, other=0.0).to(tl.float32)
        z += w[None, :] * _before(x, history, row, rows, col, distance, C)
    return z


@triton.jit
def _before(x, history, row, rows, col, DISTANCE: tl.constexpr, C: tl.constexpr):
    """The rows of x so many places before each of `row`, float32; zeros where there is none."""
    if DISTANCE > 0:
        row = tl.load(history + (DISTANCE - 1) * rows + row, mask=row < rows, other=rows)
    inside = (row < rows)[:, None] & (col < C)[None, :]
    return tl.load(x + row[:, None] * C + col[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, weight, bias, history, out, rows,
    C: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    z = _sum(x, weight, bias, history, row, rows, col, C, TAPS, BIAS, ROWS, COLS)
    inside = (row < rows)[:, None] & (col < C)[None, :]
    tl.store(out + row[:, None] * C + col[None, :], (z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _inner(
    grad, x, weight, bias, history, inner, partial, rows,
    C: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    place = partial + tl.program_id(1) * (TAPS + 1) * C + col
    tap = tl.arange(0, 8)[:, None]
    shares = tl.zeros((8, COLS), tl.float32)  # of up to seven taps and the bias
    for tile in range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (col < C)[None, :]
        z = _sum(x, weight, bias, history, row, rows, col, C, TAPS, BIAS, ROWS, COLS)
        s = tl.sigmoid(z)
        d = tl.load(grad + row[:, None] * C + col[None, :], mask=inside, other=0.0).to(tl.float32)
        d *= s * (1 + z * (1 - s))
        tl.store(inner + row[:, None] * C + col[None, :], d.to(inner.dtype.element_ty), mask=inside)
        for distance in tl.static_range(TAPS):
            share = tl.sum(d * _before(x, history, row, rows, col, distance, C), axis=0)
            shares += tl.where(tap == TAPS - 1 - distance, share[None, :], 0.0)
        if BIAS:
            shares += tl.where(tap == TAPS, tl.sum(d, axis=0)[None, :], 0.0)
    tl.store(place[None, :] + tap * C, shares, mask=(tap <= TAPS) & (col < C)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _outer(
    inner, weight, history, out, rows,
    C: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    channels = (col < C)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for distance in tl.static_range(TAPS):
        after = row + distance
        reads = after < rows
        if distance > 0:
            reads = tl.load(history + (distance - 1) * rows + after, mask=reads, other=rows) == row
        w = tl.load(weight + col * TAPS + (TAPS - 1 - distance), mask=col < C, other=0.0).to(tl.float32)
        d = tl.load(inner + after[:, None] * C + col[None, :], mask=reads[:, None] & channels, other=0.0)
        total += w[None, :] * d.to(tl.float32)
    inside = (row < rows)[:, None] & channels
    tl.store(out + row[:, None] * C + col[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tails(
    inner, weight, tail_rows, offsets, successors, distances, out,
    C: tl.constexpr, TAPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tail = tl.program_id(1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for number in range(tl.load(offsets + tail), tl.load(offsets + tail + 1)):
        row, distance = tl.load(successors + number).to(tl.int64), tl.load(distances + number)
        w = tl.load(weight + col * TAPS + (TAPS - 1 - distance), mask=col < C, other=0.0).to(tl.float32)
        total += w * tl.load(inner + row * C + col, mask=col < C, other=0.0).to(tl.float32)
    row = tl.load(tail_rows + tail).to(tl.int64)
    tl.store(out + row * C + col, total.to(out.dtype.element_ty), mask=col < C)
