"""The endpoint in the run, by plain HTTP: what it answers, refuses, survives; and the samples that sessions become."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import chat_templates as templates
import pytest
import scripted
from scripted import ScriptedEngine, make_prompt
from test_agent import HI, said_of

from lightrl.config.load import ConfigError, load_config
from lightrl.config.schema import AgentConfig, EndpointConfig, SandboxConfig
from lightrl.errors import UserError
from lightrl.observe.metrics import agent_metrics
from lightrl.rollout.agent import Agent, load_agent
from lightrl.rollout.collect import Work, run_async
from lightrl.rollout.endpoint import OutsideSession
from lightrl.types import Sample, SampleGroup, Status

USER = {"role": "user", "content": "hi 0"}
NEXT = {"role": "user", "content": "and?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
Doing = Callable[["Client"], Any]


class Client:
    """One connection of an agent's to its session."""

    def __init__(self, session: OutsideSession) -> None:
        self.session = session
        host, self.path = session.base_url.removeprefix("http://").split("/", 1)
        self.name, port = host.split(":")
        self.http = http.client.HTTPConnection(self.name, int(port), timeout=20)

    def send(self, action: str, body: Any, *, key: str | None = None, path: str | None = None, **more: str) -> Any:
        """(status, JSON)"""
        data = body if isinstance(body, bytes | str) else json.dumps(body)
        headers = {"Authorization": f"Bearer {key or self.session.api_key}", **more}
        self.http.request("POST", f"/{path or self.path}/{action}", data, headers)
        reply = self.http.getresponse()
        return reply.status, json.loads(reply.read())

    def chat(self, *messages: Any, **more: Any) -> Any:
        return self.send("chat/completions", {"model": "m", "messages": list(messages), **more})

    def say(self, *messages: Any, **more: Any) -> Any:
        """The message that was answered."""
        status, answer = self.chat(*messages, **more)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    def reward(self, value: Any, **more: Any) -> Any:
        return self.send("reward", {"reward": value, **more})


class Agents:
    """`endpoint.function` of these tests: does with a client what the test wants."""

    doing: Doing
    errors: ClassVar[list[AssertionError]] = []

    @classmethod
    def play(cls, session: OutsideSession) -> Any:
        client = Client(session)
        try:
            return cls.doing(client)
        except AssertionError as error:  # would only fail its session
            cls.errors.append(error)
            raise
        finally:
            client.http.close()


def play_outside(session: OutsideSession) -> Any:
    return Agents.play(session)


def make_agent(template: str = templates.CHATML, *, context: int = 4096, graded: bool = False, **keys: Any) -> Agent:
    tokenizer = templates.tokenizer(template)
    settings = keys.pop("endpoint", {"function": "test_endpoint:play_outside"})
    agent = load_agent(
        AgentConfig(environment="outside", **keys),
        SandboxConfig(),
        tokenizer,
        end_ids=tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"]),
        context_length=context,
        endpoint=EndpointConfig(**settings),
        model="tiny",
        graded=graded,
    )
    assert agent is not None
    return agent


def play(doing: Doing, script: Any = lambda said, seed: "no", **more: Any) -> list[SampleGroup]:
    """Groups of sessions in which `doing` is the agent."""
    Agents.doing = staticmethod(doing)
    Agents.errors.clear()
    keys = {
        k: more.pop(k) for k in list(more) if k in {*AgentConfig.__dataclass_fields__, "endpoint", "graded", "context"}
    }
    agent = make_agent(more.pop("template", templates.CHATML), **keys)
    try:
        groups = scripted.play(agent, script, **{"group_size": 1, "tokens": 600} | more)
        while Agents.errors:
            raise Agents.errors.pop()
        for group in groups:
            for sample in group.samples:
                sample.metadata["said"] = said_of(agent, sample)
        return groups
    finally:
        agent.close()


def only(groups: list[SampleGroup]) -> Sample:
    (group,) = groups
    (sample,) = group.samples
    return sample


def error_of(answer: tuple[int, Any]) -> tuple[int, str | None, str | None]:
    status, body = answer
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["code"], body["error"]["param"]


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


# ---- streams and clients that leave


def events(client: Client, *messages: Any, **more: Any) -> list[Any]:
    body = json.dumps({"model": "m", "messages": list(messages), "stream": True, **more})
    headers = {"Authorization": f"Bearer {client.session.api_key}"}
    client.http.request("POST", f"/{client.path}/chat/completions", body, headers)
    reply = client.http.getresponse()
    assert reply.getheader("Content-Type") == "text/event-stream"
    lines = reply.read().decode().split("\n\n")
    return [line.removeprefix("data: ") for line in lines if line]


def test_streams() -> None:
    def agent(client: Client) -> float:
        *parts, end = events(client, USER, stream_options={"include_usage": True}, tools=[TOOL])
        assert end == "[DONE]"
        first, said, last, usage = map(json.loads, parts)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        (call,) = said["choices"][0]["delta"]["tool_calls"]
        assert (call["index"], call["function"]["name"]) == (0, "add")
        assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
        assert usage["usage"]["total_tokens"] > usage["usage"]["completion_tokens"]
        assert {p["object"] for p in (first, said, last, usage)} == {"chat.completion.chunk"}
        assert len({p["id"] for p in (first, said, last, usage)}) == 1
        return 1.0

    assert only(play(agent, lambda said, seed: CALL)).metadata["turns"] == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_leaves_nothing(stream: bool) -> None:
    """Its turn is aborted at the engine and no part of the session, which goes on."""
    released: list[bool] = []

    def agent(client: Client) -> float:
        body = json.dumps({"model": "m", "messages": [NEXT], "stream": stream}).encode()
        raw = socket.create_connection((client.http.host, client.http.port))
        head = f"POST /{client.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        raw.sendall(f"{head}Authorization: Bearer {client.session.api_key}\r\n\r\n".encode() + body)
        while not engine.running:
            threading.Event().wait(0.01)
        raw.close()
        while engine.running:
            threading.Event().wait(0.01)
        released.append(True)
        client.say(USER)
        return 1.0

    helper = make_agent()
    engine = ScriptedEngine(helper.template.tokenizer, lambda said, seed: "wait" if "and?" in said else "no")
    helper.close()
    sample = only(play(agent, engine=engine, together=False))
    assert released == [True]
    assert sample.metadata["said"] == "«no<|im_end|>»"


def test_an_answer_that_did_not_arrive_is_withdrawn() -> None:
    """Unless something follows it: the client had it after all."""
    agent = make_agent()
    assert agent.outside is not None
    sessions = agent.outside.endpoint._sessions

    def doing(client: Client) -> float:
        (session,) = sessions.values()
        client.say(USER)
        session.loop.call_soon_threadsafe(session.withdraw, list(session._roots))
        second = client.say(USER)
        client.say(USER, second, NEXT)
        session.loop.call_soon_threadsafe(session.withdraw, list(session._roots))
        return 1.0

    Agents.doing = staticmethod(doing)
    sample = only(scripted.play(agent, lambda said, seed: f"no {seed % 1000}", group_size=1, tokens=600))
    assert (sample.status, sample.metadata["turns"]) == (Status.COMPLETED, 2)
    agent.close()


def test_many_clients_at_once() -> None:
    """256 sessions, each with a connection of its own: every one ends with its own samples and reward."""

    def agent(client: Client) -> float:
        number = client.session.prompt.index
        mine = {"role": "user", "content": f"hi {number}"}
        first = client.say(mine)
        assert first["content"] == f"no {number}"
        client.say(mine, first, NEXT)
        return float(number)

    groups = play(agent, lambda said, seed: f"no {said.split('hi ')[1].split('<')[0]}", prompts=64, group_size=4)
    assert [[s.reward for s in g.samples] for g in groups] == [[float(i)] * 4 for i in range(64)]
    assert all(s.metadata["turns"] == 2 and f"no {i}" in s.response for i, g in enumerate(groups) for s in g.samples)


# ---- what is refused


HUGE = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}'
BAD = [
    (b"{", 400, "invalid_json", None),
    (b"\xff\xfe", 400, "invalid_json", None),
    (b"[" * 100_000, 400, "invalid_json", None),
    ([], 400, "invalid_json", None),
    ({"model": None}, 400, "invalid_value", "model"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": "hi"}, 400, "invalid_value", "messages"),
    ({"messages": [3]}, 400, "invalid_value", "messages[0]"),
    ({"messages": [{"role": "x", "content": ""}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, 400, "invalid_value", "messages[1].content"),
    ({"messages": [USER | {"audio": "x"}]}, 400, "unsupported_parameter", "messages[0].audio"),
    ({"messages": [USER, {"role": "assistant", "content": "x"}]}, 400, "unsupported_value", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "invalid_value",
        "messages[0].content[0]",
    ),
    ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({"temperature": True}, 400, "invalid_value", "temperature"),
    ({"temperature": -1}, 400, "invalid_value", "temperature"),
    ({"temperature": 0.5}, 400, "unsupported_value", "temperature"),
    ({"top_p": 0.5}, 400, "unsupported_value", "top_p"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "top_p": NaN}', 400, "invalid_json", None),
    (HUGE, 400, "invalid_value", "temperature"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 1.5}, 400, "invalid_value", "max_completion_tokens"),
    ({"stop": ["a"] * 5}, 400, "invalid_value", "stop"),
    ({"n": 0}, 400, "invalid_value", "n"),
    ({"stream": 1}, 400, "invalid_value", "stream"),
    ({"stream_options": {"include_usage": 3}}, 400, "invalid_value", "include_usage"),
    ({"tools": [{"type": "web"}]}, 400, "invalid_value", "tools[0]"),
    ({"tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
    ({"seed": 3}, 400, "unsupported_parameter", "seed"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"presence_penalty": 0.1}, 400, "unsupported_parameter", "presence_penalty"),
    ({"brand_new": 1}, 400, "unsupported_parameter", "brand_new"),
]  # fmt: skip


def test_bad_requests_are_named_and_harm_nothing() -> None:
    def agent(client: Client) -> float:
        for body, *expected in BAD:
            whole = {"model": "m", "messages": [USER], **body} if isinstance(body, dict) else body
            found = client.send("chat/completions", whole)
            assert error_of(found) == tuple(expected), (body, found)
        for body, param in (({}, "reward"), ({"reward": "x"}, "reward"), ({"reward": 1, "x": 2}, "x")):
            assert error_of(client.send("reward", body))[::2] == (400, param)
        assert error_of(client.send("reward", '{"reward": 1e999}'))[2] == "reward"
        about = {"user": "me", "presence_penalty": 0, "seed": None, "temperature": 1.0, "parallel_tool_calls": True}
        client.say(USER, **about)  # what changes nothing may be said
        return 1.0

    assert only(play(agent)).metadata["turns"] == 1


def test_who_may_ask_for_what() -> None:
    def agent(client: Client) -> float:
        body = {"model": "m", "messages": [USER]}
        assert error_of(client.send("chat/completions", body, key="wrong")) == (401, "invalid_api_key", None)
        other = client.path.replace(client.session.session, "nobody")
        fresh = Client(client.session)
        assert fresh.send("chat/completions", body, key="secret", path=other)[0] == 404
        fresh = Client(client.session)
        assert error_of(fresh.send("chat/completions", body, path=other))[0] == 401  # its key opens its session alone
        assert error_of(Client(client.session).send("embeddings", body)) == (404, "unknown_url", None)
        assert error_of(Client(client.session).send("models", body)) == (405, "method_not_allowed", None)
        plain = Client(client.session).send("chat/completions", body, key="secret", path="v1")
        assert error_of(plain) == (404, "session_not_found", None)
        named = {"LightRL-Session": client.session.session}
        assert Client(client.session).send("chat/completions", body, path="v1", **named)[0] == 200
        http = client.http
        http.close()
        http.request("GET", f"/{client.path}/models", headers={"Authorization": f"Bearer {client.session.api_key}"})
        assert [m["id"] for m in json.loads(http.getresponse().read())["data"]] == ["tiny"]
        assert client.session.api_key not in repr(client.session)
        assert "secret" not in client.session.api_key
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_KEY", "secret")
        only(play(agent, endpoint={"function": "test_endpoint:play_outside", "key_env": "TINY_KEY"}))


def test_bodies_have_a_limit() -> None:
    """Told to the client though it still sends; with a length, or without."""

    def agent(client: Client) -> float:
        big = b"x" * ((1 << 20) + 1)
        for _ in range(2):
            assert error_of(client.send("chat/completions", big)) == (413, "request_too_large", None)
        client.http.close()
        headers = {"Authorization": f"Bearer {client.session.api_key}"}
        client.http.request("POST", f"/{client.path}/chat/completions", iter([big] * 4), headers, encode_chunked=True)
        assert client.http.getresponse().status == 413
        client.http.close()
        client.say(USER)
        return 1.0

    only(play(agent, endpoint={"function": "test_endpoint:play_outside", "max_body_mib": 1}))


def test_what_is_no_http_is_answered() -> None:
    def agent(client: Client) -> float:
        for sent in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 99_999):
            raw = socket.create_connection((client.http.host, client.http.port), timeout=10)
            raw.sendall(sent)
            status = int(raw.recv(4096).split()[1])
            assert status in (400, 431)
            raw.close()
        client.say(USER)
        return 1.0

    only(play(agent))


# ---- programs and ports

PROGRAM = """
import json, os, sys, urllib.request
told = json.load(sys.stdin)
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
assert os.environ["LIGHTRL_SESSION"] == told["session"]
def post(action, body):
    request = urllib.request.Request(f"{base}/{action}", json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    return json.load(urllib.request.urlopen(request))
answer = post("chat/completions", {"model": "any", "messages": told["prompt"]["messages"]})
post("reward", {"reward": len(answer["choices"][0]["message"]["content"])})
print("x" * 1_000_000)
"""


def test_a_program_is_an_agent() -> None:
    sample = only(play(print, endpoint={"command": [sys.executable, "-c", PROGRAM]}))
    assert (sample.reward, sample.status) == (2.0, Status.COMPLETED)


def test_programs_that_fail_or_stay() -> None:
    end = PROGRAM + "post('end', {})\nimport time; time.sleep(60)"
    broken = PROGRAM + "print('my', key); sys.exit(3)"
    for program, reason in ((broken, "status 3: my ***"), (None, "no-such-program cannot be started")):
        command = ["no-such-program"] if program is None else [sys.executable, "-c", program]
        sample = only(play(print, endpoint={"command": command}))
        assert reason in sample.metadata["failure"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightrl.rollout.endpoint.outside._GRACE_SECONDS", 0.1)
        assert only(play(print, endpoint={"command": [sys.executable, "-c", end]})).reward == 2.0


@pytest.fixture
def service() -> Iterator[str]:
    """An agent service that takes episodes and ends their sessions itself."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = {k: told[k] for k in ("session", "base_url", "api_key")}
            later = self.path == "/later"

            def act() -> None:
                client = Client(OutsideSession(prompt=None, **given))  # type: ignore[arg-type]
                client.say(*told["prompt"]["messages"])
                if later:
                    client.reward(4.0)
                    client.send("end", {})

            threading.Thread(target=act).start() if later else act()
            self.send_response(200)
            body = b"{}" if later else b'{"reward": 5}'
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_service_is_an_agent(service: str) -> None:
    for path, reward in (("now", 5.0), ("later", 4.0)):
        assert only(play(print, endpoint={"url": f"{service}/{path}"})).reward == reward
    gone = only(play(print, endpoint={"url": "http://127.0.0.1:9/x"}))
    assert "endpoint.url" in gone.metadata["failure"]


def test_few_at_once_hold_up_no_round() -> None:
    under_way, most, lock = [0], [0], threading.Lock()

    def agent(client: Client) -> float:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        client.say(USER)
        with lock:
            under_way[0] -= 1
        return 1.0

    endpoint = {"function": "test_endpoint:play_outside", "concurrency": 2}
    groups = play(agent, endpoint=endpoint, prompts=3, group_size=2)
    assert [s.reward for g in groups for s in g.samples] == [1.0] * 6
    assert most == [2]


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_agent()
    assert agent.outside is not None
    url = agent.outside.endpoint.url
    assert url.startswith("http://127.0.0.1:")  # and on no other address of this machine
    port = int(url.rpartition(":")[2])
    assert agent.outside.endpoint._http._socket.getsockname() == ("127.0.0.1", port)
    settings = {"function": "test_endpoint:play_outside"}
    with pytest.raises(UserError, match=f"endpoint.port = {port}: cannot listen on 127.0.0.1:{port}: .*; choose"):
        make_agent(endpoint=settings | {"port": port})
    agent.close()
    agent.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    make_agent(endpoint=settings | {"port": port}).close()
    with pytest.raises(UserError, match=r"cannot listen on 203\.0\.113\.7"):
        make_agent(endpoint=settings | {"host": "203.0.113.7"})
    named = make_agent(endpoint=settings | {"host": "0.0.0.0", "address": "node7"})
    assert named.outside is not None
    assert named.outside.endpoint.url.startswith("http://node7:")
    named.close()
    monkeypatch.delenv("TINY_KEY", raising=False)
    with pytest.raises(UserError, match=r"endpoint\.key_env: the environment has no TINY_KEY"):
        make_agent(endpoint=settings | {"key_env": "TINY_KEY"})


def test_foreign_sampling_may_be_ignored() -> None:
    def agent(client: Client) -> float:
        client.say(USER, temperature=0.5, top_p=0.9)
        return 1.0

    helper = make_agent()
    engine = ScriptedEngine(helper.template.tokenizer, lambda said, seed: "no")
    helper.close()
    endpoint = {"function": "test_endpoint:play_outside", "foreign_sampling": "ignore"}
    only(play(agent, endpoint=endpoint, engine=engine))
    assert {(r.sampling.temperature, r.sampling.top_p) for r in engine.requests} == {(1.0, 1.0)}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"endpoint": {"port": 80}}, "endpoint.port: only used with agent.environment = 'outside'"),
        ({"agent": {"environment": "outside"}}, "endpoint.command: not set; agent.environment = 'outside' needs"),
        (
            {"agent": {"environment": "outside"}, "endpoint": {"command": ["a"], "url": "http://a"}},
            "endpoint.url: endpoint.command is the agent: drop one of the two",
        ),
        ({"agent": {"environment": "outside"}, "endpoint": {"url": "a:1"}}, "'a:1' is not of the form http://"),
        ({"agent": {"environment": "outside"}, "endpoint": {"function": "f"}}, "write a function as package.module"),
        (
            {"agent": {"environment": "outside", "tools": ["python"]}, "endpoint": {"command": ["a"]}},
            "agent.tools: an agent outside brings tools of its own",
        ),
        (
            {"agent": {"environment": "outside", "options": {"a": 1}}, "endpoint": {"command": ["a"]}},
            "agent.options: an agent outside takes none",
        ),
    ],
)
def test_refused_settings(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        load_config(**({"data": {"apply_chat_template": True}} | sections))


def test_nothing_is_left_of_an_ended_session() -> None:
    agent = make_agent()
    assert agent.outside is not None
    Agents.doing = staticmethod(lambda client: float(len(client.say(USER)["content"])))
    scripted.play(agent, lambda said, seed: "no", group_size=3)
    assert agent.outside.endpoint._sessions == {}
    assert asyncio.iscoroutinefunction(agent.outside.run)
    agent.close()
