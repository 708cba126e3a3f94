"""Routing replay on CUDA: our kernels; the embedded engine and SGLang with a real model's weights (SmolLM2)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMOLLM2
from real_moe import make_real_moe, train_with_sglang
from torch import Tensor
from unit.test_packed_models import TEMPERATURE, build, samples

from lightrl.models import registry
from lightrl.models.attention import Segments
from lightrl.models.routing import Recorder, Replay, Routing, RoutingShape, routed, routers
from lightrl.training.packing import pack
from lightrl.training.policy import PolicyModule, to_device

pytestmark = pytest.mark.gpu


def results(model: Any, device: str, routing: Routing | None, *, fuse: bool) -> list[Tensor]:
    """Log-probs, and the gradients of their sum, on the host."""
    module, device_ = PolicyModule(model.to(device), packed=True, kernels=fuse), torch.device(device)
    module.zero_grad()
    units = samples()
    batch = pack(units, [[1.0] * len(u) for u in units])
    with routed(routers(model), routing):
        logprobs, _ = module(to_device(batch, device_), Segments.from_microbatch(batch, device_), TEMPERATURE)
    logprobs.sum().backward()
    return [logprobs.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_kernels_compute_the_experts_that_are_replayed(family: str) -> None:
    """Random experts, some not recorded, with our kernels in float32 against torch on a CPU; and its own, recorded."""
    found = {}
    for device, fuse in (("cpu", False), ("cuda", True)):
        _, model = build(family)
        registry.prepare_packed(model, fuse=fuse)
        shape = RoutingShape.of(model, 2)
        assert shape is not None
        units = samples()
        rows = len(pack(units, [[1.0] * len(u) for u in units]).input_ids)
        g = torch.Generator().manual_seed(4)
        chosen = torch.rand(rows, len(shape.layers), shape.num_experts, generator=g).topk(shape.top_k).indices
        chosen[::7] = -1
        found[device] = results(model, device, Replay(shape.compact(chosen).to(device)), fuse=fuse)
        if fuse:
            recorder = Recorder(shape)
            recorded = results(model, device, recorder, fuse=fuse)
            replay = Replay(recorder.experts)
            replayed = results(model, device, replay, fuse=fuse)
            assert replay.counts().rows_other == 0
            torch.testing.assert_close(replayed[0], recorded[0], atol=1e-6, rtol=1e-6)
    for ours, plain in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-3, rtol=1e-2)


def mismatches(folder: Path, device: str, **engine: Any) -> dict[str, list[dict[str, float]]]:
    """Two steps of a real mixture without and with the engine's routing, from the same weights."""
    model = make_real_moe(SMOLLM2, folder / "model", noise=0.3)
    data = folder / "data.jsonl"
    data.write_text('{"input": "What is 4 - 1?", "label": "3"}\n{"input": "What is 2 + 5?", "label": "7"}\n')
    return {
        mode: train_with_sglang(
            model,
            data,
            folder / mode,
            device,
            sections={
                "correction": {"routing_replay": mode},
                "rollout": {"group_size": 16, "max_response_tokens": 64},
            },
            **engine,
        )
        for mode in ("none", "rollout")
    }


def check(found: dict[str, list[dict[str, float]]]) -> None:
    """bfloat16: some tokens are routed otherwise, and their experts are what replay takes out of the mismatch."""
    for without, replayed in zip(found["none"], found["rollout"], strict=True):
        names = ("mismatch/logprob_abs_diff", "mismatch/logprob_abs_diff_max", "mismatch/kl_k3")
        print({name: (without[name], replayed[name]) for name in names})
        print({name: value for name, value in replayed.items() if "routing" in name})
        assert replayed["optim/grad_norm"] > 0
        assert replayed["routing/missing_share"] == 0
        assert replayed["mismatch/routing_diff"] > 0
        assert replayed["mismatch/logprob_abs_diff"] < without["mismatch/logprob_abs_diff"]


@pytest.mark.model
def test_the_embedded_engine(tmp_path: Path) -> None:
    check(mismatches(tmp_path, "cuda", kind="transformers"))


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_sglang(tmp_path: Path) -> None:
    """Prompts of a group come from its prefix cache, with their routing."""
    check(mismatches(tmp_path, "cuda", memory_fraction=0.2))
