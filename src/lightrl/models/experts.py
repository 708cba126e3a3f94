"""Mixtures of experts: routers and experts of a loaded model, exchanged on the instance.

Experts go through transformers' registry of experts functions (`lightrl_grouped`). A router gets its own `forward`:

- the weights of the chosen experts stay float32, as SGLang has them; stock transformers rounds them to the hidden
  states' type in families that choose by softmax;
- a forward that is computed again for the backward pass (activation checkpointing) chooses the same experts. Rounding
  could choose others where two are nearly tied, and gradients would be those of another function;
- its choice can be written down, or be another forward's (`models/routing.py`).

Shapes: `T` tokens, `k` experts a token, `E` experts, `H` hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightrl.kernels.moe import Activation, ExpertWeights, grouped_experts, has_kernels, swiglu
from lightrl.models import expert_parallel
from lightrl.models.shards import own_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "lightrl_grouped"

Router = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(the router module, hidden [..., H]) -> logits [T, E], weights [T, k] float32, indices [T, k]: a router's forward."""


def exchange(model: PreTrainedModel, router: Router) -> None:
    """Our experts and this router in every mixture of a loaded model (its class stays as it is)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    model.set_experts_implementation(NAME)
    for place, module in enumerate(_mixtures(model)):
        gate = module.gate if hasattr(module, "gate") else module.router
        gate.choices = None  # a `_Choices` while they are written down or read
        gate.place, gate.routing = place, None  # a `models.routing.Routing` while a forward is recorded or replayed
        gate.forward = MethodType(router, gate)
        module.experts.group = None


def _mixtures(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]


def spread(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave this rank its part of the experts of every mixture, on the meta device and after `exchange`.

    `mesh` has one axis, over which the layers then exchange their tokens (models/expert_parallel.py). A model without
    experts stays as it is.
    """
    for module in _mixtures(model):
        expert_parallel.spread(module.experts, mesh)
        module.experts.group = mesh.get_group()
        module.experts.choices = None  # its plans, as a router's choices


def experts_forward(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """In the signature of transformers' experts functions: hidden [T, H], indices and weights [T, k] -> [T, H]."""
    parameters = ExpertWeights(
        gate_up=own_part(experts.gate_up_proj),
        down=own_part(experts.down_proj),
        transposed=experts.is_transposed,
        gate_up_bias=own_part(experts.gate_up_proj_bias) if experts.has_bias else None,
        down_bias=own_part(experts.down_proj_bias) if experts.has_bias else None,
    )
    activation = _activation(experts)
    if experts.group is None:
        return grouped_experts(hidden, indices, weights, parameters, activation)
    plan = _once(experts, lambda: expert_parallel.make_plan(indices, len(parameters.gate_up), experts.group))
    return expert_parallel.parallel_experts(hidden, weights, parameters, activation, plan, experts.group)


def _activation(experts: Any) -> Activation:
    """`swiglu`, which has kernels of its own, where that is what the family does: all of ours but gpt-oss."""
    stock = type(experts)._apply_gate.__module__ == "transformers.integrations.moe"  # else the family has its own
    is_swiglu = stock and experts.is_concatenated and experts.config.hidden_act in ("silu", "swish")
    return swiglu if is_swiglu and getattr(experts, "fuse", False) else experts._apply_gate


# ----- routers


def softmax_router(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over all experts, then the best k, renormalised if the config says so (Qwen)."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    renormalize = getattr(router, "norm_topk_prob", True)
    if getattr(router, "fuse", False) and has_kernels(logits):
        from lightrl.kernels.moe_choice import best_experts, softmax_weights

        indices = _choose(router, lambda: best_experts(logits, router.top_k))
        return logits, softmax_weights(logits, indices, renormalize=renormalize), indices
    scores = logits.softmax(-1, dtype=torch.float32)
    indices = _choose(router, lambda: scores.topk(router.top_k, dim=-1).indices)
    weights = scores.gather(-1, indices)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, indices


def topk_softmax_router(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best k logits, then softmax over them (gpt-oss)."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, router.bias)
    indices = _choose(router, lambda: logits.topk(router.top_k, dim=-1).indices)
    return logits, logits.gather(-1, indices).softmax(-1, dtype=torch.float32), indices


def sigmoid_router(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sigmoid scores in float32; a bias that is not trained takes part in the choice only (DeepSeek, GLM, MiMo)."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), router.weight.float())
    scores = logits.sigmoid()
    indices = _choose(router, partial(_best_in_groups, router, scores))
    weights = scores.gather(-1, indices)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * router.routed_scaling_factor, indices


def _best_in_groups(router: Any, scores: Tensor) -> Tensor:
    """The best k experts out of the best groups; a group counts what its best two experts do."""
    groups = (scores + router.e_score_correction_bias).unflatten(-1, (router.num_group, -1))  # [T, groups, E / groups]
    worth = groups.topk(2, dim=-1).values.sum(-1)
    best = worth.topk(router.topk_group, dim=-1, sorted=False).indices
    allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)
    choice = groups.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
    return choice.topk(router.top_k, dim=-1, sorted=False).indices


def _choose(router: Any, topk: Callable[[], Tensor]) -> Tensor:
    """[T, k] of `topk`, of the router's `routing`, or those of the forward that is being repeated."""
    routing = router.routing
    indices: Tensor = _once(router, topk if routing is None else lambda: routing.choose(router.place, topk))
    return indices


def _once(module: Any, make: Callable[[], Any]) -> Any:
    """What `make` makes, or what it made in the forward that is being repeated."""
    if module.choices is not None and (known := module.choices.next()) is not None:
        return known
    with torch.no_grad():  # a choice has no gradient, and must leave nothing for autograd that a repeat would not
        made = make()
    if module.choices is not None:
        module.choices.made.append(made)
    return made


# ----- the same choices when a block is computed again


def recompute_contexts(
    block: nn.Module,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]] | None:
    """`context_fn` of torch's checkpoint for a decoder block; None if it has no router.

    The indices that the forward chose are kept with its graph, 8 bytes for each of a token's experts; where experts are
    spread over ranks, so is who sent what to whom.
    """
    routers = [m for m in block.modules() if hasattr(m, "choices")]
    if not routers:
        return None

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        made: list[Any] = []
        return _Choices(routers, made, repeat=False), _Choices(routers, made, repeat=True)

    return contexts


class _Choices(AbstractContextManager[None]):
    """While entered, the routers write their choices down in `made`, or read them from there in the same order."""

    def __init__(self, routers: list[Any], made: list[Any], *, repeat: bool) -> None:
        self.routers, self.made, self.repeat = routers, made, repeat
        self._position = 0

    def __enter__(self) -> None:
        self._position = 0
        for router in self.routers:
            router.choices = self

    def __exit__(self, *_: object) -> None:
        for router in self.routers:
            router.choices = None

    def next(self) -> Any:
        if not self.repeat:
            return None
        self._position += 1
        return self.made[self._position - 1]
