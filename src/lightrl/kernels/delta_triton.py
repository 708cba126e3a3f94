"""Triton kernels of `delta.py`: unit vectors, and the forward pass over chunks of 64 rows.

With `c` the log decays summed up within a chunk, `b` the learning rates and `S` the state before it, for each head:

    L_ij = b_i e^(c_i - c_j) <k_i, k_j>, j < i;   T = (I + L)^-1;   U = T (b v);   W = T (b e^c k)     `prepare`
    N = U - W S;   S <- e^(c_end) S + k^T (e^(c_end - c) N)                                         `states`
    out = e^c (q S) + P N,   P_ij = e^(c_i - c_j) <q_i, k_j>, j <= i                                `outputs`

(the UT transform of Yang et al., arXiv:2406.06484, with the decays of arXiv:2412.06464). Only `states` goes from chunk
to chunk. Rows beyond a chunk's end are zeros and decay nothing.

On Hopper, Triton 3.4 to 3.7.0 compiles `tl.dot` wrongly where a product is transposed in registers and then is the left
factor of another product (flash-linear-attention's issue 640). None is transposed here: where both a matrix and its
transpose are wanted, each is a product of its own, and left factors that are loaded transposed are used as they are.
"""

# Kernels are written in Triton's language, not in Python's types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32


def unit(x: Tensor, out: Tensor, inverse: Tensor | None, scale: float) -> None:
    """x [T, H, D], heads side by side: out = `scale` x, over its length if `inverse` [T, H] is to hold 1 / length."""
    rows, heads, width = x.shape
    grid = (heads, triton.cdiv(rows, _ROWS))
    _unit[grid](x, out, inverse, rows, x.stride(0), scale, H=heads, D=width, NORM=inverse is not None, ROWS=_ROWS)


@triton.jit(do_not_specialize=["rows"])
def _unit(
    x, out, inverse, rows, stride, scale, H: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr
):
    head = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    col = tl.arange(0, D)[None, :]
    y = tl.load(x + row[:, None] * stride + head * D + col, mask=inside[:, None], other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)
        tl.store(inverse + row * H + head, r, mask=inside)
        y *= r[:, None]
    y *= scale
    tl.store(out + (row[:, None] * H + head) * D + col, y.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def rows_of(x, row, stride, size, FIRST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] from row `row + FIRST` on; `x` is the first column. Zeros from row `row + size` on."""
    i = FIRST + tl.arange(0, ROWS)
    places = i[:, None] * stride + tl.arange(0, COLS)[None, :]
    return tl.load(x + row * stride + places, mask=(i < size)[:, None], other=0.0)


@triton.jit
def turned(x, row, stride, size, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[COLS, ROWS]: the same from row `row` on, loaded transposed."""
    i = tl.arange(0, ROWS)
    places = i[None, :] * stride + tl.arange(0, COLS)[:, None]
    return tl.load(x + row * stride + places, mask=(i < size)[None, :], other=0.0)


@triton.jit
def sums(decays, row, size, CHUNK: tl.constexpr):
    """A chunk's log decays, summed up; behind its end the last one again, lest e^(c_i - c_j) overflow there."""
    return tl.load(decays + row + tl.minimum(tl.arange(0, CHUNK), size - 1))


@triton.jit
def put_rows(x, value, row, stride, size, FIRST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = FIRST + tl.arange(0, ROWS)
    places = i[:, None] * stride + tl.arange(0, COLS)[None, :]
    tl.store(x + row * stride + places, value.to(x.dtype.element_ty), mask=(i < size)[:, None])


@triton.jit
def _inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower matrix: of blocks of 2 on its diagonal, from these of blocks of 4, …

    The lower left part of a block is minus the product of the lower inverse, the matrix there and the upper inverse.
    """
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for power in tl.static_range(1, 6):
        if 2**power < SIZE:
            corner = (i // 2 ** (power + 1) == j // 2 ** (power + 1)) & (i // 2**power != j // 2**power)
            corner = tl.where(corner, lower, 0.0)
            product = tl.dot(inverse, corner, input_precision=PRECISION)
            inverse -= tl.dot(product, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _halves(x, row, stride, size, HALF: tl.constexpr, COLS: tl.constexpr):
    return rows_of(x, row, stride, size, 0, HALF, COLS), rows_of(x, row, stride, size, HALF, HALF, COLS)


@triton.jit
def _put_product(
    out, t_11, t_21, t_22, x_1, x_2, row, stride, size, HALF: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr
):
    """[[t_11, 0], [t_21, t_22]] times [x_1, x_2]."""
    put_rows(out, tl.dot(t_11, x_1, input_precision=PRECISION), row, stride, size, 0, HALF, COLS)
    y = tl.dot(t_21, x_1, input_precision=PRECISION) + tl.dot(t_22, x_2, input_precision=PRECISION)
    put_rows(out, y, row, stride, size, HALF, HALF, COLS)


@triton.jit(do_not_specialize=["num_rows"])
def prepare(
    k, v, log_decay, beta, starts, sizes, decays, solved, w, u, num_rows, stride_v,
    H: tl.constexpr, HK: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk of a head, by halves of 32 rows: T = [[A, 0], [-C B A, C]] with A and C inverses, B the corner of L."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, size = tl.load(starts + chunk).to(tl.int64), tl.load(sizes + chunk)
    i = tl.arange(0, HALF)
    first, second = i < size, HALF + i < size
    place = (row + i) * H + head
    g_1 = tl.load(log_decay + place, mask=first, other=0.0).to(tl.float32)
    g_2 = tl.load(log_decay + place + HALF * H, mask=second, other=0.0).to(tl.float32)
    b_1 = tl.load(beta + place, mask=first, other=0.0).to(tl.float32)
    b_2 = tl.load(beta + place + HALF * H, mask=second, other=0.0).to(tl.float32)
    c_1 = tl.cumsum(g_1, axis=0)
    c_2 = tl.cumsum(g_2, axis=0) + tl.sum(g_1, axis=0)
    decays += head.to(tl.int64) * num_rows + row
    tl.store(decays + i, c_1, mask=first)
    tl.store(decays + HALF + i, c_2, mask=second)
    k_1, k_2 = _halves(k + (head // (H // HK)) * KD, row, HK * KD, size, HALF, KD)
    below = i[:, None] > i[None, :]
    l_11 = tl.dot(k_1, tl.trans(k_1), input_precision=PRECISION) * b_1[:, None]
    l_21 = tl.dot(k_2, tl.trans(k_1), input_precision=PRECISION) * b_2[:, None]
    l_22 = tl.dot(k_2, tl.trans(k_2), input_precision=PRECISION) * b_2[:, None]
    l_11 *= tl.exp(tl.where(below, c_1[:, None] - c_1[None, :], float("-inf")))
    l_21 *= tl.exp(c_2[:, None] - c_1[None, :])
    l_22 *= tl.exp(tl.where(below, c_2[:, None] - c_2[None, :], float("-inf")))
    t_11, t_22 = _inverse(l_11, HALF, PRECISION), _inverse(l_22, HALF, PRECISION)
    t_21 = -tl.dot(tl.dot(t_22, l_21, input_precision=PRECISION), t_11, input_precision=PRECISION)
    solved += head * (2 * HALF)
    put_rows(solved, t_11, row, H * 2 * HALF, size, 0, HALF, HALF)
    put_rows(solved + HALF, tl.zeros((HALF, HALF), tl.float32), row, H * 2 * HALF, size, 0, HALF, HALF)
    put_rows(solved, t_21, row, H * 2 * HALF, size, HALF, HALF, HALF)
    put_rows(solved + HALF, t_22, row, H * 2 * HALF, size, HALF, HALF, HALF)
    k_1, k_2 = _halves(k + (head // (H // HK)) * KD, row, HK * KD, size, HALF, KD)  # held, they would not fit registers
    x_1 = k_1.to(tl.float32) * (b_1 * tl.exp(c_1))[:, None]
    x_2 = k_2.to(tl.float32) * (b_2 * tl.exp(c_2))[:, None]
    _put_product(w + head * KD, t_11, t_21, t_22, x_1, x_2, row, H * KD, size, HALF, KD, PRECISION)
    v_1, v_2 = _halves(v + head * VD, row, stride_v, size, HALF, VD)
    x_1, x_2 = v_1.to(tl.float32) * b_1[:, None], v_2.to(tl.float32) * b_2[:, None]
    _put_product(u + head * VD, t_11, t_21, t_22, x_1, x_2, row, H * VD, size, HALF, VD, PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def states(
    k, w, u, decays, initial, ends, end_slots, before, new,
    wave, rows, lengths, chunks, parents, num_rows,
    H: tl.constexpr, HK: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr,
    INITIAL: tl.constexpr, PARENTS: tl.constexpr, ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A segment of the wave, a head, some columns of its state: one chunk after the other."""
    head, segment = tl.program_id(1), tl.load(wave + tl.program_id(2))
    col = tl.program_id(0) * COLS
    row, length = tl.load(rows + segment).to(tl.int64), tl.load(lengths + segment)
    places = tl.arange(0, KD)[:, None] * VD + col + tl.arange(0, COLS)[None, :]
    state = tl.zeros((KD, COLS), tl.float32)
    if INITIAL:
        state += tl.load(initial + (segment.to(tl.int64) * H + head) * (KD * VD) + places)
    if PARENTS:
        slot = tl.load(end_slots + tl.load(parents + segment)).to(tl.int64)
        state = tl.load(ends + (slot * H + head) * (KD * VD) + places)
    before += (tl.load(chunks + segment).to(tl.int64) * H + head) * (KD * VD)
    k += (head // (H // HK)) * KD
    w += head * KD
    u += head * VD + col
    new += head * VD + col
    decays += head.to(tl.int64) * num_rows
    for start in range(0, length, CHUNK):
        size = tl.minimum(length - start, CHUNK)
        tl.store(before + places, state.to(before.dtype.element_ty))
        b_w = rows_of(w, row, H * KD, size, 0, CHUNK, KD)
        b_u = rows_of(u, row, H * VD, size, 0, CHUNK, COLS)
        b_k = turned(k, row, HK * KD, size, CHUNK, KD)
        c = sums(decays, row, size, CHUNK)
        end = tl.load(decays + row + size - 1)
        n = b_u.to(tl.float32) - tl.dot(b_w, state.to(b_w.dtype), input_precision=PRECISION)
        put_rows(new, n, row, H * VD, size, 0, CHUNK, COLS)
        n *= tl.exp(end - c)[:, None]  # rows behind the end are zeros
        state = state * tl.exp(end) + tl.dot(b_k, n.to(b_k.dtype), input_precision=PRECISION)
        before += H * KD * VD
        row += CHUNK
    if ENDS:
        slot = tl.load(end_slots + segment)
        if slot >= 0:
            tl.store(ends + (slot.to(tl.int64) * H + head) * (KD * VD) + places, state)


@triton.jit(do_not_specialize=["num_rows"])
def outputs(
    q, k, before, new, decays, out, starts, sizes, num_rows,
    H: tl.constexpr, HK: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk of a head, some columns of its output."""
    col, head, chunk = tl.program_id(0) * COLS, tl.program_id(1), tl.program_id(2)
    row, size = tl.load(starts + chunk).to(tl.int64), tl.load(sizes + chunk)
    key = (head // (H // HK)) * KD
    i = tl.arange(0, CHUNK)
    c = sums(decays + head.to(tl.int64) * num_rows, row, size, CHUNK)
    b_q = rows_of(q + key, row, HK * KD, size, 0, CHUNK, KD)
    b_k = rows_of(k + key, row, HK * KD, size, 0, CHUNK, KD)
    b_s = tl.load(
        before + (chunk.to(tl.int64) * H + head) * (KD * VD)
        + tl.arange(0, KD)[:, None] * VD + col + tl.arange(0, COLS)[None, :]
    )  # fmt: skip
    o = tl.dot(b_q, b_s, input_precision=PRECISION) * tl.exp(c)[:, None]
    p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    p *= tl.exp(tl.where(i[:, None] >= i[None, :], c[:, None] - c[None, :], float("-inf")))
    b_n = rows_of(new + head * VD + col, row, H * VD, size, 0, CHUNK, COLS)
    o += tl.dot(p.to(b_n.dtype), b_n, input_precision=PRECISION)
    put_rows(out + head * VD + col, o, row, H * VD, size, 0, CHUNK, COLS)
