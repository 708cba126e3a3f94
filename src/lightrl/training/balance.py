"""Spreading work evenly: Karmarkar-Karp partitioning and a cost model of a forward and backward pass."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split indices of `costs` into `parts` lists of nearly equal sums (largest differencing method).

    Karmarkar & Karp 1982, in its k-way form: keep partial solutions as sorted k-tuples of sums, and merge the two with
    the largest spread, biggest part of one with the smallest of the other. Deterministic; parts may be empty.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    # heap entries: (-spread, tie-break, [(sum, indices)] sorted by falling sum)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, cost in enumerate(costs):
        solution = [(float(cost), [i])] + [(0.0, []) for _ in range(parts - 1)]
        heapq.heappush(heap, (-float(cost) if parts > 1 else 0.0, i, solution))
    while len(heap) > 1:
        _, order, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x + y, i + j) for (x, i), (y, j) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    if not heap:
        return [[] for _ in range(parts)]
    return [sorted(indices) for _, indices in heap[0][2]]


@dataclass(frozen=True)
class CostModel:
    """Floating-point operations of one forward: rows through the blocks, attended pairs, rows through the head."""

    per_token: float
    per_pair: float
    per_target: float

    def __call__(self, tokens: int, pairs: float, targets: int) -> float:
        return self.per_token * tokens + self.per_pair * pairs + self.per_target * targets

    @classmethod
    def from_config(cls, config: Any) -> CostModel:
        """From a Hugging Face config; experts count as the ones a token visits, and pairs in layers that attend."""
        hidden, layers = config.hidden_size, config.num_hidden_layers
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        attention = 2 * hidden * head_dim * (2 * heads + 2 * kv_heads)
        experts = getattr(config, "num_experts_per_tok", None)
        width = getattr(config, "intermediate_size", None) or 4 * hidden
        if experts:
            width = experts * (getattr(config, "moe_intermediate_size", None) or width)
        kinds = getattr(config, "layer_types", None) or ()
        attending = layers - sum(kind == "linear_attention" for kind in kinds)
        return cls(
            per_token=float(layers * (attention + 6 * hidden * width)),
            per_pair=float(attending * 4 * heads * head_dim),
            per_target=float(2 * hidden * config.vocab_size),
        )
