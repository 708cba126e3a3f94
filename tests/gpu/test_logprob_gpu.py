"""On CUDA: log-probs and entropies from hidden states, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_gradients import CASES, gradients

from lightrl.kernels import logprob
from lightrl.kernels.logprob import linear_logits, linear_logprobs, linear_logprobs_torch

pytestmark = pytest.mark.gpu

QWEN3, QWEN3_5 = 151_936, 248_320


@dataclass(frozen=True)
class Inputs:
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor | None
    cotangents: torch.Tensor  # [2, N]

    @classmethod
    def make(cls, num_rows: int, width: int, vocab: int, dtype: torch.dtype, *, bias: bool = False) -> Inputs:
        g = torch.Generator("cuda").manual_seed(num_rows)
        make = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
        return cls(
            make(num_rows, width).to(dtype).requires_grad_(),
            (make(vocab, width) * 3 / width**0.5).to(dtype).requires_grad_(),
            torch.randint(vocab, (num_rows,), generator=g, device="cuda"),
            make(vocab).to(dtype).requires_grad_() if bias else None,
            make(2, num_rows),
        )

    def leaves(self) -> list[torch.Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def run(self, call: Any, **settings: Any) -> tuple[torch.Tensor, ...]:
        """Log-probs, entropies, and the gradients of hidden, weight and bias."""
        outputs = call(self.hidden, self.weight, self.targets, bias=self.bias, **settings)
        gradients = torch.autograd.grad(outputs, self.leaves(), tuple(self.cotangents))
        return (*(out.detach() for out in outputs), *gradients)

    def exact(self, temperature: float) -> tuple[torch.Tensor, ...]:
        """The same in float64, a block of rows at a time."""
        h, w = self.hidden.detach().double(), self.weight.detach().double()
        b = None if self.bias is None else self.bias.detach().double()
        values: list[list[torch.Tensor]] = [[], []]
        grad_hidden, grad_weight = torch.empty_like(h), torch.zeros_like(w)
        grad_bias = w.new_zeros(len(w))
        for rows in torch.arange(len(h), device=h.device).split(256):
            z = h[rows] @ w.T if b is None else h[rows] @ w.T + b
            z = (z / temperature).requires_grad_()
            log_p = z.log_softmax(-1)
            chosen = log_p.gather(-1, self.targets[rows, None])[:, 0]
            entropy = -(log_p.exp() * log_p.clamp_min(-1e6)).sum(-1)
            loss = (chosen * self.cotangents[0, rows] + entropy * self.cotangents[1, rows]).sum()
            dz = torch.autograd.grad(loss, z)[0] / temperature
            values[0].append(chosen.detach())
            values[1].append(entropy.detach())
            grad_hidden[rows] = dz @ w
            grad_weight += dz.T @ h[rows]
            grad_bias += dz.sum(0)
        return (*(torch.cat(v) for v in values), grad_hidden, grad_weight, *([] if b is None else [grad_bias]))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-6))


def assert_close(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], *, gradient: float) -> None:
    """Values to float32's precision; gradients to a relative error."""
    for values, exact in zip(found[:2], expected[:2], strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), exact, atol=2e-4, rtol=0)
    errors = [relative_error(f, e) for f, e in zip(found[2:], expected[2:], strict=True)]
    print("errors of gradients:", [f"{e:.1e}" for e in errors])
    assert max(errors) < gradient, errors


@pytest.mark.parametrize(
    ("vocab", "temperature", "bias"), [(QWEN3, 1.0, False), (QWEN3, 0.7, True), (QWEN3_5, 0.7, False)]
)
def test_large_vocabularies_in_bfloat16(vocab: int, temperature: float, bias: bool) -> None:
    """Two roundings to bfloat16 lie between the exact gradient and ours: of the logits' gradient, and of the result."""
    inputs = Inputs.make(2051, 1024, vocab, torch.bfloat16, bias=bias)
    found = inputs.run(linear_logprobs, temperature=temperature)
    assert_close(found, inputs.exact(temperature), gradient=4e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1, 64, 97), (63, 576, 49_152), (257, 100, 50_257), (130, 128, 4099), (300, 1536, 17)], ids=str
)
def test_odd_shapes(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    inputs = Inputs.make(*shape, dtype, bias=shape[0] % 2 == 1)
    tolerance = {torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]
    assert_close(inputs.run(linear_logprobs, temperature=0.9), inputs.exact(0.9), gradient=tolerance)


def test_masked_words() -> None:
    inputs = Inputs.make(200, 256, 20_000, torch.bfloat16, bias=True)
    with torch.no_grad():
        inputs.bias[:5] = inputs.bias[9000:] = -torch.inf
        inputs.targets.clamp_(5, 8999)
    found, expected = inputs.run(linear_logprobs, temperature=1.0), inputs.exact(1.0)
    assert_close(found, expected, gradient=4e-3)
    assert not found[3][9000:].any()


def test_nan_stays_in_its_row() -> None:
    inputs = Inputs.make(300, 256, 20_000, torch.bfloat16)
    with torch.no_grad():
        inputs.hidden[123, 7] = torch.nan
        logprobs, entropy = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets)
    for values in (logprobs, entropy):
        assert values.isnan().nonzero().flatten().tolist() == [123]


@pytest.mark.parametrize("width", [1024, 4096])
def test_memory_and_repeated_bits(width: int) -> None:
    """16,384 rows of Qwen3's vocabulary in 0.6 GiB beyond the gradient of the head (a copy of whole logits: 9.3)."""
    inputs = Inputs.make(16_384, width, QWEN3, torch.bfloat16)
    first = inputs.run(linear_logprobs)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    second = inputs.run(linear_logprobs)
    peak = torch.cuda.max_memory_allocated() - before - inputs.weight.nbytes
    print(f"{width}: {peak / 2**30:.2f} GiB")
    assert peak < 0.6 * 2**30
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the public function is the Triton one, without gradients, with one of them, and for no rows."""
    from lightrl.kernels import logprob_triton

    calls = []
    original = logprob_triton.linear_logprobs_triton
    monkeypatch.setattr(
        logprob_triton, "linear_logprobs_triton", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    )
    inputs = Inputs.make(65, 128, 1000, torch.bfloat16)
    whole = inputs.run(linear_logprobs)
    with torch.no_grad():
        values = linear_logprobs(inputs.hidden, inputs.weight, inputs.targets)
    assert all(torch.equal(a, b) for a, b in zip(values, whole[:2], strict=True))
    for i, (h, w) in enumerate([(inputs.hidden, inputs.weight.detach()), (inputs.hidden.detach(), inputs.weight)]):
        outputs = linear_logprobs(h, w, inputs.targets)
        (gradient,) = torch.autograd.grad(outputs, (h, w)[i], tuple(inputs.cotangents))
        assert torch.equal(gradient, whole[2 + i])
    assert len(calls) == 4
    none = Inputs.make(0, 128, 1000, torch.bfloat16).run(linear_logprobs)
    assert [len(t) for t in none] == [0, 0, 0, 1000]
    assert not none[3].any()


def test_tied_head_under_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole policy on one GPU, its head shared with the embedding: float32 as on a CPU; bfloat16 errs no more than
    with the plain torch path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightrl.distributed.mesh import close_world
    from lightrl.training import policy

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=4099, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    found = {}
    for name, device, dtype in (("cpu", "cpu", "float32"), ("exact", "cuda", "float32"), ("ours", "cuda", "bfloat16")):
        found[name] = gradients(tmp_path, CASES["token_mean"] | {"compute_dtype": dtype, "kernels": "auto"}, device)[0]
        close_world()

    def in_torch(*given: Any, kernels: bool, **more: Any) -> Any:
        assert kernels
        return linear_logprobs_torch(*given, **more)

    monkeypatch.setattr(policy, "linear_logprobs", in_torch)
    found["plain"] = gradients(
        tmp_path, CASES["token_mean"] | {"compute_dtype": "bfloat16", "kernels": "auto"}, "cuda"
    )[0]
    close_world()
    for name, truth in found["cpu"].items():
        assert relative_error(found["exact"][name], truth.double()) < 1e-4, name
        ours, plain = (relative_error(found[k][name], truth.double()) for k in ("ours", "plain"))
        assert ours < 1.3 * plain + 2e-3, (name, ours, plain)


@pytest.mark.parametrize("shape", [(1, 576, 49_152), (7, 64, 97), (130, 1024, QWEN3)], ids=str)
def test_bfloat16_logits_are_not_rounded(shape: tuple[int, int, int]) -> None:
    num_rows, width, vocab = shape
    rows = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16)
    logits = linear_logits(rows, weight)
    assert logits.dtype == torch.float32
    expected = rows.double() @ weight.double().T
    assert relative_error(logits, expected) < 1e-5  # rounded to bfloat16: 1.7e-3


def test_plain_path_on_cuda_is_the_same() -> None:
    """Where there is no Triton: the chunked torch path on CUDA tensors."""
    inputs = Inputs.make(1027, 256, 20_000, torch.bfloat16)
    assert logprob._has_triton()
    assert_close(inputs.run(linear_logprobs_torch, temperature=0.8), inputs.exact(0.8), gradient=6e-3)
