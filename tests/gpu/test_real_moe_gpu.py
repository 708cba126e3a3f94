"""On CUDA with SGLang: a mixture of experts with a real model's weights (needs `lightrl fetch smollm2-135m`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from conftest import SMOLLM2
from real_moe import make_real_moe, train_with_sglang

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]


def test_a_real_mixture_routes_as_in_sglang(tmp_path: Path) -> None:
    """bfloat16: near ties route otherwise now and then, which a mean over 96 tokens forgives."""
    model = make_real_moe(SMOLLM2, tmp_path / "model", noise=0.3)
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "What is 4 - 1?", "label": "3"}\n{"input": "What is 2 + 5?", "label": "7"}\n')
    for step in train_with_sglang(model, data, tmp_path, "cuda", memory_fraction=0.2):
        print(step["mismatch/logprob_abs_diff"], step["mismatch/logprob_abs_diff_max"])
        assert step["optim/grad_norm"] > 0
        assert step["mismatch/logprob_abs_diff"] < 0.15
