"""Tensors of a model under the names, and in the shapes, its checkpoint has: as views wherever that is possible.

transformers keeps some tensors otherwise in memory than on disk: the experts of a layer fused into one, say. Its own
conversion is run once, without data, to see which part of which tensor each stored one is; from then on each is cut out
by its strides. The few that are no part of a tensor (concatenated, interleaved) are converted anew each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightrl.wrappers import clean_name, is_adapter

Layout = list[tuple[str, tuple[int, ...], torch.dtype]]
Named = Sequence[tuple[str, Tensor]]
_aten = torch.ops.aten


def persistent_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under their clean names, without adapters'; tied ones under each of their
    names."""
    return {name: tensor for name, tensor in _tensors(model).items() if not is_adapter(name)}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters of low-rank adapters under their clean names; none in a model without them."""
    return {name: tensor for name, tensor in _tensors(model).items() if is_adapter(name)}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for name, tensor in [*module._parameters.items(), *own.items()]:
            if tensor is not None:
                tensors[clean_name(f"{prefix}.{name}" if prefix else name)] = tensor
    return tensors


def kept_names(model: PreTrainedModel) -> list[str]:
    """Names in memory of what `save_pretrained` writes: each tied tensor once, under the name it keeps."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in persistent_tensors(model).items():
        names_of.setdefault(id(tensor), []).append(name)
    ignored = set(model._keys_to_ignore_on_save or ())
    chosen = (next((n for n in names if n not in model.all_tied_weights_keys), names[0]) for names in names_of.values())
    return [name for name in chosen if name not in ignored]


class Groups(Protocol):
    """Whole tensors under their names in memory, some at a time (`distributed.fsdp.WholeTensors`)."""

    def layout(self) -> list[Layout]: ...

    def __iter__(self) -> Iterator[Named]: ...


@dataclass(frozen=True)
class Series:
    """Stored tensors of one shape that lie at equal distances in one tensor (a layer's experts); or one alone."""

    names: tuple[str, ...]
    source: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Elements from the start of the source, which is contiguous."""
    step: int

    def views(self, source: Tensor) -> Sequence[Tensor]:
        base = source.storage_offset() + self.start
        if len(self.names) == 1:
            return (source.as_strided(self.size, self.stride, base),)
        return source.as_strided((len(self.names), *self.size), (self.step, *self.stride), base).unbind(0)


@dataclass(frozen=True)
class Recipe:
    """How the stored tensors of one group are made of those in memory."""

    series: tuple[Series, ...]
    converted: tuple[str, ...]
    """Stored tensors that are no views."""
    layout: Layout

    def apply(self, model: PreTrainedModel, group: Named) -> list[tuple[str, Tensor]]:
        tensors = {name: tensor.contiguous() for name, tensor in group}
        made: list[tuple[str, Tensor]] = []
        for series in self.series:
            made.extend(zip(series.names, series.views(tensors[series.source]), strict=True))
        if self.converted:
            with torch.no_grad():
                stored = revert_weight_conversion(model, tensors)
            made.extend((name, stored[name]) for name in self.converted)
        return made


class StoredTensors:
    """The tensors of `groups` as `save_pretrained` would store them: iterate as often as you like.

    Tensors are valid until the next group is asked for. Raises ValueError for a model whose conversion mixes tensors of
    different groups.
    """

    def __init__(self, model: PreTrainedModel, groups: Groups) -> None:
        self._model = model
        self._groups = groups
        layouts = groups.layout()
        self._recipes = [_recipe(model, layout) for layout in layouts]
        whole = {name: _meta(shape, dtype) for layout in layouts for name, shape, dtype in layout}
        expected = {name: tuple(t.shape) for name, t in revert_weight_conversion(model, whole).items()}
        if {name: shape for name, shape, _ in self.layout()} != expected:
            raise ValueError(f"{type(model).__name__}: some stored tensors are made of several layers")

    def layout(self) -> Layout:
        """Name, shape and dtype of each, in order."""
        return [entry for recipe in self._recipes for entry in recipe.layout]

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        for recipe, group in zip(self._recipes, self._groups, strict=True):
            yield recipe.apply(self._model, group)


def _recipe(model: PreTrainedModel, layout: Layout) -> Recipe:
    """Convert tensors without data, and see where each result lies in them."""
    tensors = {name: _meta(shape, dtype) for name, shape, dtype in layout}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    try:
        with torch.no_grad(), _CopiesAsViews(tensors):
            stored = revert_weight_conversion(model, dict(tensors))
    except RuntimeError:  # it asks for a copy because it needs one
        stored = revert_weight_conversion(model, dict(tensors))
    views = {name: t for name, t in stored.items() if t.untyped_storage()._cdata in owners}
    placed = [(name, owners[t.untyped_storage()._cdata], t) for name, t in views.items()]
    converted = tuple(name for name in stored if name not in views)
    order = [*views, *converted]
    return Recipe(
        tuple(_series(placed)), converted, [(name, tuple(stored[name].shape), stored[name].dtype) for name in order]
    )


def _series(placed: Iterable[tuple[str, str, Tensor]]) -> Iterator[Series]:
    """Join neighbours in the list that lie at equal distances."""
    run: Series | None = None
    for name, source, view in placed:
        size, stride, start = tuple(view.size()), tuple(view.stride()), int(view.storage_offset())
        if run is not None and (run.source, run.size, run.stride) == (source, size, stride):
            step = run.step if len(run.names) > 1 else start - run.start
            if step > 0 and start == run.start + step * len(run.names):
                run = Series((*run.names, name), source, size, stride, run.start, step)
                continue
        if run is not None:
            yield run
        run = Series((name,), source, size, stride, start, 0)
    if run is not None:
        yield run


@dataclass(frozen=True)
class Box:
    """A stored tensor as a box cut out of one in memory, its axes perhaps fewer and in another order."""

    source: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    """Along each axis of the source."""
    axes: tuple[int | None, ...]
    """For each axis of the stored tensor, which one of the source it is; None for one of length 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored tensor."""
        return tuple(1 if axis is None else self.extent[axis] for axis in self.axes)

    def within(self, local: Tensor, offsets: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], Tensor] | None:
        """What it shares with a part of the source that starts at `offsets`, None if nothing.

        That is: offsets and sizes in the stored tensor, and the elements of `local` that belong there.
        """
        low = [max(a, b) for a, b in zip(self.start, offsets, strict=True)]
        ends = zip(self.start, self.extent, offsets, local.shape, strict=True)
        high = [min(start + extent, offset + size) for start, extent, offset, size in ends]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        shared = local[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
        real = [axis for axis in self.axes if axis is not None]
        fixed = [axis for axis in range(local.ndim) if axis not in real]
        begins = tuple(0 if axis is None else low[axis] - self.start[axis] for axis in self.axes)
        sizes = tuple(1 if axis is None else high[axis] - low[axis] for axis in self.axes)
        return begins, sizes, shared.permute(*real, *fixed).view(sizes)


def boxes(model: PreTrainedModel) -> dict[str, Box] | None:
    """Each tensor of the model's checkpoint as a box of one in memory; None if some are no boxes.

    Together they cover every tensor once.
    """
    tensors = persistent_tensors(model)
    shapes = {name: tuple(tensors[name].shape) for name in kept_names(model)}
    recipe = _recipe(model, [(name, shape, tensors[name].dtype) for name, shape in shapes.items()])
    found: dict[str, Box] = {}
    for run in recipe.series:
        for number, name in enumerate(run.names):
            start = run.start + number * run.step
            if (box := _box(run.source, shapes[run.source], run.size, run.stride, start)) is None:
                return None
            found[name] = box
    covered = sum(math.prod(box.shape) for box in found.values())
    whole = sum(tensor.numel() for tensor in {id(t): t for t in tensors.values()}.values())
    return None if recipe.converted or covered != whole else found


def _box(source: str, shape: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...], start: int) -> Box | None:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first, extent, axes = [], [1] * len(shape), []
    for step in strides:
        first.append(start // step)
        start %= step
    for length, step in zip(size, stride, strict=True):
        fitting = [a for a in range(len(shape)) if strides[a] == step and first[a] + length <= shape[a] > 1]
        if length > 1 and (not fitting or fitting[0] in axes):
            return None
        axes.append(fitting[0] if length > 1 else None)
        if length > 1:
            extent[fitting[0]] = length
    return Box(source, tuple(first), tuple(extent), tuple(axes))


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


class _CopiesAsViews(TorchDispatchMode):
    """Copies of the given tensors, which a conversion makes for a tidy layout only, become views.

    RuntimeError where that would make a difference: it writes into one, or sees it as another shape.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._storages = {t.untyped_storage()._cdata for t in tensors.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in args if isinstance(a, Tensor) and a.untyped_storage()._cdata in self._storages]
        if given and func is _aten.clone.default:
            return _aten.alias.default(args[0])
        if given and func._schema.is_mutable:
            raise RuntimeError(f"{func} writes into a copy")
        return func(*args, **(kwargs or {}))
