"""Triton kernels of `gated_norm.py`: tiles of whole rows.

Backward, with n = x r, r = 1 / sqrt(mean(x^2) + eps), a = silu(z): da = dy w n, dn = dy w a,
dx = r (dn - n mean(n dn)), dw = sum over rows of dy n a; programs' shares of it are added in a fixed order.
"""

# Kernels are written in Triton's language, not in Python's types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements a program holds of each tensor
_PROGRAMS = 1024  # at most, in the backward pass: each has a row of `dw`


def forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[N, D] -> [N, D], contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        shape = _shape(x)
        grid = (triton.cdiv(x.shape[0], shape["ROWS"]),)
        _forward[grid](x, gate, weight, out, x.shape[0], x.stride(0), gate.stride(0), eps, **shape)
    return out


def backward(grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and weight."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    if not x.numel():
        return grad_x, grad_gate, torch.zeros_like(weight)
    shape = _shape(x)
    programs = min(_PROGRAMS, triton.cdiv(x.shape[0], shape["ROWS"]))
    partial = torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
    strides = (grad.stride(0), x.stride(0), gate.stride(0))
    _backward[(programs,)](grad, x, gate, weight, grad_x, grad_gate, partial, x.shape[0], *strides, eps, **shape)
    return grad_x, grad_gate, partial.sum(0).to(weight.dtype)


def _shape(x: Tensor) -> dict[str, int]:
    cols = triton.next_power_of_2(x.shape[1])
    return {"WIDTH": x.shape[1], "ROWS": max(1, _TILE // cols), "COLS": cols}


@triton.jit
def _tile(x, row, stride, num_rows, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] float32, zeros outside."""
    col = tl.arange(0, COLS)[None, :]
    inside = (row < num_rows)[:, None] & (col < WIDTH)
    return tl.load(x + row[:, None] * stride + col, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _put(x, value, row, num_rows, WIDTH: tl.constexpr, COLS: tl.constexpr):
    col = tl.arange(0, COLS)[None, :]
    inside = (row < num_rows)[:, None] & (col < WIDTH)
    tl.store(x + row[:, None] * WIDTH + col, value.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x, gate, weight, out, num_rows, stride_x, stride_gate, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, COLS)
    w = tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    y = _tile(x, row, stride_x, num_rows, WIDTH, COLS)
    z = _tile(gate, row, stride_gate, num_rows, WIDTH, COLS)
    y *= tl.rsqrt(tl.sum(y * y, axis=1) / WIDTH + eps)[:, None]
    _put(out, y * w[None, :] * z * tl.sigmoid(z), row, num_rows, WIDTH, COLS)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    grad, x, gate, weight, grad_x, grad_gate, partial, num_rows, stride_grad, stride_x, stride_gate, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, COLS)
    w = tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)[None, :]
    shares = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        d = _tile(grad, row, stride_grad, num_rows, WIDTH, COLS)
        n = _tile(x, row, stride_x, num_rows, WIDTH, COLS)
        z = _tile(gate, row, stride_gate, num_rows, WIDTH, COLS)
        r = tl.rsqrt(tl.sum(n * n, axis=1) / WIDTH + eps)[:, None]
        n *= r
        s = tl.sigmoid(z)
        shares += d * n * z * s
        d *= w
        _put(grad_gate, d * n * s * (1 + z * (1 - s)), row, num_rows, WIDTH, COLS)
        d *= z * s
        _put(grad_x, r * (d - n * (tl.sum(d * n, axis=1) / WIDTH)[:, None]), row, num_rows, WIDTH, COLS)
    tl.store(partial + tl.program_id(0) * WIDTH + col, tl.sum(shares, axis=0), mask=col < WIDTH)
