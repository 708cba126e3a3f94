"""Which kernels gated delta layers get, with stand-ins for flash-linear-attention: right, wrong, refusing, absent."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

from lightrl.kernels import gated_delta
from lightrl.models import fast_delta

CPU = torch.device("cpu")
CHUNKED = modeling_qwen3_5.torch_chunk_gated_delta_rule
STOCK_RULE = getattr(CHUNKED, "__wrapped__", CHUNKED)


def rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fla's calling convention over transformers' rule, a segment at a time."""
    outputs, states = [], []
    for s, (a, b) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        out, state = STOCK_RULE(
            *(x[:, a:b] for x in (q, k, v)),
            g=g[:, a:b],
            beta=beta[:, a:b],
            initial_state=None if initial_state is None else initial_state[s : s + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states) if output_final_state else None


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, None]:
    parts = x.mT.tensor_split(cu_seqlens[1:-1].cpu(), dim=-1)
    taps, channels = weight.shape[1], weight.shape[0]
    out = [F.conv1d(F.pad(part, (taps - 1, 0)), weight[:, None], bias, groups=channels) for part in parts]
    return torch.cat(out, dim=-1).mT, None


def without_state(*args: Any, initial_state: Any = None, **kwargs: Any) -> Any:
    return rule(*args, **kwargs)


def without_state_gradient(*args: Any, initial_state: Any = None, **kwargs: Any) -> Any:
    return rule(*args, initial_state=None if initial_state is None else initial_state.detach(), **kwargs)


def without_cuts(x: torch.Tensor, weight: torch.Tensor, bias: Any, *, cu_seqlens: torch.Tensor) -> Any:
    return convolution(x, weight, bias, cu_seqlens=cu_seqlens[[0, -1]])


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs\nproduces incorrect results")


def refusing(*args: Any, **kwargs: Any) -> Any:
    out, state = rule(*args, **kwargs)
    return _Refusing.apply(out), state


def install(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any], conv: Callable[..., Any], home: str) -> None:
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.modules", home):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = rule  # type: ignore[attr-defined]
    sys.modules[home].causal_conv1d = conv  # type: ignore[attr-defined]


@pytest.mark.parametrize("home", ["fla.modules.causal_conv1d", "fla.modules.conv"])
def test_right_kernels_are_taken(monkeypatch: pytest.MonkeyPatch, home: str, caplog: pytest.LogCaptureFixture) -> None:
    """With prompts shared and not, values and gradients: the check itself compares them."""
    install(monkeypatch, rule, convolution, home)
    found = fast_delta.find(CPU, torch.float32)
    assert found is not gated_delta.mix
    assert not caplog.records
    monkeypatch.setattr(fast_delta, "_TOLERANCE", 1e-5)
    assert fast_delta.check(found, CPU, torch.float32) == ""


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ((without_state, convolution), "wrong on this card and Triton version (output off by"),
        ((without_state_gradient, convolution), "wrong on this card and Triton version (gradient of mixed off by"),
        ((rule, without_cuts), "(output off by"),
        ((refusing, convolution), "fails here (Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results)"),
    ],
)
def test_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, *kernels, "fla.modules.causal_conv1d")
    with caplog.at_level(logging.WARNING):
        assert fast_delta.find(CPU, torch.float32) is gated_delta.mix
    (record,) = caplog.records
    assert message in record.getMessage()
    assert "\n" not in record.getMessage()


def test_absence_and_other_devices(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert fast_delta.choose(CPU, torch.bfloat16) is gated_delta.mix
    assert fast_delta.choose(torch.device("cuda"), torch.float32) is gated_delta.mix
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "fla", None)  # as if it were not there
    with caplog.at_level(logging.WARNING):
        assert fast_delta.find(CPU, torch.bfloat16) is gated_delta.mix
    assert "not installed" in caplog.text
