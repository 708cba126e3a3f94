"""Learns what SGLang's own `load_weights` does with each tensor, by running it on tensors without data.

A sync then is the copies that were written down, and nothing else. What would go wrong silently is refused: tensors
that the model skips, parameters that do not get all of their values, and loaders that do more than copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrl.engine.sglang_copies import Copy, Fill, Settled, Write, settle
from lightrl.engine.sglang_derived import Derived
from lightrl.sync.buckets import Plan, Slot

_aten = torch.ops.aten
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)
_VISION = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|mm_projector|multi_modal_projector|image_newline)(\.|$)")
_SMALLEST = 2.0**-900  # no weight is that small


@dataclass
class Rehearsed:
    """What loading does."""

    copies: list[list[tuple[Slot, list[Copy]]]]
    """By bucket. No element of a parameter is the target of two."""
    fills: list[Fill]
    """To be repeated with every sync: SGLang releases the memory of its weights in between, with what it holds."""


def rehearse(model: nn.Module, plan: Plan, derived: Derived, beat: Callable[[], None] = lambda: None) -> Rehearsed:
    """What `model.load_weights` does with each tensor of the plan; nothing is copied.

    Raises ValueError for tensors the model skips, parameters that get no or not all of their values, and models that
    do more than copy (quantised ones).
    """
    _check_form(model)
    slots = [slot for bucket in plan.buckets for slot in bucket]
    tensors = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in slots}
    before = {name: _place(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad(), derived.kept(), _Rehearsal(tensors) as notes:
        model.load_weights(_told(tensors.items(), beat))  # type: ignore[operator]
    if moved := [name for name, parameter in model.named_parameters() if _place(parameter) != before.get(name)]:
        raise ValueError(
            f"SGLang lays {_few(moved)} out anew when it loads them: choose another moe_runner_backend or "
            "quantisation in engine.args"
        )
    derived.check(notes.computed)
    notes.check_scalars()
    _check_skipped(model, [name for name in tensors if name not in notes.taken])
    constants = _kv_scales(model)
    settled = settle([*notes.writes, *(Write(fill) for fill in constants)], beat)
    _check_coverage(model, settled)
    copies: dict[str, list[Copy]] = {}
    for write in settled.writes:
        if isinstance(write.act, Copy):
            copies.setdefault(write.name, []).append(write.act)
    memory = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    fills = [write.act for write in settled.writes if isinstance(write.act, Fill)]
    return Rehearsed(
        [[(slot, _copies_of(slot, copies.get(slot.name, []))) for slot in bucket] for bucket in plan.buckets],
        [fill for fill in fills if fill.target.untyped_storage().data_ptr() in memory],
    )


def _copies_of(slot: Slot, copies: list[Copy]) -> list[Copy]:
    if slot.is_whole:
        return copies
    return [block for copy in copies for block in copy.within(slot.start, slot.start + slot.count)]


def _told(weights: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    """The same; a large model's take their time, and who waits should know that something happens."""
    for weight in weights:
        beat()
        yield weight


@dataclass(frozen=True)
class _Piece:
    """A range of elements of a storage without data, and what they stand for."""

    start: int
    count: int
    name: str = ""
    """The tensor whose elements they are, unless there is a `value`."""
    offset: int = 0
    """Which of the tensor's elements the first is."""
    value: Tensor | float | None = None
    """Not the trainer's: zero, or a constant `[count]` of the loader's."""


@dataclass
class _Origin:
    """What a storage without data stands for."""

    memory: Tensor
    """All of it, `[n]`; kept, so that no other storage gets its address."""
    pieces: list[_Piece]
    dtype: torch.dtype
    """Before casts that lose nothing."""
    rounded: bool = False
    """It was cast to fewer bits."""

    @property
    def names(self) -> list[str]:
        return [piece.name for piece in self.pieces if piece.name]


class _Rehearsal(TorchDispatchMode):
    """Writes down copies out of the given tensors without making them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.taken: set[str] = set()
        self.writes: list[Write] = []
        self.computed: list[Tensor] = []
        """What is written with values that are neither the trainer's nor constant."""
        self._origins: dict[int, _Origin] = {}
        self._scalars: dict[float, tuple[str, int]] = {}
        for name, tensor in tensors.items():
            flat = tensor.view(-1)
            self._register(_Origin(flat, [_Piece(0, flat.numel(), name)], flat.dtype))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and self._origin(t)]
        if not known:
            return self._unknown(func, args, kwargs)
        if func in (_aten.copy_.default, _aten.fill_.Tensor) and not self._origin(args[0]):
            return self._copy(*args[:2])
        if func in _FILLS and self._origin(args[0]) and (func is _aten.zero_.default or _is_zero(args[1])):
            return self._zero(args[0])
        if func is _aten.cat.default:
            return self._cat(args[0], *args[1:], **kwargs)
        if func in (_aten.clone.default, _aten._to_copy.default):
            return self._another(args[0], kwargs.get("dtype") or args[0].dtype)
        if func is _aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func.is_view and not func._schema.is_mutable:
            return self._view(known[0], func, args, kwargs)
        return self._refuse(known[0], func)

    def check_scalars(self) -> None:
        if lost := [name for name, _ in self._scalars.values() if name not in self.taken]:
            raise ValueError(
                f"{_few(lost)}: read as a number (.item()) and not written as it is: this model's loader cannot be "
                "rehearsed"
            )

    def _origin(self, tensor: Tensor) -> _Origin | None:
        return self._origins.get(tensor.untyped_storage()._cdata)

    def _known(self, tensor: Tensor) -> _Origin:
        return self._origins[tensor.untyped_storage()._cdata]

    def _register(self, origin: _Origin) -> None:
        self._origins[origin.memory.untyped_storage()._cdata] = origin

    def _refuse(self, tensor: Tensor, func: Any, reason: str = "") -> NoReturn:
        origin = self._known(tensor)
        name = _few(origin.names)
        why = f" ({reason})" if reason else ""
        if func._schema.is_mutable:
            raise ValueError(f"{name} is changed in place by {func}{why}: this model's loader cannot be rehearsed")
        raise ValueError(
            f"{name} goes through {func}: weights of quantised models, and of others whose loader does more than copy, "
            f"cannot be synchronised{why}"
        )

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation without the trainer's tensors: done, and written down where it fills something."""
        if func in _FILLS:
            value = args[1] if len(args) > 1 else 0.0
            if args[0].device.type == "meta":
                return func(*args, **kwargs)
            if isinstance(value, float) and value in self._scalars:
                name, offset = self._scalars[value]
                target = args[0].detach()
                self.taken.add(name)
                self.writes.append(Write(Copy(tuple(target.size()), (0,) * target.dim(), offset, target), name))
                return args[0]
            self.writes.append(Write(Fill(args[0].detach(), value)))
        elif func is _aten.copy_.default:
            self.computed.append(args[0].detach())
        return func(*args, **kwargs)

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        origin = self._known(source)
        names = _few(origin.names)
        if target.device.type == "meta":
            raise ValueError(f"{names} is copied into a temporary: this model's loader cannot be rehearsed")
        if origin.rounded and source.dtype != target.dtype:
            raise ValueError(f"{names} is rounded to {source.dtype} and kept as {target.dtype}: cannot be synchronised")
        part = source.expand(target.shape)
        whole = Copy(tuple(part.size()), tuple(part.stride()), int(part.storage_offset()), target.detach())
        self.taken.update(origin.names)
        for piece in origin.pieces:
            for block in whole.within(piece.start, piece.start + piece.count):
                start = block.start - piece.start
                if piece.value is None:
                    self.writes.append(Write(replace(block, start=start + piece.offset), piece.name))
                    continue
                value = piece.value
                if isinstance(value, Tensor):
                    value = replace(block, start=start).source(value)
                self.writes.append(Write(Fill(block.target, value)))
        return target

    def _view(self, tensor: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:  # a view of what is not contiguous, which a real clone would be
            self._refuse(tensor, func, str(error))
        for part in [result] if isinstance(result, Tensor) else result:
            if part.dtype != tensor.dtype or part.is_neg():
                self._refuse(tensor, func)
        return result

    def _zero(self, tensor: Tensor) -> Tensor:
        origin = self._known(tensor)
        if tensor.numel() != origin.memory.numel():
            self._refuse(tensor, _aten.zero_.default, "of a part of it")
        self.taken.update(origin.names)  # this rank wants nothing of it
        origin.pieces = [replace(piece, value=0.0) for piece in origin.pieces]
        return tensor

    def _another(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of it: other memory, that stands for the same."""
        origin = self._known(tensor)
        memory = torch.empty(origin.memory.numel(), dtype=dtype, device="meta")
        if origin.rounded and dtype != tensor.dtype:
            raise ValueError(f"{_few(origin.names)} is rounded and then cast again: cannot be synchronised")
        self._register(_Origin(memory, origin.pieces, origin.dtype, not _widens(origin.dtype, dtype)))
        return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _cat(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        known = next(tensor for tensor in tensors if self._origin(tensor))
        result = torch.cat([torch.empty_like(tensor, device="meta") for tensor in tensors], dim)
        pieces: list[_Piece] = []
        at = 0
        for tensor in tensors:
            origin = self._origin(tensor)
            if dim % result.dim() or not tensor.is_contiguous() or (origin is None and tensor.device.type == "meta"):
                self._refuse(known, _aten.cat.default, "only whole rows below each other can be")
            if tensor.dtype != result.dtype or (origin and (origin.rounded or origin.dtype != tensor.dtype)):
                self._refuse(known, _aten.cat.default, "of different dtypes")
            if origin is None:
                pieces.append(_Piece(at, tensor.numel(), value=tensor.detach().flatten().clone()))
            else:
                pieces += _cut(origin.pieces, int(tensor.storage_offset()), tensor.numel(), at)
            at += tensor.numel()
        self._register(_Origin(result.view(-1), pieces, result.dtype))
        return result

    def _scalar(self, tensor: Tensor) -> float:
        """A number that nothing else is: where it is written, it stands for the tensor."""
        origin = self._known(tensor)
        [piece] = _cut(origin.pieces, int(tensor.storage_offset()), 1, 0)
        if piece.value is not None:
            return float(piece.value)
        if not tensor.is_floating_point() or tensor.dtype != origin.dtype:
            self._refuse(tensor, _aten._local_scalar_dense.default)
        number = _SMALLEST * (len(self._scalars) + 1)
        self._scalars[number] = piece.name, piece.offset
        return number


def _cut(pieces: Sequence[_Piece], first: int, count: int, to: int) -> list[_Piece]:
    """Elements `first` to before `first + count` of what the pieces make up, moved to element `to`."""
    cut = []
    for piece in pieces:
        start, end = max(piece.start, first), min(piece.start + piece.count, first + count)
        if start < end:
            skipped = start - piece.start
            value = piece.value[skipped:][: end - start] if isinstance(piece.value, Tensor) else piece.value
            cut.append(_Piece(start - first + to, end - start, piece.name, piece.offset + skipped, value))
    return cut


def _check_form(model: nn.Module) -> None:
    """FP8 weights as they were loaded: what SGLang does to them for some kernels, it does not repeat in a sync."""
    for name, module in model.named_modules():
        changed = any(getattr(p, "format_ue8m0", False) for p in module.parameters(recurse=False))
        if changed or getattr(getattr(module, "quant_method", None), "use_marlin", False):
            raise ValueError(
                f"SGLang has laid the FP8 weights of {name} out anew for its kernels: set engine.quantization = "
                "'none', or engine.args = {fp8_gemm_runner_backend = 'triton', moe_runner_backend = 'triton'}"
            )


def _kv_scales(model: nn.Module) -> list[Fill]:
    """Scales of an FP8 KV cache are no policy's: SGLang's own, as it set them when it started."""
    found = []
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            parameter = module._parameters.get(name)
            if parameter is not None and getattr(parameter, "_skip_weight_check", False):
                found.append(Fill(parameter.detach(), float(getattr(module, f"{name}_float", None) or 1.0)))
    return found


def _check_skipped(model: nn.Module, skipped: Sequence[str]) -> None:
    """Nothing but experts that are another rank's to hold."""
    held: dict[int, tuple[int, int, int]] = {}  # by layer: this rank, ranks, experts of each
    for module in model.modules():
        layer: Any = module
        if getattr(layer, "moe_ep_size", 1) > 1 and hasattr(layer, "num_local_experts"):
            count = layer.num_local_experts - layer.num_fused_shared_experts
            held[layer.layer_id] = (layer.moe_ep_rank, layer.moe_ep_size, count)

    def elsewhere(name: str) -> bool:
        found = re.search(r"\.layers\.(\d+)\.(?:\w+\.)*experts\.(\d+)\.", f".{name}")
        if found is None or int(found[1]) not in held:
            return False
        rank, ranks, count = held[int(found[1])]
        expert = int(found[2])
        return expert < ranks * count and expert // count != rank

    if wrong := [name for name in skipped if not elsewhere(name)]:
        raise ValueError(
            f"the engine's {type(model).__name__} takes nothing from {_few(wrong)}: its names are not those of a "
            "Hugging Face checkpoint of this model type"
        )


def _check_coverage(model: nn.Module, settled: Settled) -> None:
    """Every element of every parameter is written."""
    missing = [name for name, p in model.named_parameters() if settled.count_in(p) < p.numel()]
    if not missing:
        return
    hint = ""
    if vision := [name for name in missing if _VISION.search(name)]:
        missing = vision
        hint = (
            f": SGLang has built {type(model).__name__}, which also sees or hears, and the policy is its text model "
            "alone. Save that with transformers, AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER), "
            "and train from there: its config.json names the text architecture, such as Qwen3_5ForCausalLM"
        )
    raise ValueError(f"the policy has no values, or not all, for the engine's {_few(missing)}{hint}")


def _place(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.data_ptr(), parameter.dtype, tuple(parameter.size()), tuple(parameter.stride())


def _is_zero(value: Any) -> bool:
    return not isinstance(value, Tensor) and value == 0


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    if narrow == wide:
        return True
    floats = narrow.is_floating_point and wide.is_floating_point
    return floats and torch.finfo(wide).bits > torch.finfo(narrow).bits


def _few(names: Sequence[str], count: int = 3) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
