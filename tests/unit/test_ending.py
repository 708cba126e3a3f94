"""How commands end: signals, a disk that is full, what stands above the line of an error."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl import ending
from lightrl.engine.base import EngineLostError, EngineStartError
from lightrl.errors import UserError

SRC = Path(ending.__file__).parents[1]
WAIT = """
import asyncio, sys, time
from lightrl.ending import told_when_stopped
async def loop():
    print("begun", flush=True)
    await asyncio.sleep(60)
with told_when_stopped(lambda: "stopped in step 3"):
    if sys.argv[1] == "loop":
        asyncio.run(loop())
    print("begun", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("waits", ["loop", "plain"])
@pytest.mark.parametrize(
    ("number", "rank", "status", "said"),
    [
        (signal.SIGINT, None, 130, "stopped in step 3"),
        (signal.SIGTERM, None, 143, "stopped in step 3"),
        (signal.SIGTERM, "0", 143, "stopped in step 3"),
        (signal.SIGINT, "1", 130, ""),
        (signal.SIGTERM, "1", -signal.SIGTERM, ""),
    ],
)
def test_a_signal_ends_with_its_status_and_a_line(
    waits: str, number: signal.Signals, rank: str | None, status: int, said: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(SRC)} | ({} if rank is None else {"RANK": rank})
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, waits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.strip()) == (status, said)


def test_signals_are_as_before_after_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending.told_when_stopped(lambda: "stopped"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    pipe = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(pipe)
    assert pipe == -1


def test_a_full_disk_is_a_line_from_wherever_it_was_met() -> None:
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    told, full = ending.full_disk_told, OSError(errno.ENOSPC, "No space left on device")
    text = "checkpoint of step 2 was not written: rank 1"
    with pytest.raises(UserError, match=r"No space left on device; make room: the same command"), told():
        raise full
    with pytest.raises(UserError, match=f"^a disk is full: {text}; make room"), told():
        raise RuntimeError(text) from CheckpointException("save", {1: (full, None)})
    with pytest.raises(UserError, match=r"^a disk is full: saving"), told():
        raise RuntimeError("saving") from SafetensorError("I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match=r"^other$"), told():
        raise RuntimeError("other") from OSError(errno.EIO, "a broken disk")


def test_notes_of_a_mistake_stand_above_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    error = UserError("mine.jsonl:1: ValueError: no")
    error.add_note("Traceback (most recent call last):\n  a frame of the user's")
    with pytest.raises(SystemExit, match="2"):
        ending.mistake(error)
    assert capsys.readouterr().err.splitlines() == [
        "Traceback (most recent call last):",
        "  a frame of the user's",
        "error: mine.jsonl:1: ValueError: no",
    ]


def test_a_run_that_is_lost_says_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for kind, said in ((EngineLostError, "\nin step 3\n"), (EngineStartError, "")):
        with pytest.raises(kind), ending.told_when_stopped(lambda: "in step 3"):
            raise kind("gone")
        assert capsys.readouterr().err == said


def test_a_loss_is_a_line_below_the_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for kind, status in ((EngineLostError, "1"), (EngineStartError, "2")):
        with pytest.raises(SystemExit, match=status):
            ending.mistake(kind("it ended; lower x. The end of run/e.log:\nTraceback of its own\nsigquit"))
        assert capsys.readouterr().err.splitlines() == [
            "Traceback of its own",
            "sigquit",
            "error: it ended; lower x (log: run/e.log)",
        ]


@pytest.mark.parametrize("launcher", ["torchrun", "other"])
def test_a_mistake_of_one_rank_alone_is_said(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By torchrun from its file; by the rank itself where nobody else would."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit, match="2"):
        ending.mistake(UserError("data.path: not on this node"))
    printed = capsys.readouterr().err
    assert printed == ("" if launcher == "torchrun" else "error: data.path: not on this node\n")
    if launcher == "torchrun":
        assert "not on this node" in (tmp_path / "error.json").read_text()
