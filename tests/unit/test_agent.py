"""Episodes on a scripted engine: tokens, masks, limits, failures, branches; and who generates when."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import chat_templates as templates
import pytest
from scripted import LengthScorer, ScriptedEngine, make_agent, make_prompt, play, said_of, sampler_for

from lightrl.config.load import load_config
from lightrl.engine.base import EngineLostError
from lightrl.observe.metrics import agent_metrics
from lightrl.rollout.collect import Work, run_async
from lightrl.rollout.environment import Step, Turn, results
from lightrl.rollout.episode import Episode
from lightrl.rollout.seeds import sample_seed
from lightrl.training.advantage import Advantages, set_advantages
from lightrl.types import Prompt, Status

HI = "<|im_start|>user\nhi 0<|im_end|>\n<|im_start|>assistant\n"


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


LATE: list[float] = []
"""Of each call of `stuck` that is over."""


def stuck(seconds: float) -> str:
    """Hangs."""
    threading.Event().wait(seconds)
    LATE.append(seconds)
    return "late"


class Echo:
    """Answers `again N`, N times."""

    closed = 0

    def __init__(self, times: int = 2) -> None:
        self.times = times

    def reset(self, prompt: Prompt) -> None:
        return None

    def step(self, turn: Turn) -> Step:
        if turn.number == self.times:
            return Step(done=True, reward=1.0, info={"said": turn.text})
        return Step(messages=[{"role": "user", "content": f"again {turn.number}"}], reward=0.5)

    def close(self) -> None:
        type(self).closed += 1


class Own(Echo):
    gives_reward = True


class Async(Echo):
    async def step(self, turn: Turn) -> Step:  # type: ignore[override]
        await asyncio.sleep(0.01 * (turn.tokens[0] % 3))
        return super().step(turn)


class Breaks(Echo):
    def __init__(self, how: str = "raises") -> None:
        super().__init__()
        if how == "at once":
            raise ValueError("not made")
        self.how = how

    def step(self, turn: Turn) -> Step:
        if self.how == "hangs":
            threading.Event().wait(3)
        if self.how == "answers":
            return "no step"  # type: ignore[return-value]
        if self.how == "infinite":
            return Step(done=True, reward=float("inf"))
        if self.how == "huge":
            return Step(done=True, reward=-1e300)
        if self.how == "message":
            return Step(messages=[{"role": "user", "content": None}])
        raise KeyError("broken")


class Crew:
    """Two solvers side by side, then one who selects; the first solver branches twice."""

    def __init__(self, deep: bool = False) -> None:
        self.deep = deep

    async def run(self, episode: Episode) -> None:
        solvers = [episode.start(agent="solver") for _ in range(2)]
        await asyncio.gather(*(s.generate() for s in solvers))
        for number in range(2):
            branch = solvers[0].fork()
            branch.append([{"role": "user", "content": f"check {number}"}])
            turn = await branch.generate()
            branch.reward = float(number) + 0.25 * (turn.text == "fine")
        solvers[1].reward = 3.0
        selector = episode.start([{"role": "user", "content": "which?"}], agent="selector")
        await selector.generate()
        selector.reward = 1.0
        episode.final = selector


def test_turns_and_masks_by_hand() -> None:
    agent = make_agent(environment="test_agent:Echo")
    (group,) = play(agent, lambda said, seed: f"no {said.count('again')}")
    for number, sample in enumerate(group.samples):
        assert said_of(agent, sample) == (
            "«no 0<|im_end|>»\n<|im_start|>user\nagain 0<|im_end|>\n<|im_start|>assistant\n"
            "«no 1<|im_end|>»\n<|im_start|>user\nagain 1<|im_end|>\n<|im_start|>assistant\n«no 2<|im_end|>»"
        )
        assert (sample.index, sample.status, sample.reward, sample.answer) == (number, Status.COMPLETED, 2.0, "no 2")
        assert sample.prompt.text == HI
        assert sample.rollout_logprobs is not None
        assert [p is None for p in sample.rollout_logprobs] == [m == 0 for m in sample.mask]
        assert sample.rollout_logprobs[:2] == [-0.25, -0.251]
        assert sample.policy_versions == [3]
        about = sample.metadata
        assert (about["episode"], about["turns"], about["info"]) == (number, 3, {"said": "no 2"})
        assert [m["role"] for m in about["messages"]] == ["assistant", "user", "assistant", "user", "assistant"]
        assert about["given_tokens"] == sample.mask.count(0)
    agent.close()


def test_dropped_thoughts_stay_as_sampled() -> None:
    """M1: the template drops the thought of the first turn once a second question is there; its ids stay."""
    agent = make_agent(templates.THINKING, environment="test_agent:Echo", options={"times": 1})
    (group,) = play(agent, lambda said, seed: "<think>\nhm\n</think>\n\nno", group_size=1)
    said = said_of(agent, group.samples[0])
    assert said.count("«<think>\nhm\n</think>\n\nno<|im_end|>»") == 2
    agent.close()


def test_first_turn_is_a_plain_answers() -> None:
    """Same request, same seeds: a run whose episodes have one turn samples what one without an agent does."""
    agent = make_agent(environment="test_agent:Echo", options={"times": 1})
    engine = ScriptedEngine(agent.template.tokenizer, lambda said, seed: "no")
    play(agent, lambda said, seed: "", engine=engine, group_size=3)
    first, *others = engine.requests
    assert (first.n, first.tokens) == (3, make_prompt(agent, "hi 0").tokens)
    assert first.seeds == tuple(sample_seed(7, "train", 0, i) for i in range(3))
    seeds = [s for r in [first, *others] for s in r.seeds or ()]
    assert len(set(seeds)) == len(seeds) == 6
    agent.close()


def test_tools_are_called_until_there_is_no_call() -> None:
    agent = make_agent(templates.TOOLS, tools=["test_agent:add"], parser="hermes")
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    bad = '<tool_call>{"name": "sub"}</tool_call>'
    (group,) = play(agent, lambda said, seed: "it is 5" if "tool\n5" in said else call + bad, group_size=1, tokens=500)
    (sample,) = group.samples
    assert said_of(agent, sample) == (
        f"«{call}{bad}<|im_end|>»\n<|im_start|>tool\n5\n\n"
        "Error: no tool 'sub'; there are: add<|im_end|>\n<|im_start|>assistant\n«it is 5<|im_end|>»"
    )
    assert sample.reward == len("it is 5")  # graded by what it says at the end, not by what a tool printed
    assert (sample.metadata["tool_calls"], sample.metadata["tool_failures"]) == (2, {"unknown": 1})
    agent.close()


class Adder:
    """Plays the episode itself, with tools."""

    gives_reward = True

    async def run(self, episode: Episode) -> None:
        talk = episode.start()
        called = await talk.call_tools(await talk.generate())
        talk.append(results(called))
        talk.reward = float((await talk.generate()).text.split()[-1])


def test_tools_are_called_by_an_environment_that_plays_itself() -> None:
    agent = make_agent(templates.TOOLS, environment="test_agent:Adder", tools=["test_agent:add"], parser="hermes")
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    bad = '<tool_call>{"name": "sub"}</tool_call>'
    (group,) = play(agent, lambda said, seed: "it is 5" if "tool\n5" in said else call + bad, group_size=1, tokens=500)
    (sample,) = group.samples
    assert sample.reward == 5.0
    assert (sample.metadata["tool_calls"], sample.metadata["tool_failures"]) == (2, {"unknown": 1})
    agent.close()


def test_results_as_user_messages() -> None:
    agent = make_agent(tools=["test_agent:add"], tool_role="user")
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    (group,) = play(agent, lambda said, seed: "5" if "Result" in said else call, group_size=1)
    assert "<|im_start|>user\nResult of add:\n5<|im_end|>" in said_of(agent, group.samples[0])
    assert results([], "tool") == []
    agent.close()


# ---- limits


def test_length_cuts_a_turn() -> None:
    """M3: no end is invented, nothing follows."""
    agent = make_agent(environment="test_agent:Echo", max_turn_tokens=4)
    (group,) = play(agent, lambda said, seed: "a long answer", group_size=1)
    (sample,) = group.samples
    assert said_of(agent, sample) == "«a lo»"
    assert (sample.status, sample.metadata["cut_by"], sample.reward) == (Status.TRUNCATED, "length", 0.5)
    agent.close()


def test_room_for_tokens() -> None:
    """What is told takes 25 tokens: beside a turn of 3, 28 leave none for an answer; 80 cut the second turn."""
    agent = make_agent(environment="test_agent:Echo")
    (group,) = play(agent, lambda said, seed: "no", group_size=1, tokens=28)
    (sample,) = group.samples
    assert said_of(agent, sample) == "«no<|im_end|>»"
    assert (sample.status, sample.metadata["cut_by"]) == (Status.TRUNCATED, "context")
    assert agent_metrics([group]).result()["agent/context_exhausted"] == 1.0
    (group,) = play(agent, lambda said, seed: "no" if "again" not in said else "x" * 99, group_size=1, tokens=80)
    (sample,) = group.samples
    assert sample.response_length == 80
    assert (sample.status, sample.metadata["cut_by"]) == (Status.TRUNCATED, "context")
    agent.close()


def test_the_models_context() -> None:
    agent = make_agent(environment="test_agent:Echo", context_length=50)
    (group,) = play(agent, lambda said, seed: "no", group_size=1, tokens=4000)
    (sample,) = group.samples
    assert len(sample.tokens) <= 50
    assert sample.metadata["cut_by"] == "context"
    agent.close()
    agent = make_agent(environment="test_agent:Echo", context_length=10)
    (group,) = play(agent, lambda said, seed: "no", group_size=1)
    assert (group.samples[0].status, group.samples[0].metadata["failure"]) == (
        Status.FAILED,
        "the prompt leaves no room for an answer",
    )
    agent.close()


def test_turns_are_counted() -> None:
    agent = make_agent(environment="test_agent:Echo", max_turns=2)
    (group,) = play(agent, lambda said, seed: "no", group_size=1)
    (sample,) = group.samples
    assert said_of(agent, sample).endswith("«no<|im_end|>»")
    assert (sample.metadata["turns"], sample.metadata["cut_by"], sample.status) == (2, "turns", Status.COMPLETED)
    assert agent_metrics([group]).result()["agent/turns_exhausted"] == 1.0
    agent.close()


def test_an_episodes_time() -> None:
    """Generation is ended at the limit, and what there is is kept."""
    agent = make_agent(environment="test_agent:Echo", episode_timeout=1.0)
    (group,) = play(agent, lambda said, seed: "wait" if "again" in said else "no", group_size=2)
    for sample in group.samples:
        assert (sample.status, sample.metadata["cut_by"], sample.metadata["turns"]) == (Status.ABORTED, "time", 2)
        assert said_of(agent, sample).endswith("«wa»")
    agent.close()


def test_long_and_strange_observations() -> None:
    agent = make_agent(tools=["test_agent:shout"], max_observation_tokens=20)
    call = '<tool_call>{"name": "shout", "arguments": {"n": 5000}}</tool_call>'
    (group,) = play(agent, lambda said, seed: "ok" if "left out" in said else call, group_size=1, tokens=400)
    (sample,) = group.samples
    text = said_of(agent, sample)
    assert "tokens left out …]" in text
    assert text.endswith("«ok<|im_end|>»")
    given = [t for t, m in zip(sample.response_tokens, sample.mask, strict=True) if not m]
    ends = [agent.template.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert sum(t in ends for t in given) == 1  # the template's: what the tool printed is only text
    agent.close()


def shout(n: int) -> str:
    """Shouts."""
    return "<|im_end|>" + "x" * n


# ---- failures


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "'broken'"),
        ("hangs", "took longer than 0.2 s"),
        ("answers", "the environment's step returned 'no step', not a Step"),
        ("infinite", "the environment's reward is inf, not a finite number"),
        ("huge", "the environment's reward is -1e+300: beyond 1e+18 a group's deviation overflows"),
        ("message", "a message's content is text, not None"),
        ("at once", "not made"),
    ],
)
def test_environments_that_fail(how: str, message: str) -> None:
    agent = make_agent(environment="test_agent:Breaks", options={"how": how}, turn_timeout=0.2, tool_timeout=0.1)
    scorer = LengthScorer()
    (group,) = play(agent, lambda said, seed: "no", scorer=scorer)
    assert [s.status for s in group.samples] == [Status.FAILED] * 2
    assert scorer.failures == [message] * 2
    assert agent_metrics([group]).result()["agent/failed"] == 1.0
    agent.close()


class Grades:
    """Plays by itself, and gives what it likes."""

    gives_reward = True

    def __init__(self, reward: Any) -> None:
        self.reward = reward

    async def run(self, episode: Episode) -> None:
        talk = episode.start()
        await talk.generate()
        talk.reward = self.reward


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("nan"), "the environment's reward is nan, not a finite number"),
        (1e300, "the environment's reward is 1e+300: beyond 1e+18 a group's deviation overflows"),
        ("good", "could not convert string to float: 'good'"),
    ],
)
def test_rewards_that_programs_set(reward: Any, message: str) -> None:
    agent, scorer = make_agent(environment="test_agent:Grades", options={"reward": reward}), LengthScorer()
    (group,) = play(agent, lambda said, seed: "no", scorer=scorer)
    assert [(s.status, s.reward) for s in group.samples] == [(Status.FAILED, None)] * 2
    assert scorer.failures == [message] * 2
    agent.close()


def test_tools_that_hang_do_not_hold_the_others() -> None:
    agent = make_agent(tools=["test_agent:stuck", "test_agent:add"], tool_timeout=0.3, turn_timeout=1.0)
    calls = {0: '<tool_call>{"name": "stuck", "arguments": {"seconds": 8.5}}</tool_call>'}
    groups = play(agent, lambda said, seed: calls.get(seed % 2, "fine") if "Error" not in said else "so", prompts=8)
    assert 8.5 not in LATE  # no episode has waited for one
    metrics = agent_metrics(groups).result()
    assert metrics["agent/episodes"] == 16
    assert metrics["agent/tool_failures_timeout"] == metrics["agent/tool_calls"] * 16 > 0
    agent.close()


def test_environments_are_closed_and_grade() -> None:
    Own.closed = 0
    agent = make_agent(environment="test_agent:Own", max_turns=1)
    (group,) = play(agent, lambda said, seed: "no", scorer=None)
    assert [s.reward for s in group.samples] == [0.5, 0.5]
    assert Own.closed == 2
    agent.close()


# ---- trees, several agents


def test_branches_and_agents() -> None:
    """Each sampled token is trained once; a stem's reward is its branches' mean; baselines are of one agent each."""
    agent = make_agent(environment="test_agent:Crew")
    (group,) = play(agent, lambda said, seed: "fine" if "check" in said else "sure")
    assert [s.index for s in group.samples] == list(range(10))
    first = group.samples[:5]
    assert [s.metadata.get("agent") for s in first] == ["solver"] * 4 + ["selector"]
    assert [s.reward for s in first] == [(0.25 + 1.25) / 2, 3.0, 0.25, 1.25, 1.0]
    stem, _, left, right, selector = first
    assert (left.metadata["parent"], right.metadata["parent"]) == (0, 0)
    assert left.prompt.tokens == right.prompt.tokens == stem.tokens
    assert said_of(agent, stem) == "«sure<|im_end|>»"
    assert said_of(agent, right).endswith("check 1<|im_end|>\n<|im_start|>assistant\n«fine<|im_end|>»")
    assert said_of(agent, right).startswith("\n<|im_start|>user\n")
    assert selector.prompt.text == "<|im_start|>user\nwhich?<|im_end|>\n<|im_start|>assistant\n"
    set_advantages([group], Advantages.load(load_config().algorithm, 100))
    assert [s.advantage for s in group.samples if s.metadata["agent"] == "selector"] == [0.0, 0.0]
    assert sum(float(s.advantage) for s in group.samples if s.metadata["agent"] == "solver") == pytest.approx(
        0, abs=1e-6
    )
    metrics = agent_metrics([group]).result()
    assert (metrics["agent/episodes"], metrics["agent/turns"], metrics["agent/conversations"]) == (2, 5, 5)
    (group,) = play(agent, lambda said, seed: "sure", final_only=True)
    assert [(s.index, s.metadata["agent"]) for s in group.samples] == [(0, "selector"), (1, "selector")]
    agent.close()


# ---- who generates when


def test_rounds_do_not_depend_on_how_long_tools_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order and the content of requests, round by round, are the same whatever `step` takes."""
    orders = []
    for base in (0.0, 0.02):
        agent = make_agent(environment="test_agent:Async")
        monkeypatch.setattr(Async, "delay", base, raising=False)
        engine = ScriptedEngine(agent.template.tokenizer, lambda said, seed: f"n{seed % 5 if 'again 0' in said else 0}")
        if base:
            monkeypatch.setattr(Async, "step", _slower(Async.step))
        play(agent, lambda said, seed: "", engine=engine, prompts=3)
        orders.append([(r.id, r.tokens, r.seeds, r.sampling) for r in engine.requests])
        agent.close()
    assert orders[0] == orders[1]
    assert [r[0] for r in orders[0]][:3] == ["train/0/1", "train/1/2", "train/2/3"]


def _slower(step: Any) -> Any:
    async def slow(self: Any, turn: Turn) -> Step:
        await asyncio.sleep(0.03 * (turn.number + len(turn.messages[0]["content"]) % 2))
        return await step(self, turn)

    return slow


def test_lost_episodes_are_played_anew() -> None:
    """The engine dies in the middle; episodes that were over stay, the others begin again, with the same draws."""
    agent = make_agent(environment="test_agent:Echo")

    def script(said: str, seed: int) -> str:
        return f"n{seed % 1000}"

    whole = play(agent, script, prompts=2, group_size=3)
    for together in (True, False):
        engine = ScriptedEngine(agent.template.tokenizer, script, deaths=(5,))
        sampler = sampler_for(agent, engine, group_size=3, together=together)
        works = [Work(group_index=i, prompt=make_prompt(agent, f"hi {i}", i)) for i in range(2)]

        async def once(sampler: Any = sampler, works: Any = works) -> list[Any]:
            return list(await asyncio.gather(*(sampler.complete(w) for w in works), return_exceptions=True))

        found = run_async(once())
        assert any(isinstance(f, EngineLostError) for f in found)
        assert not engine.running
        engine.restart()
        groups = [w.group for w in works]
        if None in groups:
            run_async(once())
        got = [[(s.tokens, s.rollout_logprobs, s.reward) for s in w.group.samples] for w in works]
        assert got == [[(s.tokens, s.rollout_logprobs, s.reward) for s in g.samples] for g in whole]
    agent.close()


@pytest.mark.parametrize("together", [True, False])
def test_dropped_groups_end_at_once(together: bool) -> None:
    agent = make_agent(tools=["test_agent:stuck"], tool_timeout=30.0)
    call = '<tool_call>{"name": "stuck", "arguments": {"seconds": 7.5}}</tool_call>'
    engine = ScriptedEngine(agent.template.tokenizer, lambda said, seed: call if seed % 2 else "wait")
    sampler = sampler_for(agent, engine, group_size=4, together=together)
    work = Work(group_index=0, prompt=make_prompt(agent))

    async def drop() -> Any:
        task = asyncio.create_task(sampler.complete(work))
        await asyncio.sleep(0.1)
        sampler.drop(work)
        return await asyncio.wait_for(task, 60.0)

    assert run_async(drop()) is None
    assert 7.5 not in LATE  # nor was one waited for
    assert not engine.running
    agent.close()
