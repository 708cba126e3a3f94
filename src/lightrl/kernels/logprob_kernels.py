"""Triton kernels of `logprob_triton`: products reduced to statistics of logits, or turned into their gradient.

Logits `z` are in units of log 2 (times 1.4427), so that their exponential is one instruction.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

# Stands for a logit of -inf: its exponential is 0 beside any other, and 0 times it is not nan.
_FLOOR = tl.constexpr(-1e30)


@triton.jit
def _offsets(bias_ptr, columns, num_columns, factor, HAS_BIAS: tl.constexpr):
    """What is added to each column's product times `factor`: the bias, and _FLOOR beyond the last column."""
    inside = columns < num_columns
    offsets = tl.where(inside, 0.0, _FLOOR)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32) * factor
        offsets += tl.where(bias < _FLOOR, _FLOOR, bias)
    return offsets


@triton.jit
def _statistics(z):
    """z [R, C] -> log of the sum of exponentials, and entropy, [R] each, in nats. A nan in z makes both nan."""
    top = tl.max(z, 1)
    shifted = z - top[:, None]
    e = tl.exp2(shifted)
    total = tl.sum(e, 1)
    log_total = tl.log2(total)
    lse = (top + log_total) * 0.6931471805599453
    entropy = (log_total - tl.sum(e * shifted, 1) / total) * 0.6931471805599453
    return lse, entropy


@triton.jit
def _logit_gradient(z, lse2, slope, curve, HAS_CURVE: tl.constexpr):
    """-p (g + k (log p + H)) / temperature, with what depends on the row alone in `slope` and `curve`."""
    log_p = z - lse2[:, None]
    if HAS_CURVE:
        return tl.exp2(log_p) * (slope[:, None] + curve[:, None] * log_p)
    return tl.exp2(log_p) * slope[:, None]


@triton.jit
def _tile_place(tile, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile. Tiles that run together share words and rows, for the sake of L2."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    in_group = GROUP * tl.cdiv(num_columns, COLUMNS)
    first = tile // in_group * GROUP
    size = min(row_tiles - first, GROUP)
    return (first + tile % in_group % size) * ROWS, tile % in_group // size * COLUMNS


@triton.jit
def statistics_kernel(
    hidden,
    weight,
    bias_ptr,
    lse_ptr,
    entropy_ptr,
    num_rows,
    num_columns,
    depth,
    factor,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Statistics [tiles of columns, num_rows] of each row's logits within each tile."""
    num_tiles = tl.cdiv(num_rows, ROWS) * tl.cdiv(num_columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        first_row, first_column = _tile_place(tile, num_rows, num_columns, ROWS, COLUMNS, GROUP)
        z = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, depth, DEPTH):
            z = tl.dot(hidden.load([first_row, k]), weight.load([first_column, k]).T, z)
        columns = first_column + tl.arange(0, COLUMNS)
        lse, entropy = _statistics(z * factor + _offsets(bias_ptr, columns, num_columns, factor, HAS_BIAS)[None, :])
        rows = first_row + tl.arange(0, ROWS)
        place = (first_column // COLUMNS).to(tl.int64) * num_rows + rows
        tl.store(lse_ptr + place, lse, mask=rows < num_rows)
        tl.store(entropy_ptr + place, entropy, mask=rows < num_rows)


@triton.jit
def gradient_kernel(
    hidden,
    weight,
    dz,
    bias_ptr,
    lse2_ptr,
    slope_ptr,
    curve_ptr,
    num_rows,
    num_columns,
    depth,
    factor,
    HAS_BIAS: tl.constexpr,
    HAS_CURVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_tiles = tl.cdiv(num_rows, ROWS) * tl.cdiv(num_columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        first_row, first_column = _tile_place(tile, num_rows, num_columns, ROWS, COLUMNS, GROUP)
        z = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, depth, DEPTH):
            z = tl.dot(hidden.load([first_row, k]), weight.load([first_column, k]).T, z)
        columns = first_column + tl.arange(0, COLUMNS)
        z = z * factor + _offsets(bias_ptr, columns, num_columns, factor, HAS_BIAS)[None, :]
        rows = first_row + tl.arange(0, ROWS)
        lse2 = tl.load(lse2_ptr + rows, mask=rows < num_rows, other=1e30)
        slope = tl.load(slope_ptr + rows, mask=rows < num_rows, other=0.0)
        curve = tl.load(curve_ptr + rows, mask=rows < num_rows, other=0.0) if HAS_CURVE else 0.0
        dz.store([first_row, first_column], _logit_gradient(z, lse2, slope, curve, HAS_CURVE).to(dz.dtype))


# ---- a value a row


@triton.jit
def combine_kernel(
    lses_ptr, entropies_ptr, lse_ptr, entropy_ptr, num_parts, num_rows, PARTS: tl.constexpr, ROWS: tl.constexpr
):
    """Statistics of parts of the vocabulary [num_parts, num_rows] -> of all of it: with w the share of a part, entropy
    is the sum of w (entropy of the part - log w). Unlike log-sum-exp less mean logit, it subtracts no large numbers."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full((ROWS,), _FLOOR, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)  # of exp(lse of part - top)
    mean = tl.zeros((ROWS,), tl.float32)  # of the same times (entropy of part - (lse of part - top))
    for first in range(0, num_parts, PARTS):
        parts = first + tl.arange(0, PARTS)
        inside = (parts < num_parts)[:, None] & (rows < num_rows)[None, :]
        place = parts.to(tl.int64)[:, None] * num_rows + rows[None, :]
        lse = tl.load(lses_ptr + place, mask=inside, other=_FLOOR)
        entropy = tl.load(entropies_ptr + place, mask=inside, other=0.0)
        higher = tl.maximum(top, tl.max(lse, 0))
        less = tl.exp(top - higher)
        mean = less * (mean + total * (higher - top))
        total = less * total
        weight = tl.exp(lse - higher[None, :])
        total += tl.sum(weight, 0)
        mean += tl.sum(weight * (entropy - (lse - higher[None, :])), 0)
        top = higher
    log_total = tl.log(total)
    tl.store(lse_ptr + rows, top + log_total, mask=rows < num_rows)
    tl.store(entropy_ptr + rows, log_total + mean / total, mask=rows < num_rows)


@triton.jit
def chosen_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    targets_ptr,
    lse_ptr,
    logprobs_ptr,
    vocab,
    depth,
    inverse_temperature,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-prob of a row's target: its logit is a product of two vectors, cheaper than looking for it in every tile.

    A target outside the vocabulary has the log-prob nan.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row).to(tl.int64)
    known = (target >= 0) & (target < vocab)
    target = tl.where(known, target, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, depth, BLOCK):
        i = first + tl.arange(0, BLOCK)
        h = tl.load(hidden_ptr + row * depth + i, mask=i < depth, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + target * depth + i, mask=i < depth, other=0.0).to(tl.float32)
        total += h * w
    logit = tl.sum(total, 0)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + target).to(tl.float32)
    logprob = logit * inverse_temperature - tl.load(lse_ptr + row)
    logprob = tl.where(logprob > 0, 0.0, logprob)  # summed in another order than what is in the lse
    tl.store(logprobs_ptr + row, tl.where(known, logprob, float("nan")))


@triton.jit
def set_chosen_kernel(dz_ptr, stride, targets_ptr, values_ptr, first, width, num_rows, BLOCK: tl.constexpr):
    """The targets' places of a chunk's gradient: there it is not the formula of all others."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(targets_ptr + rows, mask=rows < num_rows, other=-1) - first
    value = tl.load(values_ptr + rows, mask=rows < num_rows, other=0.0).to(dz_ptr.dtype.element_ty)
    tl.store(dz_ptr + rows.to(tl.int64) * stride + column, value, mask=(column >= 0) & (column < width))
