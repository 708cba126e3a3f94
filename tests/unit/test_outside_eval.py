"""An evaluator elsewhere: asked again when it fails, never a reason to stop, and never told more than it must be."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tiny_run
import tiny_sft

from lightrl.config import load_config
from lightrl.distributed.mesh import close_world
from lightrl.errors import UserError
from lightrl.training.outside_eval import Evaluator, EvaluatorError, make_evaluator, metrics_in
from lightrl.training.sft import SFTTrainer
from lightrl.training.trainer import Trainer

KEY = "a-secret-key"


class Service(ThreadingHTTPServer):
    """Answers with (status, body) of a list, the last for ever; a number first is slept. Notes what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple] = [(200, b'{"acc": 0.5}')]
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.found: list[set[str]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/evaluate?suite=a"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/evaluate?suite=a"
        self.server.asked.append(question)
        self.server.keys.append(self.headers["Authorization"])
        if "checkpoint" in question:
            self.server.found.append({path.name for path in Path(question["checkpoint"]).iterdir()})
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        if status in ("sleep", "wait"):  # and then no answer
            time.sleep(body) if status == "sleep" else body.wait(60)
            return
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.shutdown()
    made.server_close()


def ask(url: str, retries: int = 3, timeout: float = 5.0, key: str | None = KEY):
    return Evaluator(url=url, key=key, timeout=timeout, retries=retries, pauses=(0.01,) * 9).ask({"step": 3})


def test_it_is_asked_again_while_it_may_answer(service: Service) -> None:
    service.answers = [
        (503, b""),
        (429, b"later"),
        ("sleep", 0.5),
        (200, b'{"gsm8k": {"acc": 0.25, "n": 8}, "x": "y"}'),
    ]
    assert ask(service.url, timeout=0.3) == {"eval/gsm8k/acc": 0.25, "eval/gsm8k/n": 8.0}
    assert [q["attempt"] for q in service.asked] == [1, 2, 3, 4]
    assert service.keys == [f"Bearer {KEY}"] * 4


@pytest.mark.parametrize(
    ("answer", "times", "message"),
    [
        ((500, b"trace"), 3, r"HTTP status 500 \(3 attempts\)"),
        ((403, b"no"), 1, "HTTP status 403"),
        ((302, b""), 1, "HTTP status 302"),  # the key would go along
        ((200, b"<html>"), 1, "not JSON"),
        ((200, b"[0.5]"), 1, "not a JSON object"),
        ((200, b'{"acc": "high", "x": NaN}'), 1, "holds no number"),
        ((200, b"1" * 2_000_000), 1, "more than 1048576 bytes"),
    ],
)
def test_what_it_cannot_use_is_told(service: Service, answer, times: int, message: str) -> None:
    service.answers = [answer]
    with pytest.raises(EvaluatorError, match=message) as caught:
        ask(service.url, retries=2)
    assert len(service.asked) == times
    assert KEY not in str(caught.value)


def test_nobody_there_is_told_after_the_last_attempt() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(EvaluatorError, match=r"ConnectionRefusedError: .* \(3 attempts\)"):
            ask(f"http://127.0.0.1:{taken.getsockname()[1]}/", retries=2)


def test_names_of_metrics() -> None:
    assert metrics_in(b'{"eval/a": 1, "b": {"c": {"d": true}}, "e": null}') == {"eval/a": 1.0, "eval/b/c/d": 1.0}
    assert len(metrics_in(json.dumps({str(i): i for i in range(10**4)}).encode())) == 500


def test_its_key_is_looked_for_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(evaluator={"url": "http://h:1/", "every": 1, "api_key_env": "EVALUATOR_KEY"})
    with pytest.raises(UserError, match="the environment has no EVALUATOR_KEY"):
        make_evaluator(config)
    monkeypatch.setenv("EVALUATOR_KEY", "two\nlines")
    with pytest.raises(UserError, match="not printable ASCII") as caught:
        make_evaluator(config)
    assert "two" not in str(caught.value)
    assert make_evaluator(load_config()) is None


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({"url": "host:1", "every": 1}, "evaluator.url", "not of the form http://HOST:PORT/PATH"),
        ({"url": "http://me:secret@host:1", "every": 1}, "evaluator.url", "'http://…@host:1'"),
        ({"url": "http://host:1"}, "evaluator.url", "set evaluator.every"),
        ({"every": 2}, "evaluator.every", "only used with evaluator.url"),
        ({"api_key_env": "K"}, "evaluator.api_key_env", "only used with evaluator.url"),
    ],
)
def test_settings_that_do_not_fit(section: dict, key: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(evaluator=section)
    assert str(caught.value).startswith(f"{key}: ")
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_run_goes_on_whatever_becomes_of_it(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Step 2 fails for good, step 4 has metrics; each is logged beside its step, with the checkpoint in place."""
    monkeypatch.setenv("EVALUATOR_KEY", KEY)
    service.answers = [(404, b""), (200, b'{"held_out": {"acc": 0.75}}')]
    section = {"url": service.url, "every": 2, "api_key_env": "EVALUATOR_KEY"}
    trainer = Trainer(tiny_run.make_run(tmp_path, run={"steps": 4}, evaluator=section), reward=tiny_run.count_letter)
    trainer.train()
    trainer.close()
    close_world()
    folder = tmp_path / "run" / "hf" / "step_000004"
    assert [(q["step"], q["run"], q["checkpoint"]) for q in service.asked][1] == (4, "run", str(folder))
    assert all({"config.json", "model.safetensors", "tokenizer.json"} <= found for found in service.found)
    assert tiny_run.metrics_of(tmp_path, "eval/held_out/acc", "evaluator/failures") == [(4, 0.75, 1)]
    assert (2, 1) in tiny_run.metrics_of(tmp_path, "evaluator/failures")
    said = "".join(capfd.readouterr())
    assert "evaluator.url: no metrics of step 2: HTTP status 404; the run goes on" in said
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").glob("*") if path.is_file())
    assert KEY not in said
    assert KEY.encode() not in written


def test_of_checkpoints_that_wait_the_newest_is_taken(service: Service, tmp_path: Path) -> None:
    """The first answer comes only when the run has nothing left but to wait for it."""
    trained = threading.Event()
    service.answers = [("wait", trained), (200, b'{"acc": 1}')]
    section = {"url": service.url, "every": 1, "retries": 0}
    trainer = Trainer(tiny_run.make_run(tmp_path, run={"steps": 4}, evaluator=section), reward=tiny_run.count_letter)
    finish = trainer.loop.outside.finish

    def finished(trackers) -> None:
        trained.set()
        finish(trackers)

    trainer.loop.outside.finish = finished
    trainer.train()
    trainer.close()
    close_world()
    assert [q["step"] for q in service.asked] == [1, 4]
    assert tiny_run.metrics_of(tmp_path, "eval/acc", "evaluator/failures", "evaluator/skipped") == [(4, 1.0, 1, 2)]


def test_other_kinds_of_training_ask_it_too(service: Service, tmp_path: Path) -> None:
    section = {"url": service.url, "every": 2}
    trainer = SFTTrainer(tiny_sft.make_run(tmp_path, run={"steps": 3}, evaluator=section))
    trainer.train()
    trainer.close()
    close_world()
    assert [q["step"] for q in service.asked] == [2, 3]
    assert tiny_run.metrics_of(tmp_path, "eval/acc") == [(2, 0.5), (3, 0.5)]
