"""Layers of the gated delta rule (Qwen3-Next, Qwen3.5), made to take packed rows, on a loaded instance only.

transformers' own forward would let convolution and state run on from one sample into the next. Its projections, norm
and gate stay; what mixes rows is exchanged for `kernels.gated_delta` over segments (the trainer), or over the states of
an engine's slots. Segments and cache come as keyword arguments of the model's call, as the attention function's do.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from lightrl.kernels import delta, gated_delta
from lightrl.kernels.delta import Heads
from lightrl.kernels.gated_delta import Chains, DeltaInputs
from lightrl.kernels.gated_norm import gated_norm
from lightrl.models import context_parallel
from lightrl.models.context_parallel import SharedSegments
from lightrl.models.fast_delta import Mix, choose

FAMILIES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Model types of the text configs whose linear-attention layers these are."""

LAYER_TYPES = frozenset({"full_attention", "linear_attention"})
"""Kinds of layers in these families."""


class Segmented(Protocol):
    """What a trainer passes as `segments`."""

    @property
    def chains(self) -> Chains: ...


class Memory(Protocol):
    """What an engine passes as `kv_cache`."""

    def mix(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """[T, Hv, Dv]; keeps what the next tokens need."""


class Decay(nn.Module):
    """A layer's `A_log` and `dt_bias`, apart from its other weights: FSDP gathers this module's in float32.

    In bfloat16 the logarithm of a decay is off by up to 0.4 %, and a decay is applied once a token.
    """

    keeps_float32 = True

    def __init__(self, A_log: Tensor, dt_bias: Tensor, *, requires_grad: bool = True) -> None:
        super().__init__()
        self.A_log = nn.Parameter(A_log.detach().float(), requires_grad=requires_grad)
        self.dt_bias = nn.Parameter(dt_bias.detach().float(), requires_grad=requires_grad)

    def forward(self, a: Tensor) -> Tensor:
        """[…, Hv] -> logarithm of the decay, float32."""
        return log_decay(self, a)


def log_decay(owner: Any, a: Tensor) -> Tensor:
    """-exp(A_log) softplus(a + dt_bias) of the module that has the two parameters, in float32."""
    return -owner.A_log.float().exp() * F.softplus(a.float() + owner.dt_bias.float())


def layers(model: nn.Module) -> list[Any]:
    """The gated delta layers of a model."""
    return [m for m in model.modules() if all(hasattr(m, n) for n in ("conv1d", "head_v_dim", "num_v_heads"))]


def exchange(model: nn.Module) -> None:
    """Make the gated delta layers of this instance run over the `segments` or the `kv_cache` of the model's call."""
    for layer in layers(model):
        layer.forward = partial(_forward, layer, gated_delta.mix)


def prepare_training(model: nn.Module, device: torch.device, dtype: torch.dtype, *, fuse: bool = False) -> None:
    """After `exchange`, before the model is sharded: it will compute in `dtype` on `device`.

    The fastest kernels that are right there are chosen; our own only with `fuse` (`model.kernels`), and then for the
    norm behind them, too. `A_log` and `dt_bias` move into a module of their own,
    `_float32_module`, which `wrappers.clean_name` leaves out of names.
    """
    found = layers(model)
    if not found:
        return  # and no kernels are tried
    own = None
    if fuse and all(delta.takes(heads(x), x.conv_kernel_size, ACT2FN[x.activation], dtype) for x in found):
        own = heads(found[0])
    mix = choose(device, dtype, own)
    for layer in found:
        if fuse and getattr(layer.norm, "activation", None) in ("silu", "swish"):
            layer.norm.forward = MethodType(_norm_forward, layer.norm)
        decay = Decay(layer.A_log, layer.dt_bias, requires_grad=layer.A_log.requires_grad)
        del layer.A_log, layer.dt_bias
        layer._float32_module = decay
        layer.forward = partial(_forward, layer, mix)


def heads(layer: Any) -> Heads:
    """A layer's numbers and sizes of heads."""
    return Heads(layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim)


def _norm_forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """Both [N, D]."""
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    return gated_norm(hidden_states, gate, self.weight, eps)


def prepare_engine(model: nn.Module) -> None:
    """After `exchange`: what decays a state stays float32, whatever the model's type."""
    for layer in layers(model):
        for name in ("A_log", "dt_bias"):
            setattr(layer, name, nn.Parameter(getattr(layer, name).detach().float(), requires_grad=False))


def _forward(
    layer: Any,
    mix: Mix,
    hidden_states: Tensor,
    segments: Segmented | SharedSegments | None = None,
    kv_cache: Memory | None = None,
    **kwargs: Any,
) -> Tensor:
    """[B, Q, hidden] -> [B, Q, hidden]; B is 1 for packed rows."""
    mixed, z, b, a = _project(layer, hidden_states)
    inputs = DeltaInputs(
        mixed=mixed.flatten(0, 1),
        weight=layer.conv1d.weight.squeeze(1),
        bias=layer.conv1d.bias,
        activation=ACT2FN[layer.activation],
        log_decay=_decay(layer, a).flatten(0, 1),
        beta=b.sigmoid().flatten(0, 1),
        key_heads=layer.num_k_heads,
        key_dim=layer.head_k_dim,
        value_heads=layer.num_v_heads,
        value_dim=layer.head_v_dim,
    )
    if kv_cache is not None:
        out = kv_cache.mix(layer.layer_idx, inputs)
    elif isinstance(segments, SharedSegments):
        out = mix(context_parallel.delta_to_heads(inputs, segments.group), segments.whole.chains)
        out = context_parallel.to_rows(out[None], segments.group).squeeze(0)
    elif segments is not None:
        out = mix(inputs, segments.chains)
    else:
        raise RuntimeError(f"{type(layer).__name__} needs segments=… or kv_cache=…: call it through PolicyModule")
    out = layer.norm(out.flatten(0, 1), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(out.view(*hidden_states.shape[:2], -1))


def _decay(layer: Any, a: Tensor) -> Tensor:
    apart = getattr(layer, "_float32_module", None)
    return log_decay(layer, a) if apart is None else apart(a)


def _project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v side by side, gate z, b and a, all [B, Q, …]."""
    if hasattr(layer, "in_proj_qkv"):
        return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
    # Qwen3-Next stores them interleaved by key head, and knows how to sort them
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1), z, b, a
