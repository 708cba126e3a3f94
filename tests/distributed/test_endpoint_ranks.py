"""Agents outside on two ranks, each with an endpoint of its own, are those of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))


def train(folder: str, name: str) -> None:
    """Entry of the processes: one step."""
    from test_endpoint_run import outside_config

    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    trainer = Trainer(outside_config(Path(folder), name, run={"steps": 1}))
    assert trainer.agent is not None
    assert trainer.agent.outside is not None
    Path(folder, f"{name}{trainer.world.rank}").write_text(trainer.agent.outside.endpoint.url)
    trainer.train()
    trainer.close()
    close_world()


def test_two_ranks_play_what_one_plays(tmp_path: Path, run_distributed: Any) -> None:
    from test_endpoint_run import outside_config

    from lightrl.observe.dumps import read_samples

    outside_config(tmp_path, "two")  # writes the model
    run_distributed(train, 2, tmp_path, "two")
    train(str(tmp_path), "one")
    kept = ("group", "index", "tokens", "loss_mask", "reward", "status", "metadata")
    one, two = ([[r[k] for k in kept] for r in read_samples(tmp_path / name, 1)] for name in ("one", "two"))
    assert one == two
    assert len({r[0] for r in one}) == 4
    urls = [(tmp_path / f"two{rank}").read_text() for rank in range(2)]
    assert len(set(urls)) == 2
    assert all(url.startswith("http://127.0.0.1:") for url in urls)
