"""The engine's process without SGLang: a stand-in package that behaves and misbehaves as SGLang does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.engine import sglang
from lightrl.engine.base import SamplingParams
from lightrl.engine.sglang_process import EngineDiedError, HostProcess
from lightrl.errors import UserError

STAND_IN = """
import asyncio, subprocess, sys

class Manager:
    def __init__(self): self.aborted = set()
    async def generate_request(self, request, _):
        if request.input_ids == [13]: raise ValueError("too long")
        tokens = []
        for step in range(request.sampling_params["max_new_tokens"]):
            await asyncio.sleep(0.01)
            if request.rid in self.aborted: break
            tokens.append(step)
            if request.stream: yield output(tokens, None)
        yield output(tokens, "abort" if request.rid in self.aborted else "length")
    def abort_request(self, rid): self.aborted.add(rid)

def output(tokens, reason):
    meta = {"output_token_logprobs": [[-0.5, t, None] for t in tokens], "finish_reason": reason and {"type": reason},
            "weight_version": "7"}
    return {"output_ids": tokens, "meta_info": meta}

class Engine:
    def __init__(self, **arguments):
        self.server_args = arguments
        print("starting with", sorted(arguments), flush=True)
        if arguments["model_path"] == "full": raise RuntimeError("CUDA out of memory")
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), Manager()
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    def get_all_child_pids(self): return [self.child.pid]
    def shutdown(self): self.child.kill()
"""
SERVER_ARGS = """
import dataclasses
@dataclasses.dataclass
class ServerArgs:
    model_path: str
    tp_size: int = 1
    mem_fraction_static: float = 0.9
    attention_backend: str = ""
    cuda_graph_max_bs: int = 0
"""
IO_STRUCT = """
class GenerateReqInput:
    def __init__(self, **fields): self.__dict__.update(fields)
"""
SETTINGS = {
    "model_path": "m", "dtype": "bfloat16", "trust_remote_code": False, "context_length": 64, "tensor_parallel": 1,
    "gpu": 0, "capability": [9, 0], "seed": 0, "memory_fraction": 0.5, "max_batch": 8, "max_prefill_tokens": 64,
    "port": 1,
}  # fmt: skip


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostProcess]]:
    package = tmp_path / "site" / "sglang"
    (package / "srt" / "managers").mkdir(parents=True)
    for folder in (package / "srt", package / "srt" / "managers"):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text(STAND_IN)
    (package / "srt" / "server_args.py").write_text(SERVER_ARGS)
    (package / "srt" / "managers" / "io_struct.py").write_text(IO_STRUCT)
    environment = sglang.child_environment({**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    started: list[HostProcess] = []

    def begin(args: dict[str, Any] | None = None, **settings: Any) -> HostProcess:
        first = {"settings": SETTINGS | settings, "args": args or {}}
        started.append(HostProcess(first, log=tmp_path / "engine.log", environment=environment, hint="lower X"))
        return started[-1]

    yield begin
    for process in started:
        process.stop()


def request(rid: str, length: int, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": length}
    return {"rid": rid, "tokens": [1], "sampling": sampling, "truncated": False, "watch": False, **fields}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 15
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[p for p in pids if alive(p)]}"
        time.sleep(0.05)


def test_answers_errors_and_aborts(start: Callable[..., HostProcess], tmp_path: Path) -> None:
    host = start({"attention_backend": "triton"})
    assert host.wait_ready() == {"seeds": False}
    # names that this version has; ours under its older name
    expected = ["attention_backend", "cuda_graph_max_bs", "mem_fraction_static", "model_path", "tp_size"]
    assert f"starting with {expected}" in (tmp_path / "engine.log").read_text()
    answer = host.call("generate", **request("a", 3))
    assert answer["tokens"] == [0, 1, 2]
    assert (answer["logprobs"], answer["reason"], answer["version"]) == ([-0.5] * 3, "length", "7")
    with pytest.raises(ValueError, match="too long"):
        host.call("generate", **request("b", 3, tokens=[13]))
    long = host.submit("generate", **request("c", 5000))
    host.call("abort", rids=["c", "unknown"])
    assert long.result(10)["reason"] == "abort"
    seen: list[int] = []
    watched = host.submit("generate", on_partial=lambda p: seen.append(len(p["tokens"])), **request("d", 4, watch=True))
    assert watched.result(10)["tokens"] == [0, 1, 2, 3]
    assert seen[:4] == [1, 2, 3, 4]
    children = [host.pid, *host.call("pids")]
    host.stop()
    host.stop()
    wait_until_gone(*children)


def test_a_crash_is_reported_to_all_who_wait(start: Callable[..., HostProcess]) -> None:
    host = start()
    host.wait_ready()
    children = host.call("pids")
    waiting = [host.submit("generate", **request(str(i), 5000)) for i in range(3)]
    host.check()
    os.kill(host.pid, signal.SIGKILL)
    begun = time.monotonic()
    for future in waiting:
        with pytest.raises(EngineDiedError, match=r"ended \(exit code -9\).*engine\.log:\nstarting with") as error:
            future.result(15)
        assert "lower X" not in str(error.value)
    assert time.monotonic() - begun < 15
    with pytest.raises(EngineDiedError):
        host.check()
    with pytest.raises(EngineDiedError):
        host.submit("flush")
    wait_until_gone(*children)  # it would hold GPU memory


def test_starts_that_fail(start: Callable[..., HostProcess]) -> None:
    with pytest.raises(EngineDiedError, match="out of memory; lower X"):
        start(model_path="full").wait_ready(60)
    with pytest.raises(UserError, match=r"engine.args.atention_backend: .*did you mean attention_backend\?"):
        start({"atention_backend": "fa3"}).wait_ready(60)
    with pytest.raises(UserError, match=r"engine.args.zzz: .* SGLang has attention_backend, cuda_graph_max_bs, mem_"):
        start({"zzz": 1}).wait_ready(60)
    with pytest.raises(UserError, match=r"engine.args.tp_size: set by LightRL \(engine.tensor_parallel\)"):
        start({"tp_size": 2}).wait_ready(60)


TRAINER = """
import os, sys, time
from pathlib import Path
from lightrl.engine.sglang_process import HostProcess
folder, settings = sys.argv[1], eval(sys.argv[2])
host = HostProcess({"settings": settings, "args": {}}, log=Path(folder, "e.log"), environment=dict(os.environ))
host.wait_ready()
print(host.pid, *host.call("pids"), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_nothing_outlives_a_killed_trainer(start: Callable[..., HostProcess], tmp_path: Path) -> None:
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TRAINER, str(tmp_path), repr(SETTINGS)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    assert trainer.stdout is not None
    host, child = map(int, trainer.stdout.readline().split())
    trainer.kill()
    trainer.wait()
    wait_until_gone(host)
    os.kill(child, signal.SIGKILL)  # SGLang's own children end with their parent; the stand-in's do not


def test_versions_and_environment() -> None:
    assert sglang.version_problem("0.5.17") is None
    assert sglang.version_problem("0.5.23.post2") is None
    for text in ("0.5.16", "0.4.9", "0.6.0", "nonsense"):
        assert f"SGLang {text} is installed; supported are 0.5.17 to 0.5.23" in str(sglang.version_problem(text))
    kept = sglang.child_environment({
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "3", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h", "PYTHONPATH": "/p"
    })  # fmt: skip
    assert kept.keys() == {"HOME", "PYTHONPATH"}
    assert kept["PYTHONPATH"].endswith(f"{os.pathsep}/p")


def test_ends_that_sglang_cannot_see() -> None:
    words = ["<eos>", "a", "b", "cd", "e"]

    def end(tokens: list[int], **sampling: Any) -> int | None:
        params = SamplingParams(max_new_tokens=9, **sampling)
        return sglang.Stops(params, lambda ids: "".join(words[i] for i in ids)).end(tokens)

    assert end([1, 2, 3, 4], stop=("bc",)) == 3  # kept whole: "d" was sampled with "c"
    assert end([1, 2, 4, 3], stop=("bc",)) is None
    assert end([1, 2, 3, 4], stop=("e", "ab")) == 2
    assert end([1, 2, 3, 4], stop_token_ids=(3,), ignore_eos=True) == 3
    assert end([1, 2, 3, 4], stop=("e",), stop_token_ids=(2,), ignore_eos=True) == 2
    assert end([], stop=("e",)) is None
