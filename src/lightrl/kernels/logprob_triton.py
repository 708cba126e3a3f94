"""`linear_logprobs` on a GPU: the vocabulary a chunk at a time, float32 logits never rounded and never all in memory.

Why these loops (N rows, V words, H hidden; figures for N = 16,384, V = 151,936 on an H200):

- The cost is four products of 2NVH: logits, logits again, and the gradients of hidden and weight; 31 ms at H = 1,024,
  118 ms at H = 4,096 at the 660 to 690 TFLOP/s that cuBLAS reaches. Gradients cannot be made in the forward pass (three
  products): the weight's sums over tokens, whose factors only the loss knows. Keeping probabilities instead of
  computing logits again saves a product, and takes 5 GB.
- Float32 logits that pass through HBM cost 10 GB written and read, 2.5 ms each way, twice. `tiled` lets cuBLAS write
  them for as few rows that they stay near L2; `fused` reduces them in the registers where they are made.
- A chunk of the vocabulary with all rows: its part of the weight's gradient is final, written once (over chunks of rows
  it would be a float32 sum, of 2.5 GB at H = 4,096, read and written every time). The gradient of hidden is the float32
  sum, N * H * 4 bytes a chunk read and written: 0.3 GB at H = 4,096. So chunks are as wide as memory allows.

Memory at a time: the chunk's gradient of logits in the inputs' precision, `rows` of its float32 logits (`tiled`), and
the float32 sum. No atomic operation: results repeat bit by bit.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

Way = Literal["fused", "tiled"]
_LOG2_E = 1.4426950408889634
# Stands for a logit of -inf: its exponential is 0 beside any other, and 0 times it is not nan.
_FLOOR = tl.constexpr(-1e30)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How the fused product is cut: `rows` by `columns` logits a program, `depth` of H at a time."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    programs: int = 1
    """A multiprocessor; 0: one a tile."""
    group: int = 16
    """Tiles of rows that run beside each other on the same words."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the work is cut. Changes time and memory, not results beyond rounding."""

    forward: Way = "tiled"
    backward: Way = "tiled"
    gradient_bytes: int = 128 << 20  # of the gradient of a chunk's logits
    logits_bytes: int = 64 << 20  # of float32 logits at a time, `tiled`
    max_columns: int = 8192
    tile: Tile = Tile()
    backward_tile: Tile = Tile()

    def columns(self, num_rows: int, vocab: int, itemsize: int) -> int:
        """Width of a chunk: whole tiles, chunks as equal as can be."""
        wanted = min(self.max_columns, max(1024, self.gradient_bytes // (itemsize * max(1, num_rows))))
        count = max(1, round(vocab / wanted), triton.cdiv(vocab, self.max_columns))
        return 128 * triton.cdiv(triton.cdiv(vocab, count), 128)

    def rows(self, columns: int) -> int:
        """Rows of float32 logits at a time."""
        return max(128, self.logits_bytes // (4 * columns) // 128 * 128)


# ---- what all kernels share: logits `z` in units of log 2, so that exp is one instruction


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


# ---- tiled: cuBLAS makes float32 logits, a program reads a row of them


@triton.jit
def _tile_logits(z_ptr, stride, bias_ptr, columns, width, factor, HAS_BIAS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z = tl.load(z_ptr + row * stride + columns, mask=columns < width, other=0.0) * factor
    z += _offsets(bias_ptr, columns, width, factor, HAS_BIAS)
    return tl.where(z < _FLOOR, _FLOOR, z)


@triton.jit
def _tile_statistics_kernel(
    z_ptr, stride, bias_ptr, lse_ptr, entropy_ptr, width, factor, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    z = _tile_logits(z_ptr, stride, bias_ptr, columns, width, factor, HAS_BIAS)
    lse, entropy = _statistics(z[None, :])
    one = tl.arange(0, 1)
    tl.store(lse_ptr + row + one, lse)
    tl.store(entropy_ptr + row + one, entropy)


@triton.jit
def _tile_gradient_kernel(
    z_ptr,
    stride,
    bias_ptr,
    lse2_ptr,
    slope_ptr,
    curve_ptr,
    dz_ptr,
    dz_stride,
    width,
    factor,
    HAS_BIAS: tl.constexpr,
    HAS_CURVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK)
    z = _tile_logits(z_ptr, stride, bias_ptr, columns, width, factor, HAS_BIAS)
    curve = tl.load(curve_ptr + row) if HAS_CURVE else 0.0
    dz = _logit_gradient(z[None, :], tl.load(lse2_ptr + row), tl.load(slope_ptr + row), curve, HAS_CURVE)
    place = dz_ptr + row.to(tl.int64)[:, None] * dz_stride + columns[None, :]
    tl.store(place, dz.to(dz_ptr.dtype.element_ty), mask=(columns < width)[None, :])


# ---- fused: the product itself in Triton


@triton.jit
def _tile_place(tile, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile. Tiles that run together share words and rows, for the sake of L2."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    in_group = GROUP * tl.cdiv(num_columns, COLUMNS)
    first = tile // in_group * GROUP
    size = min(row_tiles - first, GROUP)
    return (first + tile % in_group % size) * ROWS, tile % in_group // size * COLUMNS


@triton.jit
def _fused_statistics_kernel(
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
def _fused_gradient_kernel(
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
def _combine_kernel(
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
def _chosen_kernel(
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
def _set_chosen_kernel(dz_ptr, stride, targets_ptr, values_ptr, first, width, num_rows, BLOCK: tl.constexpr):
    """The targets' places of a chunk's gradient: there it is not the formula of all others."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(targets_ptr + rows, mask=rows < num_rows, other=-1) - first
    value = tl.load(values_ptr + rows, mask=rows < num_rows, other=0.0).to(dz_ptr.dtype.element_ty)
    tl.store(dz_ptr + rows.to(tl.int64) * stride + column, value, mask=(column >= 0) & (column < width))


# ---- the operation


def linear_logprobs_triton(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_logprobs` for hidden and weight of one dtype on one GPU (or on a CPU in Triton's interpreter)."""
    result: tuple[Tensor, Tensor] = _LinearLogprobs.apply(hidden, weight, targets, bias, temperature, plan or Plan())
    return result


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        plan: Plan,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # no gradient of the entropy, no work for it
        head = _Head(hidden.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), temperature)
        lse, entropy = head.statistics(plan)
        logprobs = head.chosen(targets := targets.contiguous(), lse)
        ctx.save_for_backward(head.hidden, head.weight, head.bias, targets, lse, entropy, logprobs)
        ctx.temperature, ctx.plan = temperature, plan
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy, logprobs = ctx.saved_tensors
        head, plan = _Head(hidden, weight, bias, ctx.temperature), ctx.plan
        rows = _RowGradients.of(*grads, lse=lse, entropy=entropy, logprobs=logprobs, temperature=ctx.temperature)
        need_hidden, need_weight, _, need_bias, *_ = ctx.needs_input_grad
        grad_hidden = hidden.new_empty(hidden.shape, dtype=torch.float32) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        columns = plan.columns(len(hidden), len(weight), hidden.itemsize)
        buffer = hidden.new_empty(len(hidden), columns)
        for first in range(0, len(weight), columns):
            words = slice(first, min(first + columns, len(weight)))
            dz = buffer[:, : words.stop - first]
            head.logit_gradient(words, rows, dz, plan)
            grid = (triton.cdiv(len(dz), 256),)
            _set_chosen_kernel[grid](dz, columns, targets, rows.chosen, first, dz.shape[1], len(dz), BLOCK=256)
            if grad_hidden is not None:
                _add_product(grad_hidden, dz, weight[words], first=first == 0)
            if grad_weight is not None:
                torch.mm(dz.T, hidden, out=grad_weight[words])
            if grad_bias is not None:
                grad_bias[words] = dz.sum(0, dtype=torch.float32)
        del buffer, dz
        return (None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, grad_bias, None, None)


@dataclass(frozen=True)
class _RowGradients:
    """What the gradient of logits takes from each row, [N] float32 each."""

    lse2: Tensor
    slope: Tensor
    curve: Tensor | None  # None: no gradient of the entropy
    chosen: Tensor  # the gradient at the target

    @classmethod
    def of(
        cls,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        *,
        lse: Tensor,
        entropy: Tensor,
        logprobs: Tensor,
        temperature: float,
    ) -> _RowGradients:
        g = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs.contiguous() / temperature
        chosen = -torch.expm1(logprobs) * g  # 1 - p, exact where p is nearly 1
        if grad_entropy is None:
            return cls(lse * _LOG2_E, -g, None, chosen)
        k = grad_entropy.contiguous() / temperature
        finite = logprobs.clamp_min(torch.finfo(torch.float32).min)  # a masked target: 0 * inf would be nan
        chosen -= k * logprobs.exp() * (finite + entropy)
        return cls(lse * _LOG2_E, -(g + k * entropy), -k / _LOG2_E, chosen)


@dataclass(frozen=True)
class _Head:
    """hidden [N, H], weight [V, H], bias [V], all contiguous."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float

    @property
    def factor(self) -> float:
        """From products to logits in units of log 2."""
        return _LOG2_E / self.temperature

    def statistics(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Log of the sum of exponentials, and entropy, [N] float32 each."""
        num_rows, vocab = len(self.hidden), len(self.weight)
        fused = plan.forward == "fused" and self._fits_descriptors()
        columns = plan.tile.columns if fused else plan.columns(num_rows, vocab, self.hidden.itemsize)
        lses, entropies = self.hidden.new_empty(2, triton.cdiv(vocab, columns), num_rows, dtype=torch.float32)
        if fused:
            self._fused_statistics(plan.tile, lses, entropies)
        else:
            for part, first in enumerate(range(0, vocab, columns)):
                words = slice(first, min(first + columns, vocab))
                for rows, z, bias in self._tiles(words, plan.rows(columns)):
                    _tile_statistics_kernel[(len(z),)](
                        z,
                        z.stride(0),
                        bias,
                        lses[part, rows],
                        entropies[part, rows],
                        z.shape[1],
                        self.factor,
                        HAS_BIAS=self.bias is not None,
                        BLOCK=triton.next_power_of_2(columns),
                        num_warps=8,
                    )
        lse, entropy = self.hidden.new_empty(2, num_rows, dtype=torch.float32)
        grid = (triton.cdiv(num_rows, 32),)
        _combine_kernel[grid](lses, entropies, lse, entropy, len(lses), num_rows, PARTS=32, ROWS=32)
        return lse, entropy

    def chosen(self, targets: Tensor, lse: Tensor) -> Tensor:
        """Log-probs [N] of the targets."""
        logprobs = torch.empty_like(lse)
        _chosen_kernel[(len(lse),)](
            self.hidden,
            self.weight,
            self.hidden if self.bias is None else self.bias,
            targets,
            lse,
            logprobs,
            len(self.weight),
            self.hidden.shape[1],
            1 / self.temperature,
            HAS_BIAS=self.bias is not None,
            BLOCK=min(1024, triton.next_power_of_2(self.hidden.shape[1])),
        )
        return logprobs

    def logit_gradient(self, words: slice, rows: _RowGradients, dz: Tensor, plan: Plan) -> None:
        """Fill dz [N, words] but for the targets' places."""
        if plan.backward == "fused" and self._fits_descriptors():
            self._fused_gradient(plan.backward_tile, words, rows, dz)
            return
        for part, z, bias in self._tiles(words, plan.rows(dz.stride(0))):
            _tile_gradient_kernel[(len(z),)](
                z,
                z.stride(0),
                bias,
                rows.lse2[part],
                rows.slope[part],
                rows.slope[part] if rows.curve is None else rows.curve[part],
                dz[part],
                dz.stride(0),
                z.shape[1],
                self.factor,
                HAS_BIAS=self.bias is not None,
                HAS_CURVE=rows.curve is not None,
                BLOCK=triton.next_power_of_2(dz.stride(0)),
                num_warps=8,
            )

    def _tiles(self, words: slice, num_rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, their float32 products with the words, the words' bias or anything) in one piece of memory."""
        weight = self.weight[words].T
        buffer = self.hidden.new_empty(min(num_rows, len(self.hidden)), weight.shape[1], dtype=torch.float32)
        for first in range(0, len(self.hidden), num_rows):
            rows = slice(first, min(first + num_rows, len(self.hidden)))
            z = buffer[: rows.stop - first]
            _product(z, self.hidden[rows], weight)
            yield rows, z, z if self.bias is None else self.bias[words]

    def _fits_descriptors(self) -> bool:
        """Whether the hardware can address both by tile. Float32 products are cuBLAS's, in the precision set there."""
        both = (self.hidden, self.weight)
        return (
            len(self.hidden) > 0
            and all(t.data_ptr() % 16 == 0 and t.stride(0) * t.itemsize % 16 == 0 for t in both)
            and (self.hidden.itemsize == 2 or not self.hidden.is_cuda)
        )

    def _fused_statistics(self, tile: Tile, lses: Tensor, entropies: Tensor) -> None:
        num_rows, vocab = len(self.hidden), len(self.weight)
        _fused_statistics_kernel[_grid(tile, num_rows, vocab, self.hidden)](
            TensorDescriptor.from_tensor(self.hidden, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(self.weight, [tile.columns, tile.depth]),
            self.weight if self.bias is None else self.bias,
            lses,
            entropies,
            num_rows,
            vocab,
            self.hidden.shape[1],
            self.factor,
            HAS_BIAS=self.bias is not None,
            **_constants(tile),
        )

    def _fused_gradient(self, tile: Tile, words: slice, rows: _RowGradients, dz: Tensor) -> None:
        _fused_gradient_kernel[_grid(tile, len(dz), dz.shape[1], self.hidden)](
            TensorDescriptor.from_tensor(self.hidden, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(self.weight[words], [tile.columns, tile.depth]),
            TensorDescriptor.from_tensor(dz, [tile.rows, tile.columns]),
            self.weight if self.bias is None else self.bias[words],
            rows.lse2,
            rows.slope,
            rows.slope if rows.curve is None else rows.curve,
            *dz.shape,
            self.hidden.shape[1],
            self.factor,
            HAS_BIAS=self.bias is not None,
            HAS_CURVE=rows.curve is not None,
            **_constants(tile),
        )


def _grid(tile: Tile, num_rows: int, num_columns: int, on: Tensor) -> tuple[int]:
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    if not tile.programs:
        return (tiles,)
    processors = torch.cuda.get_device_properties(on.device).multi_processor_count if on.is_cuda else 3
    return (min(tiles, tile.programs * processors),)


def _constants(tile: Tile) -> dict[str, int]:
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b in float32, as the accumulator has it."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.float(), b.float(), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a @ b in float32, in one pass over it; `first`: total = a @ b."""
    if first:
        _product(total, a, b)
    elif a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
