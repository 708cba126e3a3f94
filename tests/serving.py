"""Clients of `lightrl serve` in this process, and what must hold of what was served."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.types import Sample


def ask(url: str, key: str, action: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """(status, JSON) of a request below `url`; a POST where it has a body."""
    host, path = url.removeprefix("http://").split("/", 1)
    client = http.client.HTTPConnection(host, timeout=30)
    data = None if body is None else json.dumps(body)
    client.request(
        "GET" if body is None else "POST", f"/{path}/{action}", data, {"Authorization": f"Bearer {key}", **headers}
    )
    reply = client.getresponse()
    status, answer = reply.status, json.loads(reply.read())
    client.close()
    return status, answer


def serve_while(config: Any, use: Any, number: int = signal.SIGINT, **given: Any) -> list[str]:
    """`use(url, key)` on a thread, which is then ended by a signal; what was said."""
    from lightrl.training.serving import serve

    said: list[str] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not any("API_KEY" in line for line in said):
                time.sleep(0.01)
            url, key = (line.partition("=")[2] for line in said if line.startswith("export"))
            time.sleep(0.2)
            use(url, key)
        except BaseException as error:
            errors.append(error)
        finally:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    serve(config, say=said.append, **given)
    thread.join(30)
    if errors:
        raise errors[0]
    return said


def check_logprobs(model: Path, samples: list[Sample]) -> None:
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(model).float()
    for sample in samples:
        with torch.no_grad():
            logprobs = stock(torch.tensor([sample.tokens])).logits.float().log_softmax(-1)[0]
        assert sample.rollout_logprobs is not None
        for place, (token, logprob) in enumerate(zip(sample.response_tokens, sample.rollout_logprobs, strict=True)):
            if logprob is None:
                continue
            assert logprob == pytest.approx(float(logprobs[sample.prompt_length + place - 1, token]), abs=1e-4)
