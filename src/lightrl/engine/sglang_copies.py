"""What loading a checkpoint does to a model's memory: copies out of the checkpoint's tensors, and values of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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


def joined(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same copies, (source, target) each, in fewer: runs of neighbours in the list that are of one form and lie at
    equal distances, on both sides, become one. A layer's experts, of which a rank takes some rows each, are such."""
    runs: list[_Run] = []
    for source, target in pairs:
        if not runs or not runs[-1].takes(source, target):
            runs.append(_Run(source, target))
    return [run.whole() for run in runs]


@dataclass
class _Run:
    """Copies at equal distances; the first is kept."""

    source: Tensor
    target: Tensor
    count: int = 1
    steps: tuple[int, int] = (0, 0)
    """Elements from one to the next, of the source and of the target."""

    def takes(self, source: Tensor, target: Tensor) -> bool:
        """Whether this is the next one, which is then counted."""
        mine, others = (self.source, self.target), (source, target)
        if any(_form(a) != _form(b) for a, b in zip(mine, others, strict=True)):
            return False
        ways = [int(b.storage_offset() - a.storage_offset()) for a, b in zip(mine, others, strict=True)]
        steps = self.steps if self.count > 1 else (ways[0], ways[1])
        if min(steps) <= 0 or ways != [self.count * step for step in steps]:
            return False
        self.count, self.steps = self.count + 1, steps
        return True

    def whole(self) -> tuple[Tensor, Tensor]:
        if self.count == 1:
            return self.source, self.target
        pair = zip((self.source, self.target), self.steps, strict=True)
        source, target = (
            t.as_strided((self.count, *t.size()), (step, *t.stride()), t.storage_offset()) for t, step in pair
        )
        return source, target


def _form(memory: Tensor) -> tuple[object, ...]:
    """Equal for tensors that differ at most in where they start."""
    return (*_storage(memory), memory.size(), memory.stride())


@dataclass
class Fill:
    """A value that the loader puts into a part of a parameter whatever the checkpoint holds: padding, mostly."""

    target: Tensor
    value: Tensor | float

    def run(self) -> None:
        if isinstance(self.value, Tensor):
            self.target.copy_(self.value)
        else:
            self.target.fill_(self.value)


@dataclass
class Write:
    """One act of a loader, in the order of the loading."""

    act: Copy | Fill
    name: str = ""
    """Of the tensor that is copied."""

    @property
    def target(self) -> Tensor:
        return self.act.target


@dataclass
class Settled:
    """What of many acts counts in the end: no element of the memory is written by two of the `writes` that copy."""

    writes: list[Write] = field(default_factory=list)
    _written: dict[tuple[int, torch.dtype], list[tuple[int, int, int]]] = field(default_factory=dict)
    """By storage: (first element, last, how many of those between are written)."""

    def count_in(self, memory: Tensor) -> int:
        """Elements of `memory`, a whole parameter, that are written."""
        first, last = _span(memory)
        spans = self._written.get(_storage(memory), [])
        return sum(count for start, end, count in spans if first <= start and end <= last)


def settle(writes: Sequence[Write], beat: Callable[[], None] = lambda: None) -> Settled:
    """Leave out what is written over later: a sync makes its copies in another order than the loader.

    ValueError where a copy is written over in part.
    """
    latest = {_region(write.target): write for write in writes if write.target.numel()}
    order = {id(write): number for number, write in enumerate(writes)}
    settled = Settled()
    for first, last, cluster in _clusters(list(latest.values())):
        beat()
        cluster.sort(key=lambda write: order[id(write)])
        kept, count = (cluster, cluster[0].target.numel()) if len(cluster) == 1 else _paint(cluster, first, last)
        settled.writes += kept
        settled._written.setdefault(_storage(cluster[0].target), []).append((first, last, count))
    settled.writes.sort(key=lambda write: order[id(write)])
    return settled


def _clusters(writes: list[Write]) -> Iterator[tuple[int, int, list[Write]]]:
    """Writes whose extents in memory have something in common, with the first and the last element of all."""
    storages: dict[tuple[int, torch.dtype], list[tuple[int, int, Write]]] = {}
    for write in writes:
        storages.setdefault(_storage(write.target), []).append((*_span(write.target), write))
    for spans in storages.values():
        spans.sort(key=lambda span: span[:2])
        first, last, cluster = spans[0][0], spans[0][1], [spans[0][2]]
        for start, end, write in spans[1:]:
            if start > last:
                yield first, last, cluster
                first, last, cluster = start, end, []
            last = max(last, end)
            cluster.append(write)
        yield first, last, cluster


def _paint(cluster: list[Write], first: int, last: int) -> tuple[list[Write], int]:
    """Those of the writes, which may overlap, that are seen in the end, and how many elements they have together."""
    owners = torch.zeros(last - first + 1, dtype=torch.uint8 if len(cluster) < 256 else torch.int32)
    regions = [owners.as_strided(t.size(), t.stride(), t.storage_offset() - first) for t in (w.target for w in cluster)]
    for number, region in enumerate(regions):
        region.fill_(number + 1)
    kept = []
    for number, (write, region) in enumerate(zip(cluster, regions, strict=True)):
        seen = int((region == number + 1).sum())
        if seen < region.numel() and seen and isinstance(write.act, Copy):
            raise ValueError(f"{write.name} is in part written over while it is loaded: it cannot be synchronised")
        if seen:
            kept.append(write)
    return kept, int((owners != 0).sum())


def _storage(memory: Tensor) -> tuple[int, torch.dtype]:
    return memory.untyped_storage().data_ptr(), memory.dtype


def _span(memory: Tensor) -> tuple[int, int]:
    """First and last element in the storage."""
    first = int(memory.storage_offset())
    return first, first + sum((int(n) - 1) * int(s) for n, s in zip(memory.size(), memory.stride(), strict=True))


def _region(memory: Tensor) -> tuple[object, ...]:
    """Equal for tensors of the same elements, in whatever order of the dimensions."""
    dims = sorted((s, n) for n, s in zip(memory.size(), memory.stride(), strict=True) if n > 1)
    return (*_storage(memory), memory.storage_offset(), *dims)
