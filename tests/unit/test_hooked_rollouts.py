"""A rollout function of the user's own: what it gets, what it may return, and how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_engine import FakeEngine, FakeScorer

from lightrl.distributed.mesh import close_world, init_world
from lightrl.engine.base import Completion, SamplingParams
from lightrl.errors import UserError
from lightrl.rollout.collect import Sampler, run_async
from lightrl.rollout.filters import load_filter, nonzero_std
from lightrl.rollout.hooked import GenerateTask, HookRun, load_generate, samples_fault
from lightrl.rollout.ranks import Collection
from lightrl.rollout.selection import Selection
from lightrl.types import Prompt, Sample, Status

SIZE = 3
PROMPTS = [Prompt(index=i, tokens=[1, i], text="", source=f"data.jsonl:{i + 1}") for i in range(20)]


@pytest.fixture(scope="module")
def world():
    yield init_world("cpu")
    close_world()


def collected(world, generate, *, deaths=(), same=(), wanted=4, drawn=4, judge=None, engine=None, scorer=None):
    selection = Selection(PROMPTS[:drawn], start=0, wanted=wanted)
    sampler = Sampler(
        engine=engine or FakeEngine(deaths),
        sampling=SamplingParams(max_new_tokens=4),
        group_size=SIZE,
        scorer=scorer or FakeScorer(same),
        decode=lambda ids: " ".join(map(str, ids)),
        seed=5,
        generate=generate,
    )

    def renew() -> None:
        sampler.engine.policy_version = 0

    return Collection(sampler=sampler, selection=selection, world=world, judge=judge).run(renew)


async def one_turn(task: GenerateTask) -> list[Sample]:
    return [task.sample(i, await task.ask(task.prompt.tokens, i)) for i in range(task.num_samples)]


async def two_turns(task: GenerateTask) -> list[Sample]:
    async def episode(index: int) -> Sample:
        first = await task.ask(task.prompt.tokens, index)
        tool = [70, 71]
        second = await task.ask(task.prompt.tokens + first.tokens + tool, index, turn=1)
        return task.sample(index, first, tool, second, metadata={"calls": 1})

    return list(await asyncio.gather(*(episode(i) for i in range(task.num_samples))))


def test_a_hook_that_asks_once_gives_what_a_run_without_it_does(world) -> None:
    assert collected(world, one_turn) == collected(world, None)


def test_turns_are_masked_where_they_were_given(world) -> None:
    groups = collected(world, two_turns)
    assert [g.group_index for g in groups] == [0, 1, 2, 3]
    sample = groups[2].samples[1]
    first, second = sample.response_tokens[0], sample.response_tokens[3]
    assert sample.tokens == [1, 2, first, 70, 71, second]
    assert sample.loss_mask == [1, 0, 0, 1]
    assert sample.rollout_logprobs == [-1.0, 0.0, 0.0, -1.0]
    assert sample.policy_versions == [0]
    assert sample.response == f"{first} 70 71 {second}"
    assert sample.reward == 1.0
    assert sample.metadata == {"calls": 1}


def test_samples_say_which_weights_drew_which_tokens() -> None:
    def answer(versions: list[int], counts: list[int]) -> Completion:
        n = sum(counts)
        given = {"policy_versions": versions, "version_tokens": counts if len(counts) > 1 else []}
        return Completion(tokens=[5] * n, logprobs=[-1.0] * n, status=Status.COMPLETED, **given)

    def versions(*parts: Completion | list[int]) -> tuple[list[int], list[int] | None]:
        sample = task_of().sample(0, *parts)
        return sample.policy_versions, sample.version_tokens

    assert versions(answer([3, 4], [2, 1])) == ([3, 4], [2, 1])
    assert versions(answer([3], [2])) == ([3], None)
    assert versions() == ([], None)
    nothing = answer([], [])
    assert versions([7], answer([3], [2]), [7, 7], nothing, answer([3, 5], [1, 4]), [7], answer([6], [1])) == (
        [3, 5, 6],
        [6, 5, 1],
    )


def test_an_engine_that_dies_is_restarted_and_the_group_done_anew(world) -> None:
    assert collected(world, two_turns, deaths=[5, 9]) == collected(world, two_turns)

    async def swallows(task: GenerateTask) -> list[Sample]:
        found = []
        for i in range(task.num_samples):
            try:
                found.append(task.sample(i, await task.ask(task.prompt.tokens, i)))
            except Exception:
                found.append(task.sample(i, status=Status.FAILED))
        return found

    assert collected(world, swallows, deaths=[5]) == collected(world, None)


def test_rewards_of_the_hook_stay_and_failed_samples_are_not_scored(world) -> None:
    async def scored(task: GenerateTask) -> list[Sample]:
        one, two, three = await one_turn(task)
        one.reward, two.status = 0.25, Status.FAILED
        return [one, two, three]

    scorer = FakeScorer()
    (group,) = collected(world, scored, wanted=1, drawn=1, scorer=scorer)
    assert [s.reward for s in group.samples] == [0.25, None, 0.0]
    assert [s.index for s in group.scored] == [0, 2]


def test_groups_that_are_not_needed_are_ended(world) -> None:
    """The hooks of the last groups wait for something else than the engine, or for an answer that never comes."""
    ended = []

    async def slow(task: GenerateTask) -> list[Sample]:
        if task.group_index < 2:
            return await one_turn(task)
        try:
            if task.group_index == 2:
                await asyncio.sleep(1000)
            return await one_turn(task)
        except asyncio.CancelledError:
            ended.append(task.group_index)
            raise

    engine = FakeEngine(ticks=lambda seed: 1)
    engine_generate = engine.generate

    async def generate(request):
        if request.id.startswith("train/3/"):
            while request.id not in engine.aborted:
                await asyncio.sleep(0)
            return [Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[])]
        return await engine_generate(request)

    engine.generate = generate
    groups = collected(world, slow, wanted=2, judge=nonzero_std, engine=engine)
    assert [g.group_index for g in groups] == [0, 1]
    assert sorted(ended) == [2, 3]
    assert not engine.running


def task_of(engine=None) -> GenerateTask:
    return GenerateTask(
        prompt=PROMPTS[0],
        group_index=0,
        num_samples=SIZE,
        sampling=SamplingParams(max_new_tokens=4),
        is_evaluation=False,
        decode=str,
        engine=engine or FakeEngine(),
        seed=5,
        stream="train",
        context_length=512,
        vocab_size=97,
    )


def good(**changes) -> Sample:
    sample = Sample(
        prompt=PROMPTS[0], group_index=0, index=0, tokens=[1, 0, 4, 5], response_length=2, rollout_logprobs=[-1.0, -2.0]
    )
    return replace(sample, **changes)


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ([good()], None),
        ((good(loss_mask=[1, 0], reward=1),), None),
        (None, "it returned a NoneType, not a list of Sample"),
        ([], "it returned no samples"),
        (["text"], "item 0 is a str, not a Sample"),
        ([good(group_index=2)], "group_index is 2, not task.group_index = 0"),
        ([good(), good()], "two samples have index 0"),
        ([good(tokens=[1, 0, 4, 5.0])], "tokens must be a list of ids"),
        ([good(tokens=[1, 0, 4, -5])], "tokens must be a list of ids"),
        ([good(response_length=5)], "response_length is 5 of 4 tokens"),
        ([good(response_length=4)], "no prompt before the response"),
        ([good(loss_mask=[1])], "loss_mask has 1 entries for 2 response tokens"),
        ([good(loss_mask=[1, 2])], "loss_mask holds other values than 0 and 1"),
        ([good(rollout_logprobs=[-1.0])], "rollout_logprobs has 1 entries for 2"),
        ([good(rollout_logprobs=None)], "no rollout_logprobs"),
        ([good(rollout_logprobs=[-1.0, 0.5])], "holds 0.5: log-probs are numbers of at most 0"),
        ([good(rollout_logprobs=[-1.0, float("nan")])], "holds nan"),
        ([good(status="done")], "status is 'done', not a Status"),
        ([good(rollout_logprobs=[-1.0, float("-inf")])], "holds -inf"),
        ([good(reward=float("inf"))], "reward is inf, not a finite number"),
        ([good(reward=10**400)], "(None: it is scored)"),
        ([good(reward=-1e19)], "reward is -1e+19: beyond 1e+18 a group's deviation overflows"),
        ([good(tokens=[1, 0, 4, 97])], "token 97 is none of the model's 97"),
        ([good(tokens=[1, 0, *[4] * 511])], "513 tokens are more than the model's context of 512"),
    ],
)
def test_what_training_cannot_take_is_told(returned, fault) -> None:
    found = samples_fault(returned, task_of())
    assert found is fault if fault is None else fault in found


def test_what_a_hook_raises_is_told_with_its_prompt_and_frames(world) -> None:
    async def broken(task: GenerateTask) -> list[Sample]:
        raise KeyError("tool")

    async def cancels_itself(task: GenerateTask) -> list[Sample]:
        raise asyncio.CancelledError

    async def asks_twice(task: GenerateTask) -> list[Sample]:
        return [task.sample(0, await task.ask([1], 0), await task.ask([1], 0))]

    with pytest.raises(UserError, match=r"rollout\.generate: data\.jsonl:1: KeyError: 'tool'") as caught:
        collected(world, broken)
    assert "in broken" in caught.value.__notes__[0]
    with pytest.raises(UserError, match="cancelled itself"):
        collected(world, cancels_itself)
    with pytest.raises(UserError, match="sample 0 has asked for turn 0 already"):
        run_async(HookRun(task=task_of()).samples(asks_twice))


def test_only_async_functions_are_taken() -> None:
    def plain(task):
        return []

    class Callable:
        async def __call__(self, task):
            return []

    async def two(task, more):
        return []

    assert load_generate("none") is None
    assert load_generate("none", Callable()) is not None
    for wrong, text in ((plain, "write `async def`"), (two, "cannot be called with one argument"), (3, "no function")):
        with pytest.raises(UserError, match=text):
            load_generate("none", wrong)


def test_a_filter_may_be_a_callable(world) -> None:
    judge = load_filter("none", lambda group: (group.group_index % 2 == 1, "even"))
    selected = collected(world, None, wanted=2, drawn=4, judge=judge)
    assert [g.group_index for g in selected] == [1, 3]
    assert judge(selected[0]) == (True, "even")
    with pytest.raises(UserError, match=r"rollout\.filter: .* cannot be called with one argument"):
        load_filter("none", lambda: True)
