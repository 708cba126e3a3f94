"""Experts of a mixture: rows sorted by expert, one grouped product a projection, sums in float32.

On a GPU, the experts of most families run as Triton kernels (`moe_fused.py`); here is plain torch, for all others and
everywhere else.

Shapes: `T` tokens, `k` experts a token, `S = T * k` rows, `E` experts, `H` hidden, `I` intermediate. Gradients need no
atomic addition, so results repeat bit by bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
"""[n, 2I] -> [n, I]: how gate and up become one."""


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side: what most families do."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """A layer's experts."""

    gate_up: Tensor  # [E, 2I, H]; transposed: [E, H, 2I]
    down: Tensor  # [E, H, I]; transposed: [E, I, H]
    transposed: bool = False
    gate_up_bias: Tensor | None = None  # [E, 2I]
    down_bias: Tensor | None = None  # [E, H]


def grouped_experts_reference(
    hidden: Tensor, indices: Tensor, weights: Tensor, experts: ExpertWeights, activate: Activation
) -> Tensor:
    """What `grouped_experts` computes, one token and one expert at a time."""
    gate_up, down = experts.gate_up, experts.down
    if not experts.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    out = []
    for x, chosen, shares in zip(hidden, indices.tolist(), weights, strict=True):
        parts = []
        for expert, share in zip(chosen, shares, strict=True):
            y = x[None] @ gate_up[expert]
            y = y if experts.gate_up_bias is None else y + experts.gate_up_bias[expert]
            y = activate(y) @ down[expert]
            parts.append(share * (y if experts.down_bias is None else y + experts.down_bias[expert])[0])
        out.append(torch.stack(parts).sum(0))
    return torch.stack(out)


def grouped_experts(
    hidden: Tensor, indices: Tensor, weights: Tensor, experts: ExpertWeights, activate: Activation
) -> Tensor:
    """Sum over each token's experts of `weight * expert(token)`.

    hidden [T, H], indices [T, k] int64 (distinct in a row), weights [T, k] (float32 keeps them unrounded) -> [T, H] in
    hidden's dtype. Differentiable in all but the indices; an expert without rows gets a zero gradient.
    """
    if activate is swiglu and _fused_covers(hidden, experts):
        from lightrl.kernels.moe_fused import fused_experts

        return fused_experts(hidden, indices, weights, experts.gate_up, experts.down)
    rows = _Rows.sorted_by_expert(indices, experts.gate_up.shape[0])
    x = _Spread.apply(hidden, rows.token, rows.place)
    x = _grouped_linear(x, experts.gate_up, rows, experts.transposed)
    if experts.gate_up_bias is not None:
        x = torch.addmm(x, rows.one_hot(x.dtype), experts.gate_up_bias)  # indexing would add up gradients atomically
    # The weight goes in before the last product: after it, it would cost a tensor of [S, H] kept for the backward pass.
    x = (activate(x) * weights.flatten()[rows.source, None]).to(hidden.dtype)
    out = _Combine.apply(_grouped_linear(x, experts.down, rows, experts.transposed), rows.token, rows.place)
    if experts.down_bias is not None:
        shares = weights.new_zeros(len(weights), len(experts.down_bias), dtype=torch.float32)
        out = out + shares.scatter(1, indices, weights.float()) @ experts.down_bias.float()
    return out.to(hidden.dtype)


def _fused_covers(hidden: Tensor, experts: ExpertWeights) -> bool:
    """Experts of silu(gate) * up without biases, in bfloat16 on a GPU that has torch's grouped product, with Triton."""
    plain = experts.gate_up_bias is None and experts.down_bias is None and not experts.transposed
    fits = _has_grouped_kernel(hidden, experts.gate_up) and _has_grouped_kernel(hidden, experts.down)
    return plain and fits and has_kernels(hidden)


def has_kernels(x: Tensor) -> bool:
    """Can Triton kernels take this tensor? It is on a GPU, and Triton there."""
    return x.is_cuda and importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class _Rows:
    """The S pairs of a token and one of its experts, sorted by expert."""

    source: Tensor  # [S] place of each among the flattened indices
    token: Tensor  # [S]
    expert: Tensor  # [S]
    place: Tensor  # [T, k] where each pair stands after sorting
    ends: Tensor  # [E] int32, where each expert's rows end

    @classmethod
    def sorted_by_expert(cls, indices: Tensor, num_experts: int) -> _Rows:
        expert, source = indices.flatten().sort(stable=True)
        place = torch.empty_like(source)
        place[source] = torch.arange(len(source), device=source.device)
        all_experts = torch.arange(num_experts, device=expert.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, all_experts, right=True, out_int32=True)
        return cls(source, source // indices.shape[1], expert, place.view(indices.shape), ends)

    def one_hot(self, dtype: torch.dtype) -> Tensor:
        """[S, E], 1 at each row's expert."""
        return (self.expert[:, None] == torch.arange(len(self.ends), device=self.expert.device)).to(dtype)

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each expert, on the host: waits for the device."""
        ends = self.ends.tolist()
        return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class _Spread(torch.autograd.Function):
    """A token's row to each of its experts: [T, H] -> [S, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return hidden[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad[place].sum(1, dtype=torch.float32).to(grad.dtype), None, None


class _Combine(torch.autograd.Function):
    """The sum of a token's rows, in float32: [S, H] -> [T, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        ctx.dtype = rows.dtype
        return rows[place].sum(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return grad.to(ctx.dtype)[token], None, None


def _grouped_linear(x: Tensor, weight: Tensor, rows: _Rows, transposed: bool) -> Tensor:
    """Each expert's rows times its matrix: x [S, in], weight [E, out, in] (transposed: [E, in, out]) -> [S, out]."""
    matrices = weight if transposed else weight.transpose(1, 2)
    if _has_grouped_kernel(x, matrices):
        grouped_mm = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
        if torch.cuda.get_device_capability(x.device) != (9, 0):
            matrices = _ZeroWhereIdle.apply(matrices, rows.ends)
        return grouped_mm(x, matrices, offs=rows.ends)
    product: Tensor = _LoopedProduct.apply(x, matrices, rows.counts)
    return product


def _has_grouped_kernel(x: Tensor, matrices: Tensor) -> bool:
    """torch's grouped product: bfloat16, Ampere or newer, rows of 16 bytes."""
    return (
        x.is_cuda
        and x.dtype == matrices.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and all(size % 8 == 0 for size in matrices.shape[1:])
    )


class _ZeroWhereIdle(torch.autograd.Function):
    """The same matrices. What torch's product leaves as the gradient of an expert without rows is zero on Hopper, but
    anything on Blackwell (pytorch/pytorch#172439)."""

    @staticmethod
    def forward(ctx: Any, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return matrices.view_as(matrices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ends,) = ctx.saved_tensors
        idle = ends.diff(prepend=ends.new_zeros(1)) == 0
        return grad.masked_fill(idle[:, None, None], 0), None


class _LoopedProduct(torch.autograd.Function):
    """x [S, in] times matrices [E, in, out], a product an expert into its place of one result.

    Indexing `matrices[e]` under autograd would make a zero tensor of all experts for each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, matrices)
        ctx.counts = counts
        out = x.new_empty(x.shape[0], matrices.shape[2])
        for rows, matrix, result in zip(x.split(counts), matrices.unbind(), out.split(counts), strict=True):
            if len(rows):
                torch.mm(rows, matrix, out=result)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, matrices = ctx.saved_tensors
        grads = grad.split(ctx.counts)
        grad_x = grad_matrices = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            for mine, matrix, result in zip(grads, matrices.mT.unbind(), grad_x.split(ctx.counts), strict=True):
                if len(mine):
                    torch.mm(mine, matrix, out=result)
        if ctx.needs_input_grad[1]:
            grad_matrices = torch.empty_like(matrices)
            for rows, mine, result in zip(x.split(ctx.counts), grads, grad_matrices.unbind(), strict=True):
                if len(mine):
                    torch.mm(rows.T, mine, out=result)
                else:
                    result.zero_()
        return grad_x, grad_matrices, None
