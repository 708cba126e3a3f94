"""A run on two ranks, replayed from its dump: the same weights, on as many ranks to the last bit."""

from __future__ import annotations

from pathlib import Path

import tiny_run
import torch

SECTIONS = {
    "run": {"steps": 3},
    "rollout": {"filter": "nonzero_std", "prompts_per_step": 3, "oversample_prompts": 5},
    "algorithm": {"minibatches_per_step": 2},
    "checkpoint": {"hf_every": 3, "every": 0},
}


def live_and_replayed(folder: str) -> None:
    """On every rank: a run that dumps, then one that trains on the dump; `replayed` in one process is left to do."""
    from lightrl.distributed.mesh import close_world

    for name, sections in (
        ("live", {"dump": {"rollouts": True}}),
        ("again", {"debug": {"rollouts": f"{folder}/live"}}),
    ):
        train(Path(folder), name, sections)
    close_world()


def train(folder: Path, name: str, sections: dict) -> None:
    from lightrl.training.trainer import Trainer

    run = SECTIONS["run"] | {"dir": str(folder / name)}
    reward = tiny_run.count_letter if name == "live" else never
    trainer = Trainer(tiny_run.make_run(folder, **{**SECTIONS, "run": run, **sections}), reward=reward)
    trainer.train()
    trainer.close()


def never(sample) -> float:
    raise AssertionError("scored")


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / name / "hf" / "step_000003" / "model.safetensors")


def test_two_ranks_replay_to_the_last_bit(run_distributed, tmp_path: Path) -> None:
    from lightrl.distributed.mesh import close_world

    tiny_run.make_model(tmp_path / "model")
    tiny_run.make_data(tmp_path / "data.jsonl")
    run_distributed(live_and_replayed, 2, tmp_path)
    assert len(list((tmp_path / "live" / "rollouts").iterdir())) == 6
    live, again = weights(tmp_path, "live"), weights(tmp_path, "again")
    assert all(torch.equal(live[name], again[name]) for name in live)

    train(tmp_path, "alone", {"debug": {"rollouts": str(tmp_path / "live")}})  # two ranks' files on one
    close_world()
    alone = weights(tmp_path, "alone")
    for name in live:
        torch.testing.assert_close(alone[name], live[name], atol=2e-5, rtol=1e-4)
