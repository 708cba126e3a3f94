"""Checkpoints in a world of one: exact resume, damage, retention, failures, kills."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightrl.config.schema import CheckpointConfig
from lightrl.errors import UserError
from lightrl.training import checkpoint_storage
from lightrl.training.checkpoint import MARKER, Checkpointer, CheckpointError, committed_steps, latest
from lightrl.training.checkpoint_storage import read_tensors, read_whole


class Tied(nn.Module):
    """A shared weight, a persistent and a recomputed buffer, a frozen weight, a scalar."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)) * self.scale * self.frozen)


def _setup(seed: int, width: int = 8) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied(width)
    decayed = [model.embed.weight]
    rest = [model.norm.weight, model.norm.bias, model.scale]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.1 + 0.2, betas=(0.9, 0.95))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update on random ids: takes from the random generators too."""
    ids = torch.randint(0, 11, (6,))
    loss = model(ids).logsumexp(-1).sum() * (1 + random.random() + np.random.rand())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _assert_same(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            _assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, Tensor):
        assert a.dtype is b.dtype, path
        assert torch.equal(a, b), path
    else:
        assert a == b, path


@pytest.mark.parametrize("async_save", [False, True])
def test_resume_is_exact(tmp_path: Path, async_save: bool) -> None:
    config = CheckpointConfig(async_save=async_save)
    model, optimizer = _setup(0)
    own = torch.Generator().manual_seed(5)
    random.gauss(0, 1)  # leaves a cached second value
    np.random.standard_normal()
    for _ in range(3):
        _step(model, optimizer)
    extra = {"cursor": {"epoch": 1, "index": 7}, "lr": 0.1 + 0.2}
    keeper = Checkpointer(tmp_path, config)
    keeper.save(3, model=model, optimizer=optimizer, extra=extra, metrics={"reward/mean": 0.5}, generators={"own": own})
    saved = _state(model, optimizer)
    extra["lr"] = 0.0  # changes after `save` do not reach the file
    draws = [random.gauss(0, 1), np.random.standard_normal(), torch.rand(1, generator=own).item()]
    _step(model, optimizer)
    keeper.wait()
    uninterrupted = _state(model, optimizer)

    model, optimizer = _setup(1)
    own = torch.Generator()
    folder = Checkpointer(tmp_path, config).latest()
    assert folder is not None
    loaded = Checkpointer(tmp_path, config).load(folder, model, optimizer, generators={"own": own})
    assert loaded == {"cursor": {"epoch": 1, "index": 7}, "lr": 0.1 + 0.2}
    assert optimizer.param_groups[0]["lr"] == 0.1 + 0.2
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert model.head.weight is model.embed.weight
    _assert_same(_state(model, optimizer), saved)
    assert [random.gauss(0, 1), np.random.standard_normal(), torch.rand(1, generator=own).item()] == draws
    _step(model, optimizer)
    _assert_same(_state(model, optimizer), uninterrupted)


def test_no_pickle_and_no_second_copy_of_tied(tmp_path: Path) -> None:
    model, optimizer = _setup(0)
    _step(model, optimizer)
    folder = _save(tmp_path, model, optimizer, 1)
    assert sorted(f.name for f in folder.iterdir()) == [
        MARKER, "rank_00000_0000.safetensors", "state.json", "tensors.json",
    ]  # fmt: skip
    tensors = read_tensors(folder)
    assert "model.embed.weight" in tensors
    assert "model.head.weight" not in tensors
    assert "model.table" not in tensors
    assert torch.equal(read_whole(folder, "model.embed.weight", tensors), model.embed.weight)


def _save(dir: Path, model: nn.Module, optimizer: Any, *steps: int, **config: Any) -> Path:
    keeper = Checkpointer(dir, CheckpointConfig(**{"async_save": False, "keep_last": 9, **config}))
    for step in steps:
        keeper.save(step, model=model, optimizer=optimizer, extra={"step": step}, metrics={})
    return dir / f"step_{steps[-1]:06d}"


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("lightrl") and r.levelno >= logging.WARNING]


def _flip_bit(folder: Path) -> None:
    path = folder / "rank_00000_0000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)


def _truncate(folder: Path) -> None:
    path = folder / "rank_00000_0000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


_DAMAGE = {
    "wrong checksum": _flip_bit,
    "bytes, not": _truncate,
    "never completed": lambda f: (f / MARKER).unlink(),
    "state.json is missing": lambda f: (f / "state.json").unlink(),
    "COMMITTED.json is damaged": lambda f: (f / MARKER).write_text("{"),
    "does not belong to this folder": lambda f: f.rename(f.with_name("step_000004")),
}


@pytest.mark.parametrize("reason", _DAMAGE)
def test_damaged_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Case D4."""
    model, optimizer = _setup(0)
    good, bad = tmp_path / "step_000002", _save(tmp_path, model, optimizer, 1, 2, 3)
    (tmp_path / "step_000009.tmp").mkdir()
    _DAMAGE[reason](bad)
    bad = bad if bad.exists() else bad.with_name("step_000004")
    keeper = Checkpointer(tmp_path, CheckpointConfig())
    assert keeper.latest() == good
    (message,) = _warnings(caplog)
    assert all(part in message for part in (str(bad), reason, f"using {good}"))
    assert not (tmp_path / "step_000009.tmp").exists()
    assert keeper.load(good, model, optimizer) == {"step": 2}

    # The run goes on from step 2 and comes to the damaged step again.
    _save(tmp_path, model, optimizer, int(bad.name[-6:]), keep_last=1)
    assert Checkpointer(tmp_path, CheckpointConfig()).latest() == bad


def test_all_damaged_or_none(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    model, optimizer = _setup(0)
    _flip_bit(_save(tmp_path, model, optimizer, 1))
    assert latest(tmp_path, verify=False) == tmp_path / "step_000001"
    with pytest.raises(UserError, match=r"no usable checkpoint in .*step_000001: .* wrong checksum.*run.dir"):
        latest(tmp_path)


def test_keeps_last_and_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _setup(0)
    keeper = Checkpointer(tmp_path, CheckpointConfig(async_save=False, keep_last=2, keep_best=2))
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: float("nan"), 5: 0.6, 6: 0.2, 7: 0.3}
    kept = []
    for step, score in scores.items():
        keeper.save(step, model=model, optimizer=optimizer, extra={}, metrics={"reward/mean": score})
        kept.append(committed_steps(tmp_path))
    # the last two, and the best two so far
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 4, 5], [2, 5, 6], [2, 5, 6, 7]]
    assert _warnings(caplog) == [
        "checkpoint.best_metric: step 4 has no metric 'reward/mean', so it cannot be kept as one of the best"
    ]
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"step_00000{s}" for s in kept[-1]]


@pytest.mark.parametrize("async_save", [False, True])
def test_failed_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool) -> None:
    model, optimizer = _setup(0)
    keeper = Checkpointer(tmp_path, CheckpointConfig(async_save=async_save))

    def save(step: int) -> None:
        keeper.save(step, model=model, optimizer=optimizer, extra={}, metrics={})
        keeper.wait()

    save(1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_storage, "save_file", full)
        with pytest.raises(CheckpointError, match=r"step 2 was not written: .*No space left on device"):
            save(2)
    keeper.wait()  # raised once
    assert [f.name for f in tmp_path.iterdir()] == ["step_000001"]
    save(3)
    assert committed_steps(tmp_path) == [1, 3]
    with pytest.raises(TypeError):
        keeper.save(4, model=model, optimizer=optimizer, extra={"no": object()}, metrics={})


def test_another_model_or_optimizer(tmp_path: Path) -> None:
    model, optimizer = _setup(0)
    _step(model, optimizer)
    folder = _save(tmp_path, model, optimizer, 1)
    keeper = Checkpointer(tmp_path, CheckpointConfig())
    wide, wide_optimizer = _setup(0, width=9)
    with pytest.raises(UserError, match=r"another model: frozen has shape \(8,\) there, \(9,\) in this run"):
        keeper.load(folder, wide, wide_optimizer)
    with pytest.raises(UserError, match=r"another model: it has no 0\.weight; use the model\.path"):
        keeper.load(folder, nn.Sequential(nn.Linear(2, 2)), None)
    with pytest.raises(UserError, match=r"\[1, 3\] parameters in its groups, this run \[4\]"):
        keeper.load(folder, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    model.register_parameter("frozen", None)
    with pytest.raises(UserError, match="this run's has no frozen"):
        keeper.load(folder, model, optimizer)
    with pytest.raises(UserError, match="no optimizer state"):
        keeper.load(_save(tmp_path, wide, None, 2), wide, wide_optimizer)


def test_several_files_and_new_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are cut at a size; a rank the saved run did not have is seeded from rank 0's state and its own number."""
    monkeypatch.setattr(checkpoint_storage, "FILE_BYTES", 600)
    model, optimizer = _setup(0)
    _step(model, optimizer)
    folder = _save(tmp_path, model, optimizer, 1)
    assert len(list(folder.glob("rank_*.safetensors"))) > 3
    saved = _state(model, optimizer)
    other, other_optimizer = _setup(1)
    keeper = Checkpointer(tmp_path, CheckpointConfig())
    keeper.load(folder, other, other_optimizer)
    _assert_same(_state(other, other_optimizer), saved)
    draws = []
    for rank in (0, 1, 2, 2):
        keeper.rank = rank
        keeper.load(folder, other, other_optimizer)
        draws.append((torch.rand(1).item(), random.random(), np.random.rand()))
    assert draws[2] == draws[3]
    assert len(set(draws)) == 3


_KILLER = """
import json, os, signal, sys
from pathlib import Path
import torch
from lightrl.config.schema import CheckpointConfig
from lightrl.training import checkpoint, checkpoint_storage

root = Path(sys.argv[1])
torch.set_num_threads(1)


def keeper(dir):
    return checkpoint.Checkpointer(dir, CheckpointConfig(async_save=False, keep_last=1))


def save(dir, step):
    model = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, float(step))
    keeper(dir).save(step, model=model, optimizer=None, extra={"step": step}, metrics={})


def die_at(moment):
    # Every file operation counts twice: before and after it.
    count = 0

    def tick():
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(owner, name):
        inner = getattr(owner, name)

        def wrapped(*args, **kwargs):
            tick()
            result = inner(*args, **kwargs)
            tick()
            return result

        setattr(owner, name, wrapped)

    for owner, names in (
        (checkpoint_storage, ["save_file", "fsync", "write_json", "describe"]),
        (checkpoint, ["fsync", "write_json", "describe"]),
        (Path, ["mkdir", "write_text", "rename"]),
        (checkpoint.shutil, ["rmtree"]),
    ):
        for name in names:
            hook(owner, name)


outcomes = []
moment, code = 0, None
while code != 0:
    moment += 1
    dir = root / str(moment)
    save(dir, 1)
    pid = os.fork()
    if pid == 0:
        die_at(moment)
        save(dir, 2)
        os._exit(0)
    code = os.waitpid(pid, 0)[1]
    found = keeper(dir).latest()
    model = torch.nn.Linear(3, 3)
    step = keeper(dir).load(found, model, None, rng=False)["step"]
    assert (model.weight == float(step)).all(), (moment, step)
    save(dir, 3)
    assert keeper(dir).latest().name == "step_000003", moment
    assert [f.name for f in dir.iterdir()] == ["step_000003"], (moment, list(dir.iterdir()))
    outcomes.append(step)
print(json.dumps(outcomes))
"""


def test_kill_at_every_moment_of_a_save(tmp_path: Path) -> None:
    """SIGKILL before and after each file operation of a save: the old or the new checkpoint is there, whole."""
    script = tmp_path / "killer.py"
    script.write_text(_KILLER)
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120, env={**os.environ}
    )
    assert run.returncode == 0, run.stderr
    outcomes = json.loads(run.stdout.splitlines()[-1])
    assert len(outcomes) > 20
    assert outcomes == sorted(outcomes)  # step 1 up to the rename, step 2 from then on
    assert set(outcomes) == {1, 2}
