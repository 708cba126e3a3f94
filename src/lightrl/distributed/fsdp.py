"""FSDP2: what is wrapped, in which precision, and lending whole parameters to an engine in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightrl.errors import UserError
from lightrl.wrappers import clean_name


def shard(
    root: nn.Module,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool = False,
    recompute_contexts: Callable[[nn.Module], Callable[..., Any] | None] = lambda block: None,
    expert_mesh: DeviceMesh | None = None,
    reshard: bool = True,
) -> None:
    """Wrap `root` in place; `model` is the Hugging Face causal LM inside it.

    One group a decoder block, one for an untied embedding; the rest (norm, head, a tied embedding) belongs to the
    root, so that the head's weight is whole inside the root's forward, where the loss is computed. Parameters stay
    float32; blocks compute in `compute_dtype`, but for modules that say `keeps_float32`, which become small groups of
    their own; gradients are summed (not averaged) in float32: loss weights already hold the global denominator.
    `recompute_contexts` gives a block's `context_fn` for torch's checkpoint, or None. Without `reshard` blocks stay
    whole from their forward to the end of their backward pass, or until `reshard_all`.

    Experts that are DTensors over the axis `ep` of `expert_mesh` get groups of their own, over its other axes.
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
            context_fn = recompute_contexts(block)
            options = {} if context_fn is None else {"context_fn": context_fn}
            wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
            blocks.register_module(name, wrapped)
    if expert_mesh is not None:
        _shard_experts(blocks, expert_mesh, policy, reshard)
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    for exempt in [m for m in model.modules() if _keeps_float32(m)]:
        fully_shard(exempt, mesh=fsdp_mesh, mp_policy=full)
    for block in blocks.children():
        fully_shard(block, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=reshard)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and head.weight is not embedding.weight:
        fully_shard(embedding, mesh=fsdp_mesh, mp_policy=policy)
    fully_shard(root, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=False)
    if expert_mesh is not None:
        _prefetch_forward(blocks)
    if mesh.size() > 1:  # one rank has nothing to average, and would only divide by 1 into a new tensor
        for module in fsdp_modules(root):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard_experts(blocks: nn.ModuleList, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    """Groups for the experts of all blocks that are spread over `ep`."""
    if mesh["replicate"].size() > 1:
        fsdp_mesh = mesh["replicate", "efsdp"]
    else:
        fsdp_mesh = mesh["efsdp"]
    ranks = mesh["efsdp"].size()
    for module in blocks.modules():
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            placed: Any = lambda p: _expert_shard(p, ranks)  # noqa: E731
            fully_shard(
                module, mesh=fsdp_mesh, mp_policy=policy, shard_placement_fn=placed, reshard_after_forward=reshard
            )


def _prefetch_forward(blocks: nn.ModuleList) -> None:
    """Each block asks for the next one's weights. Left alone, FSDP asks when the host gets there, which waits in every
    block to know how many tokens travel; a backward pass does not wait."""
    groups = [fsdp_modules(block) for block in blocks.children()]
    for number, (mine, following) in enumerate(zip(groups, [*groups[1:], []], strict=True)):
        mine[0].set_modules_to_forward_prefetch([*(mine[1:] if number == 0 else []), *following])


def _expert_shard(parameter: nn.Parameter, ranks: int) -> Shard:
    """By expert; within each where that would leave ranks without any."""
    assert isinstance(parameter, DTensor)
    sizes = parameter.to_local().shape
    for axis, size in enumerate(sizes):
        if size % ranks == 0:
            return Shard(axis)
    raise UserError(
        f"parallel.expert_parallel: {ranks} ranks cannot share {sizes[0]} experts of {list(sizes[1:])} evenly; raise "
        "it, or lower parallel.shard_size"
    )


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of decoder blocks: the module list with the most parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder blocks")
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def _keeps_float32(module: nn.Module) -> bool:
    return getattr(module, "keeps_float32", False) is True


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


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
    """Names and tensors of an unsharded model: parameters and persistent buffers.

    A collective where experts are spread, which are gathered here.
    """
    for name, parameter in model.named_parameters():
        yield clean_name(name), _gathered(parameter.detach())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


@dataclass(frozen=True)
class WholeTensors:
    """Whole tensors of a sharded model under their names in memory, one FSDP group after the other.

    Iterate as often as you like; every rank must, to the end. Tensors are valid until the next group is asked for. On a
    single shard parameters are the float32 masters themselves, which a copy into compute precision rounds as FSDP does;
    otherwise they are gathered in compute precision, the next group while the present one is used.
    """

    groups: list[tuple[FSDPModule, list[tuple[str, nn.Module, str]]]]
    """Each FSDP module with the (name, owner, attribute) of its own parameters and buffers."""
    compute_dtype: torch.dtype

    @classmethod
    def of(cls, root: nn.Module, model: nn.Module, compute_dtype: torch.dtype, names: Iterable[str]) -> WholeTensors:
        """`names` of `model`, the Hugging Face model within the FSDP `root`: a tied tensor goes under those given."""
        owners = {id(m): m for m in root.modules() if isinstance(m, FSDPModule)}
        members: dict[int, list[tuple[str, nn.Module, str]]] = {key: [] for key in owners}
        wanted = set(names)

        def visit(module: nn.Module, prefix: str, owner: int) -> None:
            owner = id(module) if id(module) in owners else owner
            for attribute in [*module._parameters, *module._buffers]:
                if (name := clean_name(prefix + attribute)) in wanted:
                    wanted.remove(name)
                    members[owner].append((name, module, attribute))
            for child_name, child in module._modules.items():
                if child is not None:
                    visit(child, f"{prefix}{child_name}.", owner)

        visit(model, "", id(root))
        if wanted:
            raise ValueError(f"{type(model).__name__} has no {', '.join(sorted(wanted))}")
        return cls([(owners[key], names) for key, names in members.items() if names], compute_dtype)

    def layout(self) -> list[list[tuple[str, tuple[int, ...], torch.dtype]]]:
        """Name, shape and dtype of each, in order, by group."""
        return [[(name, *self._form(owner, attribute)) for name, owner, attribute in names] for _, names in self.groups]

    def _form(self, owner: nn.Module, attribute: str) -> tuple[tuple[int, ...], torch.dtype]:
        tensor = getattr(owner, attribute)
        computed = attribute in owner._parameters and not _keeps_float32(owner)
        return tuple(tensor.shape), self.compute_dtype if computed else tensor.dtype

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        for module, _ in self.groups:
            module.reshard()
        parameters = [o._parameters[a] for _, names in self.groups for _, o, a in names if a in o._parameters]
        single = all(_is_single(p) for p in parameters if p is not None)
        ahead = None if single else self.groups[0][0].unshard(async_op=True)
        for number, (module, names) in enumerate(self.groups):
            if ahead is not None:
                ahead.wait()
                following = self.groups[number + 1][0] if number + 1 < len(self.groups) else None
                ahead = None if following is None else following.unshard(async_op=True)
            tensors = [(name, getattr(owner, attribute)) for name, owner, attribute in names]
            with torch.no_grad():
                group = [(name, _gathered(t.detach())) for name, t in tensors]
            yield group
            if not single:
                module.reshard()


def _gathered(tensor: Tensor) -> Tensor:
    """All of a tensor that FSDP has unsharded: of experts that are spread over ranks, the others are gathered."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if _is_single(tensor) else tensor.full_tensor()


def _is_single(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.to_local().shape == parameter.shape


@contextmanager
def whole(root: nn.Module) -> Iterator[None]:
    """`unshard_all` for the length of a block."""
    unshard_all(root)
    try:
        yield
    finally:
        reshard_all(root)
