"""On one GPU: the loss and gradients of `lightrl sft` against the stock model on the CPU, and that it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import tiny_sft

from lightrl.distributed.mesh import close_world
from lightrl.training.sft import SFTTrainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def trainer_for(tmp_path: Path):
    made = []

    def build(**sections: Any) -> SFTTrainer:
        run = {"device": "cuda"} | sections.pop("run", {})
        made.append(SFTTrainer(tiny_sft.make_run(tmp_path, run=run, **sections)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


@pytest.mark.parametrize("max_tokens", [16384, 150])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_loss_and_gradients_are_those_by_hand(
    trainer_for, tmp_path: Path, dtype: str, bound: float, max_tokens: int
) -> None:
    """Gradients by the norm of their difference: rounding of bfloat16 is spread over all numbers of a matrix."""
    tiny_sft.make_model(tmp_path / "model", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    rows = tiny_sft.rows_of(tiny_sft.make_data(tmp_path / "data.jsonl", rows=9))
    trainer = trainer_for(
        model={"compute_dtype": dtype},
        sft={"batch_size": 9},
        optim={"max_grad_norm": 0.0},
        parallel={"max_tokens_per_microbatch": max_tokens},
    )
    seen = tiny_sft.watched(trainer)
    metrics = trainer.step(list(trainer.conversations))
    loss, gradients, trained = tiny_sft.by_hand(tmp_path, rows)
    assert metrics["loss/total"] == pytest.approx(loss, rel=bound)
    assert metrics["sft/trained_tokens"] == trained
    for name, gradient in gradients.items():
        difference = (seen[0][name].cpu() - gradient).norm() / gradient.norm()
        assert difference < bound, f"{name}: {difference:.1e}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_and_goes_on_bit_for_bit(trainer_for, tmp_path: Path, dtype: str) -> None:
    """40 steps, and 20 and 20 more of another trainer: the same losses to the last bit."""
    sections: dict[str, Any] = {
        "model": {"compute_dtype": dtype, "activation_checkpointing": True},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 20},
        "sft": {"batch_size": 12},
    }
    names = ("whole", "parts")
    for name, until in (("whole", 40), ("parts", 20), ("parts", 40)):
        run = {"dir": str(tmp_path / name), "steps": until, "deterministic": True}
        trainer_for(run=run, **sections).train()
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in names]
    losses = [[json.loads(line)["loss/total"] for line in run] for run in lines]
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.7 * losses[0][0]


def test_peak_memory_is_told(trainer_for, tmp_path: Path) -> None:
    trainer_for(run={"steps": 1}).train()
    assert tiny_run.metrics_of(tmp_path, "perf/peak_memory_gib")[0][1] > 0
