"""Episodes beside training (`rollout.schedule`), in whole miniature runs: weights that change under them."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_agent_run import Hints, _stock, run_config, train
from test_endpoint_run import outside, outside_config
from tiny_run import metrics_of

from lightrl.config.load import load_config
from lightrl.distributed.mesh import close_world
from lightrl.engine.base import Completion
from lightrl.errors import UserError
from lightrl.inspect import show
from lightrl.observe.dumps import read_samples
from lightrl.observe.metrics import Tally
from lightrl.rollout.agent import sampler_of
from lightrl.rollout.collect import Work
from lightrl.rollout.endpoint import OutsideSession
from lightrl.rollout.environment import Step, Turn
from lightrl.rollout.episode import Conversation, Episode
from lightrl.rollout.pausable import PausableEngine
from lightrl.rollout.tools import ToolBox
from lightrl.rollout.tools.parsers import Call
from lightrl.sync.weights import sync_weights
from lightrl.training.rollouts import check_staleness, versions_of
from lightrl.training.trainer import Trainer
from lightrl.types import Prompt, Sample, SampleGroup, Status
from lightrl.wrappers import clean_name

TIS = {"use_tis": True}
ASYNC = {"schedule": "async", "max_response_tokens": 90}


class Slow(Hints):
    """Its answers take longer than a step of training, so that weights change while episodes wait for them."""

    seconds = 0.02

    async def step(self, turn: Turn) -> Step:  # type: ignore[override]
        await asyncio.sleep(self.seconds * (1 + turn.tokens[0] % 4))
        return super().step(turn)


class Tree:
    """A stem and two branches, one of them told something before it speaks."""

    gives_reward = True

    async def run(self, episode: Episode) -> None:
        stem = episode.start()
        turn = await stem.generate(max_tokens=12)
        if turn.status is not Status.COMPLETED:
            stem.reward = 0.0
            return
        branches = [stem.fork("left"), stem.fork("right")]
        branches[0].append([{"role": "user", "content": "no "}])
        branches[1].append([{"role": "user", "content": "ab "}])
        for branch in branches:
            await asyncio.sleep(0.1)
            branch.reward = float(len(set((await branch.generate(max_tokens=12)).text)))


def slow_outside(session: OutsideSession) -> float:
    return outside(session, seconds=0.1)


class Hanging(Hints):
    """Every second episode's first answer never comes."""

    async def step(self, turn: Turn) -> Step:  # type: ignore[override]
        if turn.number == 0 and turn.tokens[0] % 2:
            await asyncio.sleep(3600)
        return super().step(turn)


@pytest.fixture
def trainer_for(tmp_path: Path) -> Iterator[Any]:
    made: list[Trainer] = []

    def build(name: str = "run", environment: str = "Slow", config: Any = run_config, **sections: Any) -> Trainer:
        agent = {} if config is outside_config else {"environment": f"test_agent_schedules:{environment}"}
        sections["agent"] = agent | sections.get("agent", {})
        made.append(Trainer(config(tmp_path, name, **sections)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


def trained(trainer: Trainer) -> list[list[SampleGroup]]:
    """The groups of each step that `train` will make."""
    steps: list[list[SampleGroup]] = []
    collect = trainer.collect

    def noting(*given: Any) -> list[SampleGroup]:
        steps.append(collect(*given))
        return steps[-1]

    trainer.collect = noting  # type: ignore[method-assign]
    return steps


def held_weights(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """Those of each policy version that `train` will make, by the stock model's names."""

    def now() -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in trainer.policy.module.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found[clean_name(name).removeprefix("model.")] = whole.detach().clone()
        return found

    held, advance = [now()], trainer._advance

    def noting(*given: Any) -> None:
        advance(*given)
        held.append(now())

    trainer._advance = noting  # type: ignore[method-assign]
    return held


def order_of(trainer: Trainer, count: int) -> list[int]:
    fresh = type(trainer.source)(trainer.prompts, seed=0, shuffle=True)
    return [p.index for p in fresh.next(count)]


@pytest.mark.parametrize("environment", ["Hints", "Pair", "outside"])
def test_async_with_staleness_0_equals_sync_to_the_last_bit(tmp_path: Path, environment: str) -> None:
    """Samples and weights, whatever plays: an environment, several agents, a program behind the endpoint."""
    runs = []
    for name, rollout in (("sync", {}), ("async", {"schedule": "async", "max_staleness": 0})):
        if environment == "outside":
            config = outside_config(tmp_path, name, rollout=rollout)
        else:
            config = run_config(tmp_path, name, environment, rollout=rollout)
        runs.append((train(config)[0], [read_samples(tmp_path / name, step) for step in (1, 2)]))
    assert runs[0][1] == runs[1][1]
    for name, tensor in runs[0][0].items():
        assert torch.equal(tensor, runs[1][0][name]), name


def test_one_step_off_trains_on_episodes_of_the_weights_before_and_repeats(trainer_for: Any) -> None:
    found = []
    for name in ("one", "two"):
        more = {"rollout": {"schedule": "one_step_off"}, "run": {"steps": 4}, "correction": TIS}
        trainer = trainer_for(name, **more)
        steps = trained(trainer)
        trainer.train()
        versions = [{v for g in step for s in g.samples for v in s.policy_versions} for step in steps]
        assert versions == [{0}, {0}, {1}, {2}]
        assert [g.prompt.index for step in steps for g in step] == order_of(trainer, 16)
        assert all(s.version_tokens is None for step in steps for g in step for s in g.samples)
        found.append(([s.tokens for step in steps for g in step for s in g.samples], list(trainer.policy.parameters())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("environment", ["Slow", "Tree", "outside"])
def test_weights_change_under_episodes_and_each_token_has_the_version_that_drew_it(
    trainer_for: Any, tmp_path: Path, environment: str
) -> None:
    """The recorded log-prob of each token is that of a stock model with the weights of its version; nothing is older
    than the bound, and each prompt is trained on once, in its order."""
    sections = {"rollout": ASYNC | {"max_staleness": 2}, "run": {"steps": 5}, "correction": TIS}
    kind: dict[str, Any] = {"environment": environment}
    if environment == "outside":
        kind = {"config": outside_config, "endpoint": {"function": "test_agent_schedules:slow_outside"}}
    trainer = trainer_for(**kind, **sections)
    steps, held = trained(trainer), held_weights(trainer)
    trainer.train()
    groups = [g for step in steps for g in step]
    assert [g.group_index for g in groups] == list(range(20))
    assert [g.prompt.index for g in groups] == order_of(trainer, 20)
    episodes = [(g.group_index, s.metadata["episode"]) for g in groups for s in g.samples if s.metadata.get("final")]
    assert episodes == [(group, number) for group in range(20) for number in range(4)], "each episode once"
    ages = [version - min(s.policy_versions) for version, step in enumerate(steps) for g in step for s in g.samples]
    assert min(ages) >= 0
    assert 0 < max(ages) <= 2
    assert not trainer.rollouts._carry.works, "a run's last step leaves nothing under way"
    samples = [s for g in groups for s in g.samples]
    versions: dict[tuple[int, int], set[int]] = {}
    for sample in samples:
        versions.setdefault((sample.group_index, sample.metadata["episode"]), set()).update(sample.policy_versions)
    assert any(len(found) > 1 for found in versions.values()), "weights changed under some episode"
    assert max(check_logprobs(tmp_path, held, samples)) < 1e-4
    rows = [r for step in range(1, 6) for r in read_samples(tmp_path / "run", step)]
    assert sum("version_tokens" in r for r in rows) == sum(len(s.policy_versions) > 1 for s in samples)


def check_logprobs(folder: Path, held: list[dict[str, torch.Tensor]], samples: list[Sample]) -> list[float]:
    """How far each sampled token's recorded log-prob is from what the weights of its version make of it."""
    model, found = _stock(folder), []
    with torch.no_grad():
        for version, weights in enumerate(held):
            missing, unknown = model.load_state_dict(weights, strict=False)
            assert set(missing) <= {"lm_head.weight"}
            assert not unknown
            for sample in (s for s in samples if version in s.policy_versions):
                logprobs = model(torch.tensor([sample.tokens])).logits.float().log_softmax(-1)[0]
                assert sample.rollout_logprobs is not None
                rows = zip(versions_of(sample), sample.response_tokens, sample.rollout_logprobs, strict=True)
                for place, (drawn, token, logprob) in enumerate(rows):
                    if drawn == version and logprob is not None:
                        found.append(abs(logprob - float(logprobs[sample.prompt_length + place - 1, token])))
    assert len(found) == sum(sum(s.mask) for s in samples), "each token has one version"
    return found


def test_a_pause_within_a_turn_and_between_turns_changes_nothing_but_versions(trainer_for: Any) -> None:
    """With the same weights the tokens are those of undisturbed episodes, and versions change where the pauses were."""
    trainer = trainer_for(run={"steps": 1}, rollout={"max_response_tokens": 90})
    sync_weights(trainer.policy, trainer.engine, 0)
    prompts = trainer.source.next(3)
    borders: dict[bool, int] = {True: 0, False: 0}

    async def play(engine: Any, pauses: int) -> list[SampleGroup]:
        sampler = sampler_of(
            trainer.agent,
            together=False,
            engine=engine,
            sampling=trainer.sampling,
            group_size=2,
            scorer=trainer.scorer,
            decode=trainer.decode,
            seed=0,
        )
        works = [Work(group_index=i, prompt=p) for i, p in enumerate(prompts)]
        tasks = [asyncio.create_task(sampler.complete(work)) for work in works]
        while pauses and not all(task.done() for task in tasks):
            await asyncio.sleep(0.004)
            await engine.pause()
            assert not trainer.engine._jobs
            trainer.engine.policy_version += 1
            await engine.resume()
        return [await task for task in tasks]

    plain = [s for g in asyncio.run(play(trainer.engine, 0)) for s in g.samples]
    paused = [s for g in asyncio.run(play(PausableEngine(trainer.engine), 1)) for s in g.samples]
    for one, other in zip(plain, paused, strict=True):
        assert (one.tokens, one.loss_mask, one.reward) == (other.tokens, other.loss_mask, other.reward)
        versions = versions_of(other)
        assert versions == sorted(versions)
        assert len(versions) == other.response_length
        assert other.policy_versions == sorted(set(versions))
        for place in range(1, len(versions)):
            if versions[place] != versions[place - 1]:
                borders[other.mask[place - 1] == 0] += 1
            if not other.mask[place]:
                assert versions[place] == versions[place - 1], "what was told counts with the turn before it"
    assert borders[True], "between turns"
    assert borders[False], "within a turn"


def test_groups_are_taken_by_their_number_with_a_filter(trainer_for: Any) -> None:
    rollout = ASYNC | {"max_staleness": 2, "filter": "test_agent_schedules:no_third", "max_draws": 3}
    trainer = trainer_for(rollout=rollout | {"prompts_per_step": 3}, run={"steps": 4}, correction=TIS)
    steps = trained(trainer)
    trainer.train()
    order = order_of(trainer, 60)
    assert [g.group_index for step in steps for g in step] == [i for i, p in enumerate(order) if p % 3][:12]


def no_third(group: SampleGroup) -> bool:
    return group.prompt.index % 3 != 0


def test_environments_that_hang_keep_their_limits(trainer_for: Any) -> None:
    """Steps end, the failures are counted, and other episodes are trained on."""
    trainer = trainer_for(
        environment="Hanging",
        rollout=ASYNC,
        run={"steps": 3},
        correction=TIS,
        agent={"turn_timeout": 0.2, "tool_timeout": 0.1},
        reward={"max_failure_rate": 1.0},
    )
    steps = trained(trainer)
    trainer.train()
    samples = [s for step in steps for g in step for s in g.samples]
    assert len(samples) == 48
    failed = [s for s in samples if s.status is Status.FAILED]
    assert failed
    assert len(failed) < 48
    assert all(s.tokens[s.prompt_length] % 2 for s in failed)
    assert not any(s.tokens[s.prompt_length] % 2 for s in samples if s.status is not Status.FAILED)


class Asks:
    """Calls a tool that hangs, and goes on with what it is told."""

    gives_reward = True

    def __init__(self, tools: ToolBox) -> None:
        self._tools = tools

    def reset(self, prompt: Prompt) -> None:
        return None

    async def step(self, turn: Turn) -> Step:
        called = await self._tools.call_all([Call(name="hang", arguments={"word": "a"})])
        return Step(messages=[{"role": "user", "content": called[0].content[:4]}], calls=called, reward=1.0)


def hang(word: str) -> str:
    """Does not come back in time.

    Args:
        word: Anything.
    """
    time.sleep(1.0)
    return word


def test_tools_that_hang_keep_their_limits_and_their_episodes_go_on(trainer_for: Any, tmp_path: Path) -> None:
    trainer = trainer_for(
        environment="Asks",
        rollout=ASYNC | {"max_staleness": 2, "prompts_per_step": 2, "group_size": 2},
        run={"steps": 3},
        correction=TIS,
        agent={"tools": ["test_agent_schedules:hang"], "tool_timeout": 0.1, "max_turns": 2, "tool_role": "user"},
    )
    steps = trained(trainer)
    trainer.train()
    samples = [s for step in steps for g in step for s in g.samples]
    assert len(samples) == 12
    for sample in samples:
        assert sample.status is not Status.FAILED
        assert sample.metadata["tool_failures"] == {"timeout": sample.metadata["turns"]}
    told = metrics_of(tmp_path, "agent/tool_failures_timeout")
    assert sum(count for _, count in told) == sum(s.metadata["turns"] for s in samples)


def test_episodes_that_were_ended_before_they_began_hold_up_no_round(trainer_for: Any) -> None:
    trainer = trainer_for(run={"steps": 1}, rollout={"schedule": "one_step_off"}, correction=TIS)
    sync_weights(trainer.policy, trainer.engine, 0)
    sampler = trainer._sampler(trainer.engine)
    first, second = (Work(group_index=i, prompt=p) for i, p in enumerate(trainer.source.next(2)))

    async def work() -> Any:
        ended = asyncio.create_task(sampler.complete(first))
        await asyncio.sleep(0)  # its episodes are entered, and have not begun
        sampler.drop(first)
        assert await ended is None
        return await asyncio.wait_for(sampler.complete(second), 60)

    assert len(asyncio.run(work()).samples) == 4


def test_evaluation_plays_beside_episodes_under_way(trainer_for: Any, tmp_path: Path) -> None:
    sets = [{"name": "few", "path": str(tmp_path / "data.jsonl") + "@[0:3]", "temperature": 1.0}]
    trainer = trainer_for(rollout=ASYNC, run={"steps": 3}, correction=TIS, eval={"every": 1, "sets": sets})
    trainer.train()
    assert [row[0] for row in metrics_of(tmp_path, "eval/few/avg@1")] == [0, 1, 2, 3]


def conversation(trainer: Trainer) -> Conversation:
    episode = trainer._sampler(trainer.engine)._new_episode(Work(group_index=0, prompt=trainer.prompts[0]), 1)
    return episode.start()


def test_versions_of_a_conversation_by_hand(trainer_for: Any) -> None:
    """Two turns, the second with a change of weights in its middle; four tokens told between, two before a branch."""

    def said(tokens: list[int], *versions: tuple[int, int], rows: int | None = None, chosen: int = 0) -> Completion:
        routing = None if rows is None else torch.full((rows, 1, 2), chosen, dtype=torch.uint8)
        return Completion(
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            status=Status.COMPLETED,
            policy_versions=[v for v, _ in versions],
            version_tokens=[count for _, count in versions] if len(versions) > 1 else [],
            routing=routing,
        )

    talk = conversation(trainer_for(run={"steps": 1}))
    talk.prompt = Prompt(index=0, tokens=[5, 6], text="bc")
    talk.record(said([10, 11, 2], (3, 3), rows=4, chosen=1))
    branch = talk.fork("other")
    talk.tell([], [20, 21, 22, 23])
    talk.record(said([12, 13, 14, 2], (4, 1), (6, 3), rows=12, chosen=2))
    talk.tell([], [24])
    sample = talk.to_sample(0, 0)
    assert (sample.policy_versions, sample.version_tokens) == ([3, 4, 6], [7, 1, 3])
    assert versions_of(sample) == [3] * 7 + [4] + [6] * 3
    console = Console(record=True, width=100, file=io.StringIO())
    show.one(1, sample, None, console)
    assert "3 (7 tokens), 4 (1 tokens), 6 (3 tokens)" in console.export_text()
    assert sample.rollout_routing is not None
    assert sample.rollout_routing[:, 0, 0].tolist() == [1] * 4 + [2] * 8, "what older weights chose stays"
    branch.tell([], [20, 21])
    branch.record(said([15, 2], (6, 2)))
    other = branch.to_sample(0, 1)
    assert (other.policy_versions, other.version_tokens, versions_of(other)) == ([6], None, [6] * 4)
    # the branch goes on from tokens of version 3: its episode is as old as those
    sample.reward = other.reward = 1.0
    group = SampleGroup(prompt=talk.prompt, group_index=0, samples=[sample, other])
    tally = Tally()
    check_staleness([group], 7, 4, tally)
    assert tally.result() == {"rollout/staleness_mean": 4.0, "rollout/staleness_max": 4.0}
    with pytest.raises(RuntimeError, match="sample 0/0 has tokens of policy version 3"):
        check_staleness([group], 7, 3, Tally())
    sample.reward = None  # it failed, and still says how old its episode is
    with pytest.raises(RuntimeError, match="sample 0/1 has tokens of policy version 3"):
        check_staleness([group], 7, 3, Tally())


def test_partial_rollouts_of_episodes_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"rollout\.partial.*environments go on: set 'drop'"):
        load_config(
            model={"path": "nowhere"},
            data={"path": "nothing", "apply_chat_template": True},
            rollout={"filter": "nonzero_std", "partial": "correct"},
            agent={"environment": "a.b:C"},
            correction=TIS,
        )
