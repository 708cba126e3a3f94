"""Runs inside SGLang's scheduler processes: takes weights from the trainer's buffers into the model's parameters.

SGLang calls these functions as custom weight loaders with its model. Which memory each tensor belongs to is learnt
once, by a rehearsal: SGLang's own `load_weights` runs on tensors without data while its copies are written down. A sync
then is those copies and nothing else. The rehearsal also shows what the model skips and what it never gets: errors.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightrl.sync.buckets import Plan, Slot
from lightrl.sync.mailbox import Mailbox
from lightrl.sync.shared import open_shared, release_shared, synchronize

_aten = torch.ops.aten
_STATE = "_lightrl_receiver"


@dataclass
class Copy:
    """One copy that loading a tensor makes: a strided part of the tensor into a part of a parameter."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Elements from the start of the tensor."""
    target: Tensor

    def source(self, memory: Tensor, first: int = 0) -> Tensor:
        """What is copied, where `memory` holds the tensor's elements from `first` on."""
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + self.start - first)

    def within(self, start: int, end: int) -> list[Copy]:
        """The same, of the tensor's elements `start` to before `end` alone. One block where the cuts are between rows,
        else one more for each dimension that a cut goes through."""
        extents = [(size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)]
        last = self.start + sum(extents)
        if not self.target.numel() or self.start >= end or last < start:
            return []
        if self.start >= start and last < end:
            return [self]
        dim = max(range(len(extents)), key=lambda d: self.stride[d] if extents[d] else -1)
        inner = sum(extents) - extents[dim]  # elements from the first of a slice to its last

        def index(position: int) -> int:
            """First slice that starts at `position` or later."""
            return min(max(-(-(position - self.start) // self.stride[dim]), 0), self.size[dim])

        first, stop = index(start), index(end - inner)  # the slices that lie inside
        cut = [*range(index(start - inner), min(first, index(end))), *range(max(first, stop), index(end))]
        blocks = [block for i in cut for block in self._narrow(dim, i, 1).within(start, end)]
        return [*blocks, self._narrow(dim, first, stop - first)] if first < stop else blocks

    def _narrow(self, dim: int, first: int, count: int) -> Copy:
        size = (*self.size[:dim], count, *self.size[dim + 1 :])
        target = self.target.narrow(dim, first, count)
        return Copy(size, self.stride, self.start + first * self.stride[dim], target)


@dataclass
class Receiver:
    """What one scheduler process keeps between syncs."""

    buffers: list[Tensor]
    mailbox: Mailbox
    parts: list[list[tuple[str, Tensor, Tensor]]]
    """By bucket: (tensor's name, its part in the buffer, the parameter's part). A bucket always has the same buffer."""

    def run(self, use: Callable[[list[tuple[str, Tensor, Tensor]]], None]) -> None:
        """Wait for each bucket, `use` it, let go of it."""
        for number, bucket in enumerate(self.parts):
            self.mailbox.wait("filled", number + 1, timeout=None, check=self.mailbox.check_sender)
            use(bucket)
            synchronize(self.buffers[0].device)  # only now may the trainer fill the buffer again
            self.mailbox.set("drained", number + 1)

    def finish(self, report: dict[str, Any]) -> None:
        self.mailbox.report(report)
        self.mailbox.set("drained", len(self.parts) + 1)


def open_buffers(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """The trainer introduces itself: keep its buffers open, and rehearse."""
    message, buffers = open_shared(named_tensors)
    mailbox = Mailbox(Path(message["mailbox"]))
    with _reported(mailbox):
        plan = Plan.from_json(message["plan"])
        parts = []
        for number, bucket in enumerate(rehearse(model, plan, beat=mailbox.beat)):
            buffer = buffers[number % len(buffers)]
            parts.append(
                [(s.name, c.source(s.view(buffer), s.start), c.target) for s, copies in bucket for c in copies]
            )
        receiver = Receiver(buffers, mailbox, parts)
        model.__dict__[_STATE] = receiver
        receiver.finish({})


def receive(model: nn.Module, _: Sequence[tuple[str, Tensor]]) -> None:
    """Take the weights of one sync."""
    receiver: Receiver = model.__dict__[_STATE]

    def copy(bucket: list[tuple[str, Tensor, Tensor]]) -> None:
        if bucket:  # another rank's part of a large tensor may fill one
            torch._foreach_copy_([target for _, _, target in bucket], [source for _, source, _ in bucket])

    with _reported(receiver.mailbox), torch.no_grad():
        receiver.run(copy)
        receiver.finish({})


def verify(model: nn.Module, _: Sequence[tuple[str, Tensor]]) -> None:
    """Compare, bit by bit, what is sent with what the parameters hold; the report names what differs."""
    receiver: Receiver = model.__dict__[_STATE]
    differing: dict[str, Tensor] = {}
    compared = 0

    def compare(bucket: list[tuple[str, Tensor, Tensor]]) -> None:
        nonlocal compared
        for name, source, target in bucket:
            wrong = (_bits(source.to(target.dtype)) != _bits(target)).sum()
            differing[name] = differing[name] + wrong if name in differing else wrong
            compared += target.numel()

    with _reported(receiver.mailbox), torch.no_grad():
        receiver.run(compare)
        totals = torch.stack(list(differing.values())).tolist()
        wrong = {name: int(n) for name, n in zip(differing, totals, strict=True) if n}
        receiver.finish({"differing": dict(list(wrong.items())[:20]), "compared": compared})


def close_buffers(model: nn.Module, _: Sequence[tuple[str, Tensor]]) -> None:
    """Let go of the trainer's memory."""
    model.__dict__.pop(_STATE, None)
    release_shared()


def rehearse(
    model: nn.Module, plan: Plan, beat: Callable[[], None] = lambda: None
) -> list[list[tuple[Slot, list[Copy]]]]:
    """The copies `model.load_weights` makes for each tensor of the plan, by bucket; nothing is copied.

    Raises ValueError for tensors the model skips, parameters that get no or not all of their values, and models that
    do more than copy (quantised ones).
    """
    slots = [slot for bucket in plan.buckets for slot in bucket]
    tensors = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in slots}
    with torch.no_grad(), _Rehearsal(tensors) as notes:
        model.load_weights(_told(tensors.items(), beat))  # type: ignore[operator]
    if skipped := [name for name in tensors if name not in notes.copies]:
        raise ValueError(
            f"the engine's {type(model).__name__} takes nothing from {_few(skipped)}: its names are not those of a "
            "Hugging Face checkpoint of this model type"
        )
    _check_coverage(model, notes)
    return [[(slot, _copies_of(slot, notes.copies[slot.name])) for slot in bucket] for bucket in plan.buckets]


def _copies_of(slot: Slot, copies: list[Copy]) -> list[Copy]:
    if slot.is_whole:
        return copies
    return [block for copy in copies for block in copy.within(slot.start, slot.start + slot.count)]


def _told(weights: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    """The same; a large model's take their time, and who waits should know that something happens."""
    for weight in weights:
        beat()
        yield weight


class _Rehearsal(TorchDispatchMode):
    """Writes down copies out of the given tensors without making them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
        self.copies: dict[str, list[Copy]] = {}
        self.filled: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            target, source = args[:2]
            name = self._names.get(source.untyped_storage()._cdata)
            if name is not None:
                if target.device.type == "meta":
                    raise ValueError(f"{name} is copied into a temporary: this model's loader cannot be rehearsed")
                part = source.expand(target.shape)
                note = Copy(tuple(part.size()), tuple(part.stride()), part.storage_offset(), target.detach())
                self.copies.setdefault(name, []).append(note)
                return target
        elif func in (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default):
            self.filled.append(args[0].detach())
        elif not func.is_view and func not in (_aten.detach.default, _aten.lift_fresh.default):
            for argument in args:
                if isinstance(argument, Tensor) and argument.untyped_storage()._cdata in self._names:
                    name = self._names[argument.untyped_storage()._cdata]
                    raise ValueError(f"{name} goes through {func}: weights of quantised models cannot be synchronised")
        return func(*args, **kwargs)


def _check_coverage(model: nn.Module, notes: _Rehearsal) -> None:
    """Every element of every parameter is written, once."""
    written: dict[int, int] = {}
    seen: set[tuple[Any, ...]] = set()
    for target in [c.target for copies in notes.copies.values() for c in copies] + notes.filled:
        where = (target.data_ptr(), tuple(target.size()), tuple(target.stride()))
        if target.numel() and where not in seen:
            seen.add(where)
            key = target.untyped_storage().data_ptr()
            written[key] = written.get(key, 0) + target.numel()
    missing = []
    for name, parameter in model.named_parameters():
        if written.get(parameter.untyped_storage().data_ptr(), 0) < parameter.numel():
            missing.append(name)
    if missing:
        raise ValueError(f"the policy has no values, or not all, for the engine's {_few(missing)}")


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _few(names: Sequence[str], count: int = 3) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


class _reported:
    """An error goes into the mailbox: SGLang's scheduler would end with it, and the trainer would not know why."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)  # into the engine's log
        self._mailbox.fail(f"{type(error).__name__}: {error}")
        return True
