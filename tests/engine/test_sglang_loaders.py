"""What a rehearsal learns from SGLang's own loaders, bit by bit, on tiny models of the real SGLang (on a CPU)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="sglang is not installed here: make test-sglang-cpu"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this SGLang is one for GPUs"),
]


FP8_PARAMETERS = {"qwen2": 8, "qwen3": 8, "qwen3_moe": 8, "glm4_moe": 10, "deepseek_v3": 10, "glm4_moe_lite": 10}
"""Of two layers: projections, as SGLang fuses them, and experts."""


def test_values_arrive_where_sglangs_own_loaders_put_them(tmp_path: Path) -> None:
    """Dense models, mixtures of experts, MLA, biases and sinks; whole, and as a rank of two of either kind; in FP8 too,
    where what arrives must also stand for the bfloat16 weights."""
    script = Path(__file__).with_name("sglang_loaders.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = {r.pop("case"): r for r in map(json.loads, (li for li in done.stdout.splitlines() if li[:1] == "{"))}
    assert len(reports) == 47
    for case, report in reports.items():
        derived = report.pop("derived", [])
        assert len(derived) == (4 if "deepseek" in case or "lite" in case else 0), (case, report)
        filled = report.pop("filled", None)
        width = 256 if "fp8" in case else 32
        padding = 0 if "tp0" in case else 62 * width * (1 if "llama" in case else 2)  # 192 rows for 130
        zeroed = 2 * 4 * 32 if case.startswith("gpt_oss tp1") else 0  # the experts' bias is the first rank's to add
        cache = 0  # scales of an FP8 KV cache, where SGLang has them: two in each layer, MLA four
        if "fp8" in case:
            cache = 8 if derived else 4 * case.startswith("qwen2")
            assert report.pop("far off") == []
            assert report.pop("fp8") == FP8_PARAMETERS[case.split()[0]] - 2 * case.startswith("qwen3 fp8 tp")
        assert filled == padding + zeroed + cache, (case, report)
        assert report == {"wrong": [], "moved": [], "differing": {}, "not compared": 0}, case
