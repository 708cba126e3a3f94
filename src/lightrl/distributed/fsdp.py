"""FSDP2: what is wrapped, in which precision, and lending whole parameters to an engine in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

_WRAPPER = "_checkpoint_wrapped_module."


def shard(
    root: nn.Module,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool = False,
) -> None:
    """Wrap `root` in place; `model` is the Hugging Face causal LM inside it.

    One group a decoder block, one for an untied embedding; the rest (norm, head, a tied embedding) belongs to the
    root, so that the head's weight is whole inside the root's forward, where the loss is computed. Parameters stay
    float32; blocks compute in `compute_dtype`; gradients are summed (not averaged) in float32: loss weights already
    hold the global denominator.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    if mesh.size(0) > 1:
        fsdp_mesh = mesh  # HSDP: replicate x shard
    else:
        fsdp_mesh = mesh["shard"]
    blocks = decoder_blocks(model)
    if activation_checkpointing:
        for name, block in list(blocks.named_children()):
            wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            blocks.register_module(name, wrapped)
    for block in blocks.children():
        fully_shard(block, mesh=fsdp_mesh, mp_policy=policy)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and head.weight is not embedding.weight:
        fully_shard(embedding, mesh=fsdp_mesh, mp_policy=policy)
    fully_shard(root, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=False)
    if mesh.size() > 1:  # one rank has nothing to average, and would only divide by 1 into a new tensor
        for module in fsdp_modules(root):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of decoder blocks: the module list with the most parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder blocks")
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def clean_name(name: str) -> str:
    """A parameter's name without wrappers."""
    return name.replace(_WRAPPER, "")


def set_gradient_sync(root: nn.Module, enabled: bool) -> None:
    """Reduce gradients in the next backward, or only add them up locally (all microbatches but the last)."""
    assert isinstance(root, FSDPModule)
    root.set_requires_gradient_sync(enabled)


def unshard_all(root: nn.Module) -> None:
    """Every parameter whole, in compute precision, until `reshard_all`. A collective."""
    for module in fsdp_modules(root):
        module.unshard()


def reshard_all(root: nn.Module) -> None:
    """Back to shards; whole copies are freed."""
    for module in fsdp_modules(root):
        module.reshard()


def named_whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of an unsharded model: parameters and persistent buffers."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter.detach()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


@contextmanager
def whole(root: nn.Module) -> Iterator[None]:
    """`unshard_all` for the length of a block."""
    unshard_all(root)
    try:
        yield
    finally:
        reshard_all(root)
