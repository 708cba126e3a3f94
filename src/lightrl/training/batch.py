"""From this rank's samples to this rank's share of every minibatch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from lightrl.distributed.mesh import World
from lightrl.training.balance import CostModel
from lightrl.training.packing import (
    MinibatchPlan,
    SampleSize,
    TrainSample,
    loss_weight,
    pack,
    plan_minibatches,
    share_rows,
)
from lightrl.types import Microbatch


def build_minibatches(
    samples: Sequence[TrainSample],
    world: World,
    *,
    minibatches: int,
    max_tokens: int,
    share_prompts: bool,
    whole_groups: bool = False,
    skip_zero_advantage: bool,
    aggregation: str,
    constant_length: int,
    cost: CostModel,
) -> list[list[Microbatch]]:
    """Plan together, exchange what changes rank, pack. `result[update][microbatch]`, as many on every rank.

    Updates without a single loss token anywhere are left out, on all ranks alike. Samples without a
    loss token are not computed, and with `skip_zero_advantage` those whose loss has no gradient; the loss is divided as
    if they were.
    """
    mine = [
        SampleSize(
            group_index=s.group_index,
            index=s.index,
            owner=world.rank,
            prompt=len(s.prompt),
            response=len(s.response),
            loss_tokens=sum(s.loss_mask),
            prompt_hash=_hash(s.prompt) if share_prompts else 0,
            computed=any(s.loss_mask) and (s.has_advantage or not skip_zero_advantage),
        )
        for s in samples
    ]
    sizes = [size for part in world.gather(mine) for size in part]
    ranks = world.context_parallel  # that share a microbatch
    plans = plan_minibatches(
        sizes,
        world_size=world.size // ranks,
        minibatches=minibatches,
        max_tokens=max_tokens * ranks,
        share_prompts=share_prompts,
        whole_groups=whole_groups,
        cost=cost,
    )
    plans = [p for p in plans if p.loss_tokens > 0]
    held = _exchange(samples, plans, world)

    def tensors(plan: MinibatchPlan) -> list[Microbatch]:
        batches = []
        for micro in plan.units[world.rank // ranks]:
            packed = [samples for unit in micro for samples in unit.packed]
            units = [[held[s.key] for s in samples] for samples in packed]
            weights = [
                [
                    loss_weight(plan, s.loss_tokens, aggregation=aggregation, constant_length=constant_length)
                    for s in samples
                ]
                for samples in packed
            ]
            batch = pack(units, weights)
            batches.append(batch if ranks == 1 else share_rows(batch, world.rank % ranks, ranks))
        return batches

    return [tensors(plan) for plan in plans]


def _hash(tokens: Sequence[int]) -> int:
    """The same in every process."""
    return int.from_bytes(hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8).digest(), "little")


def _exchange(
    samples: Sequence[TrainSample], plans: Sequence[MinibatchPlan], world: World
) -> dict[tuple[int, int], TrainSample]:
    """Every sample this rank will train on, by key."""
    mine = {(s.group_index, s.index): s for s in samples}
    outgoing: list[list[TrainSample]] = [[] for _ in range(world.size)]
    for plan in plans:
        for number, micros in enumerate(plan.units):
            first = number * world.context_parallel
            for size in (s for micro in micros for unit in micro for s in unit.samples):
                if size.owner == world.rank:
                    for rank in range(first, first + world.context_parallel):
                        outgoing[rank].append(mine[size.key])
    return {(s.group_index, s.index): s for s in world.exchange(outgoing)}
