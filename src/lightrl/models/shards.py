"""Tensors of a model, and this rank's part of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor (sharing its memory) and where it starts in the whole; may be empty."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    if any(p.is_partial() for p in tensor.placements):
        raise RuntimeError(f"placements {tensor.placements} are not supported: a part of a sum is no part of a tensor")
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local()
    if tuple(local.shape) != tuple(chunk.sizes):
        raise RuntimeError(f"local part has shape {tuple(local.shape)}, expected {tuple(chunk.sizes)}")
    return local, tuple(chunk.offsets)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; gradients go through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. A collective. Where several axes of its mesh cut it, all parts have one size."""
    if not isinstance(tensor, DTensor):
        return tensor
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(axes) < 2:
        return tensor.full_tensor()
    # Which axis cuts first is told by where parts start: FSDP cuts what a rank holds of the experts, an earlier axis.
    local, offsets = local_shard(tensor)
    parts, starts = local.contiguous()[None], torch.tensor([offsets], device=local.device)
    for axis in axes:
        group = tensor.device_mesh.get_group(axis)
        parts, starts = _all_of(parts, group), _all_of(starts, group)
    whole = local.new_empty(tensor.shape)
    for part, start in zip(parts, starts.tolist(), strict=True):
        whole[tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))] = part
    return whole


def _all_of(tensor: Tensor, group: Any) -> Tensor:
    """[n, …] of each rank, one after the other."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return torch.cat(everyone)
