"""Metrics: hand-worked numbers, merging over ranks, and a page that names every metric."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.schema import LogConfig
from lightrl.observe.console import Console
from lightrl.observe.metrics import Tally, eval_metrics, pass_at_k, rollout_metrics
from lightrl.rollout.filters import nonzero_std
from lightrl.types import Prompt, Sample, SampleGroup, Status

ROOT = Path(__file__).parents[2]


def group(index: int, rewards: list[float | None], lengths: list[int], **changes: dict[int, Any]) -> SampleGroup:
    """A group whose prompt has 3 tokens; `status={1: …}`, `metadata={0: …}` change single samples."""
    prompt = Prompt(index=index, tokens=[1, 2, 3], text="p")
    samples = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        sample = Sample(
            prompt=prompt,
            group_index=index,
            index=i,
            tokens=[1, 2, 3] + [9] * length,
            response_length=length,
            reward=reward,
        )
        for name, values in changes.items():
            if i in values:
                setattr(sample, name, values[i])
        samples.append(sample)
    return SampleGroup(prompt=prompt, group_index=index, samples=samples)


GROUPS = [
    group(0, [1.0, 0.0, 0.0, 1.0], [2, 4, 6, 8], status={2: Status.TRUNCATED, 3: Status.ABORTED}),
    group(
        1,
        [0.5, 0.5, None],
        [10, 2, 7],
        status={2: Status.FAILED},
        metadata={0: {"missing_think": True}, 1: {"grading_limit": "took longer than 1 s"}},
    ),
]


def test_spread_is_within_what_is_compared() -> None:
    """Two agents whose answers are each graded alike: their rewards differ, and nobody learns anything from them."""
    agents = {i: {"agent": "solver" if i < 2 else "judge"} for i in range(4)}
    alike = group(0, [1.0, 1.0, 0.0, 0.0], [2] * 4, metadata=agents)
    m = rollout_metrics([alike], 10).result()
    assert (m["reward/group_std_mean"], m["reward/zero_spread_share"], m["reward/std"]) == (0.0, 1.0, 0.5)
    assert nonzero_std(alike) == (False, "zero_std")
    differ = group(0, [1.0, 1.0, 0.0, 2.0], [2] * 4, metadata=agents)
    m = rollout_metrics([differ], 10).result()
    assert m["reward/group_std_mean"] == pytest.approx(math.sqrt(2) / 2)  # (0 + sqrt(2)) / 2
    assert m["reward/zero_spread_share"] == 0.5
    assert nonzero_std(differ) == (True, "")


def test_rollout_metrics_by_hand() -> None:
    m = rollout_metrics(GROUPS, max_response_tokens=16).result()
    assert m["reward/mean"] == pytest.approx(3.0 / 6)  # the failed sample is left out
    assert m["reward/std"] == pytest.approx(math.sqrt((4 * 0.25) / 6))
    assert (m["reward/max"], m["reward/min"]) == (1.0, 0.0)
    assert m["reward/group_std_mean"] == pytest.approx((math.sqrt(1.0 / 3) + 0.0) / 2)  # unbiased, as in GRPO
    assert m["reward/zero_spread_share"] == 0.5
    assert m["rollout/samples"] == 7
    assert m["rollout/response_tokens"] == 32
    assert m["rollout/length_mean"] == pytest.approx(32 / 6)
    assert (m["rollout/length_max"], m["rollout/length_min"]) == (10, 2)
    assert m["rollout/budget_used"] == pytest.approx(32 / 6 / 16)
    assert m["rollout/prompt_length_mean"] == 3
    shares = {n: m[f"rollout/{n}_share"] for n in ("truncated", "aborted", "failed", "missing_think", "grading_limit")}
    assert shares == {n: pytest.approx(1 / 7) for n in shares}


def test_ranks_with_unequal_samples_merge_to_the_metrics_of_one_process() -> None:
    whole = rollout_metrics(GROUPS, 16).result()
    states = [rollout_metrics([g], 16).to_dict() for g in GROUPS] + [rollout_metrics([], 16).to_dict()]
    states = json.loads(json.dumps(states))  # plain enough to travel
    merged = Tally.merged(states).result()
    assert merged == pytest.approx(whole, rel=1e-14)
    assert list(merged) == list(whole)


def test_numbers_of_a_dict_reward_are_metrics() -> None:
    answers = group(0, [1.0, 0.0, None], [1, 2, 3], status={2: Status.FAILED})
    parts: list[dict[str, Any]] = [{"acc": True, "big": 10**400}, {"acc": False, "pred": "7", "x": 0.5}, {"acc": True}]
    for sample, extras in zip(answers.samples, parts, strict=True):
        sample.metadata["reward"] = extras
    found = {n: v for n, v in rollout_metrics([answers], 8).result().items() if n.startswith("reward/parts/")}
    assert found == {"reward/parts/acc": 0.5, "reward/parts/x": 0.5}


def test_all_samples_failed_leaves_rewards_out() -> None:
    m = rollout_metrics([group(0, [None, None], [1, 2], status={0: Status.FAILED, 1: Status.FAILED})], 8).result()
    assert m["rollout/failed_share"] == 1.0
    assert not [name for name in m if name.startswith("reward/") or ("length_m" in name and "prompt" not in name)]


def test_deviation_keeps_its_digits_far_from_zero_and_is_weighted() -> None:
    left, right = Tally(), Tally()
    left.extend("x", [1e9, 1e9 + 1], kind="std")
    right.extend("x", [1e9 + 2], kind="std")
    assert left.merge([right]).result()["x"] == pytest.approx(math.sqrt(2 / 3), rel=1e-12)
    weighted = Tally()
    weighted.add("x", 1.0, weight=3, kind="std")
    weighted.add("x", 5.0, weight=1, kind="std")
    assert weighted.result()["x"] == pytest.approx(math.sqrt((3 * 1 + 1 * 9) / 4))


def test_tally_means_weigh_and_weight_zero_counts_nothing() -> None:
    tally = Tally()
    tally.add("m", 2.0, weight=5)
    tally.add("m", 8.0, weight=1)
    tally.add("m", math.nan, weight=0)
    tally.add("never", 1.0, weight=0)
    assert tally.result() == {"m": 3.0}
    with pytest.raises(ValueError, match="'m' is tallied as 'mean' and as 'max'"):
        tally.add("m", 1.0, kind="max")
    with pytest.raises(ValueError, match="negative weight"):
        tally.add("m", 1.0, weight=-1)


@pytest.mark.parametrize("kind", ["mean", "sum", "min", "max", "std"])
def test_nan_is_not_lost_whatever_the_order(kind: Any) -> None:
    for values in itertools.permutations([1.0, math.nan, 3.0]):
        tally = Tally()
        tally.extend("x", values, kind=kind)
        assert math.isnan(tally.result()["x"])


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    for n, c in [(4, 1), (5, 2), (6, 0), (6, 6), (8, 3)]:
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="undefined"):
        pass_at_k(2, 1, 3)


def test_eval_metrics_by_hand() -> None:
    groups = [
        group(0, [1.0, 0.0, 0.0, 0.0, 0.5, 0.0], [1, 2, 3, 4, 5, 6], status={5: Status.TRUNCATED}),
        group(1, [1.0, 1.0, 1.0, 1.0, 1.0, None], [2] * 6, status={5: Status.FAILED}),
    ]
    groups[0].samples[1].metadata["grading_limit"] = "took longer than 1 s"
    m = eval_metrics("dev", groups, k=6, threshold=0.5).result()
    assert m["eval/dev/avg@6"] == pytest.approx((0.25 + 1.0) / 2)
    assert m["eval/dev/pass@1"] == pytest.approx((1 / 6 + 5 / 6) / 2)  # 0.5 is not above 0.5; the failed one passes not
    assert m["eval/dev/pass@2"] == pytest.approx((1 / 3 + 1) / 2)
    assert m["eval/dev/pass@4"] == pytest.approx((2 / 3 + 1) / 2)
    assert m["eval/dev/pass@6"] == 1.0
    assert m["eval/dev/length_mean"] == pytest.approx((21 + 10) / 11)
    for name in ("truncated", "failed", "grading_limit"):
        assert m[f"eval/dev/{name}_share"] == pytest.approx(1 / 12)
    assert m["eval/dev/prompts"] == 2
    assert {name for name in m if "pass@" in name} == {f"eval/dev/pass@{j}" for j in (1, 2, 4, 6)}
    merged = Tally.merged([eval_metrics("dev", [g], 6, 0.5).to_dict() for g in groups]).result()
    assert merged == pytest.approx(m)


def test_every_metric_is_explained() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = set(rollout_metrics(GROUPS, 16).result())
    names |= {n.replace("/dev/", "/NAME/") for n in eval_metrics("dev", GROUPS, 3, 0.5).result() if "@" not in n}
    literal = re.compile(r'"((?:loss|policy|critic|optim|mismatch|perf|reward|rollout)/\w+)"')
    for path in (ROOT / "src").rglob("*.py"):
        names |= set(literal.findall(path.read_text(encoding="utf-8")))
    assert sorted(n for n in names if f"`{n}`" not in page) == []


def test_the_console_shows_metrics_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = rollout_metrics(GROUPS, 16).result()
    Console(LogConfig()).step(1, 2, metrics)
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:5] == ["1/2", "0.500", "0.408", "5.3", "14%"]
