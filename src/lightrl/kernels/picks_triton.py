"""`picks.sum_rows` as a Triton kernel. Bound by memory: every row is read once, every sum written once."""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def sum_rows(rows: Tensor, place: Tensor) -> Tensor:
    """rows [m, H], place [T, w] int64 (-1: none) -> [T, H], as `picks.sum_rows_reference`."""
    rows, place = rows.contiguous(), place.contiguous()
    (tokens, most), width = place.shape, rows.shape[1]
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        _sum_rows[(tokens, triton.cdiv(width, block))](rows, place, out, width, MOST=most, BLOCK=block)
    return out


@triton.jit
def _sum_rows(rows, place, out, width, MOST: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(MOST):
        at = tl.load(place + token * MOST + j)
        end = tl.where(at >= 0, width, 0)
        total += tl.load(rows + at * width + col, mask=col < end, other=0.0).to(tl.float32)
    tl.store(out + token * width + col, total.to(out.dtype.element_ty), mask=inside)
