"""Fused log-probs against autograd through plain logits, values and gradients."""

import pytest
import torch

import lightrl.kernels.logprob as module
from lightrl.kernels.logprob import linear_logprobs, linear_logprobs_reference


def _inputs(num_rows: int, *, hidden: int = 16, vocab: int = 97, dtype=torch.float32, bias: bool = False):
    g = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, hidden, generator=g).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=g).to(dtype).requires_grad_()
    b = torch.randn(vocab, generator=g).to(dtype).requires_grad_() if bias else None
    y = torch.randint(vocab, (num_rows,), generator=g)
    return x, w, y, b, torch.randn(2, num_rows, generator=g)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 257])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keep", [True, False])
def test_values_and_gradients_equal_autograd(monkeypatch, num_rows, temperature, bias, keep):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 97 * 10)  # several chunks, an uneven last one
    monkeypatch.setattr(module, "_KEEP_BYTES", (1 << 30) if keep else 0)
    x, w, y, b, cotangents = _inputs(num_rows, bias=bias)
    results = []
    for dtype in (torch.float32, torch.float64):
        x_, w_, b_, c = (None if t is None else t.detach().to(dtype) for t in (x, w, b, cotangents))
        inputs = [t.requires_grad_() for t in (x_, w_, b_) if t is not None]
        if dtype == torch.float32:
            logp, entropy = linear_logprobs(x_, w_, y, bias=b_, temperature=temperature)
        else:
            log_p = ((x_ @ w_.T + (0 if b_ is None else b_)) / temperature).log_softmax(-1)
            logp, entropy = log_p.gather(-1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        results.append((logp, entropy, *torch.autograd.grad((logp * c[0] + entropy * c[1]).sum(), inputs)))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), reference.double(), atol=5e-5, rtol=1e-5)


def test_hand_worked_two_tokens():
    # logits (ln 3, 0): probabilities 3/4 and 1/4
    x, w = torch.tensor([[1.0]]), torch.tensor([[1.0986123], [0.0]])
    logp, entropy = linear_logprobs(x, w, torch.tensor([0]))
    assert float(logp) == pytest.approx(-0.2876821, abs=1e-6)  # ln 0.75
    assert float(entropy) == pytest.approx(0.5623351, abs=1e-6)  # -(.75 ln .75 + .25 ln .25)


def test_bfloat16_inputs_give_float32_accuracy():
    x, w, y, _, _ = _inputs(65, dtype=torch.bfloat16)
    logp, entropy = linear_logprobs(x, w, y)
    expected = linear_logprobs_reference(x.double(), w.double(), y)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected[1], atol=1e-5, rtol=1e-5)


def test_masked_vocabulary_gives_finite_entropy_and_gradients():
    x, w, _, b, _ = _inputs(5, bias=True)
    with torch.no_grad():
        b[50:] = -torch.inf
    logp, entropy = linear_logprobs(x, w, torch.tensor([0, 1, 2, 3, 4]), bias=b)
    (logp + entropy).sum().backward()
    for t in (logp, entropy, x.grad, w.grad):
        assert t.isfinite().all()
    kept = linear_logprobs_reference(x, w[:50], torch.tensor([0, 1, 2, 3, 4]), bias=b[:50])
    torch.testing.assert_close(logp, kept[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, kept[1], atol=1e-5, rtol=1e-5)


def test_temperature_must_be_positive():
    x, w, y, _, _ = _inputs(1)
    with pytest.raises(ValueError, match="temperature"):
        linear_logprobs(x, w, y, temperature=0.0)
