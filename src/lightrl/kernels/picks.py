"""Some pairs of a token and one of its choices, in an order of their own: rows copied to them, and summed up again.

Shapes: `T` tokens, `k` choices a token, `m` of the T * k pairs. Sums are made in float32, over a token's pairs by their
place, so results repeat bit by bit; gradients need no atomic addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Picks:
    """m pairs of a token and one of its choices."""

    source: Tensor  # [m] int64, place of each among the T * k pairs
    token: Tensor  # [m] int64
    place: Tensor  # [T, w] int64, where a token's pairs stand in this order; -1 for none

    @classmethod
    def smallest(cls, keys: Tensor, count: int, most: int | None = None) -> Picks:
        """The `count` pairs with the smallest keys [T, k], sorted by them; pairs of one key keep their order.

        `most`: pairs that a token can have at most, the w of `place`; default: k.
        """
        order = keys.flatten().sort(stable=True).indices
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        place = place.view(keys.shape)
        if most is not None and most < keys.shape[1]:
            place = place.sort(1).values[:, :most]
        source = order[:count]
        return cls(source, source // keys.shape[1], place.masked_fill(place >= count, -1))

    def gather(self, rows: Tensor) -> Tensor:
        """[T, H] -> [m, H]: the row of each pair's token."""
        out: Tensor = _Gather.apply(rows, self.token, self.place)
        return out

    def sum(self, rows: Tensor) -> Tensor:
        """[m, H] -> [T, H]: over the pairs of each token, in float32, rounded once; 0 for one without."""
        out: Tensor = _Sum.apply(rows, self.token, self.place)
        return out


def sum_rows_reference(rows: Tensor, place: Tensor) -> Tensor:
    """out[t] = sum of rows[place[t, j]] over j, without those of -1: rows [m, H], place [T, w] -> [T, H]."""
    if not len(rows):
        return rows.new_zeros(len(place), rows.shape[1])
    chosen = rows[place.clamp(min=0)].masked_fill_((place < 0)[..., None], 0.0)
    return chosen.sum(1, dtype=torch.float32).to(rows.dtype)


def sum_rows(rows: Tensor, place: Tensor) -> Tensor:
    """As `sum_rows_reference`; on a GPU with Triton each row is read once and nothing of [T, w, H] is made."""
    if rows.is_cuda and find_spec("triton") is not None:
        from lightrl.kernels.picks_triton import sum_rows as fast

        return fast(rows, place)
    return sum_rows_reference(rows, place)


# Indices are kept on the context, not saved: they are no results of the forward pass. So the last sum saves nothing,
# and the repeat of a checkpointed block can end before it.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.place = place
        return rows[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(grad, ctx.place), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.token = token
        return sum_rows(rows, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.token], None, None
