"""A mixture's experts on a GPU: silu(gate) * up, matrices [E, 2I, H] and [E, H, I], no biases.

Memory: the forward pass keeps gate and up [S, 2I] and nothing of [S, H]; the backward pass copies rows once more, and
puts the gradient of gate and up in the place of these. At 32k tokens of Qwen3-30B-A3B (`moe_rows.py`): 0.75 GiB kept;
at most 3.0 GiB at once in the backward pass, 2.3 where our products read rows in place of their copies, gradients of
all weights (1.1 GiB) included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightrl.kernels.moe_products import Tiles, act_gradient_product, gate_up_product, outer_product, product
from lightrl.kernels.moe_rows import Order, combine, sort_by_expert, spread, swiglu, swiglu_backward


@dataclass(frozen=True)
class Plan:
    """Tiles of each product that is ours; torch's makes those that are None. Fixed, so that results repeat."""

    gate_up: Tiles | None = None
    down: Tiles | None = None
    grad_act: Tiles | None = None
    grad_down: Tiles | None = None
    grad_rows: Tiles | None = None
    grad_gate_up: Tiles | None = None


def fused_experts(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, plan: Plan | None = None
) -> Tensor:
    """As `moe.grouped_experts`, by the kernels of `moe_rows.py` and `moe_products.py`.

    hidden [T, H], indices [T, k] int64, weights [T, k], gate_up [E, 2I, H], down [E, H, I] -> [T, H]. Products by
    torch need rows of a multiple of 16 bytes.
    """
    out: Tensor = _Experts.apply(hidden, indices, weights, gate_up, down, plan or Plan())
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        indices: Tensor,
        weights: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        plan: Plan,
    ) -> Tensor:
        ctx.plan = plan
        if not len(hidden):
            ctx.save_for_backward(hidden, weights, gate_up_weight, down_weight)
            return torch.zeros_like(hidden)
        hidden, shares = hidden.contiguous(), weights.contiguous()
        order = sort_by_expert(indices, gate_up_weight.shape[0])
        if plan.gate_up is None:
            gate_up = product(spread(hidden, order), gate_up_weight.mT, order.ends)
            act = swiglu(gate_up, shares, order)
        else:
            gate_up, act = gate_up_product(hidden, gate_up_weight.mT, shares, order, plan.gate_up)
        out = combine(product(act, down_weight.mT, order.ends, plan.down), order)
        ctx.save_for_backward(hidden, weights, gate_up_weight, down_weight, gate_up, *order)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, gate_up_weight, down_weight, *rest = ctx.saved_tensors
        if not rest:
            zeros = [torch.zeros_like(t) for t in (hidden, weights, gate_up_weight, down_weight)]
            return zeros[0], None, *zeros[1:], None
        gate_up, order = rest[0], Order(*rest[1:])
        del rest
        plan, grad, wanted = ctx.plan, grad.contiguous(), ctx.needs_input_grad
        grad_gate_up, act, grad_weights, rows = _act_gradient(ctx.plan, grad, weights, down_weight, gate_up, order)
        del gate_up
        grad_down = grad_matrices = grad_hidden = None
        if wanted[4]:
            grad_down = outer_product(rows, act, order, plan.grad_down, spread="left")
        del rows, act
        if wanted[0]:
            grad_hidden = combine(product(grad_gate_up, gate_up_weight, order.ends, plan.grad_rows), order)
        if wanted[3]:
            x = spread(hidden, order) if plan.grad_gate_up is None else hidden
            grad_matrices = outer_product(grad_gate_up, x, order, plan.grad_gate_up, spread="right")
        return grad_hidden, None, grad_weights.to(weights.dtype), grad_matrices, grad_down, None


def _act_gradient(
    plan: Plan, grad: Tensor, weights: Tensor, down_weight: Tensor, gate_up: Tensor, order: Order
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gate and up and of the weights, the activations, and `grad` as the product after it wants it."""
    weights, overwrite = weights.contiguous(), not _graph_is_kept()
    rows = grad
    if plan.grad_act is None or plan.grad_down is None:
        rows = spread(grad, order)
    if plan.grad_act is None:
        grad_act = product(rows, down_weight, order.ends)
        found = swiglu_backward(gate_up, grad_act, weights, order, overwrite=overwrite)
    else:
        found = act_gradient_product(grad, down_weight, gate_up, weights, order, plan.grad_act, overwrite=overwrite)
    return (*found, grad if plan.grad_down is not None else rows)


def _graph_is_kept() -> bool:
    """May the running backward pass be followed by another over the same graph? Then what is saved must stay."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else bool(keeps())
