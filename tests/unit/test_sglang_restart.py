"""Engines that are lost at any moment and started again, with a stand-in for SGLang."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_stand_in import HANG, install, introduction, wait_until_gone

from lightrl.config.schema import EngineConfig, RunConfig, SyncConfig
from lightrl.engine import sglang, sglang_start
from lightrl.engine.base import EngineLostError, GenerateRequest, Restartable, SamplingParams
from lightrl.engine.sglang import Model, SGLangEngine
from lightrl.errors import UserError
from lightrl.sync.buckets import BucketSender
from lightrl.sync.mailbox import Mailbox, MailboxError, MailboxTimeoutError
from lightrl.training.engines import engine_seed
from lightrl.types import Status

GROUPS = [[("a", torch.arange(300.0))], [("b", torch.ones(300))], [("c", torch.ones(300)), ("d", torch.ones(4))]]
LAYOUT = [(name, tuple(tensor.shape), tensor.dtype) for group in GROUPS for name, tensor in group]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLangEngine]:
    """On a CPU; what it is told of the buffers is enough for the stand-in."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path)))
    monkeypatch.setattr(sglang, "check_platform", lambda *_: None)
    monkeypatch.setattr(BucketSender, "introduction", introduction)
    model = Model(
        path=tmp_path, layout=LAYOUT, eos_token_ids=[0], decode=str, dtype=torch.float32, context_length=8000,
        vocab_size=99,
    )  # fmt: skip
    config = EngineConfig(kind="sglang", hang_timeout=HANG, max_restarts=2)
    sync = SyncConfig()
    made = SGLangEngine(model, config, sync, device=torch.device("cpu"), log_dir=tmp_path)
    yield made
    made.close()
    made.close()


def loaders(folder: Path) -> list[str]:
    [log] = folder.glob("*.log")
    return [line.split()[1] for line in log.read_text().splitlines() if line.startswith("loader ")]


def request(name: str, length: int, *tokens: int, n: int = 1) -> GenerateRequest:
    return GenerateRequest(id=name, tokens=list(tokens), sampling=SamplingParams(max_new_tokens=length), n=n)


def host_of(engine: SGLangEngine) -> tuple[int, int]:
    """Process ids of the host and of the scheduler."""
    assert engine._host is not None
    return engine._host.pid, engine._host.call("pids")[0]


def lose(engine: SGLangEngine, work: GenerateRequest, end: Callable[[], None]) -> EngineLostError:
    async def run() -> None:
        task = asyncio.create_task(engine.generate(work))
        await asyncio.sleep(0.5)
        end()
        await task

    with pytest.raises(EngineLostError) as error:
        asyncio.run(run())
    return error.value


def test_only_what_was_lost_is_lost(engine: SGLangEngine, tmp_path: Path) -> None:
    assert isinstance(engine, Restartable)
    engine.load_groups(GROUPS, 4)
    assert not engine.lost
    host, scheduler = host_of(engine)
    # the first answer has two tokens, the others more than there is time for
    error = lose(engine, request("x", 5000, 16, n=3), lambda: os.kill(scheduler, signal.SIGKILL))
    assert "ended (exit code -9)" in str(error)
    assert error.finished.keys() == {0}
    assert error.finished[0].tokens == [0, 1]
    assert error.finished[0].status is Status.TRUNCATED
    assert engine.lost
    engine.abort()
    assert lose(engine, request("x", 1, 5), lambda: None).finished == {}
    wait_until_gone(host, scheduler)

    engine.restart()
    assert not engine.lost
    assert engine.policy_version == -1
    with pytest.raises(RuntimeError, match="has no weights"):
        asyncio.run(engine.generate(request("y", 3, 5)))
    engine.load_groups(GROUPS, 4)
    assert loaders(tmp_path) == ["open_buffers", "receive", "verify"] * 2  # what the new one holds is looked at again
    engine.load_groups(GROUPS, 5)
    assert loaders(tmp_path)[6:] == ["receive"]
    [answer] = asyncio.run(engine.generate(request("x", 3, 5)))
    assert answer.tokens == [0, 1, 2]


def test_lost_while_idle_and_too_often(engine: SGLangEngine) -> None:
    engine.load_groups(GROUPS, 1)
    engine.offload()
    for _ in range(2):
        os.kill(host_of(engine)[0], signal.SIGKILL)
        while not engine.lost:
            time.sleep(0.05)
        engine.offload()  # a dead engine holds no memory, and what was taken is consistent after the restart
        engine.onload(("weights",))
        assert lose(engine, request("y", 1, 5), lambda: None).finished == {}
        engine.restart()
        engine.onload()
        engine.load_groups(GROUPS, 2)
        assert asyncio.run(engine.generate(request("x", 1, 5)))[0].tokens == [0]
        engine.offload(("kv_cache",))
        engine.onload(("kv_cache",))
    os.kill(host_of(engine)[0], signal.SIGKILL)
    while not engine.lost:
        time.sleep(0.05)
    with pytest.raises(
        EngineLostError,
        match=r"^engine.max_restarts: 2 restarts are used up: .* the SGLang engine ended \(exit code -9\)",
    ) as error:
        engine.restart()
    assert re.search(r"ended \(exit code -9\).* \(log: .*sglang_cpu0\.log\)$", error.value.line)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (signal.SIGKILL, r"ended \(exit code -9\)"),
        (signal.SIGSTOP, r"took no weights for 2 s \(receive\)|did not answer|did not end 'receive' in 2 s"),
    ],
)
def test_lost_in_the_middle_of_a_sync(engine: SGLangEngine, end: signal.Signals, reason: str) -> None:
    host, scheduler = host_of(engine)
    walks: list[str] = []

    class Groups:
        """As the policy's: making one takes all ranks, so every rank must go through all, as often as the others."""

        def __iter__(self) -> Iterator[Any]:
            for number, group in enumerate(GROUPS):
                if number == 1 and not walks.count("c"):
                    time.sleep(0.3)  # the first bucket is taken
                    os.kill(host, end)
                walks.extend(name for name, _ in group[:1])
                yield group

    with pytest.raises(EngineLostError, match=reason):
        engine.load_groups(Groups(), 1)
    assert walks == ["a", "b", "c"] * 2
    assert engine.lost
    assert engine.policy_version == -1
    engine.close()
    wait_until_gone(host, scheduler)


def test_a_trainer_that_gives_up_does_not_leave_the_engine_waiting(engine: SGLangEngine, tmp_path: Path) -> None:
    def broken() -> Iterator[Any]:
        yield GROUPS[0]
        raise KeyError("a defect of the trainer")

    engine.load_groups(GROUPS, 1)
    with pytest.raises(KeyError):
        engine.load_groups(broken(), 2)
    assert "KeyError: 'a defect of the trainer'" in (tmp_path / "sglang_cpu0.log").read_text()
    engine.load_groups(GROUPS, 2)
    assert engine.policy_version == 2


def test_a_start_that_fails_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line: what was set, the error among those of all processes, and the key to change."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path)))
    monkeypatch.setattr(sglang, "check_platform", lambda *_: None)
    monkeypatch.setattr(BucketSender, "introduction", introduction)
    for path, args, line in [
        ("full", {}, r"SGLang did not start: RuntimeError: CUDA out of memory; .*: lower engine.memory_fraction .*"),
        ("crash", {"attention_backend": "x"}, r"SGLang did not start with engine.args = {'attention_backend': 'x'}: "
         r"the SGLang engine ended \(exit code 1\): ValueError: no backend x"),
    ]:  # fmt: skip
        model = Model(
            path=Path(path), layout=LAYOUT, eos_token_ids=[0], decode=str, dtype=torch.float32, context_length=8000,
            vocab_size=99,
        )  # fmt: skip
        config = EngineConfig(kind="sglang", hang_timeout=HANG, args=args)
        with pytest.raises(UserError) as error:
            SGLangEngine(model, config, SyncConfig(), device=torch.device("cpu"), log_dir=tmp_path)
        assert isinstance(error.value, EngineLostError)
        assert re.fullmatch(rf"engine.kind: {line} \(log: .*sglang_cpu0\.log\)", error.value.line)


def test_engines_of_two_machines_share_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Host:
        def __init__(self, first: dict[str, Any], *, log: Path, **_: Any) -> None:
            started.append((log.name, first["settings"]["gpu"], first["settings"]["seed"]))

        def wait_ready(self) -> None:
            pass

    monkeypatch.setattr(sglang, "check_platform", lambda *_: None)
    monkeypatch.setattr(sglang_start, "HostProcess", Host)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 100))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    model = Model(
        path=tmp_path, layout=LAYOUT, eos_token_ids=[0], decode=str, dtype=torch.float32, context_length=8000,
        vocab_size=99,
    )  # fmt: skip
    for rank in (0, 8):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        SGLangEngine(
            model, EngineConfig(kind="sglang"), SyncConfig(), device=torch.device("cuda", 0), log_dir=tmp_path, seed=5
        )
    assert [(log, gpu) for log, gpu, _ in started] == [("sglang_gpu0.log", 0), ("sglang_gpu8.log", 0)]
    assert started[0][2] != started[1][2]


def seeds_of(folder: Path) -> list[int]:
    """That SGLang was started with, in turn."""
    return [int(seed) for seed in re.findall(r"'random_seed': (\d+)", (folder / "sglang_cpu0.log").read_text())]


def test_a_restarted_engine_does_not_draw_again_what_it_drew(engine: SGLangEngine, tmp_path: Path) -> None:
    engine.restart()
    engine.restart()
    seeds = seeds_of(tmp_path)
    assert len(set(seeds)) == len(seeds) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_run_that_goes_on_does_not_draw_again_what_it_drew(tmp_path: Path) -> None:
    """Streams depend on run, engine, restarts and the step that a run goes on from, and on nothing else."""

    def seed(run: int, *, resume: bool = True, number: int = 0, restarts: int = 0) -> int:
        config = RunConfig(dir=str(tmp_path), seed=run, resume=resume)
        return sglang_start.stream_seed(engine_seed(config), number, restarts)

    def seeds() -> dict[tuple[int, int, int], int]:
        return {(r, n, k): seed(r, number=n, restarts=k) for r in (0, 1, 2**64 - 1) for n in (0, 1) for k in (0, 1)}

    found = [seeds()]
    for step in (3, 12):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        (folder / "COMMITTED.json").touch()
        found.append(seeds())
        assert seeds() == found[-1]
        assert seed(1, resume=False) == found[0][1, 0, 0]
    assert len({value for one in found for value in one.values()}) == 3 * len(found[0])


def test_a_port_that_was_taken_meanwhile(engine: SGLangEngine, tmp_path: Path) -> None:
    """Once more with another; not for ever."""

    def ports() -> list[str]:
        return re.findall(r"'port': (\d+)", (tmp_path / "sglang_cpu0.log").read_text())

    (tmp_path / "port_taken").write_text("x")
    engine.restart()
    assert not engine.lost
    assert len(set(ports())) == 3
    (tmp_path / "port_taken").write_text("xx")
    with pytest.raises(EngineLostError, match=r"(?s)Address already in use.*starting with"):
        engine.restart()
    assert len(ports()) == 5


def test_a_receiver_waits_for_a_trainer_that_lives(tmp_path: Path) -> None:
    sender = Mailbox()
    receiver = Mailbox(sender.path)
    sender.begin()
    receiver.check_sender()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    sender.set("sender", ended.pid)
    with pytest.raises(MailboxError, match=rf"the trainer \(process {ended.pid}\) is gone"):
        receiver.wait("filled", 1, timeout=None, check=receiver.check_sender)


def test_a_sender_waits_for_a_receiver_that_gets_on(tmp_path: Path) -> None:
    sender = Mailbox()
    receiver = Mailbox(sender.path)
    sender.begin()

    def slow() -> None:
        for _ in range(10):
            time.sleep(0.2)
            receiver.beat()
        receiver.set("drained", 1)

    thread = threading.Thread(target=slow)
    thread.start()
    assert sender.wait("drained", 1, timeout=1) == {}
    thread.join()
    with pytest.raises(MailboxTimeoutError, match="nothing from the other side"):
        sender.wait("drained", 2, timeout=0.2)
