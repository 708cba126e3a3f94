"""On CUDA: packed forwards and fused log-probs, in bfloat16 (every attention kernel there is) and float32.

bfloat16 is held to the error that the stock model makes in bfloat16 with the same weights, both against the stock model
in float32, one sample at a time.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from unit.test_packed_models import COMMON, SPECIAL, samples

from lightrl.kernels import attention
from lightrl.kernels.attention_dense import Dense
from lightrl.kernels.logprob import linear_logits, linear_logprobs
from lightrl.models import attention as packed
from lightrl.models import registry
from lightrl.models.attention import Segments
from lightrl.training.packing import pack
from lightrl.training.policy import PolicyModule, to_device

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "qwen3", "qwen2", "mistral")  # the last two with a sliding window of 20
MIXTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "mimo_v2_flash", "gpt_oss")
TEMPERATURE = 0.7
Results = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def build(family: str, head_dim: int) -> torch.nn.Module:
    """Float32 model on CUDA whose weights bfloat16 holds exactly; attention far from uniform."""
    changes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": head_dim, "initializer_range": 0.08}
    torch.manual_seed(1)
    if family in MIXTURES:
        # Every token to every expert: the test is of numbers, and a choice that flips in bfloat16 would drown them.
        changes |= {"intermediate_size": 128, "moe_intermediate_size": 128, "num_experts_per_tok": 8, "n_group": 1}
        changes |= {"v_head_dim": head_dim // 2}
    if family == "deepseek_v3":  # heads of 96 and 192, values of 64 and 128
        rope = head_dim // 2
        changes |= {"v_head_dim": head_dim, "qk_nope_head_dim": head_dim, "qk_rope_head_dim": rope, "head_dim": rope}
    config = AutoConfig.for_model(family, **(COMMON | SPECIAL.get(family, {}) | changes))
    kind = "eager" if family in ("gpt_oss", "mimo_v2_flash") else "sdpa"  # sinks
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kind, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(torch.bfloat16).to("cuda", torch.float32)


def stock_results(model: torch.nn.Module, units, coefficients: torch.Tensor) -> Results:
    """One sample at a time. The head's product is float32, so that stock bfloat16 is judged by its blocks."""
    logprobs, entropies = [], []
    for sample in (s for unit in units for s in unit):
        ids = torch.tensor([sample.prompt + sample.response], device="cuda")
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(sample.prompt) - 1 : -1]
        weight = model.get_output_embeddings().weight
        log_p = (hidden.float() @ weight.float().T / TEMPERATURE).log_softmax(-1)
        logprobs.append(log_p.gather(-1, torch.tensor(sample.response, device="cuda")[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return finish(model, torch.cat(logprobs), torch.cat(entropies), coefficients)


def our_results(model: torch.nn.Module, units, coefficients: torch.Tensor, *, fuse: bool) -> Results:
    registry.prepare_packed(model, fuse=fuse)
    module = PolicyModule(model, packed=True)
    batch = pack(units, [[1.0] * len(u) for u in units])
    device = torch.device("cuda")
    logprobs, entropies = module(to_device(batch, device), Segments.from_microbatch(batch, device), TEMPERATURE)
    return finish(model, logprobs, entropies, coefficients)


def finish(
    model: torch.nn.Module, logprobs: torch.Tensor, entropies: torch.Tensor, coefficients: torch.Tensor
) -> Results:
    model.zero_grad()
    (logprobs * coefficients[0] + entropies * coefficients[1]).sum().backward()
    gradients = {n: p.grad.float().clone() for n, p in model.named_parameters()}
    return logprobs.detach(), entropies.detach(), gradients


def coefficients_for(units) -> torch.Tensor:
    count = sum(len(s.response) for u in units for s in u)
    return torch.randn(2, count, generator=torch.Generator().manual_seed(2)).cuda()


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_float32_equals_stock(family: str, head_dim: int, fuse: bool) -> None:
    model, units = build(family, head_dim), samples()
    coefficients = coefficients_for(units)
    expected = stock_results(copy.deepcopy(model), units, coefficients)
    for packing in (units, [[s] for u in units for s in u]):  # prompts shared; each sample alone
        found = our_results(copy.deepcopy(model), packing, coefficients, fuse=fuse)
        torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=0)
        for name, gradient in expected[2].items():
            assert relative_error(found[2][name], gradient) < 1e-4, name


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_bfloat16_errs_no_more_than_stock(family: str, head_dim: int, fuse: bool) -> None:
    bfloat16_against_stock(family, head_dim, fuse)


@pytest.mark.parametrize("body", ["cudnn", "flash4", "flash"])
def test_bfloat16_with_each_attention_kernel(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes far shorter segments here than it would."""
    runs = {"cudnn": attention.cudnn_runs, "flash4": attention.flash4_runs}
    if body in runs and not runs[body](torch.zeros(1, 4, 64, device="cuda", dtype=torch.bfloat16)):
        pytest.skip("no Hopper, no cuDNN 9.1, or no flash-attn-4")
    separate = 30 if body == "cudnn" else 1 << 30  # of prompts and answers alone and with prefixes, some each
    monkeypatch.setattr(Dense, "plan", partial(Dense.plan, separate=separate, uniform=separate))
    for name in {"cudnn_runs", "flash4_runs"} - {f"{body}_runs"}:
        monkeypatch.setattr(attention, name, lambda q: False)
    used, plain = set(), attention.choose
    monkeypatch.setattr(packed, "choose", lambda *a: used.add(type(made := plain(*a)).__name__.lower()) or made)
    bfloat16_against_stock("qwen3", 64, True)
    assert f"{body}body" in used


def bfloat16_against_stock(family: str, head_dim: int, fuse: bool) -> None:
    model, units = build(family, head_dim), samples()
    coefficients = coefficients_for(units)
    truth = stock_results(copy.deepcopy(model), units, coefficients)
    stock = stock_results(copy.deepcopy(model).to(torch.bfloat16), units, coefficients)
    for packing in (units, [[s] for u in units for s in u]):
        found = our_results(copy.deepcopy(model).to(torch.bfloat16), packing, coefficients, fuse=fuse)
        for i, what in enumerate(("log-probs", "entropies")):
            ours, theirs = ((r[i] - truth[i]).abs().mean() for r in (found, stock))
            print(f"{family} {head_dim} {what}: {ours:.5f}, stock {theirs:.5f}")
            assert ours <= 1.5 * theirs, what
            assert ours < 0.03, what
        for name, gradient in truth[2].items():
            ours, theirs = (relative_error(r[2][name], gradient) for r in (found, stock))
            factor = 1.5 if gradient.numel() > 64 else 3  # of a few numbers (sinks) chance is a larger part
            assert ours <= factor * theirs + 2e-3, (name, ours, theirs)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", sorted(registry.FAMILIES))
def test_empty_microbatch_reaches_every_parameter(family: str, dtype: torch.dtype) -> None:
    config = AutoConfig.for_model(family, **(COMMON | SPECIAL.get(family, {})))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().cuda()
    registry.prepare_packed(model)
    batch, device = pack([], []), torch.device("cuda")
    segments = Segments.from_microbatch(batch, device)
    logprobs, entropies = PolicyModule(model, packed=True)(to_device(batch, device), segments, 1.0)
    (logprobs.sum() + entropies.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_a_large_vocabulary(temperature: float) -> None:
    """bfloat16 inputs against float64 at V = 151,936: values, gradients, and memory far below the logits'."""
    num_rows, width, vocab = 4096, 1024, 151_936
    torch.cuda.empty_cache()
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(num_rows, width, generator=g, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab, width, generator=g, device="cuda") * 3 / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (num_rows,), generator=g, device="cuda")
    cotangents = torch.randn(2, num_rows, generator=g, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature=temperature)
    (logprobs * cotangents[0] + entropy * cotangents[1]).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    state = weight.numel() * (4 + 2 + 4)  # the float32 sum of weight gradients, a chunk's, and the result
    assert peak < state + (2 << 30), peak / 2**30  # the logits alone: 2.3 GiB, their softmax and gradient as much each

    grad_weight = torch.zeros(vocab, width, dtype=torch.float64, device="cuda")
    grad_hidden = torch.empty(num_rows, width, dtype=torch.float64, device="cuda")
    for rows in torch.arange(num_rows, device="cuda").split(512):
        h, w = hidden[rows].detach().double().requires_grad_(), weight.detach().double()
        z = (h @ w.T / temperature).detach().requires_grad_()
        log_p = z.log_softmax(-1)
        mine, ent = log_p.gather(-1, targets[rows, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(logprobs[rows].double(), mine, atol=2e-4, rtol=0)
        torch.testing.assert_close(entropy[rows].double(), ent, atol=2e-4, rtol=0)
        (dz,) = torch.autograd.grad((mine * cotangents[0, rows] + ent * cotangents[1, rows]).sum(), z)
        dz /= temperature
        grad_hidden[rows] = dz @ w
        grad_weight += dz.T @ h.detach()
    assert relative_error(hidden.grad.double(), grad_hidden) < 1e-2
    assert relative_error(weight.grad.double(), grad_weight) < 1e-2


@pytest.mark.parametrize("shape", [(1, 576, 49_152), (7, 64, 97), (130, 1024, 151_936)])
def test_bfloat16_logits_are_not_rounded(shape: tuple[int, int, int]) -> None:
    num_rows, width, vocab = shape
    rows = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16)
    logits = linear_logits(rows, weight)
    assert logits.dtype == torch.float32
    expected = rows.double() @ weight.double().T
    assert relative_error(logits.double(), expected) < 1e-5  # rounded to bfloat16: 1.7e-3
