"""Gated delta layers on a card: plain torch against the CPU, and whatever kernels were chosen against plain torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightrl.kernels import gated_delta
from lightrl.kernels.gated_delta import Chains, DeltaInputs
from lightrl.models import fast_delta

pytestmark = pytest.mark.gpu
LENGTHS, PARENTS = (70, 5, 257, 1, 63, 64), (-1, 0, 0, -1, -1, 4)
NAMES = ("mixed", "weight", "log_decay", "beta")


def example(dtype: torch.dtype) -> DeltaInputs:
    g = torch.Generator().manual_seed(0)
    rows = sum(LENGTHS)
    return DeltaInputs(
        mixed=torch.randn(rows, 512, generator=g).to(dtype),
        weight=torch.randn(512, 4, generator=g).to(dtype),
        bias=None,
        activation=F.silu,
        log_decay=-0.05 * torch.rand(rows, 4, generator=g),
        beta=torch.rand(rows, 4, generator=g).to(dtype),
        key_heads=2,
        key_dim=64,
        value_heads=4,
        value_dim=64,
    )


def moved(inputs: DeltaInputs, device: str) -> DeltaInputs:
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return replace(inputs, **{n: t.to(device) for n, t in tensors.items() if isinstance(t, torch.Tensor)})


def results(mix: Any, inputs: DeltaInputs, device: str, parents: tuple[int, ...]) -> list[torch.Tensor]:
    inputs = moved(inputs, device)
    leaves = [getattr(inputs, name).requires_grad_() for name in NAMES]
    out = mix(inputs, Chains.build(LENGTHS, parents, torch.device(device)))
    push = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [t.detach().float().cpu() for t in (out, *torch.autograd.grad(out, leaves, push))]


@pytest.mark.parametrize("parents", [PARENTS, (-1,) * 6])
def test_plain_torch_equals_the_cpu(parents: tuple[int, ...]) -> None:
    inputs = example(torch.float32)
    pairs = zip(
        results(gated_delta.mix, inputs, "cuda", parents), results(gated_delta.mix, inputs, "cpu", parents), strict=True
    )
    for found, expected in pairs:
        assert (found - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("parents", [PARENTS, (-1,) * 6])
def test_the_chosen_kernels_equal_plain_torch(parents: tuple[int, ...]) -> None:
    """With flash-linear-attention where it is installed and right, else trivially."""
    inputs = example(torch.bfloat16)
    mix = fast_delta.choose(torch.device("cuda"), torch.bfloat16)
    pairs = zip(results(mix, inputs, "cuda", parents), results(gated_delta.mix, inputs, "cuda", parents), strict=True)
    for found, expected in pairs:
        assert (found - expected).norm() / expected.norm() < 0.03


def test_a_row_at_a_time_equals_all_at_once() -> None:
    inputs = moved(example(torch.float32), "cuda")
    length = LENGTHS[0]
    rows = [replace(inputs, **{n: getattr(inputs, n)[:length] for n in NAMES if n != "weight"})]
    expected, ends = gated_delta.mix_with_ends(rows[0], Chains.build([length], [-1], torch.device("cuda")))
    assert ends is not None
    recent, state = torch.zeros(1, 3, 512, device="cuda"), torch.zeros_like(ends)
    for t in range(length):
        row = replace(inputs, **{n: getattr(inputs, n)[t : t + 1] for n in NAMES if n != "weight"})
        out = gated_delta.step(row, recent, state)
        torch.testing.assert_close(out[0], expected[t], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, ends, atol=1e-4, rtol=1e-4)
