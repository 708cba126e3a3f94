"""Packed rows shared by the ranks of a group: what mixes rows sees all of them, for a part of its heads.

Every rank has an equal run of the rows, in the order of ranks. Before attention (or a gated delta rule) rows are
exchanged for heads, afterwards heads for rows, as in DeepSpeed-Ulysses (arXiv:2309.14509): the same kernels run over
the same segments, on 1 / n of the heads. Nothing else of a model mixes rows.

Shapes: `n` ranks of the group, `L` rows of this rank, `T = n L`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.kernels.gated_delta import DeltaInputs
from lightrl.models.exchange import exchange


@dataclass(frozen=True)
class SharedSegments:
    """Segments of rows that a group shares: a trainer's `segments` of a model's call."""

    whole: Any
    """`attention.Segments` of all T rows."""
    group: Any
    """Process group."""


def fault(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why a layer's heads cannot be split over ranks, None if they can."""
    if heads % ranks:
        return f"{heads} heads"
    return f"{kv_heads} key and value heads" if kv_heads % ranks and ranks % kv_heads else None


# ----- attention


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, group: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """[1, heads, L, D] of this rank's rows -> [1, heads / n, T, D] of all rows; sinks [heads] -> [heads / n].

    Where there are fewer key and value heads than ranks, several ranks have the same one.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if (copies := ranks // key.shape[1]) > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    parts = [x.squeeze(0).unflatten(0, (ranks, -1)) for x in (query, key, value)]  # [n, heads / n, L, D]
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in _swap(parts, group))
    return q, k, v, None if sinks is None else sinks.view(ranks, -1)[rank]


def to_rows(out: Tensor, group: Any) -> Tensor:
    """[1, T, heads / n, D] of all rows -> [1, L, heads, D] of this rank's."""
    ranks = dist.get_world_size(group)
    (parts,) = _swap([out.squeeze(0).unflatten(0, (ranks, -1))], group)  # [n, L, heads / n, D], by heads
    return parts.transpose(0, 1).flatten(1, 2)[None]


# ----- the gated delta rule


def delta_to_heads(inputs: DeltaInputs, group: Any) -> DeltaInputs:
    """A layer's inputs for this rank's rows -> for all rows and 1 / n of its heads, weights included."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    keys, values = inputs.key_heads * inputs.key_dim, inputs.value_heads * inputs.value_dim

    def own(channels: Tensor) -> Tensor:
        """[C, …] -> [C / n, …], the channels of this rank's heads."""
        return torch.cat([x.unflatten(0, (ranks, -1))[rank] for x in channels.split([keys, keys, values])])

    rows = [*inputs.mixed.split([keys, keys, values], dim=-1), inputs.beta, inputs.log_decay]
    parts = [x.unflatten(-1, (ranks, -1)).movedim(1, 0) for x in rows]  # [n, L, channels / n]
    *mixed, beta, log_decay = (x.flatten(0, 1) for x in [*_swap(parts[:4], group), *_swap(parts[4:], group)])
    return replace(
        inputs,
        mixed=torch.cat(mixed, dim=-1),
        weight=own(inputs.weight),
        bias=None if inputs.bias is None else own(inputs.bias),
        log_decay=log_decay,
        beta=beta,
        key_heads=inputs.key_heads // ranks,
        value_heads=inputs.value_heads // ranks,
    )


def _swap(parts: Sequence[Tensor], group: Any) -> list[Tensor]:
    """parts [n, …] each, `parts[r]` for rank r -> the same from each rank, by sender. One message for all of them."""
    ranks = len(parts[0])
    flat = [x.flatten(1) for x in parts]
    received = exchange(torch.cat(flat, dim=1), [1] * ranks, [1] * ranks, group)
    split = received.split([x.shape[1] for x in flat], dim=1)
    return [x.view(part.shape) for x, part in zip(split, parts, strict=True)]
