"""Gated delta layers' own kernels in Triton's interpreter: against the recurrence token by token in float64."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightrl.kernels import delta, gated_delta, gated_norm, short_conv
from lightrl.kernels.delta import Heads, Plan
from lightrl.kernels.delta_blocks import Blocks, Tails
from lightrl.kernels.gated_delta import Chains
from lightrl.models import fast_delta

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
NAMES = ("output", "ends", "q", "k", "v", "log_decay", "beta", "initial")


def inputs(chains: Chains, heads: Heads, strength: float, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, log decays, rates and initial states; a step decays by up to e^-strength."""
    torch.manual_seed(0)
    rows = sum(chains.lengths)
    q, k = (torch.randn(rows, heads.key_heads, heads.key_dim).to(dtype) for _ in "qk")
    v = torch.randn(rows, heads.value_heads, heads.value_dim).to(dtype)
    log_decay = -strength * torch.rand(rows, heads.value_heads)
    beta = torch.rand(rows, heads.value_heads).to(dtype)
    initial = torch.randn(len(chains.lengths), heads.value_heads, heads.key_dim, heads.value_dim)
    return [q, k, v, log_decay, beta, initial]


def results(rule: Callable[..., Any], tensors: list[Tensor], chains: Chains, **options: Any) -> list[Tensor]:
    """Output, states at the ends, and gradients of a random projection of both."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, ends = rule(*leaves[:5], chains, initial=leaves[5], **options)
    g = torch.Generator().manual_seed(1)
    push = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) for y in (out, ends)]
    return [out, ends, *torch.autograd.grad([out, ends], leaves, push)]


def compare(found: list[Tensor], expected: list[Tensor], tolerance: float, names: tuple[str, ...] = NAMES) -> None:
    for name, mine, wanted in zip(names, found, expected, strict=True):
        assert mine.shape == wanted.shape, name
        error = float((mine.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())
        assert error < tolerance, f"{name}: {error:.1e}"


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Heads, float, torch.dtype, dict[str, Any]]] = {
    "lengths": ((1, 63, 64, 65, 257), (-1,) * 5, Heads(1, 16, 1, 16), 0.02, torch.float32, {}),
    "strong": ((66,), (-1,), Heads(1, 16, 2, 32), 8.0, torch.float32, {}),
    "shared": ((66, 3, 1, 2), (-1, 0, 0, 2), Heads(1, 32, 1, 16), 0.05, torch.float32, {"plan": delta.SAFE}),
    "half": ((70, 5), (-1, 0), Heads(1, 16, 2, 16), 0.5, torch.float16, {"normalize": False, "plan": Plan(keep=True)}),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES)
def test_rule_equals_the_recurrence(name: str) -> None:
    """Outputs, states and all gradients; shared: prompts, answers and one that continues an answer."""
    lengths, parents, heads, strength, dtype, options = CASES[name]
    chains = Chains.build(lengths, parents, CPU)
    tensors = inputs(chains, heads, strength, dtype)
    if not options.get("normalize", True):
        tensors[1] = F.normalize(tensors[1].float(), dim=-1).to(dtype)
    found = results(delta.gated_delta_rule, tensors, chains, want_ends=True, **options)
    options.pop("plan", None)
    expected = results(delta.gated_delta_recurrence, [t.double() for t in tensors], chains, **options)
    assert [t.dtype for t in found[2:]] == [t.dtype for t in tensors]
    compare(found, expected, TOLERANCE[dtype])
    assert not found[-1][torch.tensor(parents) >= 0].any()  # they start from their prompts' states


@pytest.mark.interpreter
@pytest.mark.parametrize("keep", [False, True])
def test_in_a_block_that_is_computed_again(keep: bool) -> None:
    chains = Chains.build((3, 2), (-1, 0), CPU)
    tensors = inputs(chains, Heads(1, 16, 1, 16), 0.05, torch.float32)

    def again(*leaves: Any, **options: Any) -> Any:
        return checkpoint(partial(delta.gated_delta_rule, **options), *leaves, use_reentrant=False)

    options = {"want_ends": True, "plan": Plan(keep=keep)}
    expected = results(delta.gated_delta_rule, tensors, chains, **options)
    for mine, wanted in zip(results(again, tensors, chains, **options), expected, strict=True):
        assert torch.equal(mine, wanted)


def test_the_recurrence_equals_the_plain_path() -> None:
    """Which is compared with transformers' in test_gated_delta.py."""
    chains = Chains.build((66, 3, 1, 65, 2), (-1, 0, 0, 2, -1), CPU)
    *tensors, _ = inputs(chains, Heads(2, 8, 4, 12), 0.05, torch.float32)
    found = delta.gated_delta_recurrence(*(t.double() for t in tensors), chains)
    expected = gated_delta.gated_delta_rule(*tensors, chains, want_ends=True)
    assert expected[1] is not None
    compare([expected[0], expected[1]], list(found), 1e-5, NAMES[:2])


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("lengths", "parents", "taps", "biased"),
    [((18, 5, 1, 2, 1, 3), (-1, 0, 0, -1, 3, 4), 4, True), ((1, 40), (-1, -1), 3, False), ((1,), (-1,), 4, False)],
)
def test_convolution(
    lengths: tuple[int, ...], parents: tuple[int, ...], taps: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of fewer rows than taps, continued and continued again."""
    from lightrl.kernels import short_conv_triton

    monkeypatch.setattr(short_conv_triton, "_PROGRAMS", 2)  # several tiles a program
    torch.manual_seed(0)
    chains, channels = Chains.build(lengths, parents, CPU), 130
    leaves = [torch.randn(sum(lengths), channels), torch.randn(channels, taps)]
    leaves += [torch.randn(channels)] if biased else []
    pairs = []
    for convolve, dtype in ((short_conv.short_convolution, torch.float32), (plain_convolution, torch.float64)):
        own = [t.to(dtype).requires_grad_() for t in leaves]
        out = convolve(own[0], own[1], own[2] if biased else None, chains)
        push = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        pairs.append([out, *torch.autograd.grad(out, own, push)])
    compare(pairs[0], pairs[1], 1e-5, ("output", "x", "weight", "bias")[: len(pairs[0])])


def plain_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, chains: Chains) -> Tensor:
    return gated_delta.short_convolution(x, weight, bias, F.silu, chains)


@pytest.mark.interpreter
def test_the_whole_mixing_equals_plain_torch() -> None:
    chains, heads = Chains.build((5, 3), (-1, 0), CPU), Heads(1, 16, 2, 16)
    pairs = []
    for mix in (delta.mix, gated_delta.mix):
        example = fast_delta.example(chains, CPU, torch.float32, heads)
        out = mix(example, chains)
        leaves = [example.mixed, example.weight, example.log_decay, example.beta]
        pairs.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    compare(pairs[0], pairs[1], 1e-5, ("output", "mixed", "weight", "log_decay", "beta"))


@pytest.mark.interpreter
def test_gated_norm() -> None:
    """Rows that are apart, several tiles a program."""
    torch.manual_seed(0)
    wide, both, weight = torch.randn(300, 24), torch.randn(300, 48), torch.randn(24)
    pairs = []
    for norm, dtype in ((gated_norm._GatedNorm.apply, torch.float32), (gated_norm.gated_norm_reference, torch.float64)):
        x, z, w = leaves = [t.to(dtype).requires_grad_() for t in (wide, both, weight)]
        out = norm(x, z[:, 24:], w, 1e-6)
        push = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        pairs.append([out, *torch.autograd.grad(out, leaves, push)])
    compare(pairs[0], pairs[1], 1e-5, ("output", "x", "gate", "weight"))


def test_tables_by_hand() -> None:
    blocks = Blocks.build((65, 3, 1), (-1, 0, 0), CPU)
    assert (blocks.starts.tolist(), blocks.sizes.tolist()) == ([0, 64, 65, 68], [64, 1, 3, 1])
    assert [wave.tolist() for wave in blocks.waves] == [[0], [1, 2]]
    assert (blocks.parent_slots.tolist(), blocks.child_slots.tolist()) == ([0, -1, -1], [-1, 0, 1])
    assert (blocks.child_offsets.tolist(), blocks.children.tolist()) == ([0, 2, 2, 2], [1, 2])
    # rows 0 1 | 2 | 3 4, each going on from the one before: with three taps row 3 reads 2 and 1, row 4 reads 3 and 2
    tails = Tails.build((2, 1, 2), (-1, 0, 1), 3, CPU)
    lists = {}
    borders = tails.offsets.tolist()
    for row, a, b in zip(tails.rows.tolist(), borders, borders[1:], strict=False):
        lists[row] = list(zip(tails.successors[a:b].tolist(), tails.distances[a:b].tolist(), strict=True))
    assert lists == {0: [(0, 0), (1, 1), (2, 2)], 1: [(1, 0), (2, 1), (3, 2)], 2: [(2, 0), (3, 1), (4, 2)]}


def test_what_the_kernels_take() -> None:
    heads = Heads(16, 128, 32, 128)
    assert delta.takes(heads, 4, F.silu, torch.bfloat16)
    assert delta.takes(heads, 4, torch.nn.SiLU(), torch.float16)
    assert not delta.takes(heads, 4, F.gelu, torch.bfloat16)
    assert not delta.takes(heads, 8, F.silu, torch.bfloat16)
    assert not delta.takes(heads._replace(key_dim=96), 4, F.silu, torch.bfloat16)
    assert not delta.takes(heads._replace(value_heads=24), 4, F.silu, torch.bfloat16)
    assert not delta.takes(heads, 4, F.silu, torch.float64)


def test_the_first_right_plan_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On the sizes that the layers have; wrong and failing ones are left alone, with their reason."""
    heads, tried = Heads(1, 8, 2, 8), []

    def stand_in(example: Any, chains: Chains, plan: Plan) -> Tensor:
        tried.append(plan)
        assert (example.key_heads, example.key_dim, example.value_heads, example.value_dim) == heads
        out = gated_delta.mix(example, chains)
        if plan is delta.FAST:  # right values, a wrong gradient
            return out + (example.log_decay - example.log_decay.detach())[..., None]
        return out

    monkeypatch.setattr(delta, "mix", stand_in)
    found = fast_delta.find_own(CPU, torch.float32, heads)
    assert found is not None
    assert found.keywords == {"plan": delta.SAFE}  # type: ignore[attr-defined]
    assert set(tried) == {delta.FAST, delta.SAFE}
    assert not caplog.records

    def failing(example: Any, chains: Chains, plan: Plan) -> Tensor:
        raise RuntimeError("out of resource:\nshared memory")

    monkeypatch.setattr(delta, "mix", failing)
    with caplog.at_level(logging.WARNING):
        assert fast_delta.find_own(CPU, torch.float32, heads) is None
    assert "fail here (out of resource: shared memory)" in caplog.text
