"""`linear_logprobs` on a GPU: the vocabulary a chunk at a time, float32 logits never rounded and never all in memory.

Why these loops (N rows, V words, H hidden; figures for N = 16,384, V = 151,936 on an H200):

- The cost is four products of 2NVH: logits, logits again, and the gradients of hidden and weight; 31 ms at H = 1,024,
  118 ms at H = 4,096 at the 660 to 690 TFLOP/s that cuBLAS reaches. Gradients cannot be made in the forward pass (three
  products): the weight's sums over tokens, whose factors only the loss knows. Keeping probabilities instead of
  computing logits again saves a product, and takes 5 GB.
- Float32 logits that pass through HBM cost 10 GB written and read, 2.5 ms each way, twice: they are reduced in the
  registers where they are made. (Left to cuBLAS, a few rows at a time so that they stay near L2, both passes took 41 ms
  instead of 33 at H = 1,024, and 134 instead of 127 at 4,096.)
- A chunk of the vocabulary with all rows: its part of the weight's gradient is final, written once (over chunks of rows
  it would be a float32 sum, of 2.5 GB at H = 4,096, read and written every time). The gradient of hidden is the float32
  sum, N * H * 4 bytes a chunk read and written: 0.3 GB at H = 4,096. So chunks are as wide as memory allows.

Memory at a time: the chunk's gradient of logits in the inputs' precision and the float32 sum: 256 + 256 MiB at
H = 4,096. No atomic operation: results repeat bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from lightrl.kernels.logprob_kernels import (
    chosen_kernel,
    combine_kernel,
    gradient_kernel,
    set_chosen_kernel,
    statistics_kernel,
)

_LOG2_E = 1.4426950408889634


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
    group: int = 32
    """Tiles of rows that run beside each other on the same words."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the work is cut. Changes time and memory, not results beyond rounding."""

    gradient_bytes: int = 256 << 20  # of the gradient of a chunk's logits
    max_columns: int = 16_384
    tile: Tile = Tile()
    backward_tile: Tile = Tile()

    def columns(self, num_rows: int, vocab: int, itemsize: int) -> int:
        """Width of a chunk: whole tiles, chunks as equal as can be."""
        wanted = min(self.max_columns, max(1024, self.gradient_bytes // (itemsize * max(1, num_rows))))
        count = max(1, round(vocab / wanted), triton.cdiv(vocab, self.max_columns))
        return 128 * triton.cdiv(triton.cdiv(vocab, count), 128)


def linear_logprobs_triton(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_logprobs` for hidden and weight that it `fits`, on one GPU (or on a CPU in Triton's interpreter)."""
    result: tuple[Tensor, Tensor] = _LinearLogprobs.apply(hidden, weight, targets, bias, temperature, plan or Plan())
    return result


def fits(hidden: Tensor, weight: Tensor) -> bool:
    """Can the hardware address both by tile, and multiply them? (Float32 on a GPU is left to cuBLAS.)"""
    dtypes = (torch.bfloat16, torch.float16) if hidden.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    aligned = all(t.data_ptr() % 16 == 0 or not t.is_contiguous() for t in (hidden, weight))
    whole = hidden.shape[1] * hidden.itemsize % 16 == 0
    return len(hidden) > 0 and hidden.dtype == weight.dtype in dtypes and aligned and whole


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
            set_chosen_kernel[grid](dz, columns, targets, rows.chosen, first, dz.shape[1], len(dz), BLOCK=256)
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
        tile, num_rows, vocab = plan.tile, len(self.hidden), len(self.weight)
        parts = triton.cdiv(vocab, tile.columns)
        lses, entropies = self.hidden.new_empty(2, parts, num_rows, dtype=torch.float32)
        statistics_kernel[_grid(tile, num_rows, vocab, self.hidden)](
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
        lse, entropy = self.hidden.new_empty(2, num_rows, dtype=torch.float32)
        grid = (triton.cdiv(num_rows, 32),)
        combine_kernel[grid](lses, entropies, lse, entropy, len(lses), num_rows, PARTS=32, ROWS=32)
        return lse, entropy

    def chosen(self, targets: Tensor, lse: Tensor) -> Tensor:
        """Log-probs [N] of the targets."""
        logprobs = torch.empty_like(lse)
        chosen_kernel[(len(lse),)](
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
        tile = plan.backward_tile
        gradient_kernel[_grid(tile, len(dz), dz.shape[1], self.hidden)](
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
