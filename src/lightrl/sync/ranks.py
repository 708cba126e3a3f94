"""Weights from the first training rank to the ranks of the job that generate: NCCL between GPUs, gloo between CPUs.

The group is one of its own (`broadcast.join_group`). Tensors are packed into flat buckets as they come; what lies where
goes ahead of each as a message, so that the other side needs no plan. Two buckets take turns on both sides: one is
filled, or emptied, while the other travels.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrl.sync.broadcast import Piece, abandon, broadcast
from lightrl.sync.peers import Groups
from lightrl.threads import spawn

_ALIGNMENT = 256  # bytes, so that any dtype may be viewed
_GOODBYE = 10.0  # seconds for leaving the group
_LAST_WORDS = 2.0  # seconds in which the end of a rank is told
_LOOK = 0.5  # seconds between looks at the other side
Contents = list[tuple[str, list[int], str]]
"""Name, shape and dtype of each tensor of a bucket, in order. None stands for the end of a pass."""


def place(contents: Contents) -> list[Piece]:
    """Where each tensor of a bucket lies: one after the other, aligned. Both sides compute it.

    >>> [piece.offset for piece in place([("a", [3], "float32"), ("b", [2, 2], "bfloat16"), ("c", [0], "int8")])]
    [0, 256, 512]
    """
    pieces: list[Piece] = []
    for name, shape, dtype in contents:
        offset = -(-pieces[-1].end // _ALIGNMENT) * _ALIGNMENT if pieces else 0
        pieces.append(Piece(name, tuple(shape), getattr(torch, dtype), offset))
    return pieces


@dataclass(kw_only=True)
class Sender:
    """On the first training rank, rank 0 of the `group`. `announce` tells all others what a bucket will hold.

    A bucket holds what of a group of tensors fits into `bucket_bytes`, or one larger tensor. Tensors travel in the
    dtype that `dtypes` names, or their own. `check` is called while something is waited for, and raises where a rank is
    lost.
    """

    group: Any
    device: torch.device
    bucket_bytes: int
    announce: Callable[[Contents | None], None]
    check: Callable[[], None]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def send(self, groups: Groups) -> None:
        """Go through `groups` once, and say that it was all."""
        buffers: list[Tensor] = []
        under_way = None
        for number, (contents, copies) in enumerate(self._buckets(groups)):
            pieces = place(contents)
            flat = _grown(buffers, number % 2, pieces[-1].end, self.device)
            torch._foreach_copy_([piece.view(flat) for piece in pieces], copies)
            _synchronize(self.device)  # it is another thread, with a stream of its own, that sends it
            if under_way is not None:
                _finish(under_way, self.check)
            self.announce(contents)
            under_way = spawn(broadcast, self.group, flat[: pieces[-1].end])
        if under_way is not None:
            _finish(under_way, self.check)
        self.announce(None)

    def _buckets(self, groups: Groups) -> Iterator[tuple[Contents, list[Tensor]]]:
        """What fits into one, of the tensors of one group: they are valid until the next group is asked for."""
        for group in groups:
            contents: Contents = []
            tensors: list[Tensor] = []
            size = 0
            for name, tensor in group:
                dtype = self.dtypes.get(name, tensor.dtype)
                room = -(-math.prod(tensor.shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
                if tensors and size + room > self.bucket_bytes:
                    yield contents, tensors
                    contents, tensors, size = [], [], 0
                contents.append((name, list(tensor.shape), str(dtype).removeprefix("torch.")))
                tensors.append(tensor)
                size += room
            if tensors:
                yield contents, tensors


@dataclass(kw_only=True)
class Receiver:
    """On a rank that generates. Each iteration is one pass: groups as the sender has them, valid until the next.

    `begin` is called at the start of a pass, and asks for one. `announced` are the sender's messages.
    """

    group: Any
    device: torch.device
    begin: Callable[[], None]
    check: Callable[[], None]
    announced: queue.SimpleQueue[Contents | None] = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        buffers: list[Tensor] = []
        self.begin()
        number, ahead = 0, spawn(self._take, buffers, 0)
        while (found := _finish(ahead, self.check)) is not None:
            number += 1
            ahead = spawn(self._take, buffers, number % 2)
            yield found

    def _take(self, buffers: list[Tensor], number: int) -> list[tuple[str, Tensor]] | None:
        """The next bucket; None at the end of a pass."""
        contents = self.announced.get()
        if contents is None:
            return None
        _synchronize(self.device)  # what was in the buffer may still be on its way to the engine
        pieces = place(contents)
        flat = _grown(buffers, number, pieces[-1].end, self.device)[: pieces[-1].end]
        broadcast(self.group, flat)
        return [(piece.name, piece.view(flat)) for piece in pieces]


def _grown(buffers: list[Tensor], number: int, size: int, device: torch.device) -> Tensor:
    """One of two buffers, of at least `size` bytes; the other may be under way."""
    while len(buffers) <= number:
        buffers.append(torch.empty(0, dtype=torch.uint8, device=device))
    if buffers[number].numel() < size:
        buffers[number] = torch.empty(size, dtype=torch.uint8, device=device)
    return buffers[number]


def _finish(future: Future[Any], check: Callable[[], None]) -> Any:
    """Its result. Where the connection fails, as a rank is gone, `check` gets a moment to say which."""
    while not wait([future], _LOOK).done:
        check()
    if future.exception() is not None:
        deadline = time.monotonic() + _LAST_WORDS
        while time.monotonic() < deadline:
            check()
            time.sleep(0.05)
    return future.result()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def leave(group: Any, *, is_broken: bool) -> None:
    """Free the group in bounded time. One that is broken, as another process is lost, is only aborted and kept: it may
    wait in a broadcast that does not end."""
    leaving = spawn(abandon, [group], is_broken)
    if not is_broken:
        wait([leaving], _GOODBYE)
