"""Adapters at values that are not those of a start, whatever the sharding."""

from __future__ import annotations

from typing import Any


def set_values(model: Any, seed: int = 7) -> None:
    """Random B: at zero, as peft begins, adapters change nothing and A has no gradient."""
    import torch

    from lightrl.models.load import local_shard
    from lightrl.models.names import adapter_tensors

    g = torch.Generator().manual_seed(seed)
    for name, tensor in adapter_tensors(model).items():
        if ".lora_B." in name:
            whole = 0.05 * torch.randn(tensor.shape, generator=g)
            local, offsets = local_shard(tensor)
            local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))])
