"""Triton kernels of `delta.py`'s backward pass; names as in `delta_triton.py`, `dx` the gradient of x, `dS` that of the
state after a chunk:

    dN = P^T dout + e^(c_end - c) (k dS);  dS <- e^(c_end) dS + q^T (e^c dout) - W^T dN      `state_gradients`
    dq = e^c (dout S^T) + D k,  D_ij = e^(c_i - c_j) <dout_i, N_j>, j <= i                   `query_gradients`
    dk = e^(c_end - c) (N dS^T) + D^T q + (what follows through T)                           `key_gradients`
    X = T^T dW = -T^T (dN S^T),  Y = T^T dN: gradients of b e^c k and of b v                 `system_gradients`
    dL = -(X W^T + Y U^T), strictly lower                                                    `last_gradients`

The last line is dL = -T^T dT T^T with dT = dW (b e^c k)^T + dU (b v)^T. Sums over value heads that share a key head
are made in one program, those over rows are too, and nothing is added atomically: results repeat bit by bit.

Tiles are loaded where they are used and again where they are used again: held, they would take more registers than
there are. Products of 64 rows are for four warps: with eight Triton computes some of them twice.

Of the decays c: a product scaled by e^(c_i - c_j) adds itself times its gradient to that of c_i and takes it from that
of c_j. The diagonals of P and L have none. Steps' log decays get the sums of these from their row to the chunk's end.
"""

# Kernels are written in Triton's language, not in Python's types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from lightrl.kernels.delta_triton import put_rows, rows_of, sums, turned


@triton.jit
def _decay(c, CHUNK: tl.constexpr, LEAST: tl.constexpr):
    """[i, j]: e^(c_i - c_j) where i - j >= LEAST, else 0."""
    i = tl.arange(0, CHUNK)
    return tl.exp(tl.where(i[:, None] >= i[None, :] + LEAST, c[:, None] - c[None, :], float("-inf")))


@triton.jit
def _decay_turned(c, CHUNK: tl.constexpr, LEAST: tl.constexpr):
    """[j, i]: the transposed of `_decay`."""
    i = tl.arange(0, CHUNK)
    return tl.exp(tl.where(i[None, :] >= i[:, None] + LEAST, c[None, :] - c[:, None], float("-inf")))


@triton.jit(do_not_specialize=["num_rows"])
def inner_gradients(
    q, k, grad, decays, d_new, starts, sizes, num_rows,
    H: tl.constexpr, HK: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P^T dout, of a chunk of a head."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, size = tl.load(starts + chunk).to(tl.int64), tl.load(sizes + chunk)
    key = (head // (H // HK)) * KD
    c = sums(decays + head.to(tl.int64) * num_rows, row, size, CHUNK)
    b_k = rows_of(k + key, row, HK * KD, size, 0, CHUNK, KD)
    b_q = rows_of(q + key, row, HK * KD, size, 0, CHUNK, KD)
    p = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * _decay_turned(c, CHUNK, 0)
    b_o = rows_of(grad + head * VD, row, H * VD, size, 0, CHUNK, VD)
    d = tl.dot(p.to(b_o.dtype), b_o, input_precision=PRECISION)
    put_rows(d_new + head * VD, d, row, H * VD, size, 0, CHUNK, VD)


@triton.jit(do_not_specialize=["num_rows"])
def state_gradients(
    q, k, w, grad, decays, grad_ends, d_starts, start_slots, d_new, d_after,
    wave, rows, lengths, chunks, child_offsets, children, num_rows,
    H: tl.constexpr, HK: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr,
    ENDS: tl.constexpr, CHILDREN: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A segment of the wave, a head, some columns of its state: one chunk before the other."""
    head, segment = tl.program_id(1), tl.load(wave + tl.program_id(2))
    col = tl.program_id(0) * COLS
    first, length = tl.load(rows + segment).to(tl.int64), tl.load(lengths + segment)
    places = tl.arange(0, KD)[:, None] * VD + col + tl.arange(0, COLS)[None, :]
    d = tl.zeros((KD, COLS), tl.float32)
    if ENDS:
        d += tl.load(grad_ends + (segment.to(tl.int64) * H + head) * (KD * VD) + places)
    if CHILDREN:
        for child in range(tl.load(child_offsets + segment), tl.load(child_offsets + segment + 1)):
            slot = tl.load(start_slots + tl.load(children + child)).to(tl.int64)
            d += tl.load(d_starts + (slot * H + head) * (KD * VD) + places)
    count = tl.cdiv(length, CHUNK)
    d_after += ((tl.load(chunks + segment) + count - 1).to(tl.int64) * H + head) * (KD * VD)
    key = (head // (H // HK)) * KD
    q += key
    k += key
    w += head * KD
    grad += head * VD + col
    d_new += head * VD + col
    decays += head.to(tl.int64) * num_rows
    for step in range(count):
        start = (count - 1 - step) * CHUNK
        row, size = first + start, tl.minimum(length - start, CHUNK)
        tl.store(d_after + places, d.to(d_after.dtype.element_ty))
        b_k = rows_of(k, row, HK * KD, size, 0, CHUNK, KD)
        b_q = turned(q, row, HK * KD, size, CHUNK, KD)
        b_w = turned(w, row, H * KD, size, CHUNK, KD)
        b_o = rows_of(grad, row, H * VD, size, 0, CHUNK, COLS)
        inner = rows_of(d_new, row, H * VD, size, 0, CHUNK, COLS).to(tl.float32)
        c = sums(decays, row, size, CHUNK)
        end = tl.load(decays + row + size - 1)
        dn = inner + tl.dot(b_k, d.to(b_k.dtype), input_precision=PRECISION) * tl.exp(end - c)[:, None]
        put_rows(d_new, dn, row, H * VD, size, 0, CHUNK, COLS)
        scaled = (b_o.to(tl.float32) * tl.exp(c)[:, None]).to(b_o.dtype)
        d = d * tl.exp(end) + tl.dot(b_q, scaled, input_precision=PRECISION)
        d -= tl.dot(b_w, dn.to(b_w.dtype), input_precision=PRECISION)
        d_after -= H * KD * VD
    if STARTS:
        slot = tl.load(start_slots + segment)
        if slot >= 0:
            tl.store(d_starts + (slot.to(tl.int64) * H + head) * (KD * VD) + places, d)


@triton.jit
def _normed_gradient(d, x, inverse, place, mask, scale, NORM: tl.constexpr):
    """From the gradient of `scale` times a unit vector, which `x` is, to that of the vector it was made from."""
    if NORM:
        r = tl.load(inverse + place, mask=mask, other=0.0) * scale
        along = tl.sum(d * x, axis=1) / (scale * scale)
        return (d - x * along[:, None]) * r[:, None]
    return d * scale


@triton.jit(do_not_specialize=["num_rows"])
def query_gradients(
    q, k, before, new, decays, grad, inverse, dq, d_decays, starts, sizes, num_rows,
    stride: tl.constexpr, scale: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, CHUNK: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a chunk of a key head; and into `d_decays` of each of its value heads what comes from the output."""
    key, chunk = tl.program_id(0), tl.program_id(1)
    row, size = tl.load(starts + chunk).to(tl.int64), tl.load(sizes + chunk)
    i = tl.arange(0, CHUNK)
    square = tl.arange(0, KD)[:, None] * VD + tl.arange(0, VD)[None, :]
    total = tl.zeros((CHUNK, KD), tl.float32)
    for number in range(H // HK):
        head = key * (H // HK) + number
        place = head.to(tl.int64) * num_rows + row + i
        c = sums(decays + head.to(tl.int64) * num_rows, row, size, CHUNK)
        b_o = rows_of(grad + head * VD, row, H * VD, size, 0, CHUNK, VD)
        b_s = tl.load(before + (chunk.to(tl.int64) * H + head) * (KD * VD) + square)
        part = tl.dot(b_o, tl.trans(b_s), input_precision=PRECISION) * tl.exp(c)[:, None]
        b_q = rows_of(q + key * KD, row, HK * KD, size, 0, CHUNK, KD)
        d_c = tl.sum(part * b_q.to(tl.float32), axis=1)
        total += part
        b_n = rows_of(new + head * VD, row, H * VD, size, 0, CHUNK, VD)
        inner = tl.dot(b_o, tl.trans(b_n), input_precision=PRECISION) * _decay(c, CHUNK, 0)
        b_k = rows_of(k + key * KD, row, HK * KD, size, 0, CHUNK, KD)
        total += tl.dot(inner.to(b_k.dtype), b_k, input_precision=PRECISION)
        shares = inner * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        shares = tl.where(i[:, None] > i[None, :], shares, 0.0)
        d_c += tl.sum(shares, axis=1) - tl.sum(shares, axis=0)
        tl.store(d_decays + place, d_c, mask=i < size)
    b_q = rows_of(q + key * KD, row, HK * KD, size, 0, CHUNK, KD)
    d = _normed_gradient(total, b_q.to(tl.float32), inverse, (row + i) * HK + key, i < size, scale, NORM)
    put_rows(dq + key * KD, d, row, stride, size, 0, CHUNK, KD)


@triton.jit(do_not_specialize=["num_rows"])
def key_gradients(
    q, k, before, d_after, new, decays, grad, dk, d_decays, starts, sizes, num_rows,
    H: tl.constexpr, HK: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of dk of a chunk of a key head that does not go through T, float32; completes `d_decays` but for T's."""
    key, chunk = tl.program_id(0), tl.program_id(1)
    row, size = tl.load(starts + chunk).to(tl.int64), tl.load(sizes + chunk)
    i = tl.arange(0, CHUNK)
    square = tl.arange(0, KD)[:, None] * VD + tl.arange(0, VD)[None, :]
    slab = tl.arange(0, KD)[:, None] * VD + tl.arange(0, COLS)[None, :]
    total = tl.zeros((CHUNK, KD), tl.float32)
    for number in range(H // HK):
        head = key * (H // HK) + number
        place = head.to(tl.int64) * num_rows + row + i
        c = sums(decays + head.to(tl.int64) * num_rows, row, size, CHUNK)
        end = tl.load(decays + head.to(tl.int64) * num_rows + row + size - 1)
        b_n = rows_of(new + head * VD, row, H * VD, size, 0, CHUNK, VD)
        state = (chunk.to(tl.int64) * H + head) * (KD * VD)
        b_d = tl.load(d_after + state + square)
        part = tl.dot(b_n, tl.trans(b_d), input_precision=PRECISION) * tl.exp(end - c)[:, None]
        b_k = rows_of(k + key * KD, row, HK * KD, size, 0, CHUNK, KD)
        shares = tl.where(i < size - 1, tl.sum(part * b_k.to(tl.float32), axis=1), 0.0)
        total += part
        after = tl.sum(shares, axis=0)
        for col in range(0, VD, COLS):
            s = tl.load(before + state + slab + col).to(tl.float32)
            s *= tl.load(d_after + state + slab + col).to(tl.float32)
            after += tl.exp(end) * tl.sum(tl.sum(s, axis=1), axis=0)
        d_c = tl.load(d_decays + place, mask=i < size, other=0.0) - shares
        tl.store(d_decays + place, d_c + tl.where(i == size - 1, after, 0.0), mask=i < size)
        b_o = rows_of(grad + head * VD, row, H * VD, size, 0, CHUNK, VD)
        inner = tl.dot(b_n, tl.trans(b_o), input_precision=PRECISION) * _decay_turned(c, CHUNK, 0)
        b_q = rows_of(q + key * KD, row, HK * KD, size, 0, CHUNK, KD)
        total += tl.dot(inner.to(b_q.dtype), b_q, input_precision=PRECISION)
    put_rows(dk + key * KD, total, row, HK * KD, size, 0, CHUNK, KD)


@triton.jit
def system_gradients(
    before, d_new, solved, x, y, starts, sizes,
    H: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X and Y of a chunk of a head."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, size = tl.load(starts + chunk).to(tl.int64), tl.load(sizes + chunk)
    b_t = turned(solved + head * CHUNK, row, H * CHUNK, size, CHUNK, CHUNK)
    b_d = rows_of(d_new + head * VD, row, H * VD, size, 0, CHUNK, VD)
    put_rows(y + head * VD, tl.dot(b_t, b_d, input_precision=PRECISION), row, H * VD, size, 0, CHUNK, VD)
    b_s = tl.load(
        before
        + (chunk.to(tl.int64) * H + head) * (KD * VD)
        + tl.arange(0, KD)[:, None] * VD
        + tl.arange(0, VD)[None, :]
    )
    d_w = -tl.dot(b_d, tl.trans(b_s), input_precision=PRECISION)
    d = tl.dot(b_t, d_w.to(b_t.dtype), input_precision=PRECISION)
    put_rows(x + head * KD, d, row, H * KD, size, 0, CHUNK, KD)


@triton.jit(do_not_specialize=["num_rows"])
def last_gradients(
    k, v, w, u, x, y, beta, decays, inverse, dk_part, d_decays, dk, dv, d_log_decay, d_beta, starts, sizes,
    num_rows,
    stride_v: tl.constexpr, stride_dk: tl.constexpr, stride_dv: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, CHUNK: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Through L, and all that is left: dk of a chunk of a key head, the other gradients of its value heads."""
    key, chunk = tl.program_id(0), tl.program_id(1)
    row, size = tl.load(starts + chunk).to(tl.int64), tl.load(sizes + chunk)
    i = tl.arange(0, CHUNK)
    inside = i < size
    total = tl.zeros((CHUNK, KD), tl.float32)
    for number in range(H // HK):
        head = key * (H // HK) + number
        c = sums(decays + head.to(tl.int64) * num_rows, row, size, CHUNK)
        d_c = tl.load(d_decays + head.to(tl.int64) * num_rows + row + i, mask=inside, other=0.0)
        b = tl.load(beta + (row + i) * H + head, mask=inside, other=0.0).to(tl.float32)
        b_x = rows_of(x + head * KD, row, H * KD, size, 0, CHUNK, KD).to(tl.float32) * tl.exp(c)[:, None]
        b_k = rows_of(k + key * KD, row, HK * KD, size, 0, CHUNK, KD)
        d_b = tl.sum(b_x * b_k.to(tl.float32), axis=1)
        d_c += d_b * b
        total += b_x * b[:, None]
        b_y = rows_of(y + head * VD, row, H * VD, size, 0, CHUNK, VD).to(tl.float32)
        b_v = rows_of(v + head * VD, row, stride_v, size, 0, CHUNK, VD)
        d_b += tl.sum(b_y * b_v.to(tl.float32), axis=1)
        put_rows(dv + head * VD, b_y * b[:, None], row, stride_dv, size, 0, CHUNK, VD)
        b_y = rows_of(y + head * VD, row, H * VD, size, 0, CHUNK, VD)
        b_u = rows_of(u + head * VD, row, H * VD, size, 0, CHUNK, VD)
        d_l = tl.dot(b_y, tl.trans(b_u), input_precision=PRECISION)
        d_m = tl.dot(b_u, tl.trans(b_y), input_precision=PRECISION)  # the transposed of d_l
        b_x = rows_of(x + head * KD, row, H * KD, size, 0, CHUNK, KD)
        b_w = rows_of(w + head * KD, row, H * KD, size, 0, CHUNK, KD)
        d_l += tl.dot(b_x, tl.trans(b_w), input_precision=PRECISION)
        d_m += tl.dot(b_w, tl.trans(b_x), input_precision=PRECISION)
        d_m *= -_decay_turned(c, CHUNK, 1) * b[None, :]
        b_k = rows_of(k + key * KD, row, HK * KD, size, 0, CHUNK, KD)
        total += tl.dot(d_m.to(b_k.dtype), b_k, input_precision=PRECISION)
        d_l *= -_decay(c, CHUNK, 1)
        shares = d_l * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
        d_b += tl.sum(shares, axis=1)
        shares *= b[:, None]
        d_c += tl.sum(shares, axis=1) - tl.sum(shares, axis=0)
        total += tl.dot((d_l * b[:, None]).to(b_k.dtype), b_k, input_precision=PRECISION)
        d_g = tl.cumsum(d_c, axis=0, reverse=True)
        tl.store(d_log_decay + (row + i) * H + head, d_g.to(d_log_decay.dtype.element_ty), mask=inside)
        tl.store(d_beta + (row + i) * H + head, d_b.to(d_beta.dtype.element_ty), mask=inside)
    total += rows_of(dk_part + key * KD, row, HK * KD, size, 0, CHUNK, KD)
    b_k = rows_of(k + key * KD, row, HK * KD, size, 0, CHUNK, KD)
    d = _normed_gradient(total, b_k.to(tl.float32), inverse, (row + i) * HK + key, inside, 1.0, NORM)
    put_rows(dk + key * KD, d, row, stride_dk, size, 0, CHUNK, KD)
