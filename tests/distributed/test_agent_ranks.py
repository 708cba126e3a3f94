"""Episodes on two ranks are those of one: same tokens, rewards, and weights but for rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))


ENVIRONMENTS = ("Hints", "Pair")


def train(folder: str, name: str) -> None:
    """Entry of the processes: a step of each environment."""
    from test_agent_run import run_config

    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    for environment in ENVIRONMENTS:
        sections = {"run": {"steps": 1}, "checkpoint": {"hf_every": 1}, "optim": {"lr": 1e-3}}
        trainer = Trainer(run_config(Path(folder), f"{name}{environment}", environment, **sections))
        trainer.train()
        trainer.close()
    close_world()


def test_two_ranks_play_what_one_plays(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from test_agent_run import run_config

    from lightrl.observe.dumps import read_samples

    tests = Path(__file__).parents[1]
    paths = os.pathsep.join(map(str, [tests.parent / "src", tests, tests / "unit"]))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run_config(tmp_path)  # writes the model
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    subprocess.run([*command, str(tmp_path), "two"], env=env, check=True, timeout=240)
    train(str(tmp_path), "one")
    kept = ("group", "index", "tokens", "loss_mask", "reward", "status", "metadata")
    for environment in ENVIRONMENTS:
        folders = [tmp_path / f"{name}{environment}" for name in ("one", "two")]
        one, two = ([[r[k] for k in kept] for r in read_samples(folder, 1)] for folder in folders)
        assert one == two
        assert len({r[0] for r in one}) == 4
        first, second = (load_file(folder / "hf" / "step_000001" / "model.safetensors") for folder in folders)
        for name, tensor in first.items():
            torch.testing.assert_close(
                tensor, second[name], atol=2e-5, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
            )


if __name__ == "__main__":
    train(*sys.argv[1:])
