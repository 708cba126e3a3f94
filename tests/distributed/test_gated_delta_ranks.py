"""Gated delta layers over two gloo ranks against one process; activation checkpoints on and off."""

from __future__ import annotations

from pathlib import Path

import torch
from families import make_family
from test_gradients import gradients

CASES = {
    "shared": {"model": "qwen3_next"},
    "small_microbatches": {"model": "qwen3_5_text", "max_tokens": 24},  # some are empty on one of the ranks
    "one_sample": {"model": "qwen3_5_text", "only": 1},
    "checkpointing": {"model": "qwen3_5_moe_text", "activation_checkpointing": True},
    "replicated": {"model": "qwen3_5_text", "shard_size": 1},
    "bfloat16": {"model": "qwen3_next", "compute_dtype": "bfloat16", "activation_checkpointing": True},
}


def run_cases(models: str, reference: str) -> None:
    """On each of two ranks: every case's gradients equal the single process's."""
    from safetensors.torch import load_file

    for name, case in CASES.items():
        found, _ = gradients(Path(models), {"aggregation": "token_mean", **case})
        expected = load_file(f"{reference}/{name}.safetensors")
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            if name == "bfloat16":  # other shapes of products round otherwise
                assert (found[parameter] - gradient).norm() < 0.1 * gradient.norm(), parameter
                continue
            torch.testing.assert_close(found[parameter], gradient, atol=1e-5, rtol=1e-5, msg=f"{name}: {parameter}")
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one(tmp_path, run_distributed):
    from safetensors.torch import save_file

    from lightrl.distributed.mesh import close_world

    models = tmp_path / "models"
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    for family in {case["model"] for case in CASES.values()}:
        make_family(models / family, family, layer_types=kinds, num_hidden_layers=3)
    try:
        for name, case in CASES.items():
            # the plain way: one shard, nothing recomputed
            plain = {k: v for k, v in case.items() if k not in ("shard_size", "activation_checkpointing")}
            whole, _ = gradients(models, {"aggregation": "token_mean", **plain})
            assert any(n.endswith("linear_attn.A_log") and g.abs().max() > 0 for n, g in whole.items())
            save_file({k: v.contiguous() for k, v in whole.items()}, tmp_path / f"{name}.safetensors")
            if "activation_checkpointing" in case:
                again, _ = gradients(models, {"aggregation": "token_mean", **case})
                for parameter, gradient in whole.items():
                    torch.testing.assert_close(again[parameter], gradient, atol=1e-6, rtol=1e-5, msg=parameter)
    finally:
        close_world()
    run_distributed(run_cases, 2, models, tmp_path)
