"""`rollout.schedule` and `rollout.partial` in whole miniature runs with the embedded engine, in one process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace

import pytest
import tiny_run
import torch
from tiny_run import count_letter

from lightrl.config.load import load_config
from lightrl.distributed.mesh import close_world
from lightrl.engine.base import Completion, GenerateRequest, SamplingParams
from lightrl.errors import UserError
from lightrl.rollout.background import Background
from lightrl.rollout.pausable import PausableEngine, joined
from lightrl.sync.weights import sync_weights
from lightrl.training.rollouts import check_staleness, mask_older, versions_of
from lightrl.training.trainer import Trainer
from lightrl.types import Prompt, Sample, SampleGroup, Status

TIS = {"use_tis": True}
FILTER = {"filter": "nonzero_std", "prompts_per_step": 3, "oversample_prompts": 5, "max_draws": 3}


def every_third_is_even(sample) -> float:
    """No spread for every third prompt."""
    return 1.0 if sample.prompt.index % 3 == 0 else count_letter(sample) + sample.index


@pytest.fixture
def trainer_for(tmp_path):
    made = []

    def build(reward=count_letter, folder="one", **sections) -> Trainer:
        (tmp_path / folder).mkdir(exist_ok=True)
        made.append(Trainer(tiny_run.make_run(tmp_path / folder, **sections), reward=reward))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in trainer.policy.parameters()]


def trained(trainer: Trainer) -> list[list[SampleGroup]]:
    """The groups of each step that `train` will make."""
    steps, collect = [], trainer.collect

    def noting(*given):
        steps.append(collect(*given))
        return steps[-1]

    trainer.collect = noting
    return steps


def order_of(trainer: Trainer, n: int) -> list[int]:
    fresh = type(trainer.source)(trainer.prompts, seed=0, shuffle=True)
    return [p.index for p in fresh.next(n)]


def samples_of(steps):
    return [[(s.group_index, s.index, s.tokens, s.policy_versions) for g in step for s in g.samples] for step in steps]


@pytest.mark.parametrize("rollout", [{}, FILTER], ids=["plain", "filtered"])
def test_async_with_staleness_0_equals_sync_to_the_last_bit(trainer_for, rollout):
    runs = []
    for folder, more in (("sync", {}), ("async", {"schedule": "async", "max_staleness": 0})):
        trainer = trainer_for(every_third_is_even, folder, rollout=rollout | more, run={"steps": 3})
        steps = trained(trainer)
        trainer.train()
        runs.append((samples_of(steps), weights(trainer)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_one_step_off_trains_each_step_on_samples_of_the_weights_before(trainer_for):
    trainer = trainer_for(rollout={"schedule": "one_step_off"}, run={"steps": 4}, correction=TIS)
    steps, held, update = trained(trainer), [weights(trainer)], trainer._advance

    def advance(*given):
        update(*given)
        held.append(weights(trainer))

    trainer._advance = advance
    trainer.train()
    versions = [{v for g in step for s in g.samples for v in s.policy_versions} for step in steps]
    assert versions == [{0}, {0}, {1}, {2}]
    assert [g.prompt.index for step in steps for g in step] == order_of(trainer, 16)
    ages = tiny_run.metrics_of(trainer.run_dir.parent, "rollout/staleness_mean", "rollout/staleness_max")
    assert ages == [(1, 0, 0), (2, 1, 1), (3, 1, 1), (4, 1, 1)]
    waits = tiny_run.metrics_of(trainer.run_dir.parent, "time/wait_for_rollouts", "engine/idle_share")
    assert len(waits) == 4
    assert all(w >= 0 and 0 <= idle <= 1 for _, w, idle in waits)
    # what the engine says it drew them with is what the trainer makes of those weights
    other = trainer_for(folder="other", run={"steps": 1})
    with torch.no_grad():
        for parameter, value in zip(other.policy.parameters(), held[2], strict=True):
            parameter.to_local().copy_(value)
    sync_weights(other.policy, other.engine, 2)
    sample = steps[3][0].samples[0]
    request = GenerateRequest(
        id="again",
        tokens=sample.prompt.tokens,
        sampling=other.sampling,
        seeds=(seed_of(trainer, sample),),
    )
    again = asyncio.run(other.engine.generate(request))[0]
    assert again.tokens == sample.tokens[sample.prompt_length :]
    assert again.logprobs == pytest.approx(sample.rollout_logprobs, abs=1e-5)


def seed_of(trainer: Trainer, sample: Sample) -> int:
    from lightrl.rollout.seeds import sample_seed

    return sample_seed(trainer.config.run.seed, "train", sample.group_index, sample.index)


@pytest.mark.parametrize(("k", "rollout"), [(1, {}), (3, FILTER)], ids=["1", "3, filtered"])
def test_async_trains_on_nothing_older_than_its_bound_and_on_every_prompt_once(trainer_for, k, rollout):
    more = {"schedule": "async", "max_staleness": k, "max_response_tokens": 40}
    trainer = trainer_for(every_third_is_even, rollout=rollout | more, run={"steps": 6}, correction=TIS)
    steps = trained(trainer)
    trainer.train()
    order = order_of(trainer, 90)
    groups = [g for step in steps for g in step]
    assert [g.prompt.index for g in groups] == [order[g.group_index] for g in groups]
    if rollout:
        assert [g.group_index for g in groups] == [i for i, p in enumerate(order) if p % 3][:18]
    else:
        assert [g.group_index for g in groups] == list(range(24))
    assert all(len(g.samples) == 4 for g in groups)
    ages = [version - min(s.policy_versions) for version, step in enumerate(steps) for g in step for s in g.samples]
    assert 0 < max(ages) <= k
    for sample in (s for g in groups for s in g.samples):
        assert versions_of(sample) == sorted(versions_of(sample))
        assert len(versions_of(sample)) == sample.response_length
        assert len(sample.rollout_logprobs) == sample.response_length <= 40
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert (sample.status is Status.TRUNCATED) == (2 not in sample.tokens[sample.prompt_length :])
    assert not trainer.rollouts._carry.works, "a run's last step leaves nothing under way"


def test_a_run_ended_with_prompts_in_flight_and_resumed_loses_and_doubles_none(trainer_for):
    more = {"rollout": FILTER | {"schedule": "async", "max_staleness": 2}, "correction": TIS}
    first = trainer_for(every_third_is_even, run={"steps": 9}, **more)
    before = trained(first)

    def die(*_):  # the last thing of a step
        if first.steps_done == 2:
            raise KeyboardInterrupt

    first.loop.outside.log = die
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first.rollouts._carry.works, "groups of steps to come are under way"
    first.close()
    second = trainer_for(every_third_is_even, run={"steps": 5}, **more)
    after = trained(second)
    second.train()
    order = order_of(second, 60)
    numbers = [g.group_index for step in before + after for g in step]
    assert numbers == [i for i, p in enumerate(order) if p % 3][:15]
    assert [g.prompt.index for step in before + after for g in step] == [order[n] for n in numbers]
    assert second.groups_done == numbers[-1] + 1


def test_a_paused_answer_goes_on_as_if_there_had_been_no_pause(trainer_for):
    """With the same weights the tokens are those of an undisturbed answer, stop strings across the border included."""
    trainer = trainer_for(run={"steps": 1})
    sync_weights(trainer.policy, trainer.engine, 0)
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompts = [p.tokens for p in trainer.source.next(3)]

    async def answers(engine, pauses: int, sampling=sampling):
        tasks = [
            asyncio.create_task(
                engine.generate(
                    GenerateRequest(id=str(i), tokens=tokens, sampling=sampling, n=2, seeds=(2 * i, 2 * i + 1))
                )
            )
            for i, tokens in enumerate(prompts)
        ]
        for turn in range(pauses):
            for _ in range(5 + turn):
                await asyncio.sleep(0)
            await engine.pause()
            assert not trainer.engine._jobs
            trainer.engine.policy_version += 1
            await engine.resume()
        return [completion for task in tasks for completion in await task]

    plain = asyncio.run(answers(trainer.engine, 0))
    paused = asyncio.run(answers(PausableEngine(trainer.engine), 4))
    assert [c.tokens for c in paused] == [c.tokens for c in plain]
    for one, other in zip(paused, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.status is Status.TRUNCATED
        assert one.policy_versions == [0, 1, 2, 3, 4]
        assert sum(one.version_tokens) == 60
    trainer.engine.policy_version = 0
    text = trainer.tokenizer.decode(plain[0].tokens, skip_special_tokens=False)
    for size in (2, 3, 5):
        stop = SamplingParams(max_new_tokens=60, ignore_eos=True, stop=(text[12 : 12 + size],))
        whole = asyncio.run(answers(trainer.engine, 0, stop))
        assert [c.tokens for c in asyncio.run(answers(PausableEngine(trainer.engine), 6, stop))] == [
            c.tokens for c in whole
        ]


def test_parts_of_an_answer_are_joined():
    first = Completion(tokens=[5, 6], logprobs=[-1.0, -2.0], status=Status.ABORTED, policy_versions=[3])
    nothing = Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[])
    last = Completion(tokens=[7, 8, 9], logprobs=[-0.5] * 3, status=Status.TRUNCATED, policy_versions=[5])
    whole = joined(joined(joined(nothing, first), nothing), last)
    assert (whole.tokens, whole.logprobs) == ([5, 6, 7, 8, 9], [-1.0, -2.0, -0.5, -0.5, -0.5])
    assert (whole.policy_versions, whole.version_tokens) == ([3, 5], [2, 3])
    assert whole.status is Status.TRUNCATED
    same = joined(first, Completion(tokens=[4], logprobs=[-3.0], status=Status.COMPLETED, policy_versions=[3]))
    assert (same.policy_versions, same.version_tokens) == ([3], [3])
    routing = [torch.full((rows, 1, 2), value, dtype=torch.uint8) for rows, value in ((3, 1), (5, 2))]
    first.routing, last.routing = routing
    assert joined(first, last).routing[:, 0, 0].tolist() == [1, 1, 1, 2, 2]


def test_an_aborted_request_returns_what_it_had_while_paused(trainer_for):
    trainer = trainer_for(run={"steps": 1})
    sync_weights(trainer.policy, trainer.engine, 0)
    engine = PausableEngine(trainer.engine)
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)

    async def work():
        request = GenerateRequest(id="a", tokens=trainer.source.next(1)[0].tokens, sampling=sampling, n=2)
        task = asyncio.create_task(engine.generate(request))
        for _ in range(6):
            await asyncio.sleep(0)
        await engine.pause()
        engine.abort("a")
        return await task

    for completion in asyncio.run(work()):
        assert completion.status is Status.ABORTED
        assert 0 < len(completion.tokens) < 60


def test_an_answer_whose_last_token_came_as_it_was_aborted_is_not_asked_for_again():
    class Last:
        policy_version, asked = 3, 0

        async def generate(self, request):
            self.asked += 1
            assert request.sampling.max_new_tokens > 0
            await asyncio.sleep(0)
            count = min(2, request.sampling.max_new_tokens)
            return [
                Completion(
                    tokens=[7] * count, logprobs=[-1.0] * count, status=Status.ABORTED, policy_versions=[self.asked]
                )
            ]

        def abort(self, name):
            pass

    inner = Last()
    engine = PausableEngine(inner)

    async def work():
        request = GenerateRequest(id="a", tokens=[1], sampling=SamplingParams(max_new_tokens=4))
        task = asyncio.create_task(engine.generate(request))
        for _ in range(2):
            await asyncio.sleep(0)
            await engine.pause()
            await engine.resume()
        return await task

    (whole,) = asyncio.run(work())
    assert (whole.tokens, whole.status, whole.version_tokens) == ([7] * 4, Status.TRUNCATED, [2, 2])
    assert inner.asked == 2


async def asking_for_each(task) -> list[Sample]:
    answers = await asyncio.gather(*(task.ask(task.prompt.tokens, i) for i in range(task.num_samples)))
    return [task.sample(i, answer) for i, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("partial", "generate"), [("mask", None), ("correct", None), ("mask", asking_for_each)], ids=str
)
def test_partial_rollouts_go_on_in_the_next_step(trainer_for, partial, generate):
    rollout = FILTER | {"partial": partial, "max_response_tokens": 100, "group_size": 2}
    trainer = trainer_for(every_third_is_even, rollout=rollout, run={"steps": 6}, correction=TIS)
    trainer.generate = generate
    steps = trained(trainer)
    trainer.train()
    groups = [g for step in steps for g in step]
    order = order_of(trainer, 90)
    assert [g.group_index for g in groups] == [i for i, p in enumerate(order) if p % 3][:18]
    mixed = 0
    for version, step in enumerate(steps):
        for sample in (s for g in step for s in g.samples):
            versions = versions_of(sample)
            assert 0 <= version - min(versions) <= 1
            mixed += len(set(versions)) > 1
            expected = [int(v == version) for v in versions] if partial == "mask" else [1] * len(versions)
            assert sample.mask == expected
    assert mixed, "some answers were held and went on"


def test_tokens_of_older_weights_are_masked_where_the_sample_was_not_already():
    sample = Sample(
        prompt=Prompt(index=0, tokens=[1], text=""),
        group_index=0,
        index=0,
        tokens=[1, 5, 6, 7, 8],
        response_length=4,
        loss_mask=[1, 1, 0, 1],
        policy_versions=[3, 4],
        version_tokens=[1, 3],
        reward=1.0,
    )
    group = SampleGroup(prompt=sample.prompt, group_index=0, samples=[sample])
    mask_older([group], 4)
    assert sample.loss_mask == [0, 1, 0, 1]
    for counts in (None, [1, 2], [4]):  # a hook's own sample
        with pytest.raises(UserError, match=r"sample 0/0 has policy_versions \[3, 4\]"):
            mask_older(
                [SampleGroup(prompt=sample.prompt, group_index=0, samples=[replace(sample, version_tokens=counts)])], 4
            )
    from lightrl.observe.metrics import Tally

    tally = Tally()
    check_staleness([group], 5, 2, tally)
    assert tally.result() == {"rollout/staleness_mean": 2.0, "rollout/staleness_max": 2.0}
    for version in (6, 2):  # too old; of weights that are not there yet
        with pytest.raises(RuntimeError, match="sample 0/0 has tokens of policy version 3"):
            check_staleness([group], version, 2, Tally())


def test_evaluation_on_its_own_schedule_beside_groups_under_way(trainer_for, tmp_path):
    sets = [{"name": "few", "path": str(tmp_path / "one" / "data.jsonl") + "@[0:3]", "temperature": 1.0}]
    trainer = trainer_for(
        rollout={"schedule": "async", "max_response_tokens": 30},
        run={"steps": 4},
        correction=TIS,
        eval={"every": 2, "sets": sets},
    )
    trainer.train()
    found = tiny_run.metrics_of(trainer.run_dir.parent, "eval/few/avg@1")
    assert [step for step, _ in found] == [0, 2, 4]


def test_what_fails_beside_training_ends_the_run_with_its_reason(trainer_for):
    trainer = trainer_for(rollout={"schedule": "async"}, run={"steps": 5}, correction=TIS)
    forward, threads = trainer.engine._forward, set()

    def failing(*given):
        threads.add(threading.current_thread().name)
        if trainer.steps_done == 2:
            raise RuntimeError("the generator broke")
        return forward(*given)

    trainer.engine._forward = failing
    with pytest.raises(RuntimeError, match="the generator broke"):
        trainer.train()
    assert threads == {"lightrl-rollouts"}
    assert trainer.steps_done >= 2
    trainer.close()
    assert not any(t.name == "lightrl-rollouts" for t in threading.enumerate())


def test_a_background_thread_that_ended_is_told_and_an_interrupt_cancels_its_work():
    def begin() -> None:
        raise ValueError("no device")

    dead = Background(begin)
    with pytest.raises(RuntimeError, match="has ended: ValueError\\('no device'\\)"):
        dead.run(asyncio.sleep(30))
    dead.close()
    living = Background()
    with pytest.raises(TimeoutError):  # the work's own, not that of waiting
        living.run(asyncio.wait_for(asyncio.sleep(30), 0.01))
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        living.run(work())
    assert cancelled.wait(10)
    living.close()
    living.close()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"schedule": "async"}}, ["rollout.schedule", "correction.use_tis"]),
        ({"rollout": {"schedule": "one_step_off"}}, ["rollout.schedule", "correction.use_rollout_logprobs"]),
        (
            {"rollout": {"schedule": "async"}, "engine": {"kind": "sglang"}, "correction": TIS},
            ["rollout.schedule", "engine.kind = 'sglang'"],
        ),
        ({"rollout": {"max_staleness": 2}}, ["rollout.max_staleness", "rollout.schedule = 'async'"]),
        (
            {"rollout": {"schedule": "async", "partial": "correct"} | {"filter": "nonzero_std"}, "correction": TIS},
            ["rollout.partial", "rollout.schedule = 'async'"],
        ),
        ({"rollout": {"partial": "mask"}}, ["rollout.partial", "rollout.filter"]),
        ({"rollout": FILTER | {"partial": "correct"}}, ["rollout.partial", "correction.use_tis"]),
    ],
)
def test_what_cannot_be_combined_is_refused_before_anything_loads(sections, words):
    with pytest.raises(UserError) as caught:
        load_config(**{"model": {"path": "nowhere"}, "data": {"path": "nothing"}} | sections)
    assert all(word in str(caught.value) for word in words)
