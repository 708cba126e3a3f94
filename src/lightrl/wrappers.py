"""What wrappers around modules (activation checkpoints, compile, precision, adapters) do to parameter names, undone."""

from __future__ import annotations

import re

_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module|_float32_module|base_layer)\.")
_ADAPTER = re.compile(r"\.lora_[AB]\.")


def clean_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add: as its checkpoint has it.

    >>> clean_name("model.layers.0._checkpoint_wrapped_module.mlp.weight")
    'model.layers.0.mlp.weight'
    >>> clean_name("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return _WRAPPERS.sub("", name)


def is_adapter(name: str) -> bool:
    """Is it a parameter of a low-rank adapter (models/lora.py), which no checkpoint of the model has?

    >>> is_adapter("model.layers.0.mlp.up_proj.lora_A.default.weight")
    True
    """
    return _ADAPTER.search(name) is not None
