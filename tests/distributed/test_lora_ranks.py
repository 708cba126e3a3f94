"""Low-rank adapters on two gloo ranks against one: gradients, what engines get, checkpoints and exports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_family
from test_gradients import make_models, make_samples
from torch import Tensor

pytest.importorskip("peft")

CASES: dict[str, dict[str, Any]] = {
    "llama": {"rank": 3},  # cut unevenly
    "narrow": {"rank": 1, "model": "qwen3_untied", "max_tokens": 24},  # one rank holds no part of any A
    "checkpointing": {"rank": 2, "activation_checkpointing": True, "kl": True},
    "replicated": {"rank": 2, "shard_size": 1},
    "experts": {"rank": 2, "model": "qwen3_moe", "expert_parallel": 2, "max_tokens": 24},
    "rows": {"rank": 2, "context_parallel": 2},
    "half": {"rank": 4, "model": "half", "compute_dtype": "bfloat16"},
}


def run_case(models: Path, out: Path, case: dict[str, Any], spread: bool) -> dict[str, Tensor]:
    """An update's gradients, then everything that leaves the policy after it; exports go to `out`."""
    from lora_values import set_values

    from lightrl.config.schema import AlgorithmConfig, CheckpointConfig, LoraConfig, ModelConfig, OptimConfig
    from lightrl.distributed.mesh import init_world
    from lightrl.models.export import export_hf
    from lightrl.models.export_adapter import export_adapter
    from lightrl.models.names import adapter_tensors
    from lightrl.models.shards import whole_tensor
    from lightrl.observe.metrics import Tally
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.checkpoint import Checkpointer
    from lightrl.training.objective import Objective
    from lightrl.training.optim import build_optimizer, build_schedule
    from lightrl.training.policy import AdaptersOff, Policy
    from lightrl.training.update import update
    from lightrl.wrappers import clean_name

    placed = {k: case[k] for k in ("shard_size", "expert_parallel", "context_parallel") if spread and k in case}
    world = init_world("cpu", placed.pop("shard_size", None), **placed)
    model = ModelConfig(
        path=str(models / case.get("model", "llama")),
        compute_dtype=case.get("compute_dtype", "float32"),
        activation_checkpointing=case.get("activation_checkpointing", False),
    )
    policy = Policy.load(model, world, adapters=LoraConfig(rank=case["rank"], alpha=4.0, sync="merged"))
    found = {f"start.{n}": whole_tensor(t.detach()).clone() for n, t in adapter_tensors(policy.model).items()}
    set_values(policy.model)
    (minibatch,) = build_minibatches(
        make_samples()[world.rank :: world.size],
        world,
        minibatches=1,
        max_tokens=case.get("max_tokens", 1000),
        share_prompts=True,
        skip_zero_advantage=False,
        aggregation="token_mean",
        constant_length=16,
        cost=CostModel.from_config(policy.hf_config),
    )
    for microbatch in minibatch if case.get("kl") else ():
        microbatch.ref_logprobs = AdaptersOff(policy).logprobs(microbatch, 0.9)
    config = OptimConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
    optimizer = build_optimizer(policy.parameters(), config)

    def keep(*_: Any) -> None:
        named = {clean_name(n): p for n, p in policy.model.named_parameters() if p.grad is not None}
        found.update({f"grad.{n}": whole_tensor(p.grad).clone() for n, p in named.items()})

    optimizer.register_step_pre_hook(keep)
    objective = Objective.of(AlgorithmConfig(entropy_coef=0.01, kl_coef=0.1 * case.get("kl", False)))
    result = update(
        policy, optimizer, build_schedule(optimizer, config, 2), minibatch, objective,
        temperature=0.9, max_grad_norm=0.02, tally=Tally(),
    )  # fmt: skip
    found["norm"] = torch.tensor(result.grad_norm)
    found |= {f"lent.{name}": tensor.clone() for name, tensor in policy.lend()}
    policy.reclaim()
    streamed = {name: tensor for group in policy.stream() for name, tensor in group}
    assert [(n, tuple(t.shape), t.dtype) for n, t in streamed.items()] == policy.stream().layout()
    found |= {f"streamed.{name}": tensor.clone() for group in policy.stream() for name, tensor in group}
    export_hf(policy.module, out / "merged", source=policy.source, dtype=None, is_main=world.is_main)
    export_adapter(policy.module, out / "adapter", base="", is_main=world.is_main)
    checkpointer = Checkpointer(out / "checkpoints", CheckpointConfig(async_save=False))
    checkpointer.save(1, model=policy.module, optimizer=optimizer, extra={})
    values = {n: whole_tensor(t.detach()).clone() for n, t in adapter_tensors(policy.model).items()}
    set_values(policy.model, seed=8)
    checkpointer.load(out / "checkpoints" / "step_000001", policy.module, optimizer)
    again = {n: whole_tensor(t.detach()) for n, t in adapter_tensors(policy.model).items()}
    assert all(torch.equal(again[name], tensor) for name, tensor in values.items())
    found |= {f"value.{name}": tensor for name, tensor in values.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in found.items()}


def assert_close(mine: Tensor, expected: Tensor, what: str, *, case: dict[str, Any], exact: bool = False) -> None:
    atol, rtol = (5e-3, 0.05) if "compute_dtype" in case else (1e-5, 1e-4)
    if exact:
        atol = rtol = 0.0
    torch.testing.assert_close(mine, expected, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}")


def run_cases(folder: str) -> None:
    """On each of two ranks: all that a single process has, and its checkpoint read by both."""
    from safetensors.torch import load_file

    for name, case in CASES.items():
        found = run_case(Path(folder, "models"), Path(folder, f"{name}_two"), case, spread=True)
        expected = load_file(Path(folder, f"{name}.safetensors"))
        assert found.keys() == expected.keys(), (name, found.keys() ^ expected.keys())
        for key, tensor in expected.items():
            assert_close(found[key], tensor, f"{name}: {key}", exact=key.startswith("start."), case=case)
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one(tmp_path, run_distributed):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from lightrl.distributed.mesh import close_world

    make_models(tmp_path / "models")
    make_family(tmp_path / "half", "qwen3")
    AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "models" / "half"
    )
    try:
        for name, case in CASES.items():
            found = run_case(tmp_path / "models", tmp_path / f"{name}_one", case, spread=False)
            assert all(t.abs().max() > 0 for key, t in found.items() if key.startswith("grad."))
            save_file(found, tmp_path / f"{name}.safetensors")
    finally:
        close_world()
    run_distributed(run_cases, 2, tmp_path)
    for name, case in CASES.items():
        for file in ("merged/model.safetensors", "adapter/adapter_model.safetensors"):
            one, two = (load_file(tmp_path / f"{name}_{ranks}" / file) for ranks in ("one", "two"))
            assert one.keys() == two.keys()
            for key, tensor in one.items():
                assert_close(two[key], tensor, f"{name}: {file}: {key}", case=case)


if __name__ == "__main__":
    run_cases(*sys.argv[1:])
