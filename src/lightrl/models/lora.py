"""Low-rank adapters (LoRA, arXiv:2106.09685): peft's layers in a model that is then sharded.

A linear layer W [out, in] becomes W x + s B A x, with A [rank, in] and B [out, rank] trained and W frozen; s is
alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732). peft makes the layers and defines the files; what is
here is what sharding needs: values for parameters that were made without memory, and W + s B A of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightrl.errors import UserError
from lightrl.models.load import local_shard
from lightrl.models.names import Groups, Layout, Named, adapter_tensors
from lightrl.wrappers import clean_name, is_adapter

ADAPTER = "default"
"""peft's name of the one adapter that a layer has."""
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


class Settings(Protocol):
    """The section `[lora]`."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def dropout(self) -> float: ...
    @property
    def use_rslora(self) -> bool: ...
    @property
    def targets(self) -> list[str] | None: ...


def missing() -> str | None:
    """What to do where peft is not installed."""
    return None if find_spec("peft") else "peft is not installed: pip install 'lightrl-torch[lora]', or set it to 0"


# ----- into a model


def inject(model: Any, settings: Settings, dtype: torch.dtype = torch.float32) -> None:
    """Adapters of `dtype` into a model on the meta device, after whatever else is exchanged in it; the rest is frozen.

    UserError, before any weight is read, for `lora.target_modules` that cannot be adapted, and for a `lora.rank` that
    is low in none of them.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, settings.targets)
    _check_rank(model, targets, settings.rank)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        use_rslora=settings.use_rslora,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.device("meta"):
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:  # layers that peft has no adapters for
        raise UserError(f"lora.target_modules: {' '.join(str(error).split())}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for parameter in adapter_tensors(model).values():
        parameter.data = parameter.data.to(dtype)


def _targets(model: Any, wanted: list[str] | None) -> list[str]:
    """Names for peft, by their ends where these fit nothing else: other programs read them in `adapter_config.json`."""
    linear = _linear_layers(model)
    if wanted is not None:
        known = ", ".join(sorted({_end(name) for name in linear}))
        for target in wanted:
            found = _matching(model, target)
            if not found:
                raise UserError(f"lora.target_modules: {type(model).__name__} has no {target!r}; it has {known}")
            if odd := sorted(found - linear):
                raise UserError(f"lora.target_modules: {odd[0]} has no adapters here; choose of {known}")
        return list(wanted)
    if not linear:
        raise UserError(f"lora.target_modules: {type(model).__name__} has no linear layers in its blocks")
    ends = sorted({_end(name) for name in linear})
    return ends if set().union(*(_matching(model, end) for end in ends)) == linear else sorted(linear)


def _check_rank(model: Any, targets: Sequence[str], rank: int) -> None:
    """A layer that is smaller than others may be below the rank: B A is then as free as W, and no more is lost."""
    layers = {name: model.get_submodule(name) for target in targets for name in sorted(_matching(model, target))}
    name, layer = max(layers.items(), key=lambda item: min(item[1].weight.shape))
    if rank > (most := min(layer.weight.shape)):
        out, inside = layer.weight.shape
        raise UserError(
            f"lora.rank: {rank} is low for none of the layers: the largest, {name}, is {out} x {inside}, and its "
            f"updates have rank {most} at most; lower it, or train all weights (lora.rank = 0)"
        )


def _linear_layers(model: Any) -> set[str]:
    """Those whose own forward computes with their weight: not the head, which the log-prob kernels read, nor routers,
    whose forwards are exchanged. Experts fused into one tensor are no layers at all; and in models that have them MLPs
    go without, as peft takes the names of their layers for those of the experts, in files too."""
    head, named = model.get_output_embeddings(), dict(model.named_modules())
    mixtures = {name for name, module in named.items() if hasattr(module, "experts")}
    linear = {name for name, module in named.items() if type(module) is nn.Linear and module is not head}
    return {
        name
        for name in linear
        if name.rpartition(".")[0] not in mixtures
        if not (mixtures and (_end(name) in _OF_EXPERTS or ".experts." in name))
    }


def _matching(model: Any, target: str) -> set[str]:
    """Names of modules that peft takes `target` for."""
    return {name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")}


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers, by the clean name of the weight that they adapt; none in a model without adapters."""
    return {
        clean_name(f"{name}.base_layer.weight"): module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "lora_A")
    }


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """As peft does, whatever the sharding: A uniform within ±1/sqrt(in) (Kaiming, a = sqrt(5)), B zero."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers(model).values():
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        whole = nn.init.kaiming_uniform_(torch.empty(a.shape), a=math.sqrt(5), generator=generator)
        local, offsets = local_shard(a)
        local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))])
        local_shard(b)[0].zero_()


def fill(model: nn.Module, read: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Adapters of a model that is not sharded, perhaps without memory, become what `read(name, shape)` returns."""
    for weight, layer in layers(model).items():
        for name, part in zip(adapter_names(weight), (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]), strict=True):
            part.weight = nn.Parameter(read(name, tuple(part.weight.shape)))


def set_dropout(model: nn.Module, active: bool) -> None:
    """Adapters' dropout alone: everything else computes as it samples."""
    for layer in layers(model).values():
        layer.lora_dropout.train(active)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters: the one it started from.

    Not by peft's `enable_adapters`, which sets `requires_grad` of parameters that FSDP may have replaced.
    """
    found = layers(model).values()
    for layer in found:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in found:
            layer._disable_adapters = False


# ----- merged


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + s B A in float32, of whole tensors: what peft's `merge_and_unload` rounds to W's type."""
    return (b.float() @ a.float()).mul_(scaling).add_(weight)


def adapter_names(weight: str) -> tuple[str, str]:
    """Of A and B, by the clean name of the weight they adapt."""
    owner = weight.removesuffix("weight")
    return f"{owner}lora_A.{ADAPTER}.weight", f"{owner}lora_B.{ADAPTER}.weight"


def scalings(model: nn.Module) -> dict[str, float]:
    """s of each adapted weight."""
    return {name: float(layer.scaling[ADAPTER]) for name, layer in layers(model).items()}


@dataclass(frozen=True)
class Merge:
    """Whole tensors and their adapters' into the tensors of the model without adapters, computed in `dtype`."""

    scaling: Mapping[str, float]
    dtype: torch.dtype

    @torch.no_grad()
    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Adapters may come in any order. They are rounded to `dtype` as in the trainer's forward, the sum once."""
        named = dict(tensors)
        for name, tensor in named.items():
            if is_adapter(name):
                continue
            if name in self.scaling:
                a, b = (named[part].to(self.dtype) for part in adapter_names(name))
                tensor = merged(tensor.to(self.dtype), a, b, self.scaling[name]).to(self.dtype)
            yield name, tensor


@dataclass(frozen=True)
class MergedGroups:
    """`groups` that hold each adapted weight together with its adapters, merged one group at a time."""

    groups: Groups
    merge: Merge

    def layout(self) -> list[Layout]:
        return [[entry for entry in layout if not is_adapter(entry[0])] for layout in self.groups.layout()]

    def __iter__(self) -> Iterator[Named]:
        for group in self.groups:
            found: Sequence[tuple[str, Tensor]] = list(self.merge(group))
            yield found
