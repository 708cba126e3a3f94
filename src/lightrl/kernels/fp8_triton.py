"""Triton kernel of `fp8.py`: a program reads some blocks once, and writes their numbers and scales.

It rounds by integers, as the interpreter's own cast is wrong where a mantissa overflows.
"""

# Kernels are written in Triton's language, not in Python's types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # blocks of one row that a program takes together


def quantize(x: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """[..., R, C] -> e4m3 [..., R, C] and scales [..., ceil(R / rows), ceil(C / cols)]; `rows` is 1 or a power of 2."""
    *batch, height, width = x.shape
    stacked = x.reshape(-1, height, width)  # a view where the leading dimensions lie evenly
    numbers = torch.empty(stacked.shape, dtype=torch.float8_e4m3fn, device=x.device)
    down, across = triton.cdiv(height, rows), triton.cdiv(width, cols)
    scales = torch.empty((len(stacked), down, across), dtype=torch.float32, device=x.device)
    if x.numel():
        tile = rows if rows > 1 else _ROWS
        grid = (triton.cdiv(height, tile), across, len(stacked))
        _quantize[grid](
            stacked, numbers.view(torch.uint8), scales, height, width, down, across, *stacked.stride(),
            TILE=tile, COLS=cols, TOGETHER=rows > 1, num_warps=8 if rows > 1 else 4,
        )  # fmt: skip
    return numbers.view(x.shape), scales.view(*batch, down, across)


@triton.jit
def _quantize(
    x, numbers, scales, height, width, down, across, stride_batch, stride_row, stride_col,
    TILE: tl.constexpr, COLS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Of a tile [TILE, COLS]: one scale if TOGETHER, else one for each row."""
    batch = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)
    inside = (row < height)[:, None] & (col < width)[None, :]
    places = batch * stride_batch + row[:, None] * stride_row + col[None, :] * stride_col
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    bad = (values != values) | (tl.abs(values) == float("inf"))
    most = tl.max(tl.where(bad, 0.0, tl.abs(values)), 1)
    any_bad = tl.max(bad.to(tl.int32), 1)
    if TOGETHER:
        most = tl.max(most, 0)
        any_bad = tl.max(any_bad, 0)
    scale = tl.maximum(tl.math.div_rn(most, 448.0), 1.1754943508222875e-38)
    scale = tl.where(most == 0.0, 1.0, scale)
    scale = tl.where(any_bad > 0, float("nan"), scale)
    if TOGETHER:
        spread = tl.zeros([TILE, COLS], tl.float32) + scale
        tl.store(scales + (batch * down + tl.program_id(0)) * across + tl.program_id(1), scale)
    else:
        spread = tl.zeros([TILE, COLS], tl.float32) + scale[:, None]
        tl.store(scales + (batch * down + row) * across + tl.program_id(1), scale, mask=row < height)
    scaled = tl.math.div_rn(values, spread)
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    code = tl.where(spread != spread, 0, _e4m3(scaled))
    out = batch * height * width + row[:, None] * width + col[None, :]
    tl.store(numbers + out, code.to(tl.uint8), mask=inside)


@triton.jit
def _e4m3(x):
    """Bits of the e4m3 number nearest to x, |x| <= 448; ties go to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (
        120 << 3
    )  # 3 bits of mantissa; exponents from -7, not -127
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 16384's own last bit is worth 2^-9
    code = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return code | ((bits >> 24) & 0x80)
