"""The scorer: every way a reward call can fail (case R4), thinking that never ends (R1), failure rates."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightrl.config.schema import RewardConfig
from lightrl.errors import UserError
from lightrl.rewards import RewardFailure, RewardStats, Scorer, dapo
from lightrl.types import Prompt, Sample, Status


def sample(response: str, label: Any = "5", index: int = 0, text: str = "q", **metadata: Any) -> Sample:
    prompt = Prompt(index=0, tokens=[1], text=text, label=label, metadata=metadata, source="train.jsonl:7")
    return Sample(prompt=prompt, group_index=3, index=index, tokens=[1, 2], response_length=1, response=response)


@pytest.fixture
def make() -> Iterator[Callable[..., Scorer]]:
    """`make(custom, **reward keys)`: a scorer that is closed in the end."""
    scorers: list[Scorer] = []

    def make(custom: Callable[..., Any] | None = None, **config: Any) -> Scorer:
        scorers.append(Scorer(RewardConfig(**config), custom=custom))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def score(scorer: Scorer, *samples: Sample) -> list[Sample]:
    asyncio.run(scorer.score(list(samples)))
    return list(samples)


RETURNED: dict[str, Any] = {
    "nan": math.nan,
    "inf": -math.inf,
    "huge": 1e39,
    "none": None,
    "string": "1",
    "list": [1.0],
    "tensors": torch.tensor([1.0, 2.0]),
    "no entry": {"acc": 1},
    "bad entry": {"score": None},
    "bool": True,
    "numpy": np.float32(0.5),
    "numpy int": np.int64(3),
    "tensor": torch.tensor(1.5),
    "dict": {"score": 0.25, "pred": "x"},
}
GOOD = {"bool": 1.0, "numpy": 0.5, "numpy int": 3.0, "tensor": 1.5, "dict": 0.25}


def reward(sample: Sample) -> Any:
    if sample.response == "raise":
        raise RuntimeError("my own error")
    if sample.response == "exit":
        raise SystemExit(3)
    if sample.response == "group":
        raise BaseExceptionGroup("several", [KeyboardInterrupt()])
    return RETURNED[sample.response]


async def async_reward(sample: Sample) -> Any:
    await asyncio.sleep(0)
    return reward(sample)


@pytest.mark.parametrize("function", [reward, async_reward, functools.partial(async_reward), lambda s: async_reward(s)])
def test_bad_returns_fail_their_sample_only(make: Callable[..., Scorer], function: Callable[..., Any]) -> None:
    scorer = make(function)
    names = ["raise", "exit", *RETURNED]
    for s in score(scorer, *(sample(name) for name in names)):
        if s.response in GOOD:
            assert (s.reward, s.status) == (GOOD[s.response], Status.COMPLETED)
            assert "failure" not in s.metadata
        else:
            assert (s.reward, s.status) == (None, Status.FAILED)
            assert s.metadata["failure"].startswith("reward: ")
    stats = scorer.take_stats()
    assert (stats.total, stats.failures) == (len(names), len(names) - len(GOOD))
    assert scorer.take_stats() == RewardStats()


def test_extras_of_a_dict_are_kept_and_the_key_is_configurable(make: Callable[..., Scorer]) -> None:
    (s,) = score(make(lambda s: {"score": 0.0, "acc": 1, "pred": "x"}, key="acc"), sample(""))
    assert (s.reward, s.metadata["reward"]) == (1.0, {"score": 0.0, "pred": "x"})
    (s,) = score(make(lambda s: {"other": 1}, key="acc"), sample(""))
    assert "no entry 'acc', only 'other': set reward.key" in s.metadata["failure"]


def test_a_hanging_function_fails_its_sample_and_the_rest_goes_on(make: Callable[..., Scorer]) -> None:
    release = threading.Event()

    def slow(sample: Sample) -> float:
        if sample.response == "hang":
            release.wait()
        return float(sample.response == "good")

    async def slow_async(sample: Sample) -> float:
        if sample.response == "hang":
            await asyncio.Event().wait()
        return float(sample.response == "good")

    try:
        for function in (slow, slow_async):
            a, b, c = score(make(function, timeout=0.3), sample("good"), sample("hang"), sample("bad"))
            assert (a.reward, b.reward, c.reward) == (1.0, None, 0.0)
            assert b.status is Status.FAILED
            assert b.metadata["failure"] == "reward: TimeoutError: took longer than 0.3 s"
    finally:
        release.set()


def test_a_rule_that_hangs_gives_its_worst(make: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike a function: its code is known, so the text is to blame, and must not escape."""
    release = threading.Event()
    monkeypatch.setattr(dapo, "grade_dapo", lambda answer: release.wait())
    (s,) = score(make(type="dapo", timeout=0.2), sample("Answer: 5"))
    release.set()
    assert (s.reward, s.status, s.metadata) == (-1.0, Status.COMPLETED, {"grading_limit": "took longer than 0.2 s"})


def test_an_async_function_that_blocks_does_not_block_generation(make: Callable[..., Scorer]) -> None:
    release = threading.Event()

    async def rude(sample: Sample) -> float:
        release.wait()  # never gives the loop back
        return 1.0

    (s,) = score(make(rude, timeout=0.2), sample(""))
    release.set()
    assert s.status is Status.FAILED


@pytest.mark.parametrize(
    ("returned", "rewards"),
    [
        ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0]),
        (np.array([0.0, 1.0, 2.0]), [0.0, 1.0, 2.0]),
        (torch.tensor([0.0, 1.0, 2.0]), [0.0, 1.0, 2.0]),
        ([0.0, None, 2.0], [0.0, None, 2.0]),  # the order never shifts
        ([0.0, math.nan, {"score": 2}], [0.0, None, 2.0]),
        ([0.0, 1.0], [None, None, None]),
        ([0.0, 1.0, 2.0, 3.0], [None, None, None]),
        ("abc", [None, None, None]),
        (None, [None, None, None]),
        (1.0, [None, None, None]),
    ],
)
def test_batched(make: Callable[..., Scorer], returned: Any, rewards: list[float | None]) -> None:
    calls: list[list[str]] = []

    def function(samples: list[Sample]) -> Any:
        calls.append([s.response for s in samples])
        return returned

    samples = score(make(function, batched=True), *(sample(name) for name in "abc"))
    assert [s.reward for s in samples] == rewards
    assert [s.status is Status.FAILED for s in samples] == [r is None for r in rewards]
    assert calls == [["a", "b", "c"]]


def pops(sample: Sample) -> float:
    sample.tokens.pop()
    return 1.0


def renumbers(sample: Sample) -> float:
    sample.index = 7
    return 1.0


def masks(sample: Sample) -> float:
    sample.loss_mask = [0]
    raise KeyError("label")


def forgets(sample: Sample) -> float:
    sample.metadata = None  # type: ignore[assignment]
    return 1.0


def notes(sample: Sample) -> float:
    sample.metadata["seen"] = True  # its own business, as `advantage` is
    return 1.0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (pops, "the function changed sample.tokens: return the reward, and leave the sample alone"),
        (renumbers, "the function changed sample.index:"),
        (masks, "KeyError: 'label'"),
        (forgets, "the function changed sample.metadata:"),
        (notes, None),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_a_function_that_changes_what_is_trained_fails_its_sample(
    make: Callable[..., Scorer], function: Callable[[Sample], float], reason: str | None, batched: bool
) -> None:
    """Ids that lose one would be trained against another's log-probs. They are put back."""
    scorer = make((lambda samples: [function(s) for s in samples]) if batched else function, batched=batched)
    (scored,) = score(scorer, sample("a"))
    assert scored.reward == (1.0 if reason is None else None)
    first = scorer.take_stats().first_failure
    assert (first is None) if reason is None else (reason in str(first))
    fresh = sample("a")
    assert (scored.tokens, scored.index, scored.loss_mask) == (fresh.tokens, fresh.index, fresh.loss_mask)


def test_samples_that_generation_failed_are_left_alone(make: Callable[..., Scorer]) -> None:
    failed = sample("x")
    failed.status = Status.FAILED
    scorer = make(lambda s: 1.0)
    _, good = score(scorer, failed, sample("y"))
    assert (failed.reward, good.reward, scorer.take_stats().total) == (None, 1.0, 1)


def test_no_more_than_concurrency_calls_at_once(make: Callable[..., Scorer]) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def function(sample: Sample) -> float:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1
        return 1.0

    scorer = make(function, concurrency=2)
    score(scorer, *(sample(str(i)) for i in range(8)))
    assert most == 2
    score(scorer, *(sample(str(i)) for i in range(4)))  # again, on another event loop
    assert most == 2


# ---- which reward ----


def test_the_row_wins_over_the_type_and_a_passed_function_over_both(make: Callable[..., Scorer]) -> None:
    own, other = sample("5", rm_type="exact"), sample("Answer: 5")
    score(make(type="dapo"), own, other)
    assert (own.reward, other.reward) == (1.0, 1.0)
    assert other.metadata["reward"] == {"acc": True, "pred": "5"}
    (own,) = score(make(lambda s: 0.5, type="dapo"), sample("5", rm_type="exact"))
    assert own.reward == 0.5


def test_boxed_rules(make: Callable[..., Scorer]) -> None:
    samples = score(make(type="boxed_exact"), sample(r"it is \boxed{5}"), sample(r"\boxed{\boxed{5}}"), sample("5"))
    assert [s.reward for s in samples] == [1.0, 1.0, 0.0]
    samples = score(make(type="boxed_dapo"), sample(r"Answer: \boxed{5}"), sample("Answer: 5"))
    assert [s.reward for s in samples] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "maht"}, r"no reward rule 'maht': did you mean 'math'\?.*package.module:function"),
        ({"type": "boxed_dap"}, r"no reward rule 'boxed_dap': did you mean 'dapo'\?"),
        ({"type": "math", "batched": True}, r"reward.batched is for functions of your own"),
        ({"type": "no_such_module:f"}, r"reward.type = 'no_such_module:f': no module 'no_such_module'"),
        ({"type": "lightrl.rewards.box:last_bx"}, r"has no 'last_bx' \(did you mean 'last_box'\?\)"),
        ({"type": "lightrl.rewards.box:TAIL"}, r"'TAIL' is of type int, not a function"),
        ({"type": "my.rewards.good"}, r"no reward rule 'my.rewards.good': did you mean 'my.rewards:good'\?"),
        ({"type": "lightrl.rewards.text"}, r"did you mean 'lightrl.rewards.text:FUNCTION'\?"),
        ({"type": "a b:c"}, r"write a function as package.module:function"),
    ],
)
def test_wrong_names_are_errors_at_once(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Scorer(RewardConfig(**config))
    assert "\n" not in str(caught.value)


def test_a_reward_that_is_no_function_is_an_error_at_once() -> None:
    with pytest.raises(UserError, match=r"reward= takes a function, not a str; one that is named goes into"):
        Scorer(RewardConfig(), custom="my_module:f")  # type: ignore[arg-type]


# ---- thinking ----

THOUGHTS = [  # response, end of the prompt, missing
    ("<think>2+3=5</think> 5", "", False),
    ("<think>2+3", "", True),
    ("2+3", "assistant\n<think>\n", True),
    ("2+3</think> 5", "assistant\n<think>\n", False),
    ("5", "assistant\n", False),
    ("<think></think><think>again", "", True),
]


@pytest.mark.parametrize(("response", "prompt", "missing"), THOUGHTS)
def test_thinking_that_never_ends_is_counted(
    make: Callable[..., Scorer], response: str, prompt: str, missing: bool
) -> None:
    for policy, expected in (("grade_all", 0.75), ("zero", 0.0 if missing else 0.75)):
        scorer = make(lambda s: 0.75, missing_think=policy)
        (s,) = score(scorer, sample(response, text=prompt))
        assert s.reward == expected
        assert s.metadata.get("missing_think", False) is missing
        assert scorer.take_stats().missing_think == int(missing)


def test_zero_is_the_worst_a_rule_gives(make: Callable[..., Scorer]) -> None:
    scorer = make(type="dapo", missing_think="zero")
    (s,) = score(scorer, sample("<think> Answer: 5"))
    assert s.reward == -1.0  # 0 would be better than a wrong answer


# ---- failure rates ----


def test_failures_above_the_rate_stop_the_run_with_the_first_reason(make: Callable[..., Scorer]) -> None:
    scorer = make(reward, max_failure_rate=0.25)
    score(scorer, sample("raise"), *(sample("bool") for _ in range(3)))
    stats = scorer.take_stats()
    scorer.check_failures(stats)  # a quarter is allowed
    quiet = RewardStats(total=4)
    scorer.check_failures([quiet, stats])
    scorer.check_failures([])
    score(scorer, sample("raise"), sample("bool"))
    with pytest.raises(RewardFailure) as caught:
        scorer.check_failures([quiet, RewardStats(total=0), stats, RewardStats(failures=2, total=2, first_failure="?")])
    assert str(caught.value) == (
        "3 of 10 samples could not be scored, more than reward.max_failure_rate = 0.25 allows; the first: "
        "train.jsonl:7: RuntimeError: my own error"
    )
    (note,) = caught.value.__notes__  # frames of the function alone
    assert [line.split(", ")[-1] for line in note.splitlines() if "File" in line] == ["in reward"]
    assert note.endswith('raise RuntimeError("my own error")\nRuntimeError: my own error')


@pytest.mark.parametrize(
    ("function", "reason", "frames"),
    [
        (lambda s: None, "the reward is None, not a number", 0),
        (lambda s: {}["acc"], "KeyError: 'acc'", 1),
        (lambda s: reward(sample("exit")), "RuntimeError: SystemExit: 3", 2),
        (lambda s: async_reward(sample("group")), "RuntimeError: BaseExceptionGroup: several", 2),
        (lambda s: async_reward(sample("raise")), "RuntimeError: my own error", 2),
    ],
)
def test_the_first_failure_is_told_in_a_line_and_frames_are_the_users(
    make: Callable[..., Scorer], function: Callable[..., Any], reason: str, frames: int
) -> None:
    scorer = make(function)
    score(scorer, sample("x"))
    with pytest.raises(RewardFailure, match=f"the first: train.jsonl:7: {reason}") as caught:
        scorer.check_failures(scorer.take_stats())
    assert "\n" not in str(caught.value)
    found = [line for note in getattr(caught.value, "__notes__", []) for line in note.splitlines() if " File " in line]
    assert len(found) == frames
    assert all("test_rewards_scorer.py" in line for line in found)


def test_a_function_that_takes_no_sample_is_refused_at_once(make: Callable[..., Scorer]) -> None:
    with pytest.raises(UserError, match=r"^reward=: <lambda>\(\) cannot be called with one argument"):
        make(lambda: 1.0)
