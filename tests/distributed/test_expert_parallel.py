"""Experts spread over gloo ranks against one process that holds them all: gradients, updates, files, engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_family
from test_gradients import make_samples

CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"max_tokens": 24},  # a rank has a single row without loss at times
    "recomputed": {"model": "glm4_moe", "activation_checkpointing": True, "max_tokens": 30},
    "one_sample": {"model": "gpt_oss", "only": 1, "activation_checkpointing": True},  # one rank has all there is
    "idle": {"model": "idle", "activation_checkpointing": True},  # all tokens go to experts of the first rank
    "delta": {"model": "qwen3_next", "max_tokens": 24},
}
FOUR: dict[str, dict[str, Any]] = {
    "two_by_two": {"as": "qwen3_moe", "expert_parallel": 2},
    "all_four": {"as": "recomputed", "expert_parallel": 4},  # one expert a rank
    "replicated": {"as": "recomputed", "expert_parallel": 2, "shard_size": 2},
    "cut": {"as": "one_sample", "expert_parallel": 1},
}


def make_models(folder: Path) -> None:
    for family in ("qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next", "deepseek_v3"):
        make_family(folder / family, family)
    make_family(folder / "idle", "glm4_moe", n_routed_experts=8)
    from safetensors.torch import load_file, save_file

    file = folder / "idle" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[:] = torch.tensor([9.0, 9.0, 9.0] + [0.0] * 5)
    save_file(tensors, file, metadata={"format": "pt"})


def updates(models: Path, case: dict[str, Any], device: str = "cpu") -> dict[str, torch.Tensor]:
    """Loss, gradients, their norm and the weights after each of two clipped updates, whole."""
    from lightrl.config.schema import AlgorithmConfig, ModelConfig, OptimConfig
    from lightrl.distributed.mesh import init_world
    from lightrl.models.load import whole_tensor
    from lightrl.observe.metrics import Tally
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.optim import build_optimizer, build_schedule
    from lightrl.training.policy import Policy
    from lightrl.training.update import update
    from lightrl.wrappers import clean_name

    world = init_world(device, case.get("shard_size"), expert_parallel=case.get("expert_parallel", 1))
    model = ModelConfig(
        path=str(models / case.get("model", "qwen3_moe")),
        compute_dtype=case.get("compute_dtype", "float32"),
        activation_checkpointing=case.get("activation_checkpointing", False),
    )
    policy = Policy.load(model, world)
    config = OptimConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
    optimizer = build_optimizer(policy.parameters(), config)
    schedule = build_schedule(optimizer, config, 2)
    gradients: dict[str, torch.Tensor] = {}
    results: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in policy.module.named_parameters():
            gradients[clean_name(name)] = whole_tensor(parameter.grad).clone().cpu()

    optimizer.register_step_pre_hook(keep)
    for number in range(2):
        samples = make_samples(case.get("only"))
        (minibatch,) = build_minibatches(
            samples[world.rank :: world.size],
            world,
            minibatches=1,
            max_tokens=case.get("max_tokens", 1000),
            share_prompts=True,
            skip_zero_advantage=False,
            aggregation="token_mean",
            constant_length=16,
            cost=CostModel.from_config(policy.hf_config),
        )
        tally = Tally()
        result = update(
            policy, optimizer, schedule, minibatch, AlgorithmConfig(entropy_coef=0.01),
            temperature=0.9, max_grad_norm=0.02, tally=tally,
        )  # fmt: skip
        assert result.stepped
        metrics = Tally.merged(world.gather(tally.to_dict())).result()
        results[f"{number}.norm"] = torch.tensor(result.grad_norm)
        results[f"{number}.loss"] = torch.tensor(metrics["loss/total"])
        results |= {f"{number}.grad.{name}": gradient for name, gradient in gradients.items()}
        policy.reclaim()
        for name, parameter in policy.module.named_parameters():
            results[f"{number}.{clean_name(name)}"] = whole_tensor(parameter.detach()).clone().cpu()
    return results
