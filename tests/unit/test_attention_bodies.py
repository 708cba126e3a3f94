"""Attention kernels' bodies without a GPU: what is chosen, cuDNN's calls, and outputs that are not computed twice.

torch's CPU attention stands in for the kernels: the same two halves, a forward and a backward without autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from unit.test_packed_models import build, compare, our_results, samples, stock_results

from lightrl.kernels import attention as kernels
from lightrl.kernels.attention import CudnnBody, Flash4Body, FlashBody, Group, Packing, attend, choose, dense_groups
from lightrl.models import attention, experts, recompute, registry
from lightrl.training.policy import PolicyModule


def packing(lengths: list[int], *, own_keys: bool = True) -> Packing:
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return Packing(borders, borders, max(lengths), max(lengths), tuple(lengths) if own_keys else None)


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([16384], [Group(0, 1, 16384, 16384)]),
        ([16000], [Group(0, 1, 16000, 16384)]),
        ([12289], [Group(0, 1, 12289, 13312)]),
        ([2048] * 8, [Group(0, 8, 2048, 2048)]),
        ([2047] * 8, [Group(0, 8, 2047, 2048)]),
        ([4096, 4100, 4100], [Group(0, 1, 4096, 4096), Group(4096, 2, 4100, 4608)]),
        ([511], None),
        ([4096, 4095], None),
        ([2048, 2048, 1], None),
        ([1], None),
        (None, None),  # shared prompts
    ],
)
def test_which_sequences_are_worth_dense_calls(lengths, groups):
    found = dense_groups(lengths)
    assert found == (None if groups is None else tuple(groups))
    if found:
        assert sum(g.count * g.length for g in found) == sum(lengths)
        assert all(g.length <= g.padded < 1.13 * g.length + 256 for g in found)


def test_choice(monkeypatch):
    q, v, narrow = torch.zeros(1, 4, 64), torch.zeros(1, 2, 64), torch.zeros(1, 2, 32)
    there = {"cudnn": True, "flash4": True}
    monkeypatch.setattr(kernels, "cudnn_runs", lambda q: there["cudnn"])
    monkeypatch.setattr(kernels, "flash4_is_right", lambda *_: there["flash4"])
    one, many, shared = packing([8192]), packing([700, 50]), packing([8192], own_keys=False)

    def kind(packed: Packing, window: int | None = None, sinks: bool = False, values: Tensor = v) -> type:
        return type(choose(packed, q, values, 0.1, window, sinks))

    assert (kind(one), kind(many), kind(shared)) == (CudnnBody, Flash4Body, Flash4Body)
    assert kind(one, window=8192) is CudnnBody  # as wide as the row
    assert kind(one, window=8191) is kind(one, sinks=True) is kind(one, values=narrow) is FlashBody
    there["flash4"] = False
    assert (kind(one), kind(many), kind(shared)) == (CudnnBody, FlashBody, FlashBody)
    there["cudnn"] = False
    assert kind(one) is FlashBody


# ----- cuDNN's calls


def cudnn_forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale):
    assert attn_bias is None
    assert (compute_log_sumexp, dropout_p, is_causal, return_debug_mask) == (True, 0.0, True, False)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
    return out, lse, None, None, 0, 0, torch.zeros(()), torch.zeros(()), None


def cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
    max_q, max_k, dropout_p, is_causal, *, scale,
):  # fmt: skip
    assert attn_bias is cum_seq_q is cum_seq_k is None
    assert (max_q, max_k, dropout_p, is_causal) == (query.shape[2], key.shape[2], 0.0, True)
    assert philox_seed.shape == philox_offset.shape == ()
    heads = key.shape[1]
    key, value = (x.repeat_interleave(query.shape[1] // heads, 1) for x in (key, value))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, True, scale=scale
    )
    return grads[0], *(g.unflatten(1, (heads, -1)).sum(2) for g in grads[1:])


@pytest.mark.parametrize(
    "groups",
    [
        (Group(0, 1, 63, 63),),
        (Group(0, 3, 21, 32),),
        (Group(0, 1, 1, 4), Group(1, 2, 15, 15), Group(31, 1, 32, 40)),
    ],
)
def test_dense_calls_equal_a_loop_over_sequences(groups, monkeypatch):
    """Padding is cut off again and adds to no gradient."""
    stand_in = SimpleNamespace(
        _scaled_dot_product_cudnn_attention=cudnn_forward, _scaled_dot_product_cudnn_attention_backward=cudnn_backward
    )
    monkeypatch.setattr(kernels.torch.ops, "aten", Both(torch.ops.aten, stand_in))
    g = torch.Generator().manual_seed(0)
    q, cotangent = (torch.randn(63, 4, 16, generator=g).requires_grad_() for _ in range(2))
    k, v = (torch.randn(63, 2, 16, generator=g).requires_grad_() for _ in range(2))
    ours = attend(q, k, v, CudnnBody(groups, 0.3))
    plain = []
    for group in groups:
        for i in range(group.count):
            rows = slice(group.start + i * group.length, group.start + (i + 1) * group.length)
            heads_first = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.3, enable_gqa=True)
            plain.append(out[0].transpose(0, 1))
    expected = torch.cat(plain)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    found, wanted = (torch.autograd.grad((o * cotangent.detach()).sum(), (q, k, v)) for o in (ours, expected))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


class Both:
    """torch.ops.aten with some operations replaced."""

    def __init__(self, real, replaced) -> None:
        self.real, self.replaced = real, replaced

    def __getattr__(self, name):
        return getattr(self.replaced if hasattr(self.replaced, name) else self.real, name)


def test_the_real_operations_take_these_arguments():
    """On the meta device, through torch's own schemas."""
    q, k = (torch.empty(300, heads, 64, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    body = CudnnBody((Group(0, 1, 100, 256), Group(100, 2, 100, 100)), 0.1)
    out, saved = body.forward(q, k, k)
    grads = body.backward(torch.empty_like(out), q, k, k, out, saved)
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, k.shape]


# ----- outputs that are kept for a block's recomputation


@dataclass(frozen=True)
class CpuBody:
    """Any packing by torch's CPU attention, with a mask over all rows and keys; counts its forwards."""

    packing: Packing
    scale: float
    counted: list[str]

    def forward(self, q, k, v):
        self.counted.append("forward")
        group = q.shape[1] // k.shape[1]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            first(q), first(k, group), first(v, group), 0.0, False, attn_mask=self.mask(q, k), scale=self.scale
        )
        return out[0].transpose(0, 1), (lse[0],)

    def backward(self, grad, q, k, v, out, saved):
        self.counted.append("backward")
        group = q.shape[1] // k.shape[1]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            first(grad), first(q), first(k, group), first(v, group), first(out), saved[0][None].contiguous(),
            0.0, False, attn_mask=self.mask(q, k), scale=self.scale,
        )  # fmt: skip
        whole = [g[0].transpose(0, 1) for g in grads]
        return whole[0], *(g.unflatten(1, (-1, group)).sum(2) for g in whole[1:])

    def mask(self, q, k):
        mask = torch.full((len(q), len(k)), float("-inf"))
        borders = zip(*(b.tolist() for b in (self.packing.cu_seqlens_q, self.packing.cu_seqlens_k)), strict=True)
        start_q = start_k = 0
        for end_q, end_k in list(borders)[1:]:
            num_q, num_k = end_q - start_q, end_k - start_k
            allowed = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
            mask[start_q:end_q, start_k:end_k].masked_fill_(allowed, 0.0)
            start_q, start_k = end_q, end_k
        return mask


def first(x: Tensor, copies: int = 1) -> Tensor:
    return x.transpose(0, 1).repeat_interleave(copies, 0)[None].contiguous()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_text"])
@pytest.mark.parametrize("keep", [True, False])
def test_attention_is_computed_once_where_it_is_kept(family, keep, monkeypatch):
    counted: list[str] = []
    monkeypatch.setattr(attention, "_by_block", lambda q, *rest: attention._by_kernel(caller[0], q, *rest))
    monkeypatch.setattr(attention, "choose", lambda packed, q, v, scale, *_: CpuBody(packed, scale, counted))
    caller: list[torch.nn.Module] = []
    plain = attention.packed_attention
    stock, model = build(family)
    registry.prepare_packed(model, fuse=True)
    layers = sum(hasattr(m, "is_causal") for m in model.modules())

    def remembered(module, *args, **kwargs):
        caller[:] = [module]
        return plain(module, *args, **kwargs)

    from lightrl.models import fused

    monkeypatch.setattr(fused, "packed_attention", remembered)
    for name, block in list(model.model.layers.named_children()):
        context_fn = recompute.contexts(block, keep_attention=keep)
        options = {} if context_fn is None else {"context_fn": context_fn}
        wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
        model.model.layers.register_module(name, wrapped)
    units = samples()
    coefficients = torch.randn(
        2, sum(len(s.response) for u in units for s in u), generator=torch.Generator().manual_seed(2)
    )
    found = our_results(PolicyModule(model, packed=True), units, coefficients)
    assert counted.count("forward") == layers * (1 if keep else 2)
    assert counted.count("backward") == layers
    expected = stock_results(stock, units, coefficients)
    found = (*found[:2], {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in found[2].items()})
    compare(found, expected)
    assert all(getattr(m, attention.OUTPUTS, None) is None for m in model.modules())


def test_blocks_with_nothing_to_take_over_have_no_contexts():
    _, model = build("qwen3")
    assert recompute.contexts(model.model.layers[0], keep_attention=False) is None
    _, model = build("qwen3_moe")
    registry.prepare_packed(model)
    alone = recompute.contexts(model.model.layers[1], keep_attention=False)
    assert alone is not None
    assert isinstance(alone()[0], experts._Choices)
