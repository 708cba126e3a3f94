"""The order of prompts: every prompt once an epoch, and the same after any restart (case D1)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.data import DataError, PromptSet, PromptSource
from lightrl.types import Prompt


def prompts(n: int, label: str = "x") -> PromptSet:
    rows = [Prompt(index=i, tokens=[i, i + 1], text=str(i), label=label, source=f"f:{i}") for i in range(n)]
    return PromptSet(prompts=rows, limit=10)


def indices(source: PromptSource, n: int) -> list[int]:
    return [p.index for p in source.next(n)]


def test_without_shuffle_epochs_follow_each_other_in_file_order() -> None:
    source = PromptSource(prompts(3), seed=0, shuffle=False)
    assert indices(source, 2) + indices(source, 5) == [0, 1, 2, 0, 1, 2, 0]
    assert source.epoch == pytest.approx(7 / 3)


def test_the_shuffled_order_is_fixed_for_ever() -> None:
    """Golden: another numpy, torch or machine must deal out the same prompts."""
    source = PromptSource(prompts(8), seed=7, shuffle=True)
    golden = [4, 1, 6, 3, 2, 7, 5, 0, 3, 1, 6, 2, 5, 4, 0, 7]
    assert indices(source, 16) == golden
    assert indices(PromptSource(prompts(8), seed=8, shuffle=True), 8) != golden[:8]


@given(size=st.integers(1, 17), steps=st.lists(st.integers(1, 40), max_size=8), seed=st.integers(0, 2**70))
@settings(max_examples=60, deadline=None)
def test_each_epoch_deals_every_prompt_once(size: int, steps: list[int], seed: int) -> None:
    source = PromptSource(prompts(size), seed=seed, shuffle=True)
    dealt = [i for n in steps for i in indices(source, n)]
    assert len(dealt) == sum(steps)
    for start in range(0, len(dealt), size):
        epoch = dealt[start : start + size]
        assert len(set(epoch)) == len(epoch)
        if len(epoch) == size:
            assert sorted(epoch) == list(range(size))


@given(
    size=st.integers(1, 13),
    before=st.lists(st.integers(0, 20), max_size=5),
    lost=st.integers(0, 30),
    after=st.lists(st.integers(0, 20), max_size=5),
    shuffle=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_restored_source_continues_exactly(
    size: int, before: list[int], lost: int, after: list[int], shuffle: bool
) -> None:
    source = PromptSource(prompts(size), seed=3, shuffle=shuffle)
    for n in before:
        source.next(n)
    state = json.loads(json.dumps(source.state()))
    expected = [indices(source, n) for n in after]
    fresh = PromptSource(prompts(size), seed=3, shuffle=shuffle)
    fresh.next(lost)  # work of a step that was not saved
    fresh.restore(state)
    assert [indices(fresh, n) for n in after] == expected


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (prompts(4), {"seed": 1}, r"run.seed = 1, but the checkpoint was made with 0"),
        (prompts(4), {"shuffle": False}, r"data.shuffle = False, but the checkpoint was made with True"),
        (prompts(5), {}, r"data.path: the checkpoint was made with other rows \(4, now 5;"),
        (prompts(4, label="y"), {}, r"data.path: the checkpoint was made with other rows \(4, now 4;"),
    ],
)
def test_a_state_of_other_data_is_refused(other: PromptSet, options: dict[str, Any], message: str) -> None:
    state = PromptSource(prompts(4), seed=0, shuffle=True).state()
    with pytest.raises(DataError, match=message):
        PromptSource(other, **{"seed": 0, "shuffle": True, **options}).restore(state)


def test_what_was_dealt_for_a_step_that_failed_comes_again() -> None:
    source, plain = PromptSource(prompts(5), seed=3, shuffle=True), PromptSource(prompts(5), seed=3, shuffle=True)
    steps = []
    for number in range(4):
        for fails in (True, False):
            try:
                with source.dealt(4) as dealt:
                    if fails and number % 2:
                        raise KeyboardInterrupt
                    steps.append([p.index for p in dealt])
            except KeyboardInterrupt:
                continue
            break
    assert steps == [indices(plain, 4) for _ in range(4)]


@given(size=st.integers(1, 7), steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_what_is_given_back_comes_again_first(size: int, steps: list[tuple[int, int]]) -> None:
    """Over ends of epochs too; the state is that of a source that never dealt them."""
    source, plain = PromptSource(prompts(size), seed=3, shuffle=True), PromptSource(prompts(size), seed=3, shuffle=True)
    for used, unused in steps:
        assert indices(source, used + unused)[:used] == indices(plain, used)
        source.give_back(unused)
        assert source.state() == plain.state()
    assert indices(source, 9) == indices(plain, 9)


def test_no_prompts() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptSource(prompts(0), seed=0, shuffle=True)
