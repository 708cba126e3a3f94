"""Programs and services as agents outside, and the endpoint's port and settings."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import scripted
from outside_agents import USER, Agents, Client, make_agent, only, play

from lightrl.config.load import ConfigError, load_config
from lightrl.errors import UserError
from lightrl.rollout.endpoint import OutsideSession
from lightrl.types import Status

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

    endpoint = {"function": "outside_agents:play_outside", "concurrency": 2}
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
    settings = {"function": "outside_agents:play_outside"}
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
