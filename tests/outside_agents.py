"""Agents outside that tests script, over plain HTTP to the endpoint of a scripted engine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any, ClassVar

import chat_templates as templates
import scripted
from scripted import said_of

from lightrl.config.schema import AgentConfig, EndpointConfig, SandboxConfig
from lightrl.rollout.agent import Agent, load_agent
from lightrl.rollout.endpoint import OutsideSession
from lightrl.types import Sample, SampleGroup

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
    settings = keys.pop("endpoint", {"function": "outside_agents:play_outside"})
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
