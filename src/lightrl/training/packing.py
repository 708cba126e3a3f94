"""From scored samples to packed microbatches: who computes what, and the tensors it takes.

Every rank sees the sizes of all samples and makes the same plan, so that minibatches hold the same groups whatever the
number of ranks, each rank gets the same number of microbatches, and only samples that change rank travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from lightrl.training.balance import CostModel, karmarkar_karp
from lightrl.types import NOT_RECORDED, Microbatch, RoutingRecord, Sample


@dataclass(kw_only=True)
class TrainSample:
    """What training needs of a sample. Per-token lists align with the response."""

    group_index: int
    index: int
    prompt: list[int]
    response: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float] | None
    advantage: float | list[float]
    """Advantage of every token of the response, or of each."""
    rollout_top_ids: list[list[int]] | None = None
    rollout_top_logprobs: list[list[float]] | None = None
    teacher_logprobs: list[float] | None = None
    teacher_top_ids: list[list[int]] | None = None
    teacher_top_logprobs: list[list[float]] | None = None
    rollout_routing: torch.Tensor | None = None
    """As `Sample`'s: of the prompt and the response but its last token."""

    @property
    def has_advantage(self) -> bool:
        """Is that of any token not 0?"""
        return any(self.advantage) if isinstance(self.advantage, list) else self.advantage != 0

    @classmethod
    def from_sample(cls, sample: Sample) -> TrainSample:
        if sample.advantage is None:
            raise ValueError(f"sample {sample.group_index}/{sample.index} has no advantage yet")
        return cls(
            group_index=sample.group_index,
            index=sample.index,
            prompt=sample.tokens[: sample.prompt_length],
            response=sample.response_tokens,
            loss_mask=sample.mask,
            # given tokens have none; any number will do where there is no loss
            rollout_logprobs=None
            if sample.rollout_logprobs is None
            else [0.0 if value is None else value for value in sample.rollout_logprobs],
            rollout_top_ids=sample.rollout_top_ids,
            rollout_top_logprobs=sample.rollout_top_logprobs,
            teacher_logprobs=sample.teacher_logprobs,
            teacher_top_ids=sample.teacher_top_ids,
            teacher_top_logprobs=sample.teacher_top_logprobs,
            rollout_routing=sample.rollout_routing,
            advantage=sample.advantage,
        )


@dataclass(frozen=True, order=True)
class SampleSize:
    """What a plan needs to know of a sample, wherever it is."""

    group_index: int
    index: int
    owner: int  # rank that holds it
    prompt: int
    response: int
    loss_tokens: int
    computed: bool = True
    """False: counts in what losses are divided by, but is not fed to the model."""
    prompt_hash: int = 0
    """Of the prompt's tokens: a group of several agents, or branches, has several prompts."""

    @property
    def key(self) -> tuple[int, int]:
        return self.group_index, self.index


@dataclass(frozen=True)
class Unit:
    """Samples that travel and are packed together: one, or several of a group, most often on their prompt's rows."""

    samples: tuple[SampleSize, ...]
    shared: bool = True
    """The prompt is there once, for all of them."""

    @property
    def packed(self) -> tuple[tuple[SampleSize, ...], ...]:
        """Its samples, those that share a prompt's rows together."""
        return (self.samples,) if self.shared else tuple((s,) for s in self.samples)

    @property
    def tokens(self) -> int:
        """Rows fed to the model: the prompt, and each response but its last token."""
        return len(self.packed) * self.samples[0].prompt + sum(s.response - 1 for s in self.samples)

    @property
    def targets(self) -> int:
        return sum(s.response for s in self.samples)

    @property
    def pairs(self) -> float:
        prompt = self.samples[0].prompt
        return len(self.packed) * prompt**2 / 2 + sum(
            (s.response - 1) * (prompt + s.response / 2) for s in self.samples
        )


@dataclass(frozen=True)
class MinibatchPlan:
    """One optimizer update: `units[rank][microbatch]`, and what its losses are divided by."""

    units: tuple[tuple[tuple[Unit, ...], ...], ...]
    loss_tokens: int
    sequences: int
    """Samples with at least one loss token."""


def plan_minibatches(
    sizes: Sequence[SampleSize],
    *,
    world_size: int,
    minibatches: int,
    max_tokens: int,
    share_prompts: bool,
    whole_groups: bool = False,
    cost: CostModel,
) -> list[MinibatchPlan]:
    """Split samples into minibatches of whole groups, over ranks by cost, and into microbatches of `max_tokens` rows.

    Samples without a response are left out, those not `computed` only count. A unit longer than `max_tokens` gets a
    microbatch of its own. `whole_groups`: the samples of a group are one unit, as their loss compares them.
    """
    ordered = sorted(s for s in sizes if s.response > 0)
    groups: dict[int, list[SampleSize]] = {}
    for size in ordered:
        groups.setdefault(size.group_index, []).append(size)
    members = list(groups.values())
    borders = [len(members) * i // minibatches for i in range(minibatches + 1)]
    plans = []
    for start, end in pairwise(borders):
        samples = [s for group in members[start:end] for s in group]
        limit = max_tokens
        computed = [[s for s in group if s.computed] for group in members[start:end]]
        if world_size > 1:  # smaller units spread better over ranks
            rows = sum(s.prompt + s.response for group in computed for s in group)
            limit = min(limit, rows // (2 * world_size) + 1)
        if whole_groups:
            units = [Unit(tuple(group), shared=share_prompts) for group in computed if group]
        else:
            units = [u for group in computed for u in _units(group, limit if share_prompts else 0)]
        plans.append(
            MinibatchPlan(
                units=_spread(units, world_size, max_tokens, cost),
                loss_tokens=sum(s.loss_tokens for s in samples),
                sequences=sum(s.loss_tokens > 0 for s in samples),
            )
        )
    return plans


def _units(group: list[SampleSize], limit: int) -> list[Unit]:
    """Samples of one group in runs that fit `limit` rows; 0 keeps each alone."""
    units: list[Unit] = []
    for sample in group:
        first = units[-1].samples[0] if units else sample
        same = (first.prompt, first.prompt_hash) == (sample.prompt, sample.prompt_hash)
        if units and same and units[-1].tokens + sample.response - 1 <= limit:
            units[-1] = Unit((*units[-1].samples, sample))
        else:
            units.append(Unit((sample,)))
    return units


def _spread(
    units: list[Unit], world_size: int, max_tokens: int, cost: CostModel
) -> tuple[tuple[tuple[Unit, ...], ...], ...]:
    costs = [cost(u.tokens, u.pairs, u.targets) for u in units]
    ranks = [[units[i] for i in part] for part in karmarkar_karp(costs, world_size)]
    count = max(1, *(_fewest_microbatches(part, max_tokens) for part in ranks))
    while True:
        split = [_microbatches(part, count, max_tokens) for part in ranks]
        found = [micros for micros in split if micros is not None]
        if len(found) == world_size:
            return tuple(found)
        count += 1


def _fewest_microbatches(units: list[Unit], max_tokens: int) -> int:
    short = sum(u.tokens for u in units if u.tokens <= max_tokens)
    return sum(u.tokens > max_tokens for u in units) + -(-short // max_tokens)


def _microbatches(units: list[Unit], count: int, max_tokens: int) -> tuple[tuple[Unit, ...], ...] | None:
    """One rank's units in `count` microbatches, some perhaps empty. Those too long are alone; None where the others
    cannot be kept within `max_tokens`."""
    alone = [(u,) for u in units if u.tokens > max_tokens]
    rest = [u for u in units if u.tokens <= max_tokens]
    parts = karmarkar_karp([float(u.tokens) for u in rest], count - len(alone)) if count > len(alone) else []
    shared = [tuple(rest[i] for i in part) for part in parts]
    if any(sum(u.tokens for u in micro) > max_tokens for micro in shared):
        return None
    return (*alone, *shared)


def loss_weight(plan: MinibatchPlan, loss_tokens: int, *, aggregation: str, constant_length: int) -> float:
    """Share of one loss token in the loss of the update, for a sample with `loss_tokens` of them.

    token_mean: 1 / all loss tokens. sequence_mean: 1 / (loss tokens of the sample x sequences). constant: 1 /
    (sequences x constant_length), Dr.GRPO's unbiased sum. Over all ranks and microbatches the weighted sum of token
    losses is the loss, so any split gives the same gradients.
    """
    if loss_tokens == 0:
        return 0.0
    if aggregation == "token_mean":
        return 1.0 / plan.loss_tokens
    if aggregation == "sequence_mean":
        return 1.0 / (loss_tokens * plan.sequences)
    if aggregation == "constant":
        return 1.0 / (plan.sequences * constant_length)
    raise ValueError(f"unknown aggregation {aggregation!r}")


def pack(units: Sequence[Sequence[TrainSample]], weights: Sequence[Sequence[float]]) -> Microbatch:
    """Tensors of one microbatch on the host. Samples of a unit share their prompt's rows, with the first one's routing.

    Without units, a single row that carries no loss: a rank with less work still takes part in every collective.
    """
    rows: list[int] = []
    positions: list[int] = []
    borders_q, borders_k = [0], [0]
    kv: list[int] = []
    logit_rows: list[int] = []
    flat: dict[str, list[float]] = {name: [] for name in ("mask", "weight", "advantage", "rollout")}
    targets: list[int] = []
    sample_ids: list[int] = []
    have_rollout = all(s.rollout_logprobs is not None for unit in units for s in unit)
    have_routing = bool(units) and all(s.rollout_routing is not None for unit in units for s in unit)
    routing: list[torch.Tensor] = []

    def segment(tokens: list[int], first_position: int, keys_before: range) -> range:
        start = len(rows)
        rows.extend(tokens)
        positions.extend(range(first_position, first_position + len(tokens)))
        kv.extend(keys_before)
        kv.extend(range(start, len(rows)))
        borders_q.append(len(rows))
        borders_k.append(len(kv))
        return range(start, len(rows))

    keys: list[tuple[int, int]] = []
    for unit, unit_weights in zip(units, weights, strict=True):
        alone = len(unit) == 1
        prompt = unit[0].prompt
        shared = range(0) if alone else segment(prompt, 0, range(0))
        if have_routing and not alone:
            routing.append(_routing_of(unit[0])[: len(prompt)])
        for sample, weight in zip(unit, unit_weights, strict=True):
            fed = sample.response[:-1]
            if alone:
                own = segment(prompt + fed, 0, range(0))
                logit_rows.extend(own[len(prompt) - 1 :])
            else:
                own = segment(fed, len(prompt), shared) if fed else range(0)
                logit_rows.append(shared[-1])
                logit_rows.extend(own)
            if have_routing:
                routing.append(_routing_of(sample)[0 if alone else len(prompt) :])
            targets.extend(sample.response)
            sample_ids.extend([len(keys)] * len(sample.response))
            flat["mask"].extend(sample.loss_mask)
            flat["weight"].extend(weight * m for m in sample.loss_mask)
            each = sample.advantage
            flat["advantage"].extend(each if isinstance(each, list) else [each] * len(sample.response))
            if have_rollout:
                flat["rollout"].extend(sample.rollout_logprobs or ())
            keys.append((sample.group_index, sample.index))
    if not rows:
        segment([0], 0, range(0))  # an id that every model has; a tokenizer's pad id may lie beyond its vocabulary
    lengths_q = [b - a for a, b in pairwise(borders_q)]
    lengths_k = [b - a for a, b in pairwise(borders_k)]
    shares = any(len(unit) > 1 for unit in units)
    return Microbatch(
        input_ids=torch.tensor(rows, dtype=torch.int64),
        position_ids=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens_q=torch.tensor(borders_q, dtype=torch.int32),
        cu_seqlens_k=torch.tensor(borders_k, dtype=torch.int32),
        kv_index=torch.tensor(kv, dtype=torch.int64) if shares else None,
        max_seqlen_q=max(lengths_q),
        max_seqlen_k=max(lengths_k),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        sample_ids=torch.tensor(sample_ids, dtype=torch.int64),
        loss_mask=torch.tensor(flat["mask"], dtype=torch.float32),
        loss_weights=torch.tensor(flat["weight"], dtype=torch.float32),
        advantages=torch.tensor(flat["advantage"], dtype=torch.float32),
        rollout_logprobs=torch.tensor(flat["rollout"], dtype=torch.float32) if have_rollout else None,
        routing=RoutingRecord(experts=torch.cat(routing)) if have_routing else None,
        sample_keys=keys,
        **_where_all_have(units),
    )


_OPTIONAL = {
    "rollout_top_ids": torch.int64,
    "rollout_top_logprobs": torch.float32,
    "teacher_logprobs": torch.float32,
    "teacher_top_ids": torch.int64,
    "teacher_top_logprobs": torch.float32,
}


def _where_all_have(units: Sequence[Sequence[TrainSample]]) -> dict[str, Any]:
    """What some runs' samples have for each response token: None unless there are samples, and all of them have it."""
    lists = {name: [getattr(s, name) for unit in units for s in unit] for name in _OPTIONAL}
    return {
        name: torch.tensor([x for part in parts for x in part], dtype=_OPTIONAL[name])
        for name, parts in lists.items()
        if parts and all(part is not None for part in parts)
    }


def _routing_of(sample: TrainSample) -> torch.Tensor:
    """A row for each token that is fed."""
    assert sample.rollout_routing is not None
    fed = len(sample.prompt) + len(sample.response) - 1
    if len(sample.rollout_routing) != fed:
        have = len(sample.rollout_routing)
        raise ValueError(f"sample {sample.group_index}/{sample.index}: routing of {have} tokens, {fed} are fed")
    return sample.rollout_routing


def share_rows(batch: Microbatch, rank: int, ranks: int) -> Microbatch:
    """This rank's part of a microbatch whose rows `ranks` ranks share: an equal run of them, and what they predict.

    Borders and keys of segments stay those of all rows. Rows are added at the end to make the runs equal, a segment of
    their own that predicts nothing.
    """
    rows = len(batch.input_ids)
    extra = -rows % ranks
    count = (rows + extra) // ranks
    start = rank * count

    def run(values: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return torch.cat([values, added])[start : start + count]

    borders = [batch.cu_seqlens_q, batch.cu_seqlens_k]
    kv_index = batch.kv_index
    if extra:
        borders = [torch.cat([b, b[-1:] + extra]) for b in borders]
        if kv_index is not None:
            kv_index = torch.cat([kv_index, torch.arange(rows, rows + extra)])
    mine = (batch.logit_rows >= start) & (batch.logit_rows < start + count)
    names = ["targets", "sample_ids", "loss_mask", "loss_weights", "advantages", "rollout_logprobs"]
    names += _OPTIONAL
    routing = batch.routing
    if routing is not None:
        more = routing.experts.new_full((extra, *routing.experts.shape[1:]), NOT_RECORDED[routing.experts.dtype])
        routing = replace(routing, experts=run(routing.experts, more))
    predicted: dict[str, Any] = {name: None if (v := getattr(batch, name)) is None else v[mine] for name in names}
    return replace(
        batch,
        input_ids=run(batch.input_ids, torch.zeros(extra, dtype=torch.int64)),
        position_ids=run(batch.position_ids, torch.arange(extra)),
        cu_seqlens_q=borders[0],
        cu_seqlens_k=borders[1],
        kv_index=kv_index,
        max_seqlen_q=max(batch.max_seqlen_q, extra),
        max_seqlen_k=max(batch.max_seqlen_k, extra),
        logit_rows=batch.logit_rows[mine] - start,
        routing=routing,
        **predicted,
    )
