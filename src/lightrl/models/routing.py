"""Routing replay: what the routers of a model chose in one forward is written down, and chosen again in another.

The same experts, with weights that the present router gives them, so that gradients reach it: "routing replay" of GSPO
(arXiv:2507.18071, 5.3) and "rollout routing replay" (R3, arXiv:2510.11370). Routers ask in `models/experts.py`.

Shapes: `T` rows of a forward, `L` layers with a router, `k` experts a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightrl.types import NOT_RECORDED


@dataclass(frozen=True)
class RoutingShape:
    """What there is to choose in a model."""

    layers: tuple[int, ...]
    """Numbers of the decoder blocks that have a router."""
    num_layers: int
    """Decoder blocks."""
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds every expert's number and one more, for "not recorded"."""
        return torch.uint8 if self.num_experts <= NOT_RECORDED[torch.uint8] else torch.int16

    @classmethod
    def of(cls, model: nn.Module, num_layers: int) -> RoutingShape | None:
        """Of a Hugging Face model with our routers; None where there are none."""
        found = [(name, m) for name, m in model.named_modules() if _is_router(m)]
        if not found:
            return None
        router: Any = found[0][1]
        return cls(
            layers=tuple(_block_of(name) for name, _ in found),
            num_layers=num_layers,
            top_k=int(router.top_k),
            num_experts=int(router.weight.shape[0]),
        )

    def compact(self, experts: Tensor) -> Tensor:
        """Numbers of experts, -1 for "not recorded", in `dtype`."""
        return experts.masked_fill(experts < 0, NOT_RECORDED[self.dtype]).to(self.dtype)


def _block_of(name: str) -> int:
    """Number of the decoder block that a module is in."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if found is None:
        raise ValueError(f"{name} is in no decoder block")
    return int(found[1])


def routers(model: nn.Module) -> list[nn.Module]:
    """In the order of layers."""
    return [m for m in model.modules() if _is_router(m)]


def _is_router(module: nn.Module) -> bool:
    return "routing" in vars(module)


class Routing(Protocol):
    """What goes along with one forward of a model."""

    def choose(self, place: int, own: Callable[[], Tensor]) -> Tensor:
        """Experts [T, k] int64 for router number `place`, whose `own` choice is there to be asked for."""

    def finish(self, count: int) -> None:
        """The forward is over; RuntimeError unless each of `count` routers has chosen."""


@contextmanager
def routed(gates: Sequence[Any], routing: Routing | None) -> Iterator[None]:
    """While entered, these routers choose by `routing`."""
    if routing is None:
        yield
        return
    for gate in gates:
        gate.routing = routing
    try:
        yield
    finally:
        for gate in gates:
            gate.routing = None
    routing.finish(len(gates))


class _Once:
    """Each router chooses once in a forward. One that is repeated for its backward pass takes what it has chosen from
    elsewhere (`models/recompute.py`), and does not ask again."""

    def __init__(self) -> None:
        self._done: set[int] = set()

    def note(self, place: int) -> None:
        if place in self._done:
            raise RuntimeError(f"router {place} chose twice in one forward: its record would be used twice")
        self._done.add(place)

    def finish(self, count: int) -> None:
        if self._done != set(range(count)):
            left = sorted(set(range(count)) - self._done)
            raise RuntimeError(f"routers {left} of {count} chose nothing in a forward with routing replay")


class Recorder(_Once):
    """Writes down what routers choose by themselves."""

    def __init__(self, shape: RoutingShape) -> None:
        super().__init__()
        self.shape = shape
        self._chosen: dict[int, Tensor] = {}

    def choose(self, place: int, own: Callable[[], Tensor]) -> Tensor:
        self.note(place)
        chosen = own()
        self._chosen[place] = self.shape.compact(chosen)
        return chosen

    @property
    def experts(self) -> Tensor:
        """[T, L, k] of the forward that is over, compact, on its device."""
        return torch.stack([chosen for _, chosen in sorted(self._chosen.items())], dim=1)


class Replay(_Once):
    """Makes routers choose `experts` [T, L, k], compact; their own where none are recorded.

    Counts, on the way, where their own choice (a set: the order does not matter) would have been another.
    """

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self._experts = experts
        rows = len(experts)
        self._known = torch.zeros(rows, dtype=torch.int64, device=experts.device)
        self._other = torch.zeros(rows, dtype=torch.int64, device=experts.device)

    def choose(self, place: int, own: Callable[[], Tensor]) -> Tensor:
        self.note(place)
        mine, recorded = own(), self._experts[:, place]
        if mine.shape != recorded.shape:
            raise RuntimeError(f"a record of {list(recorded.shape)} choices for a router that makes {list(mine.shape)}")
        known = (recorded != NOT_RECORDED[recorded.dtype]).all(-1)
        chosen = torch.where(known[:, None], recorded.long(), mine)
        self._known += known
        self._other += (chosen.sort(-1).values != mine.sort(-1).values).any(-1)
        return chosen

    def finish(self, count: int) -> None:
        if count != self._experts.shape[1]:
            raise RuntimeError(f"a record of {self._experts.shape[1]} layers for a model with {count} routers")
        super().finish(count)

    def counts(self) -> ReplayCounts:
        """Of the forward that is over; waits for the device."""
        known, other = self._known, self._other
        rows, rows_other, choices, choices_other = torch.stack(
            [(known > 0).sum(), (other > 0).sum(), known.sum(), other.sum()]
        ).tolist()
        return ReplayCounts(
            rows=rows,
            rows_other=rows_other,
            choices=choices,
            choices_other=choices_other,
            total=self._experts.shape[0] * self._experts.shape[1],
        )


@dataclass(frozen=True, kw_only=True)
class ReplayCounts:
    """How far a replay was from what routers would have chosen."""

    rows: int
    """Rows with a record, in any layer."""
    rows_other: int
    """… for which a router would have chosen other experts."""
    choices: int
    """Choices with a record: rows times layers."""
    choices_other: int
    total: int
    """Rows times layers, with or without a record."""
