"""Triton kernels of `gate.py`, in tiles of rows and columns; rows may be apart (a gate that is half of a product)."""

# Kernels are written in Triton's language, not in Python's types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048


def forward(gate: Tensor, x: Tensor, silu: bool) -> Tensor:
    """[..., D] each -> [..., D], contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        g, y = _rows(gate), _rows(x)
        grid, shape = _shape(y)
        _forward[grid](g, y, out, g.stride(0), y.stride(0), SILU=silu, **shape)
    return out


def backward(grad: Tensor, gate: Tensor, x: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """Gradients of gate and x, contiguous."""
    grad_gate = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        d, g, y = _rows(grad), _rows(gate), _rows(x)
        grid, shape = _shape(y)
        strides = (d.stride(0), g.stride(0), y.stride(0))
        _backward[grid](d, g, y, grad_gate, grad_x, *strides, SILU=silu, **shape)
    return grad_gate, grad_x


def _rows(x: Tensor) -> Tensor:
    """[N, D] with a contiguous last dimension; a view where one can be had."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(rows: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    num_rows, width = rows.shape
    cols = min(_TILE, triton.next_power_of_2(width))
    tile = {"ROWS": _TILE // cols, "COLS": cols}
    return (triton.cdiv(num_rows, tile["ROWS"]), triton.cdiv(width, cols)), {
        "num_rows": num_rows,
        "width": width,
    } | tile


@triton.jit
def _tile(num_rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    return row[:, None], col[None, :], (row < num_rows)[:, None] & (col < width)[None, :]


@triton.jit
def _forward(
    gate, x, out, stride_gate, stride_x, num_rows, width, SILU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row, col, inside = _tile(num_rows, width, ROWS, COLS)
    g = tl.load(gate + row * stride_gate + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x + row * stride_x + col, mask=inside, other=0.0).to(tl.float32)
    y *= tl.sigmoid(g)
    if SILU:
        y *= g
    tl.store(out + row * width + col, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, gate, x, grad_gate, grad_x, stride_grad, stride_gate, stride_x, num_rows, width,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col, inside = _tile(num_rows, width, ROWS, COLS)
    d = tl.load(grad + row * stride_grad + col, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * stride_gate + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x + row * stride_x + col, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    if SILU:
        dx, dg = d * g * s, d * y * s * (1 + g * (1 - s))
    else:
        dx, dg = d * s, d * y * s * (1 - s)
    place = row * width + col
    tl.store(grad_x + place, dx.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_gate + place, dg.to(grad_gate.dtype.element_ty), mask=inside)
