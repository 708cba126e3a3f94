"""The gated delta rule over packed segments: against transformers' token-by-token recurrence, and whole models (L5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

from lightrl.kernels import gated_delta
from lightrl.kernels.gated_delta import Chains, DeltaInputs

CPU = torch.device("cpu")
STEP = modeling_qwen3_5.torch_recurrent_gated_delta_rule
STOCK_RULE = getattr(STEP, "__wrapped__", STEP)
HEADS = {"key_heads": 2, "key_dim": 8, "value_heads": 4, "value_dim": 12}
CHANNELS = 2 * 2 * 8 + 4 * 12


def example(rows: int, seed: int = 0) -> DeltaInputs:
    """Slow decay, so that what leaks stays."""
    g = torch.Generator().manual_seed(seed)
    return DeltaInputs(
        mixed=torch.randn(rows, CHANNELS, generator=g),
        weight=torch.randn(CHANNELS, 4, generator=g),
        bias=torch.randn(CHANNELS, generator=g),
        activation=F.silu,
        log_decay=-0.02 * torch.rand(rows, 4, generator=g),
        beta=torch.rand(rows, 4, generator=g),
        **HEADS,
    )


def sliced(inputs: DeltaInputs, rows: torch.Tensor) -> DeltaInputs:
    return replace(inputs, mixed=inputs.mixed[rows], log_decay=inputs.log_decay[rows], beta=inputs.beta[rows])


def token_by_token(inputs: DeltaInputs) -> torch.Tensor:
    """One sample: torch's own convolution and transformers' recurrence."""
    taps = inputs.weight.shape[1]
    padded = F.pad(inputs.mixed.T[None], (taps - 1, 0))
    x = inputs.activation(F.conv1d(padded, inputs.weight[:, None], inputs.bias, groups=CHANNELS))[0].T
    q, k, v = (t[None] for t in inputs.heads(x))
    q, k = (t.repeat_interleave(2, dim=2) for t in (q, k))
    g, beta = inputs.log_decay[None], inputs.beta[None]
    return STOCK_RULE(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0]


SEGMENTS = {
    "odd": ((1, 63, 257, 2, 64, 65), (-1,) * 6),
    "one": ((1,), (-1,)),
    "short": ((3, 5, 1), (-1, -1, -1)),
    "shared": ((70, 5, 130, 1, 2, 1, 64, 64), (-1, 0, 0, 0, -1, 4, -1, 6)),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_equal_samples_token_by_token(name: str) -> None:
    lengths, parents = SEGMENTS[name]
    inputs = example(sum(lengths))
    leaves = [t.requires_grad_() for t in (inputs.mixed, inputs.weight, inputs.bias, inputs.log_decay, inputs.beta)]
    push = torch.randn(sum(lengths), 4, 12, generator=torch.Generator().manual_seed(1))
    out = gated_delta.mix(inputs, Chains.build(lengths, parents, CPU))
    found = torch.autograd.grad((out * push).sum(), leaves)
    borders = torch.tensor([0, *lengths]).cumsum(0).tolist()
    expected = []
    for s, parent in enumerate(parents):
        own = torch.arange(borders[s], borders[s + 1])
        before = own[:0] if parent < 0 else torch.arange(borders[parent], borders[parent + 1])
        expected.append(token_by_token(sliced(inputs, torch.cat([before, own])))[len(before) :])
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad((torch.cat(expected) * push).sum(), leaves)
    for ours, stock in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4)
