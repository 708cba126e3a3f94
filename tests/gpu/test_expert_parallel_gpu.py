"""Experts spread over two GPUs with NCCL: the layer against float64, updates against ranks that hold all experts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.distributed as dist
from distributed.test_expert_parallel import (
    CASES,
    METRICS,
    RUN,
    make_run_folder,
    reference,
    sampled,
    two_updates,
    with_parallel,
)
from families import make_family
from torch import Tensor

pytestmark = pytest.mark.gpu2

SIZES = {"hidden": 256, "width": 128, "experts": 16, "choices": 4}
REAL = {"hidden": 2048, "width": 768, "experts": 128, "choices": 8}  # Qwen3-30B-A3B


def example(
    tokens: int, used: int, dtype: torch.dtype, *, hidden: int, width: int, experts: int, choices: int
) -> list[Tensor]:
    """hidden, weights, gate_up, down and indices; experts are the same on every rank, tokens are not.

    Tokens choose among the first `used` experts.
    """
    own = torch.Generator("cuda").manual_seed(dist.get_rank())
    shared = torch.Generator("cuda").manual_seed(7)

    def draw(generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda") / shape[-1] ** 0.25

    gate_up, down = draw(shared, experts, 2 * width, hidden), draw(shared, experts, hidden, width)
    scores = torch.rand(tokens, experts, generator=own, device="cuda")
    scores[:, used:] = -1.0
    weights, indices = scores.topk(choices, dim=-1)
    return [draw(own, tokens, hidden).to(dtype), weights, gate_up.to(dtype), down.to(dtype), indices]


def layer(inputs: list[Tensor], group: Any) -> list[Tensor]:
    """Output, and the gradients of hidden, weights and this rank's experts."""
    from lightrl.kernels.moe import ExpertWeights, swiglu
    from lightrl.models.expert_parallel import make_plan, parallel_experts

    leaves = [t.detach().requires_grad_() for t in inputs[:4]]
    experts = ExpertWeights(gate_up=leaves[2], down=leaves[3])
    if group is None:
        from lightrl.kernels.moe import grouped_experts

        out = grouped_experts(leaves[0], inputs[4], leaves[1], experts, swiglu)
    else:
        plan = make_plan(inputs[4], len(inputs[2]), group)
        out = parallel_experts(leaves[0], leaves[1], experts, swiglu, plan, group)
    push = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(dist.get_rank()), device="cuda")
    return [out.detach(), *torch.autograd.grad(out, leaves, push.to(out.dtype))]


def spread(inputs: list[Tensor]) -> list[Tensor]:
    count = len(inputs[2]) // 2
    mine = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    return [*inputs[:2], inputs[2][mine], inputs[3][mine], inputs[4]]


def check_layer(group: Any) -> None:
    """Against float64 with all experts; the same bits when repeated.

    Odd numbers of tokens; a rank that has none; one whose experts get none.
    """
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for tokens, used in (((257, 63), 15), ((1, 1), 15), ((0, 65), 15), ((65, 33), 8)):
            inputs = example(tokens[dist.get_rank()], used, dtype, **SIZES)
            found, again = (layer(spread(inputs), group) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
            wide = [t.double() if t.is_floating_point() else t for t in inputs]
            exact = layer(wide, None)
            for gradient in exact[3:]:
                dist.all_reduce(gradient)
            count = SIZES["experts"] // 2
            mine = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
            for ours, theirs in zip(found, [*exact[:3], exact[3][mine], exact[4][mine]], strict=True):
                assert ours.shape == theirs.shape
                error = float((ours.double() - theirs).norm())
                assert error <= tolerance * float(theirs.norm()) + 1e-9, (dtype, tokens, ours.shape, error)


def measure_layer(group: Any) -> None:
    """Milliseconds of forward and backward at a real shape, 16k tokens a rank: spread, and with all experts here."""
    inputs = example(16384, 128, torch.bfloat16, **REAL)
    for name, given, over in (("spread", spread(inputs), group), ("all here", inputs, None)):
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            layer(given, over)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        if dist.get_rank() == 0:
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"{name}: {min(times):.1f} ms (of {', '.join(f'{t:.1f}' for t in times)}), {peak:.1f} GiB at most")
        torch.cuda.reset_peak_memory_stats()


def two_gpus(root: str) -> None:
    from safetensors.torch import load_file

    from lightrl.distributed.mesh import close_world, init_world

    models = Path(root)
    world = init_world("cuda", expert_parallel=2)
    assert world.expert_mesh is not None
    group = world.expert_mesh["ep"].get_group()
    check_layer(group)
    measure_layer(group)
    for name, case in CASES.items():
        found = two_updates(models, {**case, "expert_parallel": 2}, "cuda")
        compare(found, load_file(models / f"{name}.safetensors"), 1e-4, name)
    # One mixture, so that what the router sees is the same to the last bit and no token changes its experts.
    for family in ("one_qwen3_moe", "glm4_moe", "one_gpt_oss"):
        case = {"model": family, "compute_dtype": "bfloat16", "activation_checkpointing": True, "max_tokens": 30}
        spread_out, plain = (two_updates(models, {**case, "expert_parallel": n}, "cuda") for n in (2, 1))
        firsts = ({k: v for k, v in results.items() if k.startswith("0.")} for results in (spread_out, plain))
        compare(*firsts, 2e-2, f"{family} in bfloat16")
    close_world()


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, case: str) -> None:
    """Each tensor by its norm; gradients that are nearly nothing, by the largest one's."""
    assert found.keys() == expected.keys()
    largest = max(float(t.norm()) for name, t in expected.items() if ".grad." in name)
    for name, tensor in expected.items():
        floor = 1e-3 * largest if ".grad." in name else 1e-3
        error = float((found[name].float() - tensor.float()).norm())
        assert error <= tolerance * max(float(tensor.float().norm()), floor), (case, name, error)


def test_two_gpus_equal_ranks_that_hold_all_experts(tmp_path: Path, run_distributed) -> None:
    from lightrl.distributed.mesh import close_world

    try:
        reference(tmp_path)
    finally:
        close_world()
    make_family(tmp_path / "one_qwen3_moe", "qwen3_moe", num_hidden_layers=1)
    make_family(tmp_path / "one_gpt_oss", "gpt_oss", num_hidden_layers=1, layer_types=["sliding_attention"])
    print(run_distributed(two_gpus, 2, tmp_path, timeout=300))


def test_runs_are_the_same(tmp_path: Path, run_distributed) -> None:
    """What is sampled and learned with experts spread, with rows shared, with both, and without either."""
    ways = {"plain": {}, "experts": {"expert_parallel": 2}, "rows": {"context_parallel": 2}}
    ways["both"] = ways["experts"] | ways["rows"]
    for name, parallel in ways.items():
        make_run_folder(tmp_path / name)
        sections = with_parallel(RUN, **parallel) | {"run": {"steps": 2, "device": "cuda"}}
        run_distributed(Path(tiny_run.__file__), 2, tmp_path / name, json.dumps(sections))
    for name in ways:
        assert sampled(tmp_path / name, 1) == sampled(tmp_path / "plain", 1)
        ours, plain = (tiny_run.metrics_of(tmp_path / folder, *METRICS)[0] for folder in (name, "plain"))
        assert ours == pytest.approx(plain, rel=1e-3, abs=1e-4)
