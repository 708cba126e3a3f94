"""A teacher by URL, against a small server that answers as SGLang 0.5.17 does about tokens of a prompt: the first entry
says nothing, the last ids of its vocabulary are shown as 0, and log-probs are of temperature 1."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.distributed.mesh import close_world
from lightrl.engine.sglang_http import ServerError
from lightrl.engine.sglang_teacher import TeacherServer
from lightrl.errors import UserError
from lightrl.training.trainer import Trainer

PAUSES = (0.01, 0.01)


class FakeTeacher:
    """A stock model and its tokenizer. `change` makes something else of an answer to `/generate`."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.size = int(self.model.config.vocab_size)
        self.key: str | None = None
        self.info: dict[str, Any] = {"context_length": 128}
        self.busy = 0
        self.change = lambda meta: meta
        self.bodies: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/server_info":
            return 200, self.info
        if path == "/detokenize":
            texts = [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in body["tokens"]]
            return 200, {"text": texts}
        if path != "/generate":
            return 404, {"error": {"message": "Not Found"}}
        if beyond := [t for t in body.get("token_ids_logprob", ()) if t >= self.size]:
            text = (
                f"token_ids_logprob contains out-of-vocabulary token id {beyond[0]}; valid range is [0, {self.size})."
            )
            return 400, {"error": {"message": text}}
        with self._lock:
            if self.busy:
                self.busy -= 1
                return 503, {"error": {"message": "The request queue is full."}}
            self.bodies.append(body)
            return 200, {"text": "", "output_ids": [], "meta_info": self.change(self.score(body))}

    @torch.no_grad()
    def score(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["sampling_params"]["max_new_tokens"] == 0
        assert body["return_logprob"] is True
        ids, start, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        assert max(ids) < self.size, "the scheduler would die"
        logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)[start:-1]
        shown = [i if i < self.size - 1 else 0 for i in ids[start:]]
        own = logprobs[torch.arange(len(logprobs)), ids[start + 1 :]]
        meta: dict[str, Any] = {"id": "x", "prompt_tokens": len(ids), "finish_reason": {"type": "length", "length": 0}}
        meta["input_token_logprobs"] = [[v, i, None] for v, i in zip([None, *own.tolist()], shown, strict=True)]
        if k:
            top = logprobs.topk(k, -1)
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            meta["input_top_logprobs"] = [None, *([[v, i, None] for v, i in zip(*p, strict=True)] for p in pairs)]
        return meta


@contextlib.contextmanager
def serving(fake: FakeTeacher) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            status, answer = 401, {"error": {"message": "Unauthorized"}}
            if fake.key is None or self.headers["Authorization"] == f"Bearer {fake.key}":
                status, answer = fake.answer(self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Listener(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    listener = Listener(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}"
    finally:
        listener.shutdown()
        listener.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_model(tmp_path_factory.mktemp("teacher"), seed=7, vocab_size=34, initializer_range=0.3)


@pytest.fixture
def fake(folder: Path) -> FakeTeacher:
    return FakeTeacher(folder)


@pytest.fixture
def url(fake: FakeTeacher) -> Iterator[str]:
    with serving(fake) as address:
        yield address


def answers(fake: FakeTeacher, count: int) -> list[tuple[list[int], int]]:
    """Prompts and answers of many lengths."""
    g = torch.Generator().manual_seed(0)
    sizes = [(1 + i % 5, 1 + (3 * i) % 11) for i in range(count)]
    return [(torch.randint(3, 30, (p + n,), generator=g).tolist(), n) for p, n in sizes]


def expected(fake: FakeTeacher, tokens: list[int], length: int) -> Tensor:
    with torch.no_grad():
        return fake.model(torch.tensor([tokens])).logits[0].log_softmax(-1)[-length - 1 : -1]


def test_scores_are_the_models(fake: FakeTeacher, url: str) -> None:
    """More answers than are asked for at once, in order, of a server that is busy at first."""
    fake.busy = 2
    asked = answers(fake, 40)
    found = TeacherServer(url, None, timeout=20, pauses=PAUSES).score(asked, top_k=5)
    for (tokens, length), scores in zip(asked, found, strict=True):
        logprobs = expected(fake, tokens, length)
        own = logprobs.gather(-1, torch.tensor(tokens[-length:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scores.logprobs), own, atol=1e-5, rtol=1e-5)
        top = logprobs.topk(5, -1)
        assert scores.top_ids == top.indices.tolist()
        torch.testing.assert_close(torch.tensor(scores.top_logprobs), top.values, atol=1e-5, rtol=1e-5)
    assert TeacherServer(url, None, timeout=20).score([]) == []
    (only,) = TeacherServer(url, None, timeout=20).score(asked[:1])
    assert only.top_ids == []
    assert only.logprobs == pytest.approx(found[0].logprobs, abs=1e-6)


def test_ids_at_and_beyond_the_end_of_its_vocabulary(fake: FakeTeacher, url: str) -> None:
    """33 is its last, which SGLang shows as 0; 36 it does not have: it is asked about 33, and 36 gets probability 0."""
    (scores,) = TeacherServer(url, None, timeout=20).score([([5, 33, 36, 4], 3)])
    logprobs = expected(fake, [5, 33, 33, 4], 3)
    assert scores.logprobs == pytest.approx([float(logprobs[0, 33]), -100.0, float(logprobs[2, 4])], abs=1e-5)


BAD_REPLIES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda _: {}, "it gave no log-probs for an answer of 3 tokens"),
    "short": (
        lambda meta: {"input_token_logprobs": meta["input_token_logprobs"][-2:]},
        "it gave 2 log-probs for an answer of 3 tokens",
    ),
    "a gap": (
        lambda meta: meta | {"input_token_logprobs": [[None, i, None] for _, i, _ in meta["input_token_logprobs"]]},
        "it left out log-probs of an answer of 3 tokens",
    ),
    "another token": (
        lambda meta: meta | {"input_token_logprobs": [[-1.0, 9, None]] * 4},
        "it gave the log-prob of token 9 where 6 stands",
    ),
    "no number": (
        lambda meta: meta | {"input_token_logprobs": [["x", i, None] for _, i, _ in meta["input_token_logprobs"]]},
        "it gave a log-prob that is not a number",
    ),
    "no likeliest": (
        lambda meta: meta | {"input_top_logprobs": None},
        "it gave no lists of likeliest tokens for an answer of 3 tokens",
    ),
    "few likeliest": (
        lambda meta: meta | {"input_top_logprobs": [t and t[:1] for t in meta["input_top_logprobs"]]},
        "it named 1 likeliest tokens of 2 that the policy knows",
    ),
}


@pytest.mark.parametrize(("change", "says"), BAD_REPLIES.values(), ids=BAD_REPLIES)
def test_replies_that_are_none(fake: FakeTeacher, url: str, change: Any, says: str) -> None:
    fake.change = change
    with pytest.raises(ServerError) as caught:
        TeacherServer(url, None, timeout=20).score([([5, 6, 7, 8], 3)], top_k=2)
    assert caught.value.line == str(caught.value) == f"teacher.url: {url}/generate: {says}"


def test_a_server_that_is_not_there_or_wants_a_key(fake: FakeTeacher, url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    gone = TeacherServer(closed, None, timeout=20, pauses=PAUSES)
    with pytest.raises(UserError) as unreachable:
        gone.check(fake.tokenizer, 30, 20)
    assert str(unreachable.value).startswith(f"teacher.url: {closed} cannot be reached: ")
    assert str(unreachable.value).endswith("(3 attempts)")
    with pytest.raises(ServerError, match=r"^teacher.url: http://127.0.0.1:\d+ cannot be reached"):
        gone.score([([5, 6], 1)])
    fake.key = "right"
    TeacherServer(url, "right", timeout=20).check(fake.tokenizer, 30, 20)
    with pytest.raises(UserError) as refused:
        TeacherServer(url, "wrong", timeout=20, pauses=PAUSES).check(fake.tokenizer, 30, 20)
    assert str(refused.value) == (
        f"teacher.url: {url}/server_info: the server refuses the key (HTTP 401): set teacher.api_key_env to the "
        "environment variable that holds its --api-key (its --admin-api-key, where it has one)"
    )


def test_a_server_of_other_tokens(fake: FakeTeacher, url: str, tmp_path: Path) -> None:
    server = TeacherServer(url, None, timeout=20, pauses=PAUSES)
    server.check(fake.tokenizer, 34, 20)

    def said(tokenizer: Any, vocab_size: int = 34, longest: int = 20) -> str:
        with pytest.raises(UserError) as caught:
            server.check(tokenizer, vocab_size, longest)
        return str(caught.value)

    other = tiny_run.make_model(tmp_path)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"c": 5', '"X": 5'))
    assert said(AutoTokenizer.from_pretrained(other)) == (
        f"teacher.url: {url}: its tokenizer is another than the policy's (model.path): token 5 is 'c' there and 'X' "
        "here, as are 0 of 30 others; name a teacher with the policy's tokenizer"
    )
    assert said(fake.tokenizer, longest=128).startswith(f"teacher.url: {url}: its context is 128 tokens, and prompts")
    larger: Any = type("Larger", (), {"__len__": lambda _: 40})()
    assert said(larger, 40) == f"teacher.url: {url}: its model has 34 tokens, the policy (model.path) 40"
    fake.answer = lambda path, body: (  # type: ignore[method-assign]
        (404, {"error": {"message": "no tokenizer"}}) if path == "/detokenize" else FakeTeacher.answer(fake, path, body)
    )
    assert "it does not decode tokens, so that they cannot be compared with the policy's" in said(fake.tokenizer)


@pytest.mark.parametrize("form", ["sampled", "top_k"])
def test_a_run_is_the_same_by_path_and_by_url(folder: Path, fake: FakeTeacher, url: str, tmp_path: Path, form: str):
    """Several updates a step, small microbatches: the same metrics, and weights within rounding."""
    keys = {"form": form} | ({"top_k": 6} if form == "top_k" else {})
    found = []
    for number, where in enumerate(({"path": str(folder)}, {"url": url})):
        config = tiny_run.make_run(
            tmp_path, run={"dir": str(tmp_path / str(number)), "steps": 2}, teacher=where | keys,
            algorithm={"minibatches_per_step": 2}, parallel={"max_tokens_per_microbatch": 40},
            optim={"lr": 1e-4},
        )  # fmt: skip
        trainer = Trainer(config)
        metrics = trainer.train()
        found.append((metrics, {n: p.full_tensor().clone() for n, p in trainer.policy.module.named_parameters()}))
        assert trainer.teacher is not None
        assert len(trainer.teacher.modules) == 1 - number
        trainer.close()
        close_world()
    (by_path, weights), (by_url, others) = found
    names = [n for n in by_path if n.startswith(("distill/", "loss/"))]
    assert len(names) >= 4
    assert {n: by_url[n] for n in names} == pytest.approx({n: by_path[n] for n in names}, abs=2e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, atol=2e-5, rtol=0)
    assert len(fake.bodies) == 32


def test_a_teacher_that_goes_ends_the_run_in_a_line(fake: FakeTeacher, url: str, tmp_path: Path) -> None:
    trainer = Trainer(tiny_run.make_run(tmp_path, teacher={"url": url}))
    fake.change = lambda _: {}
    with pytest.raises(
        ServerError, match=r"^teacher\.url: http://[\d.:]+/generate: it gave no log-probs for an answer"
    ):
        trainer.step(trainer.source.next(4))
    trainer.close()
    close_world()


if __name__ == "__main__":
    with serving(FakeTeacher(Path(sys.argv[1]))) as address:
        print(address, flush=True)
        sys.stdin.read()
