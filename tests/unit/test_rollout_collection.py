"""A collection on one rank, with a scripted engine: filters, further draws, and deaths at chosen moments."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest
from fake_engine import FakeEngine, FakeScorer

from lightrl.distributed.mesh import World
from lightrl.engine.base import EngineLostError, SamplingParams
from lightrl.rollout.collect import Sampler
from lightrl.rollout.filters import nonzero_std
from lightrl.rollout.ranks import Collection
from lightrl.rollout.seeds import sample_seed
from lightrl.rollout.selection import Selection, Verdict
from lightrl.types import Prompt

PROMPTS = [Prompt(index=i, tokens=[1, 2], text="") for i in range(40)]
ALONE = World(rank=0, size=1, local_rank=0, device=None, mesh=None, cpu_group=None)
SIZE = 4


def collection(engine, scorer, *, wanted=4, first=6, max_draws=4, judge=nonzero_std, **options) -> Collection:
    def more():
        start = selection.num_drawn
        return PROMPTS[start : start + first]

    selection = Selection(PROMPTS[:first], start=0, wanted=wanted, more=more, max_draws=max_draws)
    sampler = Sampler(
        engine=engine,
        sampling=SamplingParams(max_new_tokens=1),
        group_size=SIZE,
        scorer=scorer,
        decode=str,
        seed=5,
    )
    return Collection(sampler=sampler, selection=selection, world=ALONE, judge=judge, **options)


def contents(groups):
    return {g.group_index: [(s.index, s.tokens, s.reward) for s in g.samples] for g in groups}


def seeds(group: int) -> list[int]:
    return [sample_seed(5, "train", group, i) for i in range(SIZE)]


def renewing(engine):
    def renew() -> None:
        engine.policy_version = 0

    return renew


@pytest.mark.parametrize("draw_early", [False, True])
def test_filter_takes_the_first_that_pass_and_leaves_the_engine_idle(draw_early) -> None:
    """Of the draws 0-5 and 6-11, 1, 2, 4, 5 and 6 have equal rewards: 0, 3, 7 and 8 are taken, 9 to 11 come again."""
    slow = {s for g in (3, 9) for s in seeds(g)}
    engine, scorer = FakeEngine(ticks=lambda seed: 300 if seed in slow else 1 + seed % 3), FakeScorer({1, 2, 4, 5, 6})
    made = collection(engine, scorer, draw_early=draw_early)
    groups = made.run(lambda: pytest.fail("no engine died"))
    assert [g.group_index for g in groups] == [0, 3, 7, 8]
    assert made.selection.end == 9
    assert made.selection.num_drawn == 12
    assert not engine.running
    assert 9 not in scorer.scored  # was still generated when enough had passed
    assert Counter(engine.asked).most_common(1)[0][1] == 1
    for g in groups:
        assert [s.tokens for s in g.samples] == [[1, 2, seed % 97] for seed in seeds(g.group_index)]


def test_without_a_filter_all_are_taken_and_nothing_is_aborted() -> None:
    engine, scorer = FakeEngine(), FakeScorer(range(6))
    done = []
    made = collection(engine, scorer, wanted=6, judge=None, on_group=lambda g: done.append(g.group_index))
    assert [g.group_index for g in made.run(lambda: None)] == [0, 1, 2, 3, 4, 5]
    assert sorted(done) == [0, 1, 2, 3, 4, 5]
    assert not engine.aborted


def test_prepare_comes_before_the_filter() -> None:
    def flatten(group) -> None:
        for sample in group.samples:
            sample.reward = 0.0 if group.group_index < 3 else sample.reward

    groups = collection(FakeEngine(), FakeScorer(), wanted=2, prepare=flatten).run(lambda: None)
    assert [g.group_index for g in groups] == [3, 4]


@pytest.mark.parametrize("deaths", [(1,), (9,), (10, 1, 5), (23,), (24,)])
@pytest.mark.parametrize("judge", [None, nonzero_std])
def test_only_lost_answers_are_sampled_again(deaths, judge) -> None:
    """Whenever it dies, the groups are those of an undisturbed run, and no finished answer was asked for twice."""
    wanted = 6 if judge is None else 4
    undisturbed = collection(FakeEngine(), FakeScorer({1}), wanted=wanted, judge=judge)
    expected = contents(undisturbed.run(lambda: None))
    engine, restarts = FakeEngine(deaths), []
    made = collection(
        engine, FakeScorer({1}), wanted=wanted, judge=judge, on_restart=lambda *told: restarts.append(told)
    )
    assert contents(made.run(renewing(engine))) == expected
    assert made.selection.end == undisturbed.selection.end
    assert engine.life == len(restarts)
    if judge is None:  # exactly what was not finished: 24 answers are needed, the n-th death left n unfinished
        assert engine.life == len(deaths)
        left = [24]
        for finished in deaths:
            left.append(left[-1] - finished)
        assert len(engine.asked) == sum(left)
    assert not engine.lost


def test_a_group_whose_answers_are_all_there_is_not_asked_for_again() -> None:
    """It dies when one group is complete and another half: the first is kept, scoring included."""
    first, second = seeds(0), seeds(1)
    times = dict(zip(first + second, [1, 1, 1, 1, 1, 1, 50, 50], strict=True))
    engine, scorer = FakeEngine((6,), ticks=times.__getitem__), FakeScorer()
    groups = collection(engine, scorer, first=2, wanted=2, judge=None).run(renewing(engine))
    assert engine.asked == first + second + second[2:]
    assert sorted(scorer.scored) == [0, 1]
    assert [s.tokens[2] for s in groups[1].samples] == [seed % 97 for seed in second]


def test_an_engine_that_dies_while_it_gets_its_weights_is_restarted_again() -> None:
    engine, times = FakeEngine((3,)), []

    def renew() -> None:
        times.append(1)
        if len(times) == 1:
            engine.lost = True
            raise EngineLostError("died again")
        engine.policy_version = 0

    groups = collection(engine, FakeScorer(), wanted=6, judge=None).run(renew)
    assert (len(groups), engine.life, len(times)) == (6, 2, 2)


def test_what_cannot_be_restarted_ends_the_run() -> None:
    class Mortal:
        generate, abort, _check_alive = FakeEngine.generate, FakeEngine.abort, FakeEngine._check_alive
        __init__ = FakeEngine.__init__

    with pytest.raises(EngineLostError, match="the engine died"):
        collection(Mortal((3,)), FakeScorer()).run(lambda: None)


def test_every_other_error_is_raised_and_leaves_nothing_running() -> None:
    class Broken(FakeScorer):
        async def score(self, samples) -> None:
            if samples[0].group_index == 2:
                raise ZeroDivisionError("the grader broke")
            await super().score(samples)

    engine = FakeEngine(ticks=lambda seed: 1 if seed in seeds(2) else 10**9)
    with pytest.raises(ZeroDivisionError, match="the grader broke"):
        collection(engine, Broken(), judge=None).run(lambda: None)
    assert not engine.running


def test_a_group_that_is_done_while_verdicts_are_exchanged_counts() -> None:
    """Of two ranks, the other is idle: its groups passed. This rank's are done between its report and the others'."""
    exchanging, done, exchanges = threading.Event(), threading.Event(), []

    class Pair(World):
        def gather(self, record):
            if record is None:  # no engine is lost
                return [None, None]
            exchanges.append(record)
            assert len(exchanges) < 20, "verdicts were lost: the collection has no end"
            exchanging.set()
            assert done.wait(10)
            theirs = {number: Verdict(keep=True) for number in (1, 3, 5)} if len(exchanges) == 1 else {}
            return [record, replace(record, verdicts=theirs, is_idle=True)]

    engine = FakeEngine(ticks=lambda seed: 0 if exchanging.is_set() else 10**9)
    made = collection(engine, FakeScorer(), wanted=6, on_group=lambda group: group.group_index == 4 and done.set())
    made.world = Pair(rank=0, size=2, local_rank=0, device=None, mesh=None, cpu_group=None)
    assert [g.group_index for g in made.run(lambda: None)] == [0, 2, 4]
    assert exchanges[0].verdicts == {}
