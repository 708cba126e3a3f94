"""`lightrl check-hook`: hooks that fit pass, and each way not to fit is found by its own check."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from lightrl.cli import main
from lightrl.inspect.hook_checks import KINDS, Settings, check_hook
from lightrl.types import Status

FAST = Settings(timeout=0.5)


async def one_turn(task):
    return [task.sample(i, await task.ask(task.prompt.tokens, i)) for i in range(task.num_samples)]


async def two_turns(task):
    found = []
    for i in range(task.num_samples):
        first = await task.ask(task.prompt.tokens, i)
        if first.status is Status.FAILED:
            found.append(task.sample(i, first))
            continue
        found.append(task.sample(i, first, [5], await task.ask(task.prompt.tokens + first.tokens + [5], i, turn=1)))
    return found


async def retokenizes(task):
    sample = task.sample(0, await task.ask(task.prompt.tokens, 0), [5])
    sample.loss_mask = None
    return [sample]


async def short(task):
    samples = await one_turn(task)
    samples[0].loss_mask = [1] * (samples[0].response_length + 1)
    return samples


async def own_requests(task):
    from lightrl.engine.base import GenerateRequest

    request = GenerateRequest(id="x", tokens=task.prompt.tokens, sampling=task.sampling)
    (answer,) = await task.engine.generate(request)
    return [task.sample(0, answer)]


async def draws_lots(task):
    samples = await one_turn(task)
    samples[0].reward = random.random()
    return samples


async def only_complete(task):
    samples = await one_turn(task)
    assert all(s.status is Status.COMPLETED for s in samples)
    return samples


async def stubborn(task):
    try:
        return await one_turn(task)
    except asyncio.CancelledError:
        await asyncio.sleep(60)
        raise


async def slow(task):
    await asyncio.sleep(60)


def plain(task):
    return []


def contains(sample):
    return {"score": float(sample.prompt.label in sample.response), "length": sample.response_length}


async def later(sample):
    return 1.0


def ones(samples):
    return [1.0] * len(samples)


def six(samples):
    return [1.0] * 6


def divides(sample):
    return 1 / sample.response_length


def text(sample):
    return "good"


def changes(sample):
    sample.tokens.append(1)
    return 1.0


def sleeps(sample):
    time.sleep(2)


def spread(group):
    return len({s.reward for s in group.scored}) > 1, "equal"


def nothing(group):
    return None


def first_two(group):
    return group.scored[0].reward != group.scored[1].reward


def sorts(group):
    group.samples.reverse()
    return True


def renames(row):
    return {"input": row["input"] + "!", "label": row["label"]}


def leaves_out(row):
    return None


def needs_question(row):
    return {"input": row["question"]}


def at_random(row):
    return {"input": str(random.random())}


def objects(row):
    return {"input": object()}


def numbers(info):
    return {"mine/groups": len(info.groups), "mine/reward": info.metrics["reward/mean"]}


def words(info):
    return {"mine": "good"}


def first_group(info):
    return {"mine": info.groups[0].samples[0].reward}


async def awaited(info):
    return None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("generate", "one_turn"),
        ("generate", "two_turns"),
        ("reward", "contains"),
        ("reward", "later"),
        ("filter", "spread"),
        ("map", "renames"),
        ("map", "leaves_out"),
        ("on_step", "numbers"),
    ],
)
def test_hooks_that_fit_pass(kind: str, name: str) -> None:
    checks = list(check_hook(kind, f"{__name__}:{name}", FAST))
    assert [c.fault for c in checks] == [None] * len(checks)
    assert len(checks) >= 3


@pytest.mark.parametrize(
    ("kind", "name", "what", "fault"),
    [
        ("generate", "plain", "async function", "write `async def`"),
        ("generate", "short", "fit training", "loss_mask has"),
        ("generate", "retokenizes", "tokens the engine gave", "token 5 with log-prob 0 is trained"),
        ("generate", "own_requests", "seeds of their own", "use task.ask"),
        ("generate", "draws_lots", "gives the same", "other samples"),
        ("generate", "only_complete", "answers that are truncated", "AssertionError"),
        ("generate", "stubborn", "not needed any more", "let CancelledError through"),
        ("generate", "slow", "fit training", "not done after 0.5 s"),
        ("reward", "divides", "an empty response", "ZeroDivisionError"),
        ("reward", "text", "a right answer", "not a number"),
        ("reward", "changes", "a right answer", "changed sample.tokens"),
        ("reward", "sleeps", "a right answer", "took longer than 0.5 s"),
        ("filter", "nothing", "rewards that differ", "return a bool"),
        ("filter", "first_two", "no sample that could be scored", "IndexError"),
        ("filter", "sorts", "rewards that differ", "changed the group"),
        ("map", "needs_question", "a row", "--row"),
        ("map", "at_random", "the same row", "must not draw lots"),
        ("map", "objects", "a row", "no file could hold"),
        ("on_step", "words", "a step", "'good': metrics are finite numbers"),
        ("on_step", "first_group", "a rank without groups", "IndexError"),
        ("on_step", "awaited", "plain function", "not `async def`"),
        ("reward", "missing", "can be loaded", "has no 'missing'"),
        ("filter", "FAST", "can be loaded", "not a function"),
    ],
)
def test_hooks_that_do_not_fit_are_found(kind: str, name: str, what: str, fault: str) -> None:
    failed = [c for c in check_hook(kind, f"{__name__}:{name}", FAST) if c.fault is not None]
    assert failed
    assert what in failed[0].what
    assert fault in failed[0].fault


def test_batched_rewards_and_rows_of_ones_own() -> None:
    batched = Settings(batched=True, timeout=0.5)
    assert all(c.fault is None for c in check_hook("reward", f"{__name__}:ones", batched))
    faults = [c.fault for c in check_hook("reward", f"{__name__}:six", batched) if c.fault]
    assert faults == ["made-up.jsonl:1: the reward function returned 6 results for 1 samples"]
    row = Settings(row={"question": "why"})
    assert all(c.fault is None for c in check_hook("map", f"{__name__}:needs_question", row))


def test_the_command_prints_a_line_a_check(capsys, monkeypatch) -> None:
    def status(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["check-hook", *words])
        return int(ended.value.code or 0)

    assert status("filter", f"{__name__}:spread") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[2] == "ok    equal rewards: a bool, or (bool, reason): dropped (equal)"
    assert status("map", f"{__name__}:needs_question", "--row", json.dumps({"question": "why"})) == 0
    assert status("map", f"{__name__}:needs_question", "--row", "why") == 2
    assert "--row: not valid JSON" in capsys.readouterr().err
    assert status("reward", f"{__name__}:text") == 2
    told = capsys.readouterr()
    assert told.out.splitlines()[1].startswith("FAIL  a right answer: a finite number: ")
    assert told.err.splitlines()[-1] == "error: check-hook: 6 of 7 checks failed"


def test_every_kind_has_checks() -> None:
    for kind in KINDS:
        assert len(list(check_hook(kind, "math:nothing", FAST))) == 1
    with pytest.raises(KeyError):
        list(check_hook("loss", "math:floor", FAST))
