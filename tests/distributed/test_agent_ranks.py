"""Episodes on two ranks are those of one: same tokens, rewards, and weights but for rounding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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


def test_two_ranks_play_what_one_plays(tmp_path: Path, run_distributed: Any) -> None:
    from safetensors.torch import load_file
    from test_agent_run import run_config

    from lightrl.observe.dumps import read_samples

    run_config(tmp_path)  # writes the model
    run_distributed(train, 2, tmp_path, "two")
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
