"""How packed segments are cut for the kernels of gated delta layers; built once a microbatch, for all layers.

Segments, in the order of their rows, are cut into chunks of 64 rows, numbered through. Segments that continue another
one (answers of a prompt that is there once) run in a later wave than that one, each wave being one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """`N` chunks of `S` segments. All tensors are int32; of a slot, -1 is none."""

    starts: Tensor  # [N] first row of each chunk
    sizes: Tensor  # [N] its rows, 1 to 64
    rows: Tensor  # [S] first row of each segment
    lengths: Tensor  # [S]
    chunks: Tensor  # [S] first chunk of each segment
    parents: Tensor  # [S] the segment it continues; -1: it starts afresh
    everyone: Tensor  # [S] 0, 1, …: a slot for each segment
    parent_slots: Tensor  # [S] slots of those that others continue
    child_slots: Tensor  # [S] slots of those that continue another
    num_parents: int
    num_children: int
    child_offsets: Tensor  # [S + 1] borders of each one's part of `children`
    children: Tensor
    waves: tuple[Tensor, ...]  # segments that do not wait for each other

    @classmethod
    def build(cls, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> Blocks:
        """Of segments of `lengths` rows (at least one each), one after the other; parents come first.

        >>> b = Blocks.build([65, 3], [-1, 0], torch.device("cpu"))
        >>> b.starts.tolist(), b.sizes.tolist(), [w.tolist() for w in b.waves]
        ([0, 64, 65], [64, 1, 3], [[0], [1]])
        """
        rows = [0, *accumulate(lengths)]
        counts = [-(-n // CHUNK) for n in lengths]
        cut = [(rows[s], n, c) for s, n in enumerate(lengths) for c in range(0, n, CHUNK)]
        children: list[list[int]] = [[] for _ in lengths]
        depth: list[int] = []
        for s, parent in enumerate(parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            if parent >= 0:
                children[parent].append(s)

        def table(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device)

        waves = [table([s for s, d in enumerate(depth) if d == wave]) for wave in range(max(depth) + 1)]
        return cls(
            starts=table([start + c for start, _, c in cut]),
            sizes=table([min(CHUNK, n - c) for _, n, c in cut]),
            rows=table(rows[:-1]),
            lengths=table(lengths),
            chunks=table([0, *accumulate(counts)][:-1]),
            parents=table(parents),
            everyone=table(range(len(lengths))),
            parent_slots=table(_slots([bool(c) for c in children])),
            child_slots=table(_slots([p >= 0 for p in parents])),
            num_parents=sum(bool(c) for c in children),
            num_children=sum(p >= 0 for p in parents),
            child_offsets=table([0, *accumulate(map(len, children))]),
            children=table([s for c in children for s in c]),
            waves=tuple(waves),
        )

    @property
    def num_chunks(self) -> int:
        return len(self.starts)

    @property
    def num_segments(self) -> int:
        return len(self.rows)


def _slots(wanted: Sequence[bool]) -> list[int]:
    return [number - 1 if want else -1 for want, number in zip(wanted, accumulate(map(int, wanted)), strict=True)]


@dataclass(frozen=True)
class Tails:
    """Rows with successors outside their segment: the last ones of a segment that others continue."""

    rows: Tensor  # [R] int32
    offsets: Tensor  # [R + 1] int32, borders of each one's part of the next two
    successors: Tensor  # int32: a row whose convolution reads this one,
    distances: Tensor  # int32: and from so many rows on (0 for the row itself)

    @classmethod
    def build(cls, lengths: Sequence[int], parents: Sequence[int], taps: int, device: torch.device) -> Tails:
        """For a convolution of `taps` rows."""
        borders = [0, *accumulate(lengths)]
        found: dict[int, list[tuple[int, int]]] = {}
        for s, parent in enumerate(parents):
            if parent < 0:
                continue
            history = _last_rows(borders, parents, parent, taps - 1)  # nearest first
            for t in range(min(taps - 1, lengths[s])):
                for distance, row in enumerate(history[: taps - 1 - t], start=t + 1):
                    found.setdefault(row, []).append((borders[s] + t, distance))
        ends = [end for s, end in enumerate(borders[1:]) for _ in range(lengths[s])]  # of each row's segment
        lists = []
        for row in sorted(found):
            own = [(row + d, d) for d in range(taps) if row + d < ends[row]]
            lists.append(own + found[row])

        def table(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device)

        return cls(
            table(sorted(found)),
            table([0, *accumulate(map(len, lists))]),
            table([row for pairs in lists for row, _ in pairs]),
            table([d for pairs in lists for _, d in pairs]),
        )


def _last_rows(borders: Sequence[int], parents: Sequence[int], segment: int, count: int) -> list[int]:
    """The last `count` rows of a segment and of what it continues, the last one first."""
    rows: list[int] = []
    while segment >= 0 and len(rows) < count:
        rows += range(
            borders[segment + 1] - 1, max(borders[segment], borders[segment + 1] - 1 - count + len(rows)) - 1, -1
        )
        segment = parents[segment]
    return rows[:count]
