"""Grouped products of a mixture's experts: torch's, of rows that lie sorted, and ours, which gather rows as they read.

Ours never write the sorted copy [S, H] of a token's rows, and have SwiGLU or its gradient done while a tile is in
registers. What a stage saves against torch's product with the kernels of `moe_rows.py` (32k tokens of Qwen3-30B-A3B,
H200, bytes at 4.2 TB/s) must not be lost in the product itself:

| stage | product | not moved | ms |
|---|---|---|---|
| gate_up | [S, H] x [H, 2I] | copy of rows, gate and up read again | 0.3 + 0.2 |
| grad_act | [S, H] x [H, I] | its gradient written and read | 0.2 |
| grad_down | [H, S] x [S, I] | with grad_act: copy of the output's gradient | 0.3 |
| grad_gate_up | [2I, S] x [S, H] | copy of rows | 0.3 |

The products are 2 S 3 H I operations forward and twice that backward: 7.4e12, 15 ms at 491 TFLOP/s.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightrl.kernels.moe_rows import Order, swiglu_gradients

PLAIN, SWIGLU, SWIGLU_BACKWARD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what becomes of a tile


@dataclass(frozen=True)
class Tiles:
    """A tile of a product, `rows` x `cols` of its result, and how it is computed."""

    rows: int = 128
    cols: int = 256
    depth: int = 64
    stages: int = 4
    warps: int = 8
    tma: bool = False
    """Read blocks of the matrices, and of sorted rows, by the copy engine of Hopper. Not of outer products."""
    persistent: int = 0
    """This many programs a multiprocessor take one tile after the other; 0: one tile each. Not of outer products."""

    @property
    def constants(self) -> dict[str, int]:
        names = {"ROWS": self.rows, "COLS": self.cols, "DEPTH": self.depth}
        return names | {"num_warps": self.warps, "num_stages": self.stages}


def product(x: Tensor, matrices: Tensor, ends: Tensor, tiles: Tiles | None = None) -> Tensor:
    """Each expert's rows times its matrix: x [S, in], matrices [E, in, out] of any strides -> [S, out]."""
    if tiles is None:
        return _torch_product()(x, matrices, offs=ends)
    out = x.new_empty(x.shape[0], matrices.shape[2])
    _launch_rows(tiles, x, matrices, ends, out, epilogue=PLAIN)
    return out


def outer_product(left: Tensor, right: Tensor, order: Order, tiles: Tiles | None = None, *, spread: str = "") -> Tensor:
    """Each expert's rows of `left` [S, P] transposed times those of `right` [S, Q] -> [E, P, Q].

    With `tiles`, the one that `spread` names ("left" or "right") may be [T, ...]: a pair's row is its token's.
    """
    if tiles is None:
        out = _torch_product()(left.T, right, offs=order.ends)
        size = out[0].numel()  # of an expert without rows torch leaves zeros on Hopper, but anything on Blackwell
        _clear_idle[(16, len(order.ends))](out, order.ends, size, triton.cdiv(size, 16), BLOCK=1024)
        return out
    experts = len(order.ends)
    out = left.new_empty(experts, left.shape[1], right.shape[1])
    # Tiles of one expert run side by side: they share its rows, which the cache holds.
    grid = (triton.cdiv(left.shape[1], tiles.rows) * triton.cdiv(right.shape[1], tiles.cols), experts)
    _outer[grid](
        left, right, out, order.token, order.ends, left.shape[1], right.shape[1],
        SPREAD_LEFT=spread == "left", SPREAD_RIGHT=spread == "right", **tiles.constants,
    )  # fmt: skip
    return out


def gate_up_product(
    hidden: Tensor, matrices: Tensor, weights: Tensor, order: Order, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """hidden [T, H], matrices [E, H, 2I], weights [T, k] -> (gate and up [S, 2I], activations [S, I] with weights)."""
    width = matrices.shape[2]
    gate_up = hidden.new_empty(order.source.shape[0], width)
    act = hidden.new_empty(order.source.shape[0], width // 2)
    _launch_rows(tiles, hidden, matrices, order.ends, gate_up, epilogue=SWIGLU, order=order, weights=weights, act=act)
    return gate_up, act


def act_gradient_product(
    grad: Tensor, matrices: Tensor, gate_up: Tensor, weights: Tensor, order: Order, tiles: Tiles, *, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `moe_rows.swiglu_backward` of grad [T, H] times matrices [E, H, I], which are not written anywhere."""
    width = matrices.shape[2]
    grad_gate_up = gate_up if overwrite else torch.empty_like(gate_up)
    act = grad.new_empty(order.source.shape[0], width)
    parts = torch.empty(
        order.source.shape[0], 4 * triton.cdiv(width, tiles.cols), dtype=torch.float32, device=grad.device
    )
    _launch_rows(
        tiles, grad, matrices, order.ends, grad_gate_up, epilogue=SWIGLU_BACKWARD, order=order, weights=weights,
        act=act, gate_up=gate_up, parts=parts,
    )  # fmt: skip
    return grad_gate_up, act, parts.sum(1).view(order.place.shape)


def _torch_product() -> Callable[..., Any]:
    return F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm


def _launch_rows(
    tiles: Tiles,
    x: Tensor,
    matrices: Tensor,
    ends: Tensor,
    out: Tensor,
    *,
    epilogue: tl.constexpr,
    order: Order | None = None,
    weights: Tensor | None = None,
    act: Tensor | None = None,
    gate_up: Tensor | None = None,
    parts: Tensor | None = None,
) -> None:
    experts, depth, width = matrices.shape
    programs = triton.cdiv(out.shape[0], tiles.rows) + experts  # at most: every expert may end with a part of a tile
    programs *= triton.cdiv(width, tiles.cols)
    if tiles.persistent:
        programs = min(programs, _processors(x) * tiles.persistent)
    wide = matrices.stride(2) == 1  # a matrix's rows are `depth` apart, not its columns
    blocks = x, matrices
    if tiles.tma:
        blocks = _descriptors(tiles, x, matrices, wide, epilogue is SWIGLU, order is not None)
    _rows[(programs,)](
        *blocks, out, act, gate_up, weights, parts, *((None, None) if order is None else order[1:3]), ends,
        experts, depth, width, *matrices.stride(),
        SPREAD=order is not None, EPILOGUE=epilogue.value, TMA=tiles.tma, WIDE=wide,
        EVEN=depth % tiles.depth == 0, EXPERTS=triton.next_power_of_2(experts), FLATTEN=tiles.persistent > 0,
        **tiles.constants,
    )  # fmt: skip


def _descriptors(tiles: Tiles, x: Tensor, matrices: Tensor, wide: bool, gated: bool, spread: bool) -> tuple[Any, Any]:
    """x and matrices in blocks; x as it is where its rows are gathered."""
    rows = x if spread else TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth])
    if wide:
        return rows, TensorDescriptor.from_tensor(matrices, [1, tiles.depth, tiles.cols])
    if gated:
        both = matrices.mT.unflatten(1, (2, -1))
        return rows, TensorDescriptor.from_tensor(both, [1, 2, tiles.cols // 2, tiles.depth])
    return rows, TensorDescriptor.from_tensor(matrices.mT, [1, tiles.cols, tiles.depth])


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


@triton.jit
def _rows(
    x, matrices, out, act, gate_up, weights, parts, source, token, ends,
    experts, depth, width, of_expert, of_depth, of_width,
    SPREAD: tl.constexpr, EPILOGUE: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tiles of rows times their expert's matrix. SPREAD: row r of x is that of r's token.

    With FLATTEN a program takes every `num_programs`th tile, and loads of the next begin before one is stored.
    """
    col_tiles = tl.cdiv(width, COLS)
    # Which expert has a tile of rows? An expert's first one stands behind those of all experts before it.
    each = tl.arange(0, EXPERTS)
    stops = tl.load(ends + each, mask=each < experts, other=0)
    starts = tl.load(ends + each - 1, mask=(each > 0) & (each < experts), other=0)
    counts = tl.where(each < experts, tl.cdiv(stops - starts, ROWS), 0)
    past = tl.cumsum(counts, 0)
    num_tiles = tl.sum(counts, 0) * col_tiles
    work = (past, counts, starts, stops, x, matrices, out, act, gate_up, weights, parts, source, token)
    sizes = (col_tiles, depth, width, of_expert, of_depth, of_width)
    if FLATTEN:
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
            _tile(tile, *work, *sizes, SPREAD, EPILOGUE, TMA, WIDE, EVEN, EXPERTS, ROWS, COLS, DEPTH)
    elif tl.program_id(0) < num_tiles:
        _tile(tl.program_id(0), *work, *sizes, SPREAD, EPILOGUE, TMA, WIDE, EVEN, EXPERTS, ROWS, COLS, DEPTH)


@triton.jit
def _tile(
    tile, past, counts, starts, stops, x, matrices, out, act, gate_up, weights, parts, source, token,
    col_tiles, depth, width, of_expert, of_depth, of_width,
    SPREAD: tl.constexpr, EPILOGUE: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile: product, then what EPILOGUE says becomes of it."""
    row_tile, col_tile = tile // col_tiles, tile % col_tiles
    expert = tl.sum((past <= row_tile).to(tl.int32), 0)
    mine = tl.arange(0, EXPERTS) == expert
    stop = tl.sum(tl.where(mine, stops, 0), 0)
    first = tl.sum(tl.where(mine, starts + (row_tile - past + counts) * ROWS, 0), 0)

    row = first + tl.arange(0, ROWS)
    known = row < stop
    row = tl.where(known, row, first)  # computed twice rather than masked in the loop
    col = col_tile * COLS + tl.arange(0, COLS)
    inside = col < width
    from_row, from_col, pair = row, col % width, row  # a remainder, unlike `where`, is still known to be contiguous
    if SPREAD:
        pair = tl.load(source + row)
        from_row = tl.load(token + row)
    if EPILOGUE == SWIGLU:  # a gate beside its up: a thread then holds both
        from_col = from_col // 2 + (from_col % 2) * (width // 2)
    deep = tl.arange(0, DEPTH)
    x_at = x
    m_at = matrices
    if not TMA or SPREAD:
        x_at = x + from_row.to(tl.int64)[:, None] * depth + deep[None, :]
    if not TMA:
        m_at = matrices + expert.to(tl.int64) * of_expert + deep[:, None] * of_depth + from_col[None, :] * of_width
    total = tl.zeros([ROWS, COLS], tl.float32)
    for done in range(0, depth, DEPTH):
        left = deep < depth - done
        if TMA and not SPREAD:
            a = x.load([first, done])
        elif EVEN:
            a = tl.load(x_at)
        else:
            a = tl.load(x_at, mask=left[None, :], other=0.0)
        if TMA:
            if WIDE:
                b = tl.reshape(matrices.load([expert, done, col_tile * COLS]), (DEPTH, COLS))
            elif EPILOGUE == SWIGLU:
                b = tl.reshape(matrices.load([expert, 0, col_tile * (COLS // 2), done]), (COLS, DEPTH)).T
            else:
                b = tl.reshape(matrices.load([expert, col_tile * COLS, done]), (COLS, DEPTH)).T
        elif EVEN:
            b = tl.load(m_at)
        else:
            b = tl.load(m_at, mask=left[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        if not TMA or SPREAD:
            x_at += DEPTH
        if not TMA:
            m_at += DEPTH * of_depth

    place = row.to(tl.int64)[:, None] * width
    if EPILOGUE == PLAIN:
        mask = known[:, None] & inside[None, :]
        tl.store(out + place + col[None, :], total.to(out.dtype.element_ty), mask=mask)
    elif EPILOGUE == SWIGLU:
        half = width // 2
        share = tl.load(weights + pair).to(tl.float32)
        gate, up = _halves(total) if TMA else tl.split(tl.reshape(total, (ROWS, COLS // 2, 2)))
        gate, up = gate.to(out.dtype.element_ty), up.to(out.dtype.element_ty)
        col = col_tile * (COLS // 2) + tl.arange(0, COLS // 2)[None, :]
        mask = known[:, None] & (col < half)
        tl.store(out + place + col, gate, mask=mask)
        tl.store(out + place + half + col, up, mask=mask)
        gate, up = gate.to(tl.float32), up.to(tl.float32)  # as the backward pass finds them
        both = gate * tl.sigmoid(gate) * up * share[:, None]
        tl.store(act + place // 2 + col, both.to(act.dtype.element_ty), mask=mask)
    else:  # some columns at a time, or registers would not hold it
        share = tl.load(weights + pair).to(tl.float32)
        tensors = (out, act, gate_up, parts + pair * (4 * col_tiles) + 4 * col_tile)
        halves = _halves(total)
        for half in tl.static_range(2):
            quarters = _halves(halves[half])
            for quarter in tl.static_range(2):
                col = col_tile * COLS + (2 * half + quarter) * (COLS // 4) + tl.arange(0, COLS // 4)
                _push_through_swiglu(quarters[quarter], share, place, col, known, width, *tensors, 2 * half + quarter)


@triton.jit
def _halves(x):
    """Its columns as two tiles."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _push_through_swiglu(grad, share, place, col, known, width, out, act, gate_up, part, number):
    mask = known[:, None] & (col < width)[None, :]
    at = 2 * place + col[None, :]
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=mask, other=0.0).to(tl.float32)
    grad_gate, grad_up, plain, both = swiglu_gradients(gate, up, grad, share)
    tl.store(out + at, grad_gate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + width, grad_up.to(out.dtype.element_ty), mask=mask)
    tl.store(act + place + col[None, :], both.to(act.dtype.element_ty), mask=mask)
    tl.store(part + number, tl.sum(grad * plain, 1), mask=known)


@triton.jit
def _clear_idle(out, ends, size, share, BLOCK: tl.constexpr):
    """Zeros where an expert has no rows: a program writes `share` of the `size` numbers of one matrix."""
    expert = tl.program_id(1)
    if tl.load(ends + expert) == tl.load(ends + expert - 1, mask=expert > 0, other=0):
        start, stop = tl.program_id(0) * share, tl.minimum((tl.program_id(0) + 1) * share, size)
        for first in range(start, stop, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(out + expert.to(tl.int64) * size + at, tl.zeros([BLOCK], out.dtype.element_ty), mask=at < stop)


@triton.jit
def _outer(
    left, right, out, tokens, ends, left_width, right_width,
    SPREAD_LEFT: tl.constexpr, SPREAD_RIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's matrix: the sum over its rows. None: zeros."""
    expert = tl.program_id(1)
    col_tiles = tl.cdiv(right_width, COLS)
    row = tl.program_id(0) // col_tiles * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS)
    from_row, from_col = row % left_width, col % right_width
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    deep = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLS], tl.float32)
    pair = start + deep
    token = pair
    if SPREAD_LEFT or SPREAD_RIGHT:
        token = tl.load(tokens + pair, mask=pair < stop, other=0)
    for _ in range(start, stop, DEPTH):
        known = pair < stop
        left_row, right_row = (token if SPREAD_LEFT else pair), (token if SPREAD_RIGHT else pair)
        a_at = left + left_row.to(tl.int64)[None, :] * left_width + from_row[:, None]
        b_at = right + right_row.to(tl.int64)[:, None] * right_width + from_col[None, :]
        a = tl.load(a_at, mask=known[None, :], other=0.0)
        b = tl.load(b_at, mask=known[:, None], other=0.0)
        pair += DEPTH
        token = pair
        if SPREAD_LEFT or SPREAD_RIGHT:  # those of the next turn: addresses that wait for a load come late
            token = tl.load(tokens + pair, mask=pair < stop, other=0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = expert.to(tl.int64) * left_width * right_width + row[:, None] * right_width + col[None, :]
    mask = (row < left_width)[:, None] & (col < right_width)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
