"""Losses against those of TRL's DPOTrainer and RewardTrainer: the same models and rows, loss and gradients to 1e-5."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_pairs
import tiny_run
import tiny_sft
import torch
from tiny_sft import watched

from lightrl.distributed.mesh import close_world
from lightrl.training.dpo import DPOTrainer
from lightrl.training.reward_model import RewardModelTrainer

trl = pytest.importorskip("trl", reason="TRL is in no extra that tests need: pip install -e '.[bench]'")
pytestmark = pytest.mark.skipif(
    not trl.__version__.startswith("1.16."), reason=f"reads the trainers' insides as of 1.16, found {trl.__version__}"
)
PLAIN = {"apply_chat_template": False}
COMMON = {"use_cpu": True, "bf16": False, "report_to": [], "per_device_train_batch_size": 6, "disable_tqdm": True}


def make_rows(folder: Path) -> list[dict[str, Any]]:
    """Texts of different lengths, without roles: what TRL makes of them is told by the tokenizer alone."""
    rng = random.Random(0)
    letters = tiny_run.CHARACTERS[:16]
    rows = [
        {key: "".join(rng.choices(letters, k=rng.randint(1, 12))) for key in ("prompt", "chosen", "rejected")}
        for _ in range(6)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def batch_of(trainer: Any) -> dict[str, Any]:
    return trainer.data_collator([trainer.train_dataset[i] for i in range(len(trainer.train_dataset))])


def assert_same(ours: Any, loss: torch.Tensor, theirs: torch.nn.Module) -> dict[str, float]:
    """One step of ours against TRL's loss, whose backward is made here."""
    theirs.zero_grad()
    loss.backward()
    seen = watched(ours)
    metrics = ours.step(list(ours.rows))
    assert metrics["loss/total"] == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(seen[0][name], parameter.grad, atol=1e-5, rtol=0, msg=name)
    assert float(torch.cat([g.flatten() for g in seen[0].values()]).norm()) > 1e-3
    return metrics


@pytest.fixture(scope="module")
def dpo(tmp_path_factory):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("dpo")
    tiny_sft.make_model(folder / "model")
    tiny_sft.make_model(folder / "reference", seed=1)
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("model", "reference")
    ]
    trainer = trl.DPOTrainer(
        model=models[0],
        ref_model=models[1],
        args=trl.DPOConfig(output_dir=str(folder / "out"), gradient_checkpointing=False, **COMMON),
        train_dataset=Dataset.from_list(make_rows(folder)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.model.eval()
    yield trainer, folder
    close_world()


CASES: list[tuple[list[str], list[float], dict[str, Any]]] = [
    (["sigmoid"], [1.0], {}),
    (["sigmoid_norm"], [1.0], {"loss": "sigmoid_norm", "beta": 0.7}),
    (["ipo"], [1.0], {"loss": "ipo", "beta": 0.3}),
    (["robust"], [1.0], {"loss": "robust", "label_smoothing": 0.2}),
    (["sigmoid", "sft"], [1.0, 0.5], {"sft_coef": 0.5}),
    (["aot"], [1.0], {"label_smoothing": 0.2}),  # of one pair alone aot is cDPO, which TRL has not by itself
]


@pytest.mark.parametrize(("losses", "weights", "options"), CASES, ids=["+".join(c[0]) for c in CASES])
def test_dpo(dpo, losses, weights, options) -> None:
    theirs, folder = dpo
    theirs.loss_types, theirs.loss_weights = losses, weights
    theirs.beta, theirs.label_smoothing = options.get("beta", 0.1), options.get("label_smoothing", 0.0)
    section = {"batch_size": 6, "reference_path": str(folder / "reference"), **options}
    ours = DPOTrainer(tiny_pairs.make_run(folder, dpo=section, data=PLAIN, optim={"max_grad_norm": 0.0}))
    if losses == ["aot"]:
        every = [theirs.data_collator([theirs.train_dataset[i]]) for i in range(6)]
        loss = torch.stack([theirs.compute_loss(theirs.model, inputs) for inputs in every]).mean()
    else:
        loss = theirs.compute_loss(theirs.model, batch_of(theirs))
    metrics = assert_same(ours, loss, theirs.model)
    if losses == ["sigmoid"]:
        last = {name: values[-1] for name, values in theirs._metrics["eval"].items()}
        for name in ("chosen", "rejected", "margins", "accuracies"):
            assert metrics[f"rewards/{name}"] == pytest.approx(last[f"rewards/{name}"], abs=1e-5)
        assert metrics["loss/entropy"] == pytest.approx(last["entropy"], abs=1e-5)


@pytest.mark.parametrize("center", [0.0, 0.05])
def test_reward_model(tmp_path, center: float) -> None:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    causal = tiny_sft.make_model(tmp_path / "causal")
    tokenizer = AutoTokenizer.from_pretrained(causal)
    model = AutoModelForSequenceClassification.from_pretrained(causal, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [row | {"margin": 0.1 * i} for i, row in enumerate(make_rows(tmp_path))]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    joined = [
        {key: row["prompt"] + row[key] for key in ("chosen", "rejected")} | {"margin": row["margin"]} for row in rows
    ]
    theirs = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(
            output_dir=str(tmp_path / "out"), gradient_checkpointing=False, center_rewards_coefficient=center or None,
            **COMMON,
        ),
        train_dataset=Dataset.from_list(joined),
        processing_class=tokenizer,
    )  # fmt: skip
    theirs.model.eval()
    section = {"batch_size": 6, "margin_key": "margin", "center_coef": center}
    ours: Any = RewardModelTrainer(tiny_pairs.make_run(tmp_path, rm=section, data=PLAIN, optim={"max_grad_norm": 0.0}))
    ours.policy = ours.rewarder  # for `watched`
    inputs = batch_of(theirs)
    assert "margin" in inputs
    metrics = assert_same(ours, theirs.compute_loss(theirs.model, inputs), theirs.model)
    last = {name: values[-1] for name, values in theirs._metrics["eval"].items()}
    assert metrics["rewards/accuracies"] == pytest.approx(last["accuracy"])
    assert metrics["rewards/margins"] == pytest.approx(last["margin"], abs=1e-5)
    close_world()
