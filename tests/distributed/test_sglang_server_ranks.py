"""Runs whose engine is a server: two ranks that broadcast to it train as one that goes through files does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

FAKE = Path(__file__).parents[1] / "engine" / "fake_sglang.py"
NAMES = ("reward/mean", "loss/policy", "optim/grad_norm")


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """URL of a server, in a process of its own, for the model of a tiny run in `tmp_path`."""
    tiny_run.make_run(tmp_path / "a")
    command = [sys.executable, str(FAKE), str(tmp_path / "a" / "model")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.wait()


def test_two_ranks_equal_one(tmp_path: Path, server: str, run_distributed: Any) -> None:
    metrics = []
    for folder, ranks, transport in (("a", 2, "nccl"), ("b", 1, "disk")):
        overrides = {
            "run": {"steps": 3},
            "engine": {"kind": "sglang_server", "urls": [server]},
            "sync": {"transport": transport, "timeout": 30},
            "checkpoint": {"every": 0, "hf_every": 3},
        }
        run_distributed(tiny_run.train, ranks, tmp_path / folder, json.dumps(overrides))
        metrics.append(tiny_run.metrics_of(tmp_path / folder, *NAMES, "mismatch/logprob_abs_diff_max"))
    assert [len(m) for m in metrics] == [3, 3]
    for ours, theirs in zip(*metrics, strict=True):
        assert ours[:-1] == pytest.approx(theirs[:-1], rel=1e-3, abs=1e-6)
        assert max(ours[-1], theirs[-1]) < 1e-4  # sampled with the very weights that are trained, after each update
    two, one = (tiny_run.exported(tmp_path / folder, 3) for folder in "ab")
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=2e-4, rtol=0)
    assert not list((tmp_path / "b" / "run" / "sync").iterdir())


def test_a_failure_on_the_first_rank_ends_all(tmp_path: Path, server: str, run_distributed: Any) -> None:
    """The other rank waits in a collective then: it must not go on waiting, nor hide the reason."""
    output = run_distributed(refused, 2, tmp_path / "a", server)
    assert output.count("SAID http") == 2
    assert output.count("out of memory") >= 2


def refused(folder: str, server: str) -> None:
    """On each rank: a second sync that the server refuses."""
    from lightrl.distributed.mesh import close_world
    from lightrl.engine.sglang_http import Server
    from lightrl.sync.weights import sync_weights
    from lightrl.training.trainer import Trainer

    engine = {"kind": "sglang_server", "urls": [server]}
    trainer = Trainer(tiny_run.make_run(Path(folder), engine=engine, sync={"timeout": 30}))
    sync_weights(trainer.policy, trainer.engine, 0)
    if trainer.world.is_main:
        Server(server).post("/fault", {"refuse": "out of memory"}, 5)
    with pytest.raises(RuntimeError) as caught:
        sync_weights(trainer.policy, trainer.engine, 1)
    print(f"SAID {caught.value}", flush=True)
    trainer.close()
    close_world()
