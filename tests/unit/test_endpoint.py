"""The samples that sessions of agents outside become, and how sessions end."""

from __future__ import annotations

import threading
from typing import Any

import chat_templates as templates
import pytest
import scripted
from outside_agents import CALL, NEXT, TOOL, USER, Agents, Client, Doing, error_of, make_agent, only, play
from scripted import ScriptedEngine, make_prompt
from test_agent import HI

from lightrl.observe.metrics import agent_metrics
from lightrl.rollout.collect import Work, run_async
from lightrl.types import Status

# ---- samples


def test_turns_become_one_sample() -> None:
    """As an environment of two turns: the same tokens, masks and log-probs, and the first turn's are the row's own."""
    said: list[Any] = []

    def agent(client: Client) -> None:
        first = client.say(USER)
        said.append(first)
        second = client.say(USER, {k: v for k, v in first.items() if v is not None}, NEXT)
        said.append(second)
        assert client.reward(0.5, info={"why": "x"}) == (200, {"session": client.session.session, "reward": 0.5})
        assert client.reward(1)[0] == 200  # the last one counts

    sample = only(play(agent, lambda said, seed: f"no {said.count('and')}"))
    assert [m["content"] for m in said] == ["no 0", "no 1"]
    assert sample.metadata["said"] == (
        "«no 0<|im_end|>»\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«no 1<|im_end|>»"
    )
    assert sample.prompt.text == HI
    assert (sample.status, sample.reward, sample.answer) == (Status.COMPLETED, 1.0, "no 1")
    assert sample.rollout_logprobs is not None
    assert [p is None for p in sample.rollout_logprobs] == [m == 0 for m in sample.mask]
    assert sample.rollout_logprobs[:2] == [-0.25, -0.251]
    assert sample.policy_versions == [3]
    assert (sample.metadata["turns"], sample.metadata["info"]) == (2, {"why": "x"})
    assert [m["role"] for m in sample.metadata["messages"]] == ["assistant", "user", "assistant"]


def test_dropped_thoughts_stay_as_sampled() -> None:
    """M1: whatever the template, or a client that trims, makes of the turn; M2: its end token is trained."""

    def agent(client: Client) -> float:
        first = client.say(USER)
        client.say(USER, first | {"content": first["content"].strip() + "\n"}, NEXT)
        return 1.0

    sample = only(play(agent, lambda said, seed: "<think>\nhm\n</think>\n\nno", template=templates.THINKING))
    assert sample.metadata["said"].count("«<think>\nhm\n</think>\n\nno<|im_end|>»") == 2


def test_tools_travel_as_calls() -> None:
    def agent(client: Client) -> float:
        asked = client.say(USER, tools=[TOOL])
        (call,) = asked["tool_calls"]
        assert asked["content"] == "let me"
        assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 2}'})
        told = {"role": "tool", "tool_call_id": call["id"], "content": "5<|im_end|>"}
        status, answer = client.chat(USER, asked, told, tools=[TOOL])
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "stop", "it is 5")
        assert "tool_calls" not in choice["message"]
        return float(choice["message"]["content"][-1])

    script = lambda said, seed: "it is 5" if "tool\n5" in said else "let me " + CALL  # noqa: E731
    sample = only(play(agent, script, template=templates.TOOLS))
    assert sample.metadata["said"] == (
        f"«let me {CALL}<|im_end|>»\n<|im_start|>tool\n5<\u200b|im_end|><|im_end|>\n<|im_start|>assistant\n"
        "«it is 5<|im_end|>»"
    )
    assert (sample.reward, sample.metadata["tool_calls"]) == (5.0, 1)


WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments'] | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_half_characters_are_taken() -> None:
    """Spelled out in a tool's description and a call's arguments; what the model calls comes back as it went."""
    half = '{"a": "\\ud83d"}'
    tool = {"type": "function", "function": {"name": "add", "description": "\ud83d", "parameters": {}}}
    edited = {"id": "1", "type": "function", "function": {"name": "add", "arguments": half}}

    def agent(client: Client) -> float:
        client.say(USER, {"role": "assistant", "content": "", "tool_calls": [edited]}, NEXT, tools=[tool])
        called = client.say(USER, tools=[tool])
        assert called["tool_calls"][0]["function"]["arguments"] == '{"a": "?"}'
        client.say(USER, called, {"role": "tool", "content": "2", "tool_call_id": "call_0"}, tools=[tool])
        return 1.0

    def script(said: str, seed: int) -> str:
        return (
            "done" if "2<|im_end|>" in said or "and?" in said else f'<tool_call>{{"name": "add", "arguments": {half}}}'
        )

    (group,) = play(agent, script, template=WITH_TOOLS)
    assert [s.metadata["turns"] for s in group.samples] == [1, 2]  # the last request went on from the second


def test_results_as_user_messages_and_calls_not_read() -> None:
    def agent(client: Client) -> float:
        asked = client.say(USER, tools=[TOOL], tool_choice="none")
        assert asked["content"] == "let me " + CALL.replace("<tool_call>", "").replace("</tool_call>", "")  # special
        assert "tool_calls" not in asked
        told = [{"role": "tool", "tool_call_id": c, "content": c, "name": "add"} for c in "xy"]
        client.say(USER, asked, *told, tools=[TOOL])
        return 1.0

    sample = only(play(agent, lambda said, seed: "let me " + CALL, tool_role="user"))
    assert "\n<|im_start|>user\nResult of add:\nx\n\nResult of add:\ny<|im_end|>\n" in sample.metadata["said"]


def test_branches_and_new_conversations() -> None:
    """Two go on from the same turn; an edited answer and other tools begin anew; all have the session's reward."""

    def agent(client: Client) -> float:
        first = client.say(USER)
        client.say(USER, first, NEXT)
        client.say(USER, first, {"role": "user", "content": "else?"})
        client.say(USER, first | {"content": "yes"}, NEXT)
        client.say(USER, first, NEXT, tools=[TOOL])
        return 2.0

    (group,) = play(agent, lambda said, seed: f"no {said.count('assistant')}")
    told = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    trunk, edited, tools, branch = group.samples
    assert trunk.metadata["said"] == "«no 1<|im_end|>»" + told.format("and?") + "«no 2<|im_end|>»"
    assert branch.metadata["said"] == told.format("else?") + "«no 2<|im_end|>»"
    assert branch.prompt.text == HI + "no 1<|im_end|>"
    assert branch.metadata["parent"] == trunk.metadata["conversation"]
    assert edited.metadata["said"] == tools.metadata["said"] == "«no 2<|im_end|>»"
    assert "yes<|im_end|>" in edited.prompt.text
    assert {s.reward for s in group.samples} == {2.0}
    assert [s.metadata.get("final") for s in group.samples] == [None, None, True, None]
    sampled = sum(sum(s.mask) for s in group.samples)
    assert sampled == 5 * len("no 1") - 5 + 5 + 5  # each sampled token is trained once: four letters' ids and the end


def test_choices_are_branches() -> None:
    def agent(client: Client) -> float:
        status, answer = client.chat(USER, n=3, logprobs=True)
        assert status == 200
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        tokens = answer["choices"][0]["logprobs"]["content"]
        assert "".join(t["token"] for t in tokens).endswith("<|im_end|>")
        assert tokens[0]["logprob"] == -0.25
        assert answer["usage"]["completion_tokens"] == sum(len(c["logprobs"]["content"]) for c in answer["choices"])
        client.say(USER, answer["choices"][1]["message"], NEXT)
        return 1.0

    (group,) = play(agent, lambda said, seed: f"say {seed % 1000}")
    assert [s.metadata["turns"] for s in group.samples] == [1, 2, 1]
    assert len({s.response for s in group.samples}) == 3


# ---- ends


def test_length_and_room() -> None:
    """M3: a cut turn gets no end and nothing follows it; no room is what OpenAI says of it."""

    def agent(client: Client) -> float:
        status, answer = client.chat(USER, max_tokens=4)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "length", "a lo")
        client.say(USER, choice["message"], NEXT)  # a conversation of its own
        long = {"role": "user", "content": "x" * 500}
        assert error_of(client.chat(long)) == (400, "context_length_exceeded", "messages")
        return 1.0

    (group,) = play(agent, lambda said, seed: "a long answer", context=300)
    assert [s.metadata["said"] for s in group.samples] == ["«a lo»", "«a long answer<|im_end|>»"]
    assert [s.status for s in group.samples] == [Status.TRUNCATED, Status.COMPLETED]


def test_stop_strings_are_sampled_and_not_shown() -> None:
    def agent(client: Client) -> float:
        first = client.say(USER, stop=["."])
        assert first["content"] == "no"
        client.say(USER, first, NEXT)
        return 1.0

    sample = only(play(agent, lambda said, seed: "no.", engine=None))
    assert sample.metadata["turns"] == 2


def test_turns_have_a_limit() -> None:
    def agent(client: Client) -> float:
        client.say(USER)
        assert error_of(client.chat(USER, n=2)) == (400, "max_turns", None)
        return 1.0

    groups = play(agent, max_turns=2)
    assert only(groups).metadata["cut_by"] == "turns"
    assert agent_metrics(groups).result()["agent/turns_exhausted"] == 1.0


@pytest.mark.parametrize(
    ("doing", "reason"),
    [
        (lambda client: client.say(USER) and None, "the session ended without a reward"),
        (lambda client: None, "the agent asked for nothing"),
        (lambda client: client.say(USER) and 1 / 0, "division by zero"),
        (lambda client: client.say(USER) and float("nan"), "the agent's reward is nan"),
        (lambda client: client.say(USER) and 1e300, "the agent's reward is 1e+300: beyond 1e+18"),
    ],
)
def test_sessions_that_fail(doing: Doing, reason: str) -> None:
    groups = play(doing)
    sample = only(groups)
    assert (sample.status, sample.reward) == (Status.FAILED, None)
    assert reason in sample.metadata["failure"]
    assert agent_metrics(groups).result()["agent/failed"] == 1.0


def test_rules_grade_what_has_no_reward() -> None:
    def agent(client: Client) -> float | None:
        client.say(USER)
        return 7.0 if client.session.prompt.index else None

    groups = play(agent, graded=True, prompts=2)
    assert [g.samples[0].reward for g in groups] == [len("no"), 7.0]


def test_time_ends_a_session() -> None:
    """What it has is kept with the reward it has; later requests find no session."""
    late: list[Any] = []

    def agent(client: Client) -> None:
        first = client.say(USER)
        client.reward(3.0)
        late.append(error_of(client.chat(USER, first, {"role": "user", "content": "wait"})))

    groups = play(agent, lambda said, seed: "wait" if "wait" in said else "no", episode_timeout=0.6)
    for _ in range(100):  # the agent's thread is not waited for
        if late:
            break
        threading.Event().wait(0.05)
    sample = only(groups)
    assert (sample.status, sample.reward) == (Status.ABORTED, 3.0)
    assert late == [(404, "session_ended", None)]
    assert agent_metrics(groups).result()["agent/time_exhausted"] == 1.0


def test_a_lost_engine_plays_sessions_anew() -> None:
    agent = make_agent()
    Agents.doing = staticmethod(lambda client: float(client.say(USER)["content"] == "no"))
    engine = ScriptedEngine(agent.template.tokenizer, lambda said, seed: "no", deaths=(1,))
    sampler = scripted.sampler_for(agent, engine, group_size=2)
    work = Work(group_index=0, prompt=make_prompt(agent, "hi 0"))
    from lightrl.engine.base import EngineLostError

    with pytest.raises(EngineLostError):
        run_async(sampler.complete(work))
    engine.restart()
    group = run_async(sampler.complete(work))
    assert group is not None
    assert [s.reward for s in group.samples] == [1.0, 1.0]
    agent.close()
