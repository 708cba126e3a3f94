"""Plans and tensors of microbatches against hand-worked examples; aggregation exact under any split (A1-A3, A5)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.training.balance import CostModel
from lightrl.training.packing import SampleSize, TrainSample, loss_weight, pack, plan_minibatches

COST = CostModel(per_token=1.0, per_pair=0.01, per_target=0.5)


def sample(group: int, index: int, prompt: list[int], response: list[int], mask=None, advantage=1.0) -> TrainSample:
    return TrainSample(
        group_index=group,
        index=index,
        prompt=prompt,
        response=response,
        loss_mask=mask or [1] * len(response),
        rollout_logprobs=[-0.5] * len(response),
        advantage=advantage,
    )


def sizes_of(samples, owner=0):
    return [
        SampleSize(s.group_index, s.index, owner, len(s.prompt), len(s.response), sum(s.loss_mask)) for s in samples
    ]


def test_shared_prompt_is_packed_once():
    """The worked example of Microbatch's docstring: answers x y and z to a b, then p q r to c."""
    a, b, c, x, y, z, p, q, r = range(10, 19)
    batch = pack(
        [[sample(0, 0, [a, b], [x, y]), sample(0, 1, [a, b], [z])], [sample(1, 0, [c], [p, q, r], mask=[1, 0, 1])]],
        [[0.5, 0.5], [0.25]],
    )
    assert batch.input_ids.tolist() == [a, b, x, c, p, q]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 3, 6]
    assert batch.cu_seqlens_k.tolist() == [0, 2, 5, 8]
    assert batch.kv_index.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert batch.logit_rows.tolist() == [1, 2, 1, 3, 4, 5]
    assert batch.targets.tolist() == [x, y, z, p, q, r]
    assert batch.sample_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.loss_mask.tolist() == [1, 1, 1, 1, 0, 1]
    assert batch.loss_weights.tolist() == [0.5, 0.5, 0.5, 0.25, 0, 0.25]
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (3, 3)
    assert batch.sample_keys == [(0, 0), (0, 1), (1, 0)]


def test_alone_keys_are_the_rows():
    batch = pack([[sample(0, 0, [1, 2], [3, 4])]], [[1.0]])
    assert batch.kv_index is None
    assert batch.input_ids.tolist() == [1, 2, 3]
    assert batch.logit_rows.tolist() == [1, 2]
    assert torch.equal(batch.cu_seqlens_q, batch.cu_seqlens_k)


def test_no_work_is_one_row_without_loss():
    batch = pack([], [])
    assert batch.input_ids.tolist() == [0]
    assert batch.targets.numel() == batch.loss_weights.numel() == 0


@st.composite
def _groups(draw):
    """Ragged groups: sizes 1-5, some samples masked out whole, some with holes, some empty."""
    samples = []
    for group in range(draw(st.integers(1, 6))):
        prompt = [1] * draw(st.integers(1, 9))
        for index in range(draw(st.integers(1, 5))):
            mask = draw(st.lists(st.integers(0, 1), min_size=0, max_size=12))
            samples.append(sample(group, index, prompt, [2] * len(mask), mask=mask or None))
    return samples


@settings(max_examples=150, deadline=None)
@given(_groups(), st.integers(1, 4), st.integers(1, 3), st.integers(4, 60), st.booleans())
def test_plans_cover_every_sample_once_within_the_limit(samples, world, minibatches, max_tokens, share):
    sizes = sizes_of(samples)
    plans = plan_minibatches(
        sizes, world_size=world, minibatches=minibatches, max_tokens=max_tokens, share_prompts=share, cost=COST
    )
    assert len(plans) == minibatches
    seen = []
    for plan in plans:
        counts = {len(rank) for rank in plan.units}
        assert len(counts) == 1  # as many microbatches on every rank
        assert min(counts) >= 1
        for micro in (m for rank in plan.units for m in rank):
            assert len(micro) == 1 or sum(u.tokens for u in micro) <= max_tokens  # only one too long by itself exceeds
            for unit in micro:
                assert len({s.group_index for s in unit.samples}) == 1
                assert share or len(unit.samples) == 1
                seen += [s.key for s in unit.samples]
    assert sorted(seen) == sorted(s.key for s in sizes if s.response)
    groups_of = [{s.group_index for r in p.units for m in r for u in m for s in u.samples} for p in plans]
    assert sum(map(len, groups_of)) == len(set().union(*groups_of))  # no group is split over updates


@settings(max_examples=100, deadline=None)
@given(_groups(), st.sampled_from(["token_mean", "sequence_mean", "constant"]), st.integers(1, 3), st.integers(4, 40))
def test_weighted_sum_is_the_aggregation_under_any_split(samples, aggregation, world, max_tokens):
    """Cases A1, A2: token losses summed with these weights over ranks and microbatches equal the plain definition."""
    held = {(s.group_index, s.index): s for s in samples}
    generator = torch.Generator().manual_seed(len(samples))
    losses = {k: torch.randn(len(s.response), generator=generator, dtype=torch.float64) for k, s in held.items()}
    (plan,) = plan_minibatches(
        sizes_of(samples), world_size=world, minibatches=1, max_tokens=max_tokens, share_prompts=True, cost=COST
    )
    total = 0.0
    for micro in (m for rank in plan.units for m in rank):
        units = [[held[s.key] for s in u.samples] for u in micro]
        weights = [
            [loss_weight(plan, s.loss_tokens, aggregation=aggregation, constant_length=16) for s in u.samples]
            for u in micro
        ]
        batch = pack(units, weights)
        flat = torch.cat([losses[k] for k in batch.sample_keys]) if batch.sample_keys else torch.zeros(0)
        total += float((flat * batch.loss_weights.double()).sum())
    masked = [
        (losses[k], torch.tensor(s.loss_mask, dtype=torch.float64))
        for k, s in held.items()
        if sum(s.loss_mask) and s.response
    ]
    if not masked:
        assert total == 0.0
        return
    if aggregation == "token_mean":
        expected = sum((x * m).sum() for x, m in masked) / sum(m.sum() for _, m in masked)
    elif aggregation == "sequence_mean":
        expected = sum((x * m).sum() / m.sum() for x, m in masked) / len(masked)
    else:
        expected = sum((x * m).sum() for x, m in masked) / (len(masked) * 16)
    assert total == pytest.approx(float(expected), abs=1e-6)


def test_only_a_unit_that_is_too_long_exceeds_the_limit():
    samples = [sample(g, 0, [1], [2] * n) for g, n in enumerate((50, 6, 6, 6, 6))]  # as many rows as tokens answered
    (plan,) = plan_minibatches(
        sizes_of(samples), world_size=1, minibatches=1, max_tokens=12, share_prompts=True, cost=COST
    )
    assert [sum(u.tokens for u in micro) for micro in plan.units[0]] == [50, 12, 12]
    (plan,) = plan_minibatches(
        sizes_of(samples), world_size=2, minibatches=1, max_tokens=12, share_prompts=True, cost=COST
    )
    assert sorted([sum(u.tokens for u in micro) for micro in rank] for rank in plan.units) == [[12, 12], [50, 0]]


def test_a1_five_tokens_and_one_weigh_the_same_each():
    samples = [sample(0, 0, [1], [2] * 5), sample(1, 0, [1], [2])]
    (plan,) = plan_minibatches(
        sizes_of(samples), world_size=2, minibatches=1, max_tokens=100, share_prompts=True, cost=COST
    )
    assert {len(r[0]) for r in plan.units} == {1}  # one sample each
    assert loss_weight(plan, 5, aggregation="token_mean", constant_length=1) == pytest.approx(1 / 6)
    assert loss_weight(plan, 1, aggregation="token_mean", constant_length=1) == pytest.approx(1 / 6)
    assert loss_weight(plan, 5, aggregation="sequence_mean", constant_length=1) == pytest.approx(1 / 10)
    assert loss_weight(plan, 1, aggregation="sequence_mean", constant_length=1) == pytest.approx(1 / 2)
    assert loss_weight(plan, 5, aggregation="constant", constant_length=8) == pytest.approx(1 / 16)


def test_a3_all_masked_has_no_loss_tokens():
    samples = [sample(0, i, [1, 2], [3, 4], mask=[0, 0]) for i in range(3)]
    (plan,) = plan_minibatches(
        sizes_of(samples), world_size=2, minibatches=1, max_tokens=100, share_prompts=True, cost=COST
    )
    assert (plan.loss_tokens, plan.sequences) == (0, 0)
    assert loss_weight(plan, 0, aggregation="token_mean", constant_length=1) == 0.0


def test_balance_over_ranks():
    samples = [sample(g, 0, [1] * 10, [2] * n) for g, n in enumerate((400, 10, 100, 90, 210, 200, 5, 390))]
    (plan,) = plan_minibatches(
        sizes_of(samples), world_size=2, minibatches=1, max_tokens=10_000, share_prompts=True, cost=COST
    )
    costs = [sum(COST(u.tokens, u.pairs, u.targets) for m in rank for u in m) for rank in plan.units]
    assert max(costs) / min(costs) < 1.1
