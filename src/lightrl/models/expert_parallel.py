"""Experts spread over the ranks of a group: each rank computes its own ones, for the tokens of all of them.

A token goes once to every rank that has some of its experts, with its choices and their weights. That rank sends back
the weighted sum over its experts, and those of all ranks are added up; both sums are made in float32. This is the
scheme of GShard (arXiv:2006.16668) without capacities: nothing is dropped or padded.

Shapes: `T` tokens of this rank, `k` experts a token, `E` experts, `H` hidden; `R` rows that other ranks (and this one)
sent, `P` pairs of such a row and one of this rank's experts. Gradients need no atomic addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightrl.errors import UserError
from lightrl.kernels.moe import Activation, ExpertWeights, grouped_experts
from lightrl.kernels.picks import Picks
from lightrl.models.exchange import exchange


def spread(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Turn a layer's parameters, [E, …] each, into DTensors of which this rank holds E / ranks experts. On meta.

    UserError where the ranks of `mesh`, which has one axis, do not divide the experts.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    for name, parameter in list(experts.named_parameters(recurse=False)):
        if len(parameter) % size:
            raise UserError(f"parallel.expert_parallel: {size} does not divide the model's {len(parameter)} experts")
        count = len(parameter) // size
        local = parameter.detach()[rank * count : (rank + 1) * count].clone()
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


@dataclass(frozen=True)
class Plan:
    """Who sends how many rows to whom, and which expert takes which: a forward's routing, for it and its repetition."""

    outgoing: list[int]
    """Rows for each rank of the group."""
    incoming: list[int]
    rows: Picks
    """The pairs of T tokens and their choices that stand for a row sent; its first one for that rank."""
    pairs: Picks
    """The pairs of R rows and their choices that are experts of this rank, sorted by expert."""
    experts: Tensor  # [P] int64, the expert of each, counted from this rank's first


@torch.no_grad()
def make_plan(indices: Tensor, local_experts: int, group: Any) -> Plan:
    """From this rank's choices [T, k]. A collective of the group; waits for the device once."""
    size = dist.get_world_size(group)
    owner = indices // local_experts
    repeated = (owner[:, :, None] == owner[:, None, :]).tril(-1).any(-1)
    target = owner.masked_fill(repeated, size)
    ranks = torch.arange(size, device=owner.device)
    # rows and pairs for each rank, [ranks, 2]
    sent = torch.stack([(keys[..., None] == ranks).sum((0, 1)) for keys in (target, owner)], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    counts = torch.stack([sent, received]).tolist()
    outgoing, incoming = ([rows for rows, _ in side] for side in counts)
    rows = Picks.smallest(target, sum(outgoing), most=size)
    first = target.flatten()[rows.source] * local_experts
    chosen = exchange((indices[rows.token] - first[:, None]).int(), outgoing, incoming, group).long()
    mine = (chosen >= 0) & (chosen < local_experts)
    chosen = chosen.masked_fill(~mine, local_experts)
    pairs = Picks.smallest(chosen, sum(number for _, number in counts[1]))
    return Plan(outgoing, incoming, rows, pairs, chosen.flatten()[pairs.source])


def parallel_experts(
    hidden: Tensor, weights: Tensor, experts: ExpertWeights, activate: Activation, plan: Plan, group: Any
) -> Tensor:
    """As `grouped_experts` over all experts of the group; `experts` are this rank's own. A collective, twice.

    hidden [T, H], weights [T, k] -> [T, H] in hidden's dtype.
    """
    there, back = (plan.outgoing, plan.incoming, group), (plan.incoming, plan.outgoing, group)
    rows = exchange(plan.rows.gather(hidden), *there)
    shares = exchange(plan.rows.gather(weights), *there)
    x, chosen, share = plan.pairs.gather(rows), plan.experts[:, None], shares.flatten()[plan.pairs.source, None]
    count = len(x)
    if not count:  # a row of weight 0, as kernels need not take none
        x, chosen, share = (F.pad(t, (0, 0, 0, 1)) for t in (x, chosen, share))
    out = grouped_experts(x, chosen, share, experts, activate)[:count]
    sums = exchange(plan.pairs.sum(out), *back)
    return plan.rows.sum(sums)
