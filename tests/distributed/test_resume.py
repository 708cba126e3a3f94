"""Killed, resumed, spread over other numbers of ranks and over two machines: the same weights (D1, L1, L4)."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run
import torch

NAMES = ("reward/mean", "loss/policy", "optim/grad_norm")


@pytest.fixture(scope="module")
def forks():
    """Children that have torch and transformers imported already: ten kills cost seconds, not minutes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightrl.training.trainer", "lightrl.engine.transformers", "tiny_run"])
    return context


def start(forks, folder: Path, overrides: dict):
    child = forks.Process(target=tiny_run.train, args=(str(folder), json.dumps(overrides)))
    child.start()
    return child


def complete(forks, folder: Path, overrides: dict) -> None:
    child = start(forks, folder, overrides)
    child.join(120)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0


def committed(folder: Path) -> int:
    """Newest step with a checkpoint; 0 before the first."""
    return max((int(p.name[5:]) for p in (folder / "run/checkpoints").glob("step_??????")), default=0)


def wait_for_step(child, folder: Path, step: int) -> None:
    """Until the child has committed it: kills are spread over the run's steps, however fast the machine."""
    for _ in range(6000):
        if committed(folder) >= step or child.exitcode is not None:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached")


def test_killed_ten_times_ends_with_the_same_weights(tmp_path, forks):
    steps = 60  # more than ten kills get to
    overrides = {
        "run": {"steps": steps},
        "checkpoint": {"every": 1, "hf_every": steps, "async_save": True},
        "optim": {"schedule": "cosine", "warmup_steps": 3},
        "algorithm": {"minibatches_per_step": 2},
    }
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    complete(forks, tmp_path / "whole", overrides)
    tiny_run.make_run(tmp_path / "killed")
    rng, reached = random.Random(0), []
    for _ in range(10):
        child = start(forks, tmp_path / "killed", overrides)
        before = reached[-1] if reached else 0
        wait_for_step(child, tmp_path / "killed", before + rng.choice((0, 1, 1, 2, 3)))
        child.join(rng.uniform(0, 0.3))  # anywhere in the step after it, or in the start
        assert child.exitcode is None, reached
        child.kill()
        child.join()
        reached.append(committed(tmp_path / "killed"))
    complete(forks, tmp_path / "killed", overrides)
    assert any(0 < r < steps for r in reached), reached  # some of them mid-run
    whole, killed = (tiny_run.exported(tmp_path / name, steps) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name
    # and every step's numbers, once each: no prompt skipped or repeated
    assert tiny_run.metrics_of(tmp_path / "killed", *NAMES) == tiny_run.metrics_of(tmp_path / "whole", *NAMES)


def test_other_numbers_of_ranks(tmp_path, forks, run_distributed):
    """2 -> 1 -> 2 ranks, against one rank throughout; sampling does not depend on the number of ranks either."""
    steps = 6
    base = {"checkpoint": {"hf_every": 2}, "optim": {"lr": 1e-4}, "algorithm": {"minibatches_per_step": 2}}
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    complete(forks, tmp_path / "one", {**base, "run": {"steps": steps}})
    tiny_run.make_run(tmp_path / "many")
    for until, ranks in ((2, 2), (4, 1), (6, 2)):
        overrides = json.dumps({**base, "run": {"steps": until}})
        run_distributed(Path(tiny_run.__file__), ranks, tmp_path / "many", overrides)
    for step in (2, 4, 6):
        one, many = (tiny_run.exported(tmp_path / name, step) for name in ("one", "many"))
        for name, tensor in one.items():
            torch.testing.assert_close(many[name], tensor, atol=1e-5, rtol=0, msg=f"step {step}: {name}")
    rewards = [tiny_run.metrics_of(tmp_path / name, "reward/mean") for name in ("one", "many")]
    assert rewards[0] == [(s, pytest.approx(r, abs=1e-6)) for s, r in rewards[1]]


def test_two_agents_on_one_machine(tmp_path, forks):
    """torchrun's own rendezvous, as over two machines, replicated (HSDP): equal to one process."""
    overrides = {"checkpoint": {"hf_every": 2}, "run": {"steps": 2}, "optim": {"lr": 1e-4}}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    complete(forks, tmp_path / "one", overrides)
    tiny_run.make_run(tmp_path / "two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test",
        "--local-addr", "127.0.0.1",
        str(tiny_run.__file__), str(tmp_path / "two"), json.dumps({**overrides, "parallel": {"shard_size": 1}}),
    ]  # fmt: skip
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        for _ in range(2)
    ]
    outputs = []
    try:
        outputs = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    one, two = (tiny_run.exported(tmp_path / name, 2) for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=0, msg=name)


def fail_on_one_rank(folder: str) -> None:
    """Rank 1 dies in the middle of a step, without a word to the others."""
    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    def reward(sample):
        if os.environ["RANK"] == "1" and sample.group_index >= 4:
            raise SystemExit("this rank gives up")
        return float(sample.index)

    trainer = Trainer(tiny_run.make_run(Path(folder)), reward=reward)
    step = trainer.collect

    def collect(prompts):
        if os.environ["RANK"] == "1" and trainer.steps_done == 1:
            raise RuntimeError("this rank gives up")
        return step(prompts)

    trainer.collect = collect
    trainer.train()
    close_world()


def test_a_rank_that_fails_takes_the_run_down(tmp_path, run_distributed):
    tiny_run.make_run(tmp_path)
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        run_distributed(fail_on_one_rank, 2, tmp_path, timeout=120)
    assert "this rank gives up" in str(failure.value)
    assert "not over after" not in str(failure.value)
    assert time.monotonic() - started < 110
