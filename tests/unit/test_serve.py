"""`lightrl serve`: sessions that clients open, and what they become."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest
import tiny_run
from scripted import ScriptedEngine, make_agent, sampler_for
from serving import ask, check_logprobs, serve_while

from lightrl.cli import main
from lightrl.config.load import load_for_run
from lightrl.config.schema import EndpointConfig
from lightrl.engine.base import EngineLostError
from lightrl.observe.rollouts import RolloutDump
from lightrl.rollout.endpoint.service import Service, Sessions, Unscored
from lightrl.types import Sample, SampleGroup, Status

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


class Served:
    """A service around an engine that says what a script tells it, on a thread of its own."""

    def __init__(self, script: Any = lambda said, seed: "no", *, deaths: tuple[int, ...] = (), **keys: Any) -> None:
        self.groups: list[SampleGroup] = []
        agent = make_agent(templates.CHATML, max_turns=keys.pop("max_turns", 100), tools=["python"])
        self.engine = ScriptedEngine(agent.template.tokenizer, script, deaths=deaths)
        idle = keys.pop("idle", 60.0)
        config = EndpointConfig(**keys)
        self.service = Service(config, agent.config, agent.template, model="tiny", idle=idle, record=self.groups.append)
        self.agent = replace(agent, environment=Sessions(self.service), outside=None)
        self.url, self.key = f"{self.service.url}/v1", self.service.key
        self.done: Future[None] = Future()
        self.loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()
        while self.service._loop is None:
            time.sleep(0.005)

    def _work(self) -> None:
        async def work() -> None:
            self.loop = asyncio.get_running_loop()
            sampler = sampler_for(
                self.agent, self.engine, group_size=1, together=False, scorer=Unscored(), stream="serve"
            )
            await self.service.serve(sampler)

        try:
            asyncio.run(work())
            self.done.set_result(None)
        except BaseException as error:
            self.done.set_exception(error)

    def stop(self) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.service.stop)
        self.done.result(30)

    def ask(self, action: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        return ask(self.url, self.key, action, body, **headers)

    def chat(self, *messages: Any, at: str = "", **more: Any) -> Any:
        """The message that was answered."""
        status, answer = self.ask(f"{at}chat/completions", {"model": "m", "messages": list(messages), **more})
        assert status == 200, answer
        return answer["choices"][0]["message"]

    def wait(self, count: int) -> list[Sample]:
        """Samples of the first sessions that ended, once there are so many."""
        until = time.monotonic() + 30
        while len(self.groups) < count and time.monotonic() < until:
            time.sleep(0.01)
        assert len(self.groups) == count
        return [s for g in self.groups for s in g.samples]


@contextmanager
def served(*given: Any, **keys: Any) -> Iterator[Served]:
    found = Served(*given, **keys)
    found.start()
    try:
        yield found
    finally:
        if not found.done.done():
            found.stop()
        found.service.close()
        found.agent.close()


def test_a_request_that_goes_on_belongs_to_the_session_of_the_answer() -> None:
    """Ids stay as they were sampled; another beginning is another session, and a second successor a branch."""
    with served(lambda said, seed: "no") as it:
        first = it.chat(HI)
        other = it.chat({"role": "user", "content": "hey"})
        it.chat(HI, first, MORE)
        it.chat(HI, first, {"role": "user", "content": "else"})
        assert other == first
        assert it.groups == []
        it.stop()
    one, branch, two = it.wait(2)
    text = it.agent.template.text
    said = [text(s.tokens, special=True) for s in (one, branch, two)]
    turn = "<|im_start|>assistant\nno<|im_end|>"
    assert said[0] == f"<|im_start|>user\nhi<|im_end|>\n{turn}\n<|im_start|>user\nmore<|im_end|>\n{turn}"
    assert said[1] == f"<|im_start|>user\nhi<|im_end|>\n{turn}\n<|im_start|>user\nelse<|im_end|>\n{turn}"
    assert said[2] == f"<|im_start|>user\nhey<|im_end|>\n{turn}"
    assert [p is None for p in one.rollout_logprobs or []] == [m == 0 for m in one.mask]
    assert sum(one.mask) == 2 * len(it.engine._tokenizer("no<|im_end|>")["input_ids"])
    assert sum(branch.mask) == sum(two.mask) == sum(one.mask) / 2
    assert [s.metadata["conversation"] for s in (one, branch)] == [0, 1]
    assert one.policy_versions == [3]
    assert one.reward is None


def test_sessions_with_a_name_get_a_reward_and_end() -> None:
    with served() as it:
        it.chat(HI, at="sessions/mine/")
        status, _ = it.ask("chat/completions", {"model": "m", "messages": [MORE]}, **{"lightrl-session": "mine"})
        assert status == 200
        assert it.ask("sessions/mine/reward", {"reward": 0.5, "info": {"won": True}})[0] == 200
        assert it.ask("sessions/mine/end", {})[0] == 200
        it.chat(HI, at="sessions/mine/")  # a new one
        samples = it.wait(1)
        assert [s.reward for s in samples] == [0.5, 0.5]
        assert samples[0].metadata["info"] == {"session": "mine", "won": True}
        assert it.ask("sessions/mine/end", {})[0] == 200
        again = it.wait(2)[-1]
        assert (again.reward, again.tokens) == (None, samples[0].tokens)
        assert it.ask("sessions/mine/reward", {"reward": 1.0})[0] == 404


def test_what_is_refused() -> None:
    it = Served()
    try:
        assert it.ask("models")[1]["data"][0]["id"] == "tiny"
        body = {"model": "m", "messages": [HI]}
        assert it.ask("chat/completions", body)[0] == 503
        it.start()
        assert it.ask("chat/completions", body)[0] == 200
        assert ask(it.url, "wrong", "chat/completions", body)[0] == 401
        assert it.ask("reward", {"reward": 1.0})[0] == 404
        assert it.ask("sessions/none/reward", {"reward": 1.0})[0] == 404
        assert it.ask(f"sessions/{'a' * 65}/chat/completions", body)[0] == 400
        assert it.ask("sessions/~0/chat/completions", body)[0] == 400, "a session that somebody else began"
        assert it.ask("chat/completions", {"model": "m", "messages": []})[0] == 400
        access = it.service._key_of("mine")
        assert ask(it.url, access, "sessions/mine/chat/completions", body)[0] == 200
        assert ask(it.url, access, "sessions/yours/chat/completions", body)[0] == 401
        it.stop()
        assert it.ask("chat/completions", body)[0] == 503
    finally:
        it.service.close()
        it.agent.close()


@pytest.mark.parametrize(("foreign", "expected"), [("refuse", (0.25, 0.5)), ("ignore", (1.0, 1.0))])
def test_requests_are_sampled_as_they_ask_unless_that_is_ignored(foreign: str, expected: Any) -> None:
    with served(foreign_sampling=foreign) as it:
        it.chat(HI, temperature=0.25, top_p=0.5)
        it.chat(HI)
    sampled = [(r.sampling.temperature, r.sampling.top_p) for r in it.engine.requests]
    assert sampled == [expected, (1.0, 1.0)]


def test_sessions_that_nobody_uses_end_and_turns_have_a_limit() -> None:
    with served(idle=0.2, max_turns=1) as it:
        first = it.chat(HI)
        status, answer = it.ask("chat/completions", {"model": "m", "messages": [HI, first, MORE]})
        assert (status, answer["error"]["code"]) == (400, "max_turns")
        (sample,) = it.wait(1)
        assert sample.metadata["cut_by"] == "turns"
        it.chat(HI, first, MORE)  # of a session that has ended: a conversation of its own
        assert it.wait(2)[1].metadata["turns"] == 1


def test_many_clients_at_once() -> None:
    def play(it: Served, number: int) -> str:
        first = it.chat({"role": "user", "content": f"hi {number}"})
        return str(it.chat({"role": "user", "content": f"hi {number}"}, first, MORE)["content"])

    with served(lambda said, seed: said.split("hi ")[1].split("<")[0]) as it, ThreadPoolExecutor(64) as pool:
        assert list(pool.map(lambda n: play(it, n), range(64))) == [str(n) for n in range(64)]
        it.stop()
    samples = it.wait(64)
    assert {s.prompt.messages[0]["content"] for s in samples if s.prompt.messages} == {f"hi {n}" for n in range(64)}
    assert all(s.metadata["turns"] == 2 for s in samples)


def test_its_end_keeps_what_was_said_and_tells_who_waits() -> None:
    with served(lambda said, seed: "wait" if "more" in said else "no") as it, ThreadPoolExecutor(1) as pool:
        first = it.chat(HI)
        waiting = pool.submit(it.ask, "chat/completions", {"model": "m", "messages": [HI, first, MORE]})
        while len(it.engine.running) < 1:
            time.sleep(0.005)
        it.stop()
        assert waiting.result(30)[0] == 404
        assert not it.engine.running
        assert it.wait(1)[0].metadata["turns"] == 1


def test_a_lost_engine_ends_the_service_with_its_reason() -> None:
    with served(deaths=(2,)) as it:
        it.chat(HI, at="sessions/one/")
        status, answer = it.ask("sessions/two/chat/completions", {"model": "m", "messages": [HI]})
        assert (status, answer["error"]["code"]) == (503, "engine_lost")
        with pytest.raises(EngineLostError, match="the engine died"):
            it.done.result(30)
    assert [s.status for s in it.wait(1)] == [Status.COMPLETED]


# ---- the command


def test_a_model_is_served_and_its_sessions_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs are the stock model's, two answers of one session share its prompt, and `inspect` reads the dump."""
    monkeypatch.setenv("SECRET", "a-key")
    tiny_run.make_model(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, statuses = f"http://127.0.0.1:{port}/v1", []

    def use() -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 6, "n": 2}
        status, until = 503, time.monotonic() + 60
        while status == 503 and time.monotonic() < until:  # the port, and then the model, are not there yet
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                status, _ = ask(f"{url}/sessions/one", "a-key", "chat/completions", body)
        statuses.append(status)
        statuses.append(ask(f"{url}/sessions/one", "a-key", "reward", {"reward": 2.0})[0])
        os.kill(os.getpid(), signal.SIGINT)

    flags = [
        "--run.device=cpu",
        "--model.compute_dtype=float32",
        f"--endpoint.port={port}",
        "--endpoint.key_env=SECRET",
    ]
    words = ["serve", "--model.path", str(tmp_path / "model"), *flags, "--record", str(tmp_path / "dump")]
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    main_status(words, 0)
    thread.join(30)
    assert statuses == [200, 200]
    printed = capsys.readouterr().out
    assert f"export OPENAI_BASE_URL={url}\nexport OPENAI_API_KEY=$SECRET\n" in printed
    assert "a-key" not in printed
    (group,) = RolloutDump(tmp_path / "dump").groups(1)
    assert [s.reward for s in group.samples] == [2.0, 2.0]
    check_logprobs(tmp_path / "model", group.samples)
    main_status(["inspect", str(tmp_path / "dump")], 0)
    assert "2 of 2 samples, reward 2" in capsys.readouterr().out
    main_status(words, 2)
    assert "serve: --record" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 4])
def test_the_newest_checkpoint_of_a_run_is_served_under_its_limits(tmp_path: Path, rank: int) -> None:
    """By the run's own file: its weights, its longest answer, its turns. No prompts or agent's code are looked for."""
    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    if rank:
        pytest.importorskip("peft")
    sections: dict[str, Any] = {"run": {"steps": 2}, "checkpoint": {"hf_every": 2}, "optim": {"lr": 0.05}}
    trainer = Trainer(tiny_run.make_run(tmp_path, **sections, lora={"rank": rank}))
    trainer.train()
    trainer.close()
    close_world()
    toml = tmp_path / "outside.toml"
    toml.write_text(
        f'[run]\ndir = "{tmp_path}/run"\ndevice = "cpu"\n[model]\npath = "{tmp_path}/model"\n'
        'compute_dtype = "float32"\n[data]\npath = "gone.jsonl"\napply_chat_template = true\n[rollout]\n'
        'max_response_tokens = 5\n[agent]\nenvironment = "outside"\nmax_turns = 2\n[endpoint]\n'
        f'function = "no_such_module:agent"\n[lora]\nrank = {rank}\n'
    )
    config = load_for_run([str(toml)], [], command="serve")
    found = []

    def use(url: str, key: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "abc"}]}
        found.extend(ask(f"{url}/sessions/one", key, "chat/completions", body) for _ in range(3))

    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    serve_while(config, use, signal.SIGTERM, checkpoint=newest, record=tmp_path / "dump")
    assert [status for status, _ in found] == [200, 200, 400]
    assert found[2][1]["error"]["code"] == "max_turns"
    (group,) = RolloutDump(tmp_path / "dump").groups(1)
    assert all(s.response_length <= 5 for s in group.samples)
    assert {v for s in group.samples for v in s.policy_versions} == {2}
    check_logprobs(tmp_path / "run" / "hf" / "step_000002", group.samples)


def main_status(words: list[str], status: int) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert (caught.value.code or 0) == status


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "model.path: not set"),
        (["--model.path", "./nowhere"], "model.path: no such folder: ./nowhere"),
        (["--model.path", ".", "--agent.parser", "hermse"], "did you mean 'hermes'?"),
        (["--model.path", ".", "--checkpoint", "nowhere"], "serve: --checkpoint: nowhere: no such folder"),
        (["--model.path", ".", "--endpoint.prot=1"], "did you mean --endpoint.port?"),
        (
            [
                "--model.path=.",
                "--engine.kind=sglang_server",
                '--engine.urls=["http://a:9"]',
                "--engine.api_key_env=NONE",
            ],
            "engine.api_key_env: ",
        ),
    ],
)
def test_mistakes_are_told_in_a_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    main_status(["serve", *words], 2)
    assert text in capsys.readouterr().err
