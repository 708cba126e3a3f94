"""The engine's process without SGLang: a stand-in package that behaves and misbehaves as SGLang does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_stand_in import HANG, install, wait_until_gone

from lightrl.config.schema import EngineConfig
from lightrl.engine import sglang_start
from lightrl.engine.base import EngineLostError, SamplingParams
from lightrl.engine.sglang_memory import memory_hint
from lightrl.engine.sglang_process import HostProcess
from lightrl.engine.sglang_requests import Stops
from lightrl.errors import UserError

SETTINGS = {
    "model_path": "m", "dtype": "bfloat16", "trust_remote_code": False, "context_length": 64, "vocab_size": 9,
    "tensor_parallel": 1, "device": "cuda", "gpu": 0, "capability": [9, 0], "seed": 0, "memory_fraction": 0.5,
    "max_batch": 8, "max_prefill_tokens": 64, "port": 1,
}  # fmt: skip


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostProcess]]:
    environment = sglang_start.child_environment({**os.environ, "PYTHONPATH": str(install(tmp_path))})
    started: list[HostProcess] = []

    def begin(args: dict[str, Any] | None = None, start_timeout: float = 60, **settings: Any) -> HostProcess:
        first = {"settings": SETTINGS | settings, "args": args or {}}
        host = HostProcess(
            first,
            log=tmp_path / "engine.log",
            environment=environment,
            hint=lambda log: memory_hint(log, EngineConfig()),
            hang_timeout=HANG,
            start_timeout=start_timeout,
        )
        started.append(host)
        return host

    yield begin
    for process in started:
        process.stop()


def request(rid: str, length: int, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": length}
    return {"rid": rid, "tokens": [1], "sampling": sampling, "truncated": False, "watch": False, **fields}


def test_answers_errors_and_aborts(start: Callable[..., HostProcess], tmp_path: Path) -> None:
    host = start({"attention_backend": "triton"})
    assert host.wait_ready() == {"seeds": False}
    started = (tmp_path / "engine.log").read_text()
    assert "'attention_backend': 'triton'" in started
    assert "sampling_mask_max_tokens" not in started  # this version has none
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
    for future in waiting:
        with pytest.raises(EngineLostError, match=r"ended \(exit code -9\).*engine\.log:\nstarting with") as error:
            future.result(60)
        assert "engine.m" not in str(error.value)  # nothing of memory
    with pytest.raises(EngineLostError):
        host.check()
    with pytest.raises(EngineLostError):
        host.submit("flush")
    wait_until_gone(*children)  # it would hold GPU memory


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is as short as a socket's must be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("end", ["stop", "kill", "kill scheduler"])
def test_no_file_of_it_stays(
    end: str, start: Callable[..., HostProcess], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    host = start()
    host.wait_ready()
    [folder] = temporary.iterdir()
    assert len(list(folder.iterdir())) == 1
    if end == "stop":
        host.stop()
    else:
        os.kill(host.pid if end == "kill" else host.call("pids")[0], signal.SIGKILL)
        while host.error is None:
            time.sleep(0.05)
    assert not list(temporary.iterdir())


def test_a_defect_is_not_a_loss(start: Callable[..., HostProcess]) -> None:
    host = start()
    host.wait_ready()
    with pytest.raises(RuntimeError, match=r"KeyError: 'a defect'.*engine\.log:\nstarting with") as error:
        host.call("generate", **request("a", 3, tokens=[14]))
    assert not isinstance(error.value, EngineLostError)
    assert host.call("generate", **request("b", 2))["tokens"] == [0, 1]


def test_an_error_in_looking_at_an_answer_ends_that_alone(start: Callable[..., HostProcess]) -> None:
    def look(_: dict[str, Any]) -> None:
        raise ZeroDivisionError("cannot be decoded")

    host = start()
    host.wait_ready()
    bad = host.submit("generate", on_partial=look, **request("a", 3, watch=True))
    with pytest.raises(ZeroDivisionError, match="cannot be decoded"):
        bad.result(10)
    assert host.submit("generate", **request("b", 2)).result(10)["tokens"] == [0, 1]


def test_what_is_gone_is_not_ended_again(start: Callable[..., HostProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its process group may be somebody else's."""
    host = start()
    host.wait_ready()
    assert host.stop()
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    assert host.stop()
    assert not killed


def test_a_scheduler_that_dies(start: Callable[..., HostProcess]) -> None:
    host = start()
    host.wait_ready()
    [scheduler] = host.call("pids")
    waiting = host.submit("generate", **request("a", 5000))
    os.kill(scheduler, signal.SIGKILL)
    with pytest.raises(EngineLostError, match=r"ended \(exit code -9\); killed from outside, .* out of memory"):
        waiting.result(15)


def test_a_stopped_host(start: Callable[..., HostProcess]) -> None:
    host = start()
    host.wait_ready()
    children = host.call("pids")
    waiting = host.submit("generate", **request("a", 5000))
    os.kill(host.pid, signal.SIGSTOP)
    more = host.submit("generate", **request("b", 1, tokens=[1] * 1_000_000))  # more than the connection holds
    for future in (waiting, more):
        with pytest.raises(EngineLostError, match=r"the SGLang engine did not answer for \d s\. The end of"):
            future.result(60)
    assert host.stop()
    wait_until_gone(host.pid, *children)


def test_a_stuck_scheduler_and_what_only_looks_like_one(start: Callable[..., HostProcess]) -> None:
    host = start()
    host.wait_ready()
    # a batch longer than the limit: the scheduler answers meanwhile; while it takes weights it does not, and need not
    long = host.submit("generate", **request("a", 1, tokens=[15]))
    assert long.result(15)["tokens"] == [0]
    update = host.submit("update", payloads=[], loader="", flush=False)
    assert update.result(15) == {}
    [scheduler] = host.call("pids")
    os.kill(scheduler, signal.SIGSTOP)
    time.sleep(1.2 * HANG)
    host.check()  # nobody has asked it for anything
    waiting = [host.submit("generate", **request(str(i), 5)) for i in range(2)]
    for future in waiting:
        with pytest.raises(EngineLostError, match=r"did not answer .* scheduler is stuck \(under way: 2 x generate\)"):
            future.result(60)
    wait_until_gone(host.pid, scheduler)


def test_what_takes_too_long_is_given_up(start: Callable[..., HostProcess]) -> None:
    host = start()
    host.wait_ready()
    with pytest.raises(EngineLostError, match="did not end 'generate' in 0 s"):
        host.call("generate", timeout=0.2, **request("a", 5000))
    assert host.error is not None
    wait_until_gone(host.pid)


def test_starts_that_fail(start: Callable[..., HostProcess]) -> None:
    with pytest.raises(EngineLostError, match=r"out of memory; no memory beside .*: lower engine.memory_fraction"):
        start(model_path="full").wait_ready(60)
    with pytest.raises(EngineLostError, match=r"ended \(exit code 3\)\. The end of") as error:
        start(model_path="exits").wait_ready(60)
    assert "engine.m" not in str(error.value)  # what was in the log before is another engine's
    with pytest.raises(EngineLostError, match=r"wrote nothing for \d s while it started\. .*:\nstarting with"):
        start(model_path="silent", start_timeout=2).wait_ready(60)
    with pytest.raises(EngineLostError, match="did not start in 0 s"):
        start(model_path="silent").wait_ready(0.3)
    with pytest.raises(UserError, match=r"engine.args.atention_backend: .*did you mean attention_backend or "):
        start({"atention_backend": "fa3"}).wait_ready(60)
    with pytest.raises(UserError, match=r"engine.args.zzz: .* SGLang has attention_backend, base_gpu_id, context_"):
        start({"zzz": 1}).wait_ready(60)
    with pytest.raises(UserError, match=r"engine.args.tp_size: set by LightRL \(engine.tensor_parallel\)"):
        start({"tp_size": 2}).wait_ready(60)


def test_started_in_a_thread_that_ends(start: Callable[..., HostProcess]) -> None:
    hosts: list[HostProcess] = []
    thread = threading.Thread(target=lambda: hosts.append(start()))
    thread.start()
    thread.join()
    hosts[0].wait_ready()  # the kernel would have ended a child of that thread
    assert hosts[0].call("generate", **request("a", 1))["tokens"] == [0]


@pytest.mark.parametrize(
    ("log", "advice"),
    [  # SGLang 0.5.17's own words
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.1",
         "raise engine.memory_fraction (now 0.5) or lower engine.max_batch (now 64)"),
        ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1. "
         "Raise --mem-fraction-static above 0.312", "raise engine.memory_fraction"),
        ("Try: (1) reduce --max-running-requests, (2) increase --mem-fraction-static", "raise engine.memory_fraction"),
        ("RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 64 tokens.",
         "lower engine.max_batch (now 64) or raise engine.memory_fraction (now 0.5)"),
        ("alloc_req_slots runs out of memory. Please set a smaller number for", "lower engine.max_batch"),
        ("Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB.\nPossible solutions:\n"
         "1. set --mem-fraction-static to a smaller value (e.g., 0.8)\n", "lower engine.memory_fraction (now 0.5), "),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "engine.max_prefill_tokens (now 8192)"),
        ("Rank 0 scheduler died during initialization (exit code: -9).", "the machine (not the GPU)"),
        ("Exception: Capture cuda graph failed: no image\n1. set --mem-fraction-static to a smaller value", None),
    ],
)  # fmt: skip
def test_advice_on_memory(log: str, advice: str | None) -> None:
    hint = memory_hint(log, EngineConfig())
    assert hint is None if advice is None else advice in str(hint)


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
def test_nothing_outlives_a_killed_trainer(start: Callable[..., HostProcess], tmp_path: Path, temporary: Path) -> None:
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TRAINER, str(tmp_path), repr(SETTINGS | {"model_path": "orphan"})]
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert trainer.stdout is not None
    host, child = map(int, trainer.stdout.readline().split())
    assert list(temporary.iterdir())
    trainer.kill()
    trainer.wait()
    wait_until_gone(host)
    wait_until_gone(child)
    [sleeper] = re.findall(r"sleeper (\d+)", (tmp_path / "e.log").read_text())
    wait_until_gone(int(sleeper))  # as SGLang's children, it knows nothing of its parent while it starts
    assert not list(temporary.iterdir())


def test_environment() -> None:
    kept = sglang_start.child_environment({
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "3", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h",
        "PYTHONPATH": "/p", "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "1",
    })  # fmt: skip
    assert kept.keys() == {"HOME", "PYTHONPATH"}
    assert kept["PYTHONPATH"].endswith(f"{os.pathsep}/p")


def test_ends_that_sglang_cannot_see() -> None:
    words = ["<eos>", "a", "b", "cd", "e"]

    def end(tokens: list[int], **sampling: Any) -> int | None:
        params = SamplingParams(max_new_tokens=9, **sampling)
        return Stops(params, lambda ids: "".join(words[i] for i in ids)).end(tokens)

    assert end([1, 2, 3, 4], stop=("bc",)) == 3  # kept whole: "d" was sampled with "c"
    assert end([1, 2, 4, 3], stop=("bc",)) is None
    assert end([1, 2, 3, 4], stop=("e", "ab")) == 2
    assert end([1, 2, 3, 4], stop_token_ids=(3,), ignore_eos=True) == 3
    assert end([1, 2, 3, 4], stop=("e",), stop_token_ids=(2,), ignore_eos=True) == 2
    assert end([], stop=("e",)) is None
