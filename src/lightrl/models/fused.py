"""Norms, rotations and gates of a loaded model through the fused kernels, exchanged on the instance.

What lies between a block's matrix products is written out in stock code, each operation reading and writing all rows.
Here a norm, a norm with the rotation of positions behind it, and an activated product are a kernel each
(`kernels/norm.py`, `kernels/gate.py`). Values differ from stock ones by rounding only: float32 in between instead of
the model's type. The classes, and other models of them, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from lightrl.kernels.gate import gated
from lightrl.kernels.norm import Norm, norm_rotate, rms_norm
from lightrl.models.attention import packed_attention


@dataclass(frozen=True, kw_only=True)
class Fused:
    """What of a family's blocks is exchanged."""

    norm_offset: float = 0.0
    """What is added to an RMSNorm's weight: 1 where it is centred on zero."""
    attention: bool = False
    """Projections, perhaps norms of heads, rotation of (the first part of) heads by halves, perhaps a gate: Llama's
    attention and its descendants. Others keep their own code around the attention function."""


def exchange(model: nn.Module, fused: Fused) -> None:
    """The forwards of norms, gated MLPs and, where the family's is known, attention."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):  # not those with a gate, which are named …RMSNormGated
            module._offset = fused.norm_offset  # type: ignore[assignment]
            module.forward = MethodType(_norm_forward, module)
        elif fused.attention and name.endswith("Attention"):
            module._norm_offset = fused.norm_offset  # type: ignore[assignment]
            module.forward = MethodType(_attention_forward, module)
        elif _is_swiglu(module):
            module.forward = MethodType(_mlp_forward, module)


def _is_swiglu(module: nn.Module) -> bool:
    parts = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    silu = isinstance(getattr(module, "act_fn", None), nn.SiLU) or _name(module, "act_fn") == "SiLUActivation"
    return all(isinstance(part, nn.Linear) for part in parts) and silu


def _name(module: nn.Module, attribute: str) -> str:
    return type(getattr(module, attribute, None)).__name__


def _norm(module: Any, offset: float) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(weight=module.weight, eps=eps, offset=offset)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, _norm(self, self._offset))


def _mlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    out: Tensor = self.down_proj(gated(self.gate_proj(hidden_states), self.up_proj(hidden_states), "silu"))
    return out


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """hidden_states [1, T, hidden], cos and sin [1, T, R] -> [1, T, hidden]. Without a cache: the trainer has none."""
    if any(kwargs.pop(name, None) is not None for name in ("cache", "past_key_values")):
        raise RuntimeError(f"{type(self).__name__} runs packed rows here and takes no cache")
    cos, sin = (angles[0] for angles in position_embeddings)
    query, key, value = (p(hidden_states).squeeze(0) for p in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in (query, key, value))  # [T, heads, D]
    gate = None
    if self.q_proj.out_features == 2 * self.o_proj.in_features:  # each head's query, then its gate
        query, gate = query.unflatten(1, (-1, 2)).unbind(2)
    norms = [None if n is None else _norm(n, self._norm_offset) for n in _head_norms(self)]
    query, key = (norm_rotate(x, n, cos, sin) for x, n in zip((query, key), norms, strict=True))
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, _ = packed_attention(
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        sliding_window=getattr(self, "sliding_window", None),
        **kwargs,
    )
    if gate is not None:
        out = gated(gate[None], out, "sigmoid")
    return self.o_proj(out.flatten(2)), None


def _head_norms(attention: Any) -> tuple[nn.Module | None, nn.Module | None]:
    return getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
