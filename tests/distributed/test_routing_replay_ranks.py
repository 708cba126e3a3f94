"""Routing replay on two gloo ranks against one process: records travel with their samples, whatever is spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from distributed.test_expert_parallel import Run, assert_close, assert_same_runs, make_run_folder
from distributed.test_gradients import make_samples
from families import make_family
from safetensors.torch import load_file, save_file
from torch import Tensor

CASES: dict[str, dict[str, Any]] = {
    "engine": {
        "model": "glm4_moe",
        "mode": "rollout",
        "max_tokens": 24,
    },  # a rank may have no sample
    "engine_alone": {"mode": "rollout", "share": False, "activation_checkpointing": True, "minibatches": 2},
    "trainer": {"mode": "trainer", "activation_checkpointing": True, "max_tokens": 30, "minibatches": 2},
    "long_rows": {"mode": "rollout", "share": False, "max_tokens": 30, "minibatches": 2},
}
TWO: dict[str, dict[str, Any]] = {
    "engine": {},
    "engine_alone": {"expert_parallel": 2},
    "trainer": {"expert_parallel": 2, "context_parallel": 2},
    "long_rows": {"context_parallel": 2},
}


RUN: dict[str, Any] = {
    "run": {"steps": 2},
    "correction": {"routing_replay": "rollout"},
    "algorithm": {"minibatches_per_step": 2, "kl_coef": 0.1},
    "rollout": {"prompts_per_step": 8, "group_size": 3},
    "parallel": {"max_tokens_per_microbatch": 64},
    "checkpoint": {"hf_every": 1, "keep_last": 9},
}


def train(folder: Path) -> None:
    """What the embedded engine chose travels with its answers."""
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(folder, **RUN))
    trainer.train()
    trainer.close()


def results_of(models: Path, case: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients and norms of a step's updates, and its weights; every sample has random routing of its own."""
    from lightrl.config.schema import AlgorithmConfig, CorrectionConfig
    from lightrl.observe.metrics import Tally
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.objective import Objective
    from lightrl.training.replay import old_logprobs
    from lightrl.training.update import update

    run = Run(models, case)
    world, policy, shape = run.world, run.policy, run.policy.routing_shape
    assert shape is not None
    correction = CorrectionConfig(routing_replay=case["mode"])
    samples = make_samples()
    for sample in samples if case["mode"] == "rollout" else ():
        rows = len(sample.prompt) + len(sample.response) - 1
        g = torch.Generator().manual_seed(100 * sample.group_index + sample.index)
        chosen = torch.rand(rows, len(shape.layers), shape.num_experts, generator=g).topk(shape.top_k).indices
        if case.get("share", True):  # which of a group is first depends on the plan
            same = torch.Generator().manual_seed(sample.group_index)
            random = torch.rand(len(sample.prompt), len(shape.layers), shape.num_experts, generator=same)
            chosen[: len(sample.prompt)] = random.topk(shape.top_k).indices
        sample.rollout_routing = shape.compact(chosen)
    batch = build_minibatches(
        samples[world.rank :: world.size],
        world,
        minibatches=case.get("minibatches", 1),
        max_tokens=case.get("max_tokens", 1000),
        share_prompts=case.get("share", True),
        skip_zero_advantage=False,
        aggregation="token_mean",
        constant_length=16,
        cost=CostModel.from_config(policy.hf_config),
    )
    tally, objective = Tally(), Objective.of(AlgorithmConfig(entropy_coef=0.01), correction)
    for microbatch in (m for minibatch in batch for m in minibatch):
        if len(batch) > 1:
            microbatch.old_logprobs = old_logprobs(policy, microbatch, 0.9, correction, tally)
    found: dict[str, Tensor] = {}
    for number, minibatch in enumerate(batch):
        result = update(
            policy, run.optimizer, run.schedule, minibatch, objective, temperature=0.9, max_grad_norm=0.02, tally=tally
        )
        parts = {"norm": torch.tensor(result.grad_norm), **run.gradients}
        found |= {f"{number}.{name}": tensor for name, tensor in parts.items()}
    metrics = Tally.merged(world.gather(tally.to_dict())).result()
    names = ["loss/total"]
    if not case.get("share", True):  # how often a prompt is fed depends on the plan
        names += [name for name in metrics if name.startswith("mismatch/routing")]
    found |= {name: torch.tensor(metrics[name]) for name in names}
    return run.cleaned(found) | run.state()


def two_ranks(root: str) -> None:
    from lightrl.distributed.mesh import close_world

    models = Path(root)
    for name, changes in TWO.items():
        expected = load_file(models / f"{name}.safetensors")
        assert_close(results_of(models, {**CASES[name], **changes}), expected, name)
    train(models / "two")
    close_world()


def test_two_ranks_equal_one(tmp_path: Path, run_distributed) -> None:
    from lightrl.distributed.mesh import close_world

    for family in ("qwen3_moe", "glm4_moe"):
        make_family(tmp_path / family, family)
    try:
        for name, case in CASES.items():
            results = results_of(tmp_path, case)
            assert 0.3 < results.get("mismatch/routing_diff", torch.tensor(1.0)) <= 1.0
            save_file(results, tmp_path / f"{name}.safetensors")
        plain = results_of(tmp_path, {**CASES["engine"], "mode": "none"})
        assert (plain["0.norm"] - load_file(tmp_path / "engine.safetensors")["0.norm"]).abs() > 1e-4
        for name in ("alone", "two"):
            make_run_folder(tmp_path / name)
        train(tmp_path / "alone")
    finally:
        close_world()
    run_distributed(two_ranks, 2, tmp_path, timeout=240)
    assert_same_runs(tmp_path / "two", tmp_path / "alone")
    names = ("mismatch/routing_diff", "routing/missing_share", "mismatch/logprob_abs_diff_max")
    for name in ("alone", "two"):
        for _, other, missing, largest in tiny_run.metrics_of(tmp_path / name, *names):
            assert (other, missing) == pytest.approx((0.0, 0.0), abs=0.02)
            assert largest < 1e-4
