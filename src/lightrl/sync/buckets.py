"""Weights through two buffers in device memory, into an engine in another process on the same device.

The buffers are opened once by the engine (a CUDA IPC handle each) and used for the whole run: a sync is one gather by
the trainer and one copy by the engine, which work on alternate buffers at the same time. Which tensor lies where is
planned once; only counters travel (`mailbox.py`).
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.sync.mailbox import Mailbox

ALIGNMENT = 256  # bytes; every tensor starts on one, so that any dtype may be viewed
TIMEOUT = 120.0  # seconds that one bucket may take


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Without `torch.`."""
    offset: int
    """Bytes from the start of the bucket."""
    num_bytes: int

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor itself, in a buffer of bytes."""
        return buffer[self.offset : self.offset + self.num_bytes].view(getattr(torch, self.dtype)).view(self.shape)


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
        return cls(tuple(tuple(Slot(n, tuple(s), d, o, b) for n, s, d, o, b in bucket) for bucket in buckets))


def plan_buckets(layout: Iterable[tuple[str, Sequence[int], torch.dtype]], limit: int) -> Plan:
    """Place tensors, in order, into buckets of at most `limit` bytes; a layer is split only if it exceeds one.

    Some model families must be handed certain tensors of a layer together. A single tensor beyond the limit gets a
    bucket of its own, and the buffers become as large as that.
    """
    units: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = []
    previous: str | None = None
    for name, shape, dtype in layout:
        layer = _layer(name)
        if layer is None or layer != previous:
            units.append([])
        units[-1].append((name, tuple(shape), dtype))
        previous = layer
    if not units:
        raise ValueError("no tensors to plan")
    buckets: list[list[Slot]] = [[]]
    for unit in units:
        size = sum(_aligned(_num_bytes(shape, dtype)) for _, shape, dtype in unit)
        if buckets[-1] and _aligned(_end(buckets[-1][-1])) + size > limit:
            buckets.append([])
        for name, shape, dtype in unit:
            num_bytes = _num_bytes(shape, dtype)
            start = _aligned(_end(buckets[-1][-1])) if buckets[-1] else 0
            if start and start + num_bytes > limit:
                buckets.append([])
                start = 0
            buckets[-1].append(Slot(name, shape, str(dtype).removeprefix("torch."), start, num_bytes))
    return Plan(tuple(tuple(bucket) for bucket in buckets))


class BucketSender:
    """The trainer's side, on one rank: fills buffers and counts. `close` frees them."""

    def __init__(self, plan: Plan, device: torch.device, mailbox_path: Path) -> None:
        self.plan = plan
        self.mailbox = Mailbox(mailbox_path, create=True)
        count = min(2, len(plan.buckets))
        self.buffers = [torch.empty(plan.capacity, dtype=torch.uint8, device=device) for _ in range(count)]
        self._places = [
            (number, slot.name, slot.view(self.buffers[number % count]))
            for number, bucket in enumerate(plan.buckets)
            for slot in bucket
        ]

    def introduction(self) -> str:
        """What the engine needs to open the buffers: named handles, pickled and in base64."""
        message = json.dumps({"mailbox": str(self.mailbox.path), "plan": self.plan.to_json()})
        return ipc_payload([(message, self.buffers[0]), *(("", b) for b in self.buffers[1:])])

    def send(
        self, groups: Iterable[Sequence[tuple[str, Tensor]]], check: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Pass all tensors once, in the plan's order; returns the engine's report. `check` may raise while it waits.

        A buffer is filled again only after the engine says that its device is done with what was there.
        """
        places = iter(self._places)
        filling = 0
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for group in groups:
            for name, tensor in group:
                number, expected, target = next(places, (-1, "nothing more", tensor))
                if name != expected:
                    self.mailbox.fail(f"expected {expected} in the plan's order, got {name}")
                    raise ValueError(f"expected {expected} in the plan's order, got {name}")
                if number != filling:
                    self._copy(filling, targets, sources, check, last=True)
                    filling, targets, sources = number, [], []
                targets.append(target)
                sources.append(tensor)
            self._copy(filling, targets, sources, check)  # the group's tensors are valid only now
            targets, sources = [], []
        self._copy(filling, [], [], check, last=True)
        if (left := next(places, None)) is not None:
            self.mailbox.fail(f"nothing came for {left[1]}")
            raise ValueError(f"nothing came for {left[1]}")
        return self.mailbox.wait("drained", len(self.plan.buckets) + 1, timeout=TIMEOUT, check=check)

    def _copy(
        self,
        number: int,
        targets: list[Tensor],
        sources: list[Tensor],
        check: Callable[[], None] | None,
        last: bool = False,
    ) -> None:
        """Into bucket `number`; after its last tensors the engine may have it."""
        self.mailbox.wait("drained", number + 1 - len(self.buffers), timeout=TIMEOUT, check=check)
        if targets:
            torch._foreach_copy_(targets, sources)
        if last:
            synchronize(self.buffers[0].device)
            self.mailbox.set("filled", number + 1)

    def close(self) -> None:
        """Give the memory back; the engine has let go of it."""
        self._places.clear()
        self.buffers.clear()
        torch.cuda.ipc_collect()
        self.mailbox.close()
        self.mailbox.path.unlink(missing_ok=True)


def synchronize(device: torch.device) -> None:
    """Wait until what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _Handle:
    """Pickles as a call that opens shared device memory."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def ipc_payload(named: Sequence[tuple[str, Tensor]]) -> str:
    """Names and CUDA IPC handles of tensors, as base64 of a pickle that holds only torch's own types.

    The device goes by its UUID, which SGLang's side translates: its processes may number devices differently. Memory
    of expandable segments cannot be exported; callers refuse it beforehand.
    """
    from torch.multiprocessing import reductions

    handles = []
    for name, tensor in named:
        function, arguments = reductions.reduce_tensor(tensor)
        assert function is reductions.rebuild_cuda_tensor, f"{name!r} is not on a CUDA device"
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        handles.append((name, _Handle(function, (*arguments[:6], uuid, *arguments[7:]))))
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=4).dump(handles)
    return base64.b64encode(stream.getvalue()).decode()


EMPTY_PAYLOAD = base64.b64encode(pickle.dumps([], protocol=4)).decode()
"""No tensors: the buffers are open already."""


def _layer(name: str) -> str | None:
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else None


def _end(slot: Slot) -> int:
    return slot.offset + slot.num_bytes


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize
