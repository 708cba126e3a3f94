"""One GPU: a run with SGLang beside the trainer whose engine is killed, and that learns all the same."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from gpu.sglang_tools import (
    LEFT_OVER,
    LONG,
    MIB,
    check_only_lost_ones_were_asked_again,
    check_verified,
    kill,
    make_files,
    memory_in_use,
    num_values,
    put_back,
    schedulers,
    sections,
    settled,
    shards,
    started,
    unwatch,
    watch,
)

from lightrl.training.trainer import Trainer
from lightrl.types import SampleGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp("tiny")
    make_files(folder)
    yield from started(folder, sections())


def test_a_scheduler_killed_in_a_rollout(tiny: Trainer) -> None:
    """The step goes on with a new engine: only what was lost is sampled again, and its weights are compared."""
    sampling, weights = tiny.sampling, shards(tiny)
    tiny.sampling = replace(sampling, max_new_tokens=LONG)
    tiny.step(tiny.source.next(8))
    put_back(tiny, weights)  # which end an answer at one token in thirty: some are complete early
    before = memory_in_use()
    pid = schedulers(tiny.engine)[0]
    seen = watch(tiny.engine, kill(pid, signal.SIGKILL), after=12)
    kept: list[SampleGroup] = []
    collect = tiny.collect

    def keeping(*given: Any) -> list[SampleGroup]:
        kept[:] = collect(*given)
        return kept

    tiny.collect = keeping  # type: ignore[method-assign]
    try:
        metrics = tiny.step(tiny.source.next(8))
    finally:
        del tiny.collect
        unwatch(tiny.engine)
        tiny.sampling = sampling
        put_back(tiny, weights)  # such long answers are not what it learns from
    print(
        f"noticed after {seen.seconds:.1f} s, step of {metrics['time/total']:.0f} s; {len(seen.answered[0])} of "
        f"{len(seen.asked[0])} answers were complete, {len(seen.asked[1])} asked again"
    )
    check_only_lost_ones_were_asked_again(seen, kept)
    check_verified(seen, 1, num_values(tiny))
    assert metrics["mismatch/logprob_abs_diff"] < 0.03
    after = settled(before)
    print(f"in use before {before / MIB:.0f}, after {after / MIB:.0f} MiB")
    assert abs(after - before) <= LEFT_OVER


def test_reward_rises(tiny: Trainer) -> None:
    rewards = [tiny.step(tiny.source.next(8))["reward/mean"] for _ in range(30)]
    print([round(r, 2) for r in rewards])
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
