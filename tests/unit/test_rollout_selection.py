"""Which groups make up a step, worked by hand: the first that pass by number, whichever are done first."""

from __future__ import annotations

import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrl.config.load import load_config
from lightrl.config.schema import EvalConfig, EvalSetConfig
from lightrl.errors import UserError
from lightrl.rollout.filters import load_filter, nonzero_std
from lightrl.rollout.selection import Selection, Verdict
from lightrl.types import Prompt, Sample, SampleGroup, Status

PROMPTS = [Prompt(index=i, tokens=[1], text="") for i in range(100)]


def verdict(keep: bool) -> Verdict:
    return Verdict(keep=keep, reason="" if keep else "zero_std", reward_sum=1.0 + keep, num_scored=2)


def group(*rewards: float | None) -> SampleGroup:
    samples = [
        Sample(
            prompt=PROMPTS[0], group_index=0, index=i, tokens=[1, 2], response_length=1, reward=reward,
            status=Status.FAILED if reward is None else Status.COMPLETED,
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return SampleGroup(prompt=PROMPTS[0], group_index=0, samples=samples)


def test_the_first_that_pass_by_number_are_taken() -> None:
    """Of 10..15, 11, 13 and 14 pass and two are wanted: 11 and 13, though 14 was done first; 14 and 15 come again."""
    selection = Selection(PROMPTS[:6], start=10, wanted=2)
    assert [n for n, _ in selection.draw()] == [10, 11, 12, 13, 14, 15]
    selection.note({14: verdict(True), 13: verdict(True)})
    assert selection.end is None  # 10, 11 and 12 may pass yet
    selection.note({10: verdict(False), 11: verdict(True)})
    assert (selection.end, selection.kept) == (None, [11])
    selection.note({12: verdict(False)})
    assert (selection.end, selection.kept) == (4, [11, 13])  # 15 is not waited for
    assert selection.metrics() == {
        "filter/drawn": 4, "filter/kept": 2, "filter/returned": 2, "filter/draws": 1, "filter/dropped_zero_std": 2,
        "filter/reward_mean": (1 + 2 + 1 + 2) / 8,
    }  # fmt: skip


def test_another_draw_comes_when_too_few_can_pass_and_not_before() -> None:
    more = iter([PROMPTS[3:6], PROMPTS[6:9]])
    selection = Selection(PROMPTS[:3], start=0, wanted=2, more=lambda: next(more), max_draws=3)
    selection.draw()
    selection.note({0: verdict(False)})
    assert not selection.needs_draw  # 1 and 2 may pass
    selection.note({2: verdict(False)})
    assert selection.needs_draw
    assert selection.end is None
    assert [(n, p.index) for n, p in selection.draw()] == [(3, 3), (4, 4), (5, 5)]
    selection.note({1: verdict(True), 3: verdict(False), 4: verdict(False), 5: verdict(False)})
    assert selection.needs_draw
    selection.draw()
    selection.note({7: verdict(True), 6: verdict(False)})
    assert (selection.end, selection.kept) == (8, [1, 7])
    assert selection.metrics()["filter/returned"] == 1


def test_after_the_last_draw_it_takes_what_there_is() -> None:
    selection = Selection(PROMPTS[:2], start=0, wanted=2, more=lambda: PROMPTS[2:4], max_draws=2)
    selection.draw()
    selection.note({0: verdict(False), 1: verdict(False)})
    selection.draw()
    selection.note({3: verdict(True)})
    assert selection.end is None
    selection.note({2: verdict(False)})
    assert (selection.end, selection.kept, selection.needs_draw) == (4, [3], False)


@given(
    passing=st.lists(st.booleans(), min_size=4, max_size=24),
    wanted=st.integers(1, 6),
    order=st.randoms(use_true_random=False),
)
def test_neither_order_nor_eagerness_changes_the_outcome(passing, wanted, order) -> None:
    def run(eager: bool, shuffled: bool) -> tuple[int | None, list[int], int]:
        selection = Selection(
            PROMPTS[:4], start=0, wanted=wanted, more=lambda: PROMPTS[:4], max_draws=-(-len(passing) // 4)
        )
        waiting = [n for n, _ in selection.draw()]
        while selection.end is None:
            if selection.needs_draw and (eager or not waiting):
                waiting += [n for n, _ in selection.draw()]
            if shuffled:
                order.shuffle(waiting)
            if waiting:
                number = waiting.pop(0)
                selection.note({number: verdict(number < len(passing) and passing[number])})
        return selection.end, selection.kept, selection.num_draws

    plain = run(eager=False, shuffled=False)
    assert plain[1] == [n for n, keep in enumerate(passing) if keep][:wanted]
    assert run(eager=False, shuffled=True) == plain
    assert run(eager=True, shuffled=True) == plain


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.0, 1.0, 0.0), (True, "")),
        ((0.1, 0.1, 0.1), (False, "zero_std")),
        ((1.0, 1.0 + 1e-7), (False, "zero_std")),
        ((1.0, None, 1.0), (False, "zero_std")),
        ((1.0, None, 0.5), (True, "")),
        ((1.0, None), (False, "failed")),
        ((None, None), (False, "failed")),
    ],
)
def test_nonzero_std(rewards, expected) -> None:
    assert nonzero_std(group(*rewards)) == expected


def test_a_filter_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_filters")
    module.plain = lambda g: len(g.scored) > 1  # type: ignore[attr-defined]
    module.reasoned = lambda g: (False, "too easy!")  # type: ignore[attr-defined]
    module.forgot = lambda g: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_filters", module)
    filters = {name: load_filter(f"my_filters:{name}") for name in ("plain", "reasoned", "forgot")}
    assert filters["plain"](group(1.0, 1.0))[0] is True
    assert filters["plain"](group(1.0)) == (False, "other")
    assert filters["reasoned"](group(1.0)) == (False, "too_easy_")
    with pytest.raises(UserError, match=r"rollout\.filter = 'my_filters:forgot': it returned None: return a bool"):
        filters["forgot"](group(1.0))
    with pytest.raises(UserError, match=r"rollout\.filter = 'my_filters:absent'"):
        load_filter("my_filters:absent")
    assert load_filter("none") is None


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"filter": "nonzero"}, r"rollout\.filter: no filter 'nonzero'"),
        ({"filter": "nonzero_std", "group_size": 1}, r"rollout\.filter: no group of one"),
        ({"filter": "nonzero_std", "oversample_prompts": 8}, r"oversample_prompts: 8 are fewer than .* = 32"),
        ({"oversample_prompts": 64}, r"oversample_prompts: only used with a rollout\.filter"),
    ],
)
def test_settings_that_cannot_be_meant(rollout, message) -> None:
    with pytest.raises(UserError, match=message):
        load_config(rollout=rollout)


def test_gates() -> None:
    sets = [
        EvalSetConfig(name="a", path="a", gate=0.5, samples_per_prompt=4),
        EvalSetConfig(name="b", path="b", gate=0.5),
        EvalSetConfig(name="c", path="c"),
    ]
    metrics = {f"eval/{n}/prompts": 3.0 for n in "abc"} | {"eval/a/avg@4": 0.5, "eval/c/avg@1": 0.0}
    missed = EvalConfig(sets=sets).missed_gates(metrics)
    assert missed == ["eval/b/avg@1 = nan is below its gate of 0.5"]  # not one of its answers could be scored
    assert EvalConfig(sets=sets).missed_gates({"reward/mean": 0.0}) == []  # no evaluation
