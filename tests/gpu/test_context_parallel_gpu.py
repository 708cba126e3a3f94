"""Rows shared by two GPUs over NCCL: updates against one process in float32, against whole rows in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed.test_context_parallel import CASES, case_of
from distributed.test_expert_parallel import two_updates
from families import make_family
from gpu.test_expert_parallel_gpu import compare
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.gpu2


def two_gpus(root: str) -> None:
    from lightrl.distributed.mesh import close_world

    for name in CASES:
        changes: dict[str, Any] = {"context_parallel": 2}
        found = two_updates(Path(root), {**case_of(name), **changes}, "cuda")
        compare(found, load_file(Path(root) / f"{name}.safetensors"), 1e-4, name)
    # Kernels, with fewer heads; attention without experts, whose tokens would change them where numbers are rounded.
    for family in ("llama", "qwen3_5_text"):
        case = {"model": family, "compute_dtype": "bfloat16", "activation_checkpointing": True}
        shared, plain = (two_updates(Path(root), {**case, "context_parallel": n}, "cuda") for n in (2, 1))
        firsts = ({k: v for k, v in results.items() if k.startswith("0.")} for results in (shared, plain))
        compare(*firsts, 5e-2, f"{family} in bfloat16")
    close_world()


def test_two_gpus_equal_one_process(tmp_path: Path, run_distributed) -> None:
    from lightrl.distributed.mesh import close_world

    try:
        for name in CASES:
            family = case_of(name)["model"]
            make_family(tmp_path / family, family)
            save_file(two_updates(tmp_path, case_of(name)), tmp_path / f"{name}.safetensors")
    finally:
        close_world()
    print(run_distributed(two_gpus, 2, tmp_path, timeout=300))
