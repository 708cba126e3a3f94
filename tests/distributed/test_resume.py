"""Killed, resumed, spread over other numbers of ranks and over two machines: the same weights (D1, L1, L4)."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ranks
import tiny_run
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

NAMES = ("reward/mean", "loss/policy", "optim/grad_norm")
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


@pytest.fixture(scope="module")
def forks():
    """Children that have torch and transformers imported already: ten kills cost seconds, not minutes."""
    return ranks.preloaded()


def run_child(forks, target, *args) -> int:
    """Exit code of `target(*args)` in a process of its own."""
    child = forks.Process(target=target, args=args)
    child.start()
    child.join(180)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError("a run hangs")
    return child.exitcode


def complete(forks, folder: Path, overrides: dict) -> None:
    assert run_child(forks, tiny_run.train, str(folder), json.dumps(overrides)) == 0


class Clock:
    """A run's own time: ticks of file operations (any thread's) and of modules' forwards, of generation and training.

    How far a run is when it is killed then depends on the run alone, not on what else the machine does. The kill comes
    from a thread that tick `last` wakes, so that it hits whatever is under way then: Python, C++, or a write.
    """

    def __init__(self, last: int | None = None) -> None:
        self.ticks, self.last = 0, last
        self.updates: list[int] = []
        """Ticks at each update of the optimizer."""
        self._over = threading.Event()
        threading.Thread(target=self._kill, daemon=True).start()
        sys.addaudithook(lambda event, _: self._tick() if event in FILE_EVENTS else None)
        register_module_forward_hook(lambda *_: self._tick())
        register_optimizer_step_post_hook(lambda *_: self.updates.append(self.ticks))

    def _tick(self) -> None:
        self.ticks += 1
        if self.last is not None and self.ticks >= self.last:  # two threads may tick at once
            self._over.set()

    def _kill(self) -> None:
        self._over.wait()
        os.kill(os.getpid(), signal.SIGKILL)


def train_timed(folder: str, overrides: str, measured: str) -> None:
    """A whole run; writes down its clock at each update."""
    clock = Clock()
    tiny_run.train(folder, overrides)
    Path(measured).write_text(json.dumps(clock.updates))


def train_until(folder: str, overrides: str, tick: int) -> None:
    Clock(tick)
    tiny_run.train(folder, overrides)


def test_killed_at_ten_random_moments_ends_with_the_same_weights(tmp_path, forks):
    """Moments are new in every run of this test: KILL_SEED=… repeats those of one that failed."""
    seed = int(os.environ.get("KILL_SEED", random.SystemRandom().getrandbits(32)))
    print(f"repeat with KILL_SEED={seed}")  # shown when the test fails
    steps, updates = 50, 2
    overrides = {
        "run": {"steps": steps},
        "checkpoint": {"every": 1, "hf_every": steps, "async_save": True},
        "optim": {"schedule": "cosine", "warmup_steps": 3},
        "algorithm": {"minibatches_per_step": updates},
    }
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        tiny_run.make_run(tmp_path / name)
    text, measured = json.dumps(overrides), tmp_path / "updates.json"
    assert run_child(forks, train_timed, str(tmp_path / "whole"), text, str(measured)) == 0
    ticks = json.loads(measured.read_text())[updates - 1 :: updates]  # end of each step
    a_step = (ticks[-1] - ticks[0]) // (steps - 1)
    rng = random.Random(seed)
    for number in range(10):
        # From loading, before the first step's end, to four steps on: too little to get through the run in ten rounds.
        tick = rng.randint(max(1, ticks[0] - 2 * a_step), ticks[0] + 3 * a_step)
        code = run_child(forks, train_until, str(tmp_path / "killed"), text, tick)
        left = sorted(path.name for path in (tmp_path / "killed/run/checkpoints").glob("*"))
        print(f"kill {number}: tick {tick} of {ticks[0]} + {a_step} a step, exit code {code}, left {left}")
        assert code == -signal.SIGKILL
    complete(forks, tmp_path / "killed", overrides)
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
    for until, nproc in ((2, 2), (4, 1), (6, 2)):
        overrides = json.dumps({**base, "run": {"steps": until}})
        run_distributed(tiny_run.train, nproc, tmp_path / "many", overrides)
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
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
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

    def collect(*given):
        if os.environ["RANK"] == "1" and trainer.steps_done == 1:
            raise RuntimeError("this rank gives up")
        return step(*given)

    trainer.collect = collect
    trainer.train()
    close_world()


def test_a_rank_that_fails_takes_the_run_down(tmp_path, run_distributed):
    tiny_run.make_run(tmp_path)
    with pytest.raises(pytest.fail.Exception) as failure:
        run_distributed(fail_on_one_rank, 2, tmp_path, timeout=170, torchrun=True)
    assert "this rank gives up" in str(failure.value)
    assert "not over after" not in str(failure.value)
