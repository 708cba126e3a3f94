"""Which model families LightRL packs exactly, and how any causal LM is run.

A family is listed once its packed log-probs and gradients equal the stock model's (tests/unit/test_packed_models.py).
Every other causal LM runs stock, one padded row a sample: as exact, slower.
"""

from __future__ import annotations

from typing import Any

PACKED_FAMILIES = frozenset({"llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})


def packs_exactly(config: Any) -> bool:
    """Can this model be fed packed rows? Needs a known family, without logit caps or mixed-in linear attention."""
    return (
        config.model_type in PACKED_FAMILIES
        and getattr(config, "final_logit_softcapping", None) is None
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
    )


def stock_notice(config: Any) -> str:
    """One line for a model that runs stock."""
    return (
        f"{config.model_type} is not among the families that LightRL packs ({', '.join(sorted(PACKED_FAMILIES))}): "
        "its stock forward runs on padded rows with all logits in memory, which is as exact but slower"
    )
