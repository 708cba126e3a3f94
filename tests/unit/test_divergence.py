"""Divergences of whole distributions: by hand, and by chunks of rows against autograd in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lightrl.kernels.divergence as kernel
from lightrl.kernels.divergence import KINDS, Head, divergence, linear_divergence, linear_top_logprobs


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        # q = 1/2, 1/2 and p = 3/4, 1/4. ln(2/3) / 2 + ln(2) / 2; q (ln(q / p) - D)
        ("reverse_kl", 0.1438410, -0.2746531),
        # 3/4 ln(3/2) + 1/4 ln(1/2); q - p
        ("forward_kl", 0.1308120, -0.25),
        # m = 5/8, 3/8: half of 3/4 ln(6/5) + 1/4 ln(2/3), and of ln(4/5) / 2 + ln(4/3) / 2;
        # q / 2 (ln(q / m) - KL(q || m))
        ("jsd", 0.0338221, -0.0638532),
    ],
)
def test_by_hand(kind: str, value: float, slope: float):
    logits, teacher = torch.zeros(2, requires_grad=True), torch.tensor([0.75, 0.25]).log()
    found = divergence(logits.log_softmax(-1), teacher, kind)
    found.backward()
    assert found.item() == pytest.approx(value, abs=1e-6)
    assert logits.grad.tolist() == pytest.approx([slope, -slope], abs=1e-6)
    # the same from hidden states: logits are the rows of the head
    weight = torch.zeros(2, 1, requires_grad=True)
    head = Head(weight=teacher[:, None])
    one = torch.ones(1, 1)
    chunked = linear_divergence(one, Head(weight=weight), one, head, size=2, kind=kind)
    chunked.sum().backward()
    assert chunked.tolist() == pytest.approx([value], abs=1e-6)
    assert weight.grad.flatten().tolist() == pytest.approx([slope, -slope], abs=1e-6)


def test_jsd_of_other_mixtures_tends_to_the_two_kls():
    """JSD / beta and JSD / (1 - beta) at the ends (GKD); 0.25 by hand on q = 1/2, 1/2 and p = 3/4, 1/4."""
    q, p = torch.tensor([0.5, 0.5], dtype=torch.float64).log(), torch.tensor([0.75, 0.25], dtype=torch.float64).log()
    m = [0.5625, 0.4375]
    by_hand = 0.25 * (0.75 * math.log(0.75 / m[0]) + 0.25 * math.log(0.25 / m[1]))
    by_hand += 0.75 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    assert divergence(q, p, "jsd", 0.25).item() == pytest.approx(by_hand, abs=1e-12)
    small = 1e-5
    assert divergence(q, p, "jsd", small).item() / small == pytest.approx(0.1308120, rel=1e-3)
    assert divergence(q, p, "jsd", 1 - small).item() / small == pytest.approx(0.1438410, rel=1e-3)


def reference(hidden, weight, bias, t_hidden, t_weight, t_bias, *, temperatures, size, kind, beta) -> Tensor:
    """All logits in memory, and the definitions."""
    z = (hidden @ weight.T + bias)[:, :size] / temperatures[0]
    t = (t_hidden @ t_weight.T + t_bias)[:, :size] / temperatures[1]
    q, p = z.softmax(-1), t.softmax(-1)
    if kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    if kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_autograd(monkeypatch: pytest.MonkeyPatch, num_rows: int, dtype: torch.dtype, kind: str):
    """Heads of 97 and 101 words, of which 89 are common; other hidden sizes and temperatures; several chunks."""
    monkeypatch.setattr(kernel, "_CHUNK_BYTES", 4 * 89 * 10)
    g = torch.Generator().manual_seed(num_rows)
    shapes = [(num_rows, 16), (97, 16), (97,), (num_rows, 24), (101, 24), (101,)]
    tensors = [torch.randn(s, generator=g).mul(0.4).to(dtype) for s in shapes]
    cotangent, beta = torch.randn(num_rows, generator=g), 0.3
    mine = [t.clone().requires_grad_() for t in tensors]
    found = linear_divergence(
        mine[0],
        Head(weight=mine[1], bias=mine[2], temperature=0.8),
        mine[3],
        Head(weight=mine[4], bias=mine[5], temperature=1.3),
        size=89,
        kind=kind,
        beta=beta,
    )
    assert found.dtype == torch.float32
    exact = [t.double().requires_grad_() for t in tensors]
    expected = reference(*exact, temperatures=(0.8, 1.3), size=89, kind=kind, beta=beta)
    (found * cotangent).sum().backward()
    (expected * cotangent.double()).sum().backward()
    tolerance = 1e-6 if dtype == torch.float32 else 5e-2  # gradients are rounded to the inputs' precision
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(mine[:3], exact[:3], strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=tolerance, rtol=max(tolerance, 1e-5))
    assert all(t.grad is None for t in mine[3:])


@pytest.mark.parametrize("kind", KINDS)
def test_masked_words_stay_finite(kind: str):
    """Where a head has -inf for a word (a masked vocabulary), of both or of one of the two."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 8, generator=g).requires_grad_(), torch.randn(11, 8, generator=g).requires_grad_()
    both, one = torch.zeros(11), torch.zeros(11)
    both[2:4] = one[2] = float("-inf")
    for mine, theirs in ((both, both), (both, one), (one, both)):
        teacher = Head(weight=torch.randn(11, 8, generator=g), bias=theirs)
        found = linear_divergence(hidden, Head(weight=weight, bias=mine), hidden, teacher, size=11, kind=kind)
        grads = torch.autograd.grad(found.sum(), [hidden, weight])
        assert all(bool(t.isfinite().all()) for t in (found, *grads))
        assert bool((found > 0).all())


def test_unknown_kinds_are_named():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="unknown divergence 'kl'; known: reverse_kl, forward_kl, jsd"):
        linear_divergence(one, Head(weight=one), one, Head(weight=one), size=1, kind="kl")
    with pytest.raises(ValueError, match="unknown divergence 'kl'"):
        divergence(one, one, "kl")


@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_likeliest_tokens(monkeypatch: pytest.MonkeyPatch, num_rows: int):
    """Of the first 90 of 97 words, with log-probs under all 97."""
    monkeypatch.setattr(kernel, "_CHUNK_BYTES", 4 * 97 * 10)
    g = torch.Generator().manual_seed(num_rows)
    rows, weight, bias = (torch.randn(s, generator=g) for s in ((num_rows, 16), (97, 16), (97,)))
    ids, logprobs = linear_top_logprobs(rows, Head(weight=weight, bias=bias, temperature=0.7), 5, 90)
    expected = ((rows.double() @ weight.double().T + bias.double()) / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), expected[:, :90].topk(5, -1).values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(expected.gather(-1, ids), logprobs.double(), atol=1e-5, rtol=1e-5)
