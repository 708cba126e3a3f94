"""Which model families LightRL packs exactly, and how any causal LM is run.

A family is one entry of `FAMILIES`. It is listed once its packed log-probs and gradients equal the stock model's
(tests/unit/test_packed_models.py). Every other causal LM runs stock, one padded row a sample: as exact, slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightrl.models import attention, experts, fused, gated_delta
from lightrl.models.fused import Fused

_NORMS = Fused()


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family needs beside the attention function that all share."""

    patch: Callable[[Any], None] | None = None
    """Exchanges parts of a loaded model, on the instance, before it is sharded. The embedded engine does the same."""
    layer_types: frozenset[str] = frozenset({"full_attention", "sliding_attention"})
    """Kinds of layers that are exact on packed rows; a config that names others runs stock."""
    fused: Fused = _NORMS
    """What the fused kernels take over where they run: norms and SwiGLU, and perhaps attention around its function."""


_LLAMA = Fused(attention=True)
_ZERO_CENTRED = Fused(attention=True, norm_offset=1.0)
_softmax_experts = partial(experts.exchange, router=experts.softmax_router)
_sigmoid_experts = partial(experts.exchange, router=experts.sigmoid_router)


def _delta_and_experts(model: Any) -> None:
    gated_delta.exchange(model)
    experts.exchange(model, experts.softmax_router)


_DELTA = Family(patch=gated_delta.exchange, layer_types=gated_delta.LAYER_TYPES, fused=_ZERO_CENTRED)
_DELTA_EXPERTS = Family(patch=_delta_and_experts, layer_types=gated_delta.LAYER_TYPES, fused=_ZERO_CENTRED)

FAMILIES: dict[str, Family] = {
    "llama": Family(fused=_LLAMA),
    "mistral": Family(),
    "olmo2": Family(),
    "phi3": Family(),
    "qwen2": Family(fused=_LLAMA),
    "qwen3": Family(fused=_LLAMA),
    "smollm3": Family(),
    "qwen3_moe": Family(patch=_softmax_experts, fused=_LLAMA),
    "glm4_moe": Family(patch=_sigmoid_experts, fused=_LLAMA),
    "glm4_moe_lite": Family(patch=_sigmoid_experts),  # GLM-4.7-Flash
    "deepseek_v3": Family(patch=_sigmoid_experts),  # Moonlight too
    "mimo_v2_flash": Family(patch=_sigmoid_experts),
    "gpt_oss": Family(patch=partial(experts.exchange, router=experts.topk_softmax_router)),
    "qwen3_next": _DELTA_EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA_EXPERTS,
}
"""By `model_type`."""

_PICTURES_TOO = frozenset({"qwen3_5", "qwen3_5_moe"})


def text_config(config: Any) -> Any:
    """The part of a config that its causal LM is built from: Qwen3.5's checkpoints hold a model that sees, too."""
    return config.get_text_config() if config.model_type in _PICTURES_TOO else config


def is_own_code(model: Any) -> bool:
    """Is the model transformers' own code? What comes with a checkpoint may share no more than a name with it."""
    return type(model).__module__.startswith("transformers.")


def packs_exactly(config: Any) -> bool:
    """Can this model be fed packed rows? Needs a known family, without logit caps or layers of other kinds."""
    config = text_config(config)
    family = FAMILIES.get(config.model_type)
    return (
        family is not None
        and getattr(config, "final_logit_softcapping", None) is None
        and set(getattr(config, "layer_types", None) or ()) <= family.layer_types
    )


def prepare_packed(model: Any, *, fuse: bool = False) -> None:
    """Make a loaded model of a known family take packed rows (`segments=…` of its call).

    `fuse` also puts norms, rotations and gates into fused kernels, which is for GPUs: elsewhere it gains nothing.
    """
    model.set_attn_implementation(attention.register())
    patch_layers(model)
    if fuse:
        fused.exchange(model, FAMILIES[text_config(model.config).model_type].fused)


def patch_layers(model: Any) -> None:
    """What the family exchanges beside attention; nothing for a family that is not known."""
    family = FAMILIES.get(text_config(model.config).model_type)
    if family is not None and family.patch is not None and is_own_code(model):
        family.patch(model)


def stock_notice(config: Any) -> str:
    """One line for a model that runs stock."""
    return (
        f"{config.model_type} is not among the families that LightRL packs ({', '.join(sorted(FAMILIES))}): "
        "its stock forward runs on padded rows with all logits in memory, which is as exact but slower"
    )
