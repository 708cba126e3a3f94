"""What wrappers around modules (activation checkpoints, compile, precision) do to parameter names, undone."""

from __future__ import annotations

import re

_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module|_float32_module)\.")


def clean_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add: as its checkpoint has it.

    >>> clean_name("model.layers.0._checkpoint_wrapped_module.mlp.weight")
    'model.layers.0.mlp.weight'
    """
    return _WRAPPERS.sub("", name)
