"""Real SGLang servers as an engine: what they sample, weights through files and broadcasts, endings.

Where the installed SGLang is one for CPUs, the server is on the CPU and the broadcast goes over gloo. SGLang's server
needs two packages that its engine does not: jsonschema and soundfile.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import contract
from engine.tiny_models import CONTEXT, EOS, SMALL, VOCAB, stock
from gpu.sglang_tools import check_logprobs
from transformers import LlamaConfig

from lightrl.config.schema import EngineConfig, SyncConfig
from lightrl.engine.base import GenerateRequest, SamplingParams
from lightrl.engine.sglang import Model
from lightrl.engine.sglang_http import RefusedError, Server, UnreachableError
from lightrl.engine.sglang_server import SGLangServers
from lightrl.errors import UserError
from lightrl.training.trainer import Trainer
from lightrl.types import Status

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # environments are there

MISSING = [m for m in ("sglang", "jsonschema", "soundfile", "python_multipart") if importlib.util.find_spec(m) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"SGLang's server cannot run: no {', '.join(MISSING)}")

CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CUDA else torch.float32
KEY = "a-key"
NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}  # NVLink's multicast is not to be had everywhere
SHAPE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "initializer_range": 0.06}


class Alone:
    rank, size = 0, 1

    def gather(self, record: Any) -> list[Any]:
        return [record]


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("a") + i % 26) for i in ids)


def arguments() -> list[str]:
    """The server is on the last GPU: NCCL wants one of its own for each process."""
    if not CUDA:
        return ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]
    last = str(torch.cuda.device_count() - 1)
    return ["--base-gpu-id", last, "--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "16"]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return stock(LlamaConfig(**{**SMALL, **SHAPE}, tie_word_embeddings=False)).to(DTYPE)


@pytest.fixture(scope="module")
def server(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder with the model's config, and the URL of a server that was started without weights."""
    folder = tmp_path_factory.mktemp("server")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    with started(folder) as url:
        yield folder, url


@contextlib.contextmanager
def started(folder: Path) -> Iterator[str]:
    """The URL of a server for the model in `folder`, without its weights."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--load-format", "dummy",
        "--dtype", str(DTYPE).removeprefix("torch."), "--port", str(port), "--api-key", KEY, "--skip-tokenizer-init",
        "--mem-fraction-static", "0.1", "--max-total-tokens", "40000", "--max-running-requests", "16",
        "--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-server-warmup", *arguments(),
    ]  # fmt: skip
    environment = {**os.environ, **NCCL, "SGLANG_USE_CPU_ENGINE": str(int(not CUDA))}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                Server(url, KEY, ()).get("/server_info")
                break
            except UnreachableError:
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                time.sleep(1)
        else:
            pytest.fail(f"no answer in 300 s:\n{(folder / 'log').read_text()[-3000:]}")
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module", params=["disk", pytest.param("nccl", marks=pytest.mark.gpu2 if CUDA else ())])
def engine(request: pytest.FixtureRequest, model: torch.nn.Module, server: tuple[Path, str]) -> Iterator[SGLangServers]:
    """Holds the model's weights as version 7, after others."""
    folder, url = server
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (NCCL | {"LIGHTRL_TEST_KEY": KEY}).items():
            patch.setenv(name, value)
        made = make_engine(model, folder, url, transport=request.param)
        for version, weights in ((6, stock(model.config, seed=5)), (7, model)):
            begun = time.monotonic()
            made.load_weights(((n, p.detach()) for n, p in weights.named_parameters()), version)
            print(f"{request.param}: version {version} in {time.monotonic() - begun:.2f} s, compared")
        yield made
        made.close()


def make_engine(model: torch.nn.Module, folder: Path, url: str, vocab: int = VOCAB, **sync: Any) -> SGLangServers:
    return SGLangServers(
        Model(
            path=folder,
            layout=[(n, tuple(p.shape), DTYPE) for n, p in model.named_parameters()],
            eos_token_ids=[EOS],
            decode=letters,
            dtype=DTYPE,
            context_length=CONTEXT,
            vocab_size=vocab,
        ),
        EngineConfig(kind="sglang_server", urls=[url], api_key_env="LIGHTRL_TEST_KEY"),
        SyncConfig(**({"timeout": 60, "verify_every": 1} | sync)),
        device=torch.device("cuda", 0) if CUDA else torch.device("cpu"),
        ranks=Alone(),
        folder=folder / "sync",
        pauses=(0.1,),
    )


def greedy(name: str, length: int, n: int = 1, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True} | sampling)
    return GenerateRequest(id=name, tokens=contract.prompt(9, VOCAB), sampling=params, n=n)


def test_samples_from_the_weights_it_was_given(engine: SGLangServers, model: torch.nn.Module) -> None:
    for truncation in ({}, {"top_p": 0.8}, {"top_k": 9}):
        if CUDA:
            check_logprobs(engine, model, temperature=0.7, **truncation)
        else:
            contract.check_sampled_logprobs(engine, model, VOCAB, temperature=0.7, tolerance=2e-3, **truncation)
    contract.check_bad_requests(engine, VOCAB, CONTEXT)


def test_ends_of_answers(engine: SGLangServers) -> None:
    contract.run(engine, [greedy("first", 60)])  # now the prompt is cached: what follows is computed alike
    ((free,),) = contract.run(engine, [greedy("free", 60)])
    text = letters(free.tokens)
    stop = text[18:22]
    ((answer,),) = contract.run(engine, [greedy("stop", 60, stop=(stop,))])
    end = text.index(stop) + len(stop)
    assert (answer.tokens, answer.status, answer.policy_versions) == (free.tokens[:end], Status.COMPLETED, [7])

    async def scenario() -> Any:
        long = asyncio.create_task(engine.generate(greedy("long", 390, n=2)))
        await asyncio.sleep(0.1)
        engine.abort("long")
        return await long

    for cut in asyncio.run(scenario()):
        assert cut.status is Status.ABORTED
        assert len(cut.tokens) == len(cut.logprobs) < 390
    engine.offload()


def test_wrong_key_and_wrong_model(
    engine: SGLangServers, model: torch.nn.Module, server: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="its model's vocabulary is 128, the policy's 129"):
        make_engine(model, *server, vocab=129)
    monkeypatch.setenv("LIGHTRL_TEST_KEY", "another")
    with pytest.raises(UserError, match=r"refuses the key \(HTTP 401\)"):
        make_engine(model, *server)
    body = {"model_path": str(server[0]), "load_format": "safetensors"}
    with pytest.raises(RefusedError, match=r"HTTP 400: .*Cannot find any model weights"):
        Server(server[1], KEY).post("/update_weights_from_disk", body, 30)


@pytest.mark.skipif(CUDA, reason="heads of 8 are for SGLang on a CPU")
def test_weights_change_under_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In asynchronous runs of environments, trees and sessions the log-prob of each token is that of a stock model with
    the weights of the version that it is said to be of."""
    import test_agent_schedules as schedules
    from test_agent_run import run_config
    from test_endpoint_run import outside_config

    monkeypatch.setenv("LIGHTRL_TEST_KEY", KEY)
    run_config(tmp_path)  # writes the model
    with started(tmp_path / "model") as url:
        sections: dict[str, Any] = {
            "engine": {"kind": "sglang_server", "urls": [url], "api_key_env": "LIGHTRL_TEST_KEY"},
            "sync": {"transport": "disk"},
            "run": {"steps": 6},
            "rollout": schedules.ASYNC | {"max_staleness": 2, "stop_token_ids": [3, 4, 5, 6, 7]},
            "correction": schedules.TIS,
        }
        for name in ("Slow", "Tree", "outside"):
            if name == "outside":
                outside = {"endpoint": {"function": "test_agent_schedules:slow_outside"}}
                config = outside_config(tmp_path, name, **sections, **outside)
            else:
                agent = {"environment": f"test_agent_schedules:{name}"}
                config = run_config(tmp_path, name, **sections, agent=agent)
            trainer = Trainer(config)
            steps, held = schedules.trained(trainer), schedules.held_weights(trainer)
            trainer.train()
            trainer.close()
            assert [g.group_index for step in steps for g in step] == list(range(24))
            samples = [s for step in steps for g in step for s in g.samples]
            assert any(len(s.policy_versions) > 1 for s in samples)
            assert max(schedules.check_logprobs(tmp_path, held, samples)) < 1e-4
