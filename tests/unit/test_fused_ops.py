"""RMSNorm with rotation, and gated products: kernels in Triton's interpreter against plain torch, with gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from unit.test_packed_models import tiny_config

from lightrl.kernels import gate, norm
from lightrl.kernels.norm import Norm
from lightrl.models import fused, registry

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def angles(tokens: int, rotary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unlike halves, so that a half read in the place of the other shows."""
    a = torch.randn(tokens, rotary)
    return a.cos().to(dtype), a.sin().to(dtype)


def compare(found: Tensor, expected: Tensor, inputs: list[Tensor], dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    cotangent = torch.randn(expected.shape).to(dtype)
    ours, theirs = (torch.autograd.grad((y * cotangent).sum(), inputs) for y in (found, expected))
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == reference.dtype
        scale = float(reference.abs().max().clamp_min(1))  # a weight's gradient is a sum over all rows
        torch.testing.assert_close(mine, reference, atol=TOLERANCE[dtype] * scale, rtol=TOLERANCE[dtype])


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("tokens", "heads", "width", "rotary"), [
    (1, 1, 16, 16), (63, 3, 16, 16), (257, 2, 24, 8), (5, 2, 128, 32), (7, 1, 100, 0), (3, 1, 2050, 0),
])  # fmt: skip
def test_norm_and_rotation(tokens, heads, width, rotary, offset, dtype, monkeypatch):
    from lightrl.kernels import norm_triton

    monkeypatch.setattr(norm_triton, "_PROGRAMS", 3)  # several tiles a program
    torch.manual_seed(0)
    x = (torch.randn(tokens, heads, width) * 3).to(dtype).requires_grad_()
    weight = torch.randn(width).to(dtype).requires_grad_()
    cos, sin = angles(tokens, rotary, dtype) if rotary else (None, None)
    found = norm._NormRotate.apply(x, weight, cos, sin, 1e-6, offset)
    reference = norm.norm_rotate_reference(x, Norm(weight=weight, eps=1e-6, offset=offset), cos, sin)
    compare(found, reference, [x, weight], dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("rotary", [8, 16])
def test_rotation_without_norm_of_rows_that_are_apart(rotary):
    """Queries that lie beside their gates, as in gated attention."""
    torch.manual_seed(0)
    both = torch.randn(63, 3, 32).requires_grad_()
    cos, sin = angles(63, rotary, torch.float32)
    x = both[..., :16]
    assert not x.is_contiguous()
    found = norm._NormRotate.apply(x, None, cos, sin, 0.0, 0.0)
    compare(found, norm.norm_rotate_reference(x, None, cos, sin), [both], torch.float32)


def test_reference_equals_transformers():
    """The plain path is Llama's own norm and rotation."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    x, layer = torch.randn(63, 3, 16), LlamaRMSNorm(16, eps=1e-5)
    torch.nn.init.normal_(layer.weight)
    cos, sin = angles(63, 16, torch.float32)
    normed = layer(x)
    torch.testing.assert_close(norm.rms_norm(x, Norm(weight=layer.weight, eps=1e-5)), normed)
    expected = apply_rotary_pos_emb(normed[None], normed[None], cos[None], sin[None], unsqueeze_dim=2)[0][0]
    torch.testing.assert_close(norm.norm_rotate(x, Norm(weight=layer.weight, eps=1e-5), cos, sin), expected)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("shape", [(1, 1), (63, 3, 16), (257, 48), (2, 2060)])
def test_gated_product(shape, activation, dtype):
    torch.manual_seed(0)
    both = (torch.randn(*shape[:-1], 2 * shape[-1]) * 3).to(dtype).requires_grad_()
    x = torch.randn(shape).to(dtype).requires_grad_()
    beside = both.chunk(2, -1)[1]  # rows that are apart
    compare(gate._Gated.apply(beside, x, activation), gate.gated_reference(beside, x, activation), [both, x], dtype)
    alone = beside.detach().contiguous().requires_grad_()
    reference = gate.gated_reference(alone, x, activation)
    compare(gate._Gated.apply(alone, x, activation), reference, [alone, x], dtype)


@pytest.mark.interpreter
def test_no_rows():
    x, weight = torch.zeros(0, 2, 16).requires_grad_(), torch.ones(16).requires_grad_()
    out = norm._NormRotate.apply(x, weight, None, None, 1e-6, 0.0)
    out = gate._Gated.apply(out, out, "silu")
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape
    assert not weight.grad.any()


def test_a_cpu_keeps_the_models_own_code():
    from lightrl.config.schema import ModelConfig
    from lightrl.distributed.mesh import init_world
    from lightrl.training.policy import Policy, fused_kernels_run

    policy = Policy.without_weights(ModelConfig(), tiny_config("qwen3"), init_world("cpu"), source=Path("."))
    assert not any("forward" in vars(m) for m in policy.model.modules())
    assert not fused_kernels_run(torch.device("cpu"))


@pytest.mark.parametrize("family", sorted(registry.FAMILIES))
def test_what_is_exchanged(family):
    """On the instance alone; not the norms with a gate, and attention only where the family says so."""
    model, other = (AutoModelForCausalLM.from_config(tiny_config(family)) for _ in range(2))
    registry.prepare_packed(other)
    registry.prepare_packed(model, fuse=True)
    ours = {
        type(m).__name__ for m in model.modules() if getattr(vars(m).get("forward"), "__module__", "") == fused.__name__
    }
    assert not any(getattr(vars(m).get("forward"), "__module__", "") == fused.__name__ for m in other.modules())
    assert any(name.endswith("RMSNorm") for name in ours)
    assert not any(name.endswith("Gated") for name in ours)
    assert any(name.endswith("MLP") for name in ours) == (family not in ("phi3", "gpt_oss", "qwen3_moe"))
    assert any(name.endswith("Attention") for name in ours) == registry.FAMILIES[family].fused.attention
