"""A mixture of experts with a real model's weights: what it computes, and routed rows packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMOLLM2
from real_moe import CHOSEN, EXPERTS, make_real_moe
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.config.schema import ModelConfig
from lightrl.distributed.mesh import init_world
from lightrl.models.attention import Segments
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import Policy

pytestmark = pytest.mark.model
TEXTS = ("The capital of France is Paris, and the largest city in Germany is", "What is 4 - 1? The answer is 3.")


def stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_equal_experts_are_the_dense_model_and_unlike_ones_are_not(tmp_path: Path) -> None:
    ids = AutoTokenizer.from_pretrained(SMOLLM2)(TEXTS[0], return_tensors="pt").input_ids
    dense = stock(SMOLLM2)
    del dense.model.layers[3:]
    dense.config.num_hidden_layers = 3
    equal = stock(make_real_moe(SMOLLM2, tmp_path / "equal", noise=0.0, layers=3))
    unlike = stock(make_real_moe(SMOLLM2, tmp_path / "unlike", noise=0.3, layers=3))
    with torch.no_grad():
        expected, same, other = (m(ids, use_cache=False).logits for m in (dense, equal, unlike))
    torch.testing.assert_close(same, expected, atol=2e-4, rtol=1e-4)
    assert (other - expected).abs().mean() > 0.1


def test_packed_and_routed_as_stock(tmp_path: Path) -> None:
    folder = make_real_moe(SMOLLM2, tmp_path / "model", noise=0.3, layers=4)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    rows = [tokenizer(text).input_ids for text in TEXTS]
    samples = [
        TrainSample(
            group_index=i, index=0, prompt=row[:3], response=row[3:], loss_mask=[1] * (len(row) - 3),
            rollout_logprobs=None, advantage=1.0,
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip
    policy = Policy.load(ModelConfig(path=str(folder), compute_dtype="float32"), init_world("cpu"))
    assert policy.module.packed
    chosen: list[torch.Tensor] = []
    for layer in policy.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[-1]))
    batch = pack([[s] for s in samples], [[1.0], [1.0]])
    assert Segments.from_microbatch(batch, torch.device("cpu")).max_seqlen_q == max(map(len, rows)) - 1
    found, _ = policy(batch, 1.0)
    model = stock(folder)
    expected = []
    for row in rows:
        with torch.no_grad():
            logprobs = model(torch.tensor([row]), use_cache=False).logits[0].log_softmax(-1)
        expected.append(logprobs[2:-1].gather(1, torch.tensor(row[3:])[:, None])[:, 0])
    torch.testing.assert_close(found.detach(), torch.cat(expected), atol=1e-4, rtol=1e-4)
    assert len(torch.cat(chosen).unique()) == EXPERTS
    for indices in chosen:  # a random router sends real tokens to different ones
        assert indices.shape[1] == CHOSEN
        assert len(indices.unique()) > CHOSEN
