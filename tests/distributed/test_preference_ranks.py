"""`lightrl dpo` and `lightrl rm` on two gloo ranks equal one, and go on from each other's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny_pairs
import tiny_run
import tiny_sft
import torch

RAGGED = {"parallel": {"max_tokens_per_microbatch": 90}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "dpo_ragged": ("dpo", {"dpo": {"batch_size": 11, "sft_coef": 0.3, "precompute_reference": True}} | RAGGED),
    "dpo_ipo_replicated": ("dpo", {"dpo": {"batch_size": 7, "loss": "ipo"}, "parallel": {"shard_size": 1}}),
    "dpo_one_for_two": ("dpo", {"dpo": {"batch_size": 1}}),
    "dpo_experts": ("dpo", {"parallel": {"expert_parallel": 2}}),
    "rm_ragged": ("rm", {"rm": {"batch_size": 11, "center_coef": 0.1}} | RAGGED),
    "rm_one_for_two": ("rm", {"rm": {"batch_size": 1}}),
}


def first_updates(folder: str) -> None:
    """For each case the gradients of the first update, whole, and its metrics and the evaluation's, to `RANKS.pt`."""
    from lightrl.distributed.mesh import close_world
    from lightrl.models.shards import whole_tensor
    from lightrl.training.dpo import DPOTrainer
    from lightrl.training.reward_model import RewardModelTrainer
    from lightrl.wrappers import clean_name

    sets = {"sets": [{"name": "a", "path": f"{folder}/data.jsonl@[2:5]"}]}
    results = {}

    def look(*_: Any) -> None:
        for name, p in trainer.model.module.named_parameters():
            gradients[clean_name(name)] = whole_tensor(p.grad).clone()

    for case, (command, changes) in CASES.items():
        more = {
            command: {"batch_size": 11},
            "optim": {"max_grad_norm": 0.0},
            "eval": sets,
        } | changes
        start = {"dpo": "model", "rm": "classifier"}[command] if case != "dpo_experts" else "experts"
        more["model"] = {"path": f"{folder}/{start}"}
        if command == "dpo":  # another reference, so that rewards are not 0
            other = "reference" if case != "dpo_experts" else "other_experts"
            more["dpo"] = more["dpo"] | {"reference_path": f"{folder}/{other}"}
        if os.environ.get("WORLD_SIZE", "1") == "1":
            more.pop("parallel", None)
        kind: Any = {"dpo": DPOTrainer, "rm": RewardModelTrainer}[command]
        trainer = kind(tiny_pairs.make_run(Path(folder), **more))
        metrics, gradients = trainer.evaluate(), {}
        trainer.optimizer.register_step_pre_hook(look)
        metrics |= trainer.step(trainer.source.next(trainer.section.batch_size))
        results[case] = {"gradients": gradients, "metrics": metrics}
        trainer.close()
    ranks = trainer.world.size
    if trainer.world.is_main:
        torch.save(results, f"{folder}/{ranks}.pt")
    for command in ("dpo", "rm"):  # then the first steps of a run, of which one rank makes all
        trainer = run_of(folder, command, "many" if ranks > 1 else "one", steps=2 if ranks > 1 else 4)
        trainer.train()
        trainer.close()
    close_world()


def run_of(folder: str, command: str, name: str, steps: int) -> Any:
    """A trainer on all the pairs."""
    from lightrl.training.dpo import DPOTrainer
    from lightrl.training.reward_model import RewardModelTrainer

    more: dict[str, Any] = {"dpo": {"precompute_reference": True}} if command == "dpo" else {}
    run = {"dir": f"{folder}/{command}_{name}/run", "steps": steps}
    config = tiny_pairs.make_run(Path(folder), run=run, checkpoint={"hf_every": 2}, optim={"lr": 1e-4}, **more)
    kind: Any = {"dpo": DPOTrainer, "rm": RewardModelTrainer}[command]
    return kind(config)


def make_classifier(folder: Path) -> None:
    """With a head that is not 0, so that every parameter has a gradient."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype=torch.float32)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(folder / "classifier")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "classifier")


def test_two_ranks_equal_one_and_go_on_as_one(tmp_path, run_distributed):
    """Packed and not, sharded and replicated, and one pair for two ranks: the other still takes part."""
    tiny_sft.make_model(tmp_path / "model")
    tiny_sft.make_model(tmp_path / "reference", seed=1)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    for seed, name in enumerate(("experts", "other_experts")):
        tiny_sft.make_model(tmp_path / name, family="qwen3_moe", seed=seed, **sizes)
    make_classifier(tmp_path)
    tiny_pairs.make_data(tmp_path / "data.jsonl", rows=11)
    first_updates(str(tmp_path))
    run_distributed(first_updates, 2, tmp_path)
    ones, twos = (torch.load(tmp_path / f"{ranks}.pt", weights_only=True) for ranks in (1, 2))
    for case, (command, _) in CASES.items():
        one, two = ones[case], twos[case]
        names = {n for n in one["metrics"] if not n.startswith(("time/", "perf/"))} - {f"{command}/tokens"}
        assert {"loss/total", "rewards/margins", "eval/a/loss", "eval/a/accuracies", "eval/a/pairs"} <= names
        for name in names:
            assert two["metrics"][name] == pytest.approx(one["metrics"][name], abs=2e-6, rel=1e-6), f"{case}: {name}"
        assert one["gradients"].keys() == two["gradients"].keys()
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(two["gradients"][name], gradient, atol=1e-6, rtol=1e-5, msg=f"{case}: {name}")
    from lightrl.distributed.mesh import close_world

    for command in ("dpo", "rm"):  # two steps on two ranks and two on one, against four on one
        trainer = run_of(str(tmp_path), command, "many", steps=4)
        trainer.train()
        trainer.close()
        for step in (2, 4):
            one, many = (tiny_run.exported(tmp_path / f"{command}_{name}", step) for name in ("one", "many"))
            for name, tensor in one.items():
                torch.testing.assert_close(many[name], tensor, atol=1e-5, rtol=0, msg=f"{command} {step}: {name}")
        steps = [step for step, _ in tiny_run.metrics_of(tmp_path / f"{command}_many", "loss/total")]
        assert steps == [1, 2, 3, 4]
    close_world()
