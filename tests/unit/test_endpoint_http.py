"""The endpoint by plain HTTP: streams, clients that leave, and what is refused."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
import scripted
from outside_agents import CALL, NEXT, TOOL, USER, Agents, Client, error_of, make_agent, only, play
from scripted import ScriptedEngine

from lightrl.types import Status

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
        for number in ("1e999", "1e19", "-1e300"):
            assert error_of(client.send("reward", f'{{"reward": {number}}}')) == (400, "invalid_value", "reward")
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
        only(play(agent, endpoint={"function": "outside_agents:play_outside", "key_env": "TINY_KEY"}))


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

    only(play(agent, endpoint={"function": "outside_agents:play_outside", "max_body_mib": 1}))


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


def test_foreign_sampling_may_be_ignored() -> None:
    def agent(client: Client) -> float:
        client.say(USER, temperature=0.5, top_p=0.9)
        return 1.0

    helper = make_agent()
    engine = ScriptedEngine(helper.template.tokenizer, lambda said, seed: "no")
    helper.close()
    endpoint = {"function": "outside_agents:play_outside", "foreign_sampling": "ignore"}
    only(play(agent, endpoint=endpoint, engine=engine))
    assert {(r.sampling.temperature, r.sampling.top_p) for r in engine.requests} == {(1.0, 1.0)}
