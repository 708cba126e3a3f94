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


_MEASURED: dict[tuple[int, int], Plan] = {
    (9, 0): Plan(
        gate_up=Tiles(rows=128, cols=256, depth=64, stages=3, warps=8, tma=True, persistent=0),
        grad_act=Tiles(rows=128, cols=256, depth=64, stages=4, warps=8, tma=False, persistent=0),
    ),
}
"""Compute capability -> the plan that `moe_block --stages` found fastest there."""


def plan_for(x: Tensor) -> Plan:
    """Ours where they were measured faster on this kind of GPU, else torch's."""
    return _MEASURED.get(torch.cuda.get_device_capability(x.device), Plan()) if x.is_cuda else Plan()


def fused_experts(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, plan: Plan | None = None
) -> Tensor:
    """As `moe.grouped_experts`, by the kernels of `moe_rows.py` and `moe_products.py`.

    hidden [T, H], indices [T, k] int64, weights [T, k], gate_up [E, 2I, H], down [E, H, I] -> [T, H]. Products by
    torch need rows of a multiple of 16 bytes.
    """
    plan = plan or plan_for(hidden)
    order = sort_by_expert(indices, gate_up.shape[0]) if len(hidden) else None
    hidden, weights = hidden.contiguous(), weights.contiguous()
    ticket, gate_up_rows, act = _Experts.apply(hidden, weights, gate_up, down, order, plan)
    out: Tensor = _Outputs.apply(ticket, gate_up_rows, act, weights.detach(), down.detach(), order, plan)
    return out


class _Experts(torch.autograd.Function):
    """The first half of the forward pass, and the whole backward pass.

    `ticket` [T, H] stands for the output, which `_Outputs` computes from it and the rows [S, 2I] and [S, I] (None where
    not at hand). In two halves, because checkpointing ends the repeat of a block once all that was saved is there: if
    nothing later is saved, it never comes to the second half.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, gate_up_weight: Tensor, down_weight: Tensor, order: Order | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        act = None
        if order is None:
            gate_up = hidden.new_empty(0, gate_up_weight.shape[1])
        elif plan.gate_up is None:
            gate_up = product(spread(hidden, order), gate_up_weight.mT, order.ends)
        else:
            gate_up, act = gate_up_product(hidden, gate_up_weight.mT, weights, order, plan.gate_up)
        ctx.plan = plan
        ctx.save_for_backward(hidden, weights, gate_up_weight, down_weight, gate_up, *(order or ()))
        ctx.mark_non_differentiable(*(t for t in (gate_up, act) if t is not None))
        ctx.set_materialize_grads(False)
        return hidden.new_empty(()).expand(hidden.shape), gate_up, act

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        hidden, weights, gate_up_weight, down_weight, gate_up, *rest = ctx.saved_tensors
        if not rest:
            return *(torch.zeros_like(t) for t in (hidden, weights, gate_up_weight, down_weight)), None, None
        order, plan, grad, wanted = Order(*rest), ctx.plan, grad.contiguous(), ctx.needs_input_grad
        grad_gate_up, act, grad_weights, rows = _act_gradient(plan, grad, weights, down_weight, gate_up, order)
        del gate_up
        grad_down = grad_matrices = grad_hidden = None
        if wanted[3]:
            grad_down = outer_product(rows, act, order, plan.grad_down, spread="left")
        del rows, act
        if wanted[0]:
            grad_hidden = combine(product(grad_gate_up, gate_up_weight, order.ends, plan.grad_rows), order)
        if wanted[2]:
            x = spread(hidden, order) if plan.grad_gate_up is None else hidden
            grad_matrices = outer_product(grad_gate_up, x, order, plan.grad_gate_up, spread="right")
        return grad_hidden, grad_weights.to(weights.dtype), grad_matrices, grad_down, None, None


class _Outputs(torch.autograd.Function):
    """The second half. It saves nothing, and hands the gradient of the output to its ticket."""

    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, gate_up: Tensor, act: Tensor | None, weights: Tensor, down_weight: Tensor,
        order: Order | None, plan: Plan,
    ) -> Tensor:  # fmt: skip
        if order is None:
            return torch.zeros_like(ticket)
        act = swiglu(gate_up, weights, order) if act is None else act
        return combine(product(act, down_weight.mT, order.ends, plan.down), order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None, None


def _act_gradient(
    plan: Plan, grad: Tensor, weights: Tensor, down_weight: Tensor, gate_up: Tensor, order: Order
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gate and up and of the weights, the activations, and `grad` as the product after it wants it."""
    rows, overwrite = grad, not _graph_is_kept()
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
