"""Weights through two buffers in shared memory, into an engine in another process on the same device.

The buffers are opened once by the engine (`shared.py`) and used for the whole run: a sync is one gather by the trainer
and one copy by the engine, which work on alternate buffers at the same time. Which tensor lies where is planned once;
only counters travel (`mailbox.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightrl.sync.mailbox import Mailbox
from lightrl.sync.shared import SharedBuffers, synchronize

ALIGNMENT = 256  # bytes; every tensor starts on one, so that any dtype may be viewed
TIMEOUT = 120.0  # seconds without a sign from the engine


Layout = Iterable[tuple[str, Sequence[int], torch.dtype]]


@dataclass(frozen=True)
class Slot:
    """Where one tensor, or a part of a large one, lies in its bucket."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    """Without `torch.`."""
    offset: int
    """Bytes from the start of the bucket."""
    start: int
    """First element that is here, of the tensor's in row-major order."""
    count: int
    """Elements that are here."""

    @property
    def is_whole(self) -> bool:
        return self.count == math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.count * getattr(torch, self.dtype).itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """What lies here, in a buffer of bytes: the tensor, or its part as `[count]`."""
        here = buffer[self.offset : self.offset + self.num_bytes].view(getattr(torch, self.dtype))
        return here.view(self.shape) if self.is_whole else here

    def part(self, tensor: Tensor) -> Tensor:
        """What belongs here, of the whole tensor; shaped like `view`."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.start : self.start + self.count]


@dataclass(frozen=True)
class Plan:
    """All buckets of a sync, in order."""

    buckets: tuple[tuple[Slot, ...], ...]

    @property
    def capacity(self) -> int:
        """Bytes of the fullest bucket."""
        return max(_end(bucket[-1]) for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(slot.num_bytes for bucket in self.buckets for slot in bucket)

    def to_json(self) -> str:
        return json.dumps([[list(asdict(slot).values()) for slot in bucket] for bucket in self.buckets])

    @classmethod
    def from_json(cls, text: str) -> Plan:
        buckets = json.loads(text)
        return cls(tuple(tuple(Slot(n, tuple(s), *rest) for n, s, *rest in bucket) for bucket in buckets))


def plan_buckets(layout: Layout, limit: int) -> Plan:
    """Place tensors, in order, into buckets of at most `limit` bytes.

    A layer is kept together unless it exceeds a bucket, as it comes at once and then is one copy; a tensor that exceeds
    a bucket starts one and goes on in the next. ValueError when not even one element fits.
    """
    units: list[list[Slot]] = []
    previous: str | None = None
    for name, shape, dtype in layout:
        if dtype.itemsize > limit:
            raise ValueError(f"{name}: no element of {dtype} fits into buckets of {limit} bytes")
        layer = _layer(name)
        if layer is None or layer != previous:
            units.append([])
        units[-1].append(Slot(name, tuple(shape), str(dtype).removeprefix("torch."), 0, 0, math.prod(shape)))
        previous = layer
    if not units:
        raise ValueError("no tensors to plan")
    buckets: list[list[Slot]] = [[]]
    for unit in units:
        size = sum(_aligned(slot.num_bytes) for slot in unit)
        if buckets[-1] and _aligned(_end(buckets[-1][-1])) + size > limit:
            buckets.append([])
        for part in (part for slot in unit for part in _split(slot, limit)):
            offset = _aligned(_end(buckets[-1][-1])) if buckets[-1] else 0
            if offset and offset + part.num_bytes > limit:
                buckets.append([])
                offset = 0
            buckets[-1].append(replace(part, offset=offset))
    return Plan(tuple(tuple(bucket) for bucket in buckets))


def _split(slot: Slot, limit: int) -> Iterator[Slot]:
    """Parts of at most `limit` bytes, cut between rows (of the last dimension, or of more where they fit): what a rank
    of an engine takes of whole rows stays one strided copy."""
    most = limit // getattr(torch, slot.dtype).itemsize
    if slot.count <= most:
        yield slot
        return
    row = 1
    for size in reversed(slot.shape):
        if row * size > most:
            break
        row *= size
    step = most // row * row
    for start in range(0, slot.count, step):
        yield replace(slot, start=start, count=min(step, slot.count - start))


class BucketSender:
    """The trainer's side, on one rank: fills buffers and counts. `close` frees them."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.mailbox = Mailbox()
        self.shared = SharedBuffers(min(2, len(plan.buckets)), plan.capacity, device)
        self._places: dict[
            str, list[tuple[int, Slot, Tensor]]
        ] = {}  # by tensor: number of the bucket, slot, its memory
        for number, bucket in enumerate(plan.buckets):
            buffer = self.shared.buffers[number % len(self.shared.buffers)]
            for slot in bucket:
                self._places.setdefault(slot.name, []).append((number, slot, slot.view(buffer)))
        self.timeout = TIMEOUT

    def introduction(self) -> str:
        """What the engine needs to open buffers and mailbox, in base64."""
        return self.shared.payload({"mailbox": str(self.mailbox.path), "plan": self.plan.to_json()})

    def send(
        self, groups: Iterable[Sequence[tuple[str, Tensor]]], check: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Pass all tensors once, in the plan's order; returns the engine's report. `check` may raise while it waits.

        A buffer is filled again only after the engine says that its device is done with what was there.
        """
        places = iter(self._places.items())
        filling = 0
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for group in groups:
            for name, tensor in group:
                expected, parts = next(places, ("nothing more", []))
                if name != expected:
                    self._refuse(f"expected {expected} in the plan's order, got {name}")
                if tuple(tensor.shape) != parts[0][1].shape:
                    self._refuse(f"{name}: shape {list(tensor.shape)}, planned {list(parts[0][1].shape)}")
                for number, slot, target in parts:
                    if number != filling:
                        self._copy(filling, targets, sources, check, last=True)
                        filling, targets, sources = number, [], []
                    targets.append(target)
                    sources.append(slot.part(tensor))
            self._copy(filling, targets, sources, check)  # the group's tensors are valid only now
            targets, sources = [], []
        self._copy(filling, [], [], check, last=True)
        if (left := next(places, None)) is not None:
            self._refuse(f"nothing came for {left[0]}")
        return self.wait_done(check)

    def wait_done(self, check: Callable[[], None] | None = None) -> dict[str, Any]:
        """The engine's report, when it has one."""
        return self.mailbox.wait("drained", len(self.plan.buckets) + 1, timeout=self.timeout, check=check)

    def _refuse(self, reason: str) -> NoReturn:
        self.mailbox.fail(reason)
        raise ValueError(reason)

    def _copy(
        self,
        number: int,
        targets: list[Tensor],
        sources: list[Tensor],
        check: Callable[[], None] | None,
        last: bool = False,
    ) -> None:
        """Into bucket `number`; after its last tensors the engine may have it."""
        self.mailbox.wait("drained", number + 1 - len(self.shared.buffers), timeout=self.timeout, check=check)
        if targets:
            torch._foreach_copy_(targets, sources)
        if last:
            synchronize(self.shared.device)
            self.mailbox.set("filled", number + 1)

    def close(self) -> None:
        """Give the memory back; the engine has let go of it."""
        self._places.clear()
        self.shared.close()
        self.mailbox.close()


def _layer(name: str) -> str | None:
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else None


def _end(slot: Slot) -> int:
    return slot.offset + slot.num_bytes


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
