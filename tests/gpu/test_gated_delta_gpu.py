"""Gated delta layers on a card: plain torch against the CPU, our kernels against float64, the chosen against torch.

About a minute on an H200, most of it to compile kernels. `-s` shows the errors.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightrl.kernels import delta, gated_delta, gated_norm
from lightrl.kernels.delta import Heads
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


QWEN = Heads(16, 128, 32, 128)  # Qwen3.5-9B's
PLANS = {"fast": delta.FAST, "kept": replace(delta.FAST, keep=True), "safe": delta.SAFE}


def rule_inputs(chains: Chains, heads: Heads, strength: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, log decays, rates, initial states; gradients of output and ends."""
    g = torch.Generator("cuda").manual_seed(0)
    rows, segments = sum(chains.lengths), len(chains.lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda")

    qk = [normal(rows, heads.key_heads, heads.key_dim).to(dtype) for _ in "qk"]
    v, push = (normal(rows, heads.value_heads, heads.value_dim).to(dtype) for _ in range(2))
    log_decay = -strength * torch.rand(rows, heads.value_heads, generator=g, device="cuda")
    beta = normal(rows, heads.value_heads).sigmoid().to(dtype)
    initial, push_ends = (normal(segments, heads.value_heads, heads.key_dim, heads.value_dim) for _ in range(2))
    return [*qk, v, log_decay, beta, initial, push, push_ends]


def rule_results(rule: Any, tensors: list[torch.Tensor], chains: Chains, **options: Any) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors[:6]]
    out, ends = rule(*leaves[:5], chains, initial=leaves[5], **options)
    return [out.detach(), ends.detach(), *torch.autograd.grad([out, ends], leaves, tensors[6:])]


@pytest.mark.parametrize("strength", [0.02, 3.0])
@pytest.mark.parametrize(
    ("dtype", "plan", "bound"),
    [
        (torch.bfloat16, "fast", 0.012),
        (torch.bfloat16, "kept", 0.012),
        (torch.bfloat16, "safe", 0.012),
        (torch.float16, "fast", 0.002),
        (torch.float32, "fast", 2e-4),
    ],
)
def test_our_rule_equals_the_recurrence_in_float64(
    dtype: torch.dtype, plan: str, bound: float, strength: float
) -> None:
    """Values, states, all gradients; the same bits twice. Lengths around a chunk's, answers to a shared prompt."""
    chains = Chains.build((1, 63, 64, 65, 257, 70, 5, 40), (-1, -1, -1, -1, -1, -1, 5, 5), torch.device("cuda"))
    width = 64 if dtype == torch.float32 else 128  # three products for each: half the width compiles sooner
    tensors = rule_inputs(chains, Heads(2, width, 4, width), strength, dtype)
    found = rule_results(delta.gated_delta_rule, tensors, chains, want_ends=True, plan=PLANS[plan])
    again = rule_results(delta.gated_delta_rule, tensors, chains, want_ends=True, plan=PLANS[plan])
    exact = rule_results(delta.gated_delta_recurrence, [t.double() for t in tensors], chains)
    names = ("output", "ends", "q", "k", "v", "log_decay", "beta", "initial")
    errors = {n: relative(a, b) for n, a, b in zip(names, found, exact, strict=True)}
    print({n: f"{e:.1e}" for n, e in errors.items()})
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    errors["log_decay"] /= 2  # a sum over rows of differences
    assert max(errors.values()) < bound


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


LAYOUTS = {
    "one": ((16384,), (-1,)),
    "ragged": ((1, 4095, 63, 2049, 513, 6000, 64, 3599), (-1,) * 8),
    "shared": ((1000, *(500,) * 6) * 4, tuple(p for s in range(4) for p in (-1, *(7 * s,) * 6))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_mixing_at_a_real_shape(layout: str) -> None:
    """16k rows of Qwen3.5-9B's heads in bfloat16: no further from float32 arithmetic than rounding of the factors.

    Plain torch in float32 stands for the exact result; in bfloat16 it rounds only what goes in and out, about 0.002.
    """
    lengths, parents = LAYOUTS[layout]
    device = torch.device("cuda")
    chains = Chains.build(lengths, parents, device)
    half = fast_delta.example(chains, device, torch.bfloat16, QWEN)
    push = torch.randn(sum(lengths), QWEN.value_heads, QWEN.value_dim, device=device)
    everything = {}
    for name, mix, dtype in (
        ("exact", gated_delta.mix, torch.float32),
        ("plain", gated_delta.mix, torch.bfloat16),
        ("ours", delta.mix, torch.bfloat16),
    ):
        own = {n: getattr(half, n).detach().to(dtype).requires_grad_() for n in NAMES if n != "log_decay"}
        inputs = replace(half, **own)
        out = mix(inputs, chains)
        grads = torch.autograd.grad(out, [getattr(inputs, n) for n in NAMES], push.to(dtype))
        everything[name] = [t.float() for t in (out.detach(), *grads)]
    for number, name in enumerate(("output", *NAMES)):
        plain, ours = (relative(everything[who][number], everything["exact"][number]) for who in ("plain", "ours"))
        print(f"{layout}, {name}: plain torch {plain:.1e}, ours {ours:.1e}")
        assert ours < 0.02
        assert ours < 6 * plain + 2e-3


def test_gated_norm_against_float64() -> None:
    x, z = (torch.randn(4096, 128, device="cuda").bfloat16() for _ in "xz")
    weight, push = torch.rand(128, device="cuda").bfloat16(), torch.randn(4096, 128, device="cuda").bfloat16()
    pairs = []
    for norm, dtype in ((gated_norm.gated_norm, torch.bfloat16), (gated_norm.gated_norm_reference, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, z, weight)]
        out = norm(*leaves, 1e-6)
        pairs.append([out, *torch.autograd.grad(out, leaves, push.to(dtype))])
    for found, exact in zip(*pairs, strict=True):
        assert relative(found.detach(), exact.detach()) < 0.004


def test_our_kernels_are_chosen() -> None:
    """For the sizes of Qwen3.5: the fast plan is right on this card."""
    chosen = fast_delta.find_own(torch.device("cuda"), torch.bfloat16, QWEN)
    assert chosen is not None
    assert chosen.keywords["plan"] is delta.FAST  # type: ignore[attr-defined]


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
