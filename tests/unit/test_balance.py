"""Karmarkar-Karp partitions and the cost model."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from lightrl.training.balance import CostModel, karmarkar_karp


def test_hand_worked_example():
    # differencing: 8 7 6 5 4 -> 1 6 5 4 -> 1 1 4 -> 1 3 -> 2, so the sums are 16 and 14
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in p) for p in parts) == [14, 16]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_every_index_once_and_no_worse_than_greedy(costs, parts):
    split = karmarkar_karp(costs, parts)
    assert len(split) == parts
    assert sorted(itertools.chain(*split)) == list(range(len(costs)))
    # any sensible heuristic stays within the largest cost of the mean
    assert max((sum(costs[i] for i in p) for p in split), default=0) <= sum(costs) / parts + max(costs, default=0)


def test_better_than_longest_first():
    costs = [8, 7, 6, 5, 4, 3, 3]  # longest first: 8+4+3, 7+5, 6+3 ... leaves 15 against 9
    sums = sorted(sum(costs[i] for i in p) for p in karmarkar_karp(costs, 3))
    assert sums[-1] - sums[0] <= 1  # 36 in three parts: 12 each at best


def test_no_parts_is_an_error():
    with pytest.raises(ValueError, match="parts"):
        karmarkar_karp([1.0], 0)


def test_cost_model_counts_a_known_shape():
    config = AutoConfig.for_model(
        "llama", hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=100,
    )  # fmt: skip
    cost = CostModel.from_config(config)
    # a layer: q 8x8, k 8x4, v 8x4, o 8x8 and three 8x16 matrices, two operations a weight
    assert cost.per_token == 3 * 2 * (64 + 32 + 32 + 64 + 3 * 128)
    assert cost.per_pair == 3 * 2 * 2 * 2 * 4  # scores and values: 2 heads of 4, two operations each
    assert cost.per_target == 2 * 8 * 100
    config.layer_types = ["linear_attention", "full_attention", "linear_attention"]
    assert CostModel.from_config(config).per_pair == 2 * 2 * 2 * 4
    assert cost(2, 3, 1) == 2 * cost.per_token + 3 * cost.per_pair + cost.per_target
