"""Attention kernels' bodies without a GPU: what is chosen, cuDNN's calls, and outputs that are not computed twice.

torch's CPU attention stands in for the kernels: the same two halves, a forward and a backward without autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from unit.test_packed_models import build, compare, our_results, samples, stock_results

from lightrl.kernels import attention as kernels
from lightrl.kernels.attention import attend, choose
from lightrl.kernels.attention_dense import CudnnBody, Dense, Group
from lightrl.kernels.attention_flash import Body, Flash4Body, FlashBody, Grads, Packing, Saved, Span
from lightrl.models import attention, experts, recompute, registry
from lightrl.training.packing import pack
from lightrl.training.policy import PolicyModule

CPU = torch.device("cpu")


def spans(lengths: list[int], prefixes: list[int | None] | None = None) -> tuple[Span, ...]:
    """Segments one after the other; `prefixes` names the segment that is before each one's own rows."""
    starts = list(accumulate(lengths, initial=0))
    before = [None if p is None else (starts[p], starts[p + 1]) for p in prefixes or [None] * len(lengths)]
    return tuple(map(Span, starts, starts[1:], before))


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([16384], [Group(0, 1, 16384, 16384)]),
        ([16000], [Group(0, 1, 16000, 16384)]),
        ([12289], [Group(0, 1, 12289, 13312)]),
        ([2048] * 8, [Group(0, 8, 2048, 2048)]),
        ([2047] * 8, [Group(0, 8, 2047, 2048)]),
        ([8192, 8200, 8200], [Group(0, 1, 8192, 8192), Group(8192, 2, 8200, 9216)]),
        ([511], []),
        ([8192, 8191], [Group(0, 1, 8192, 8192)]),
        ([8191, 8191, 1], []),
        ([1], []),
    ],
)
def test_which_segments_are_worth_dense_calls(lengths, groups):
    found = Dense.plan(spans(lengths), CPU)
    assert groups == ([] if found is None else list(found.groups))
    if found is not None:
        assert all(g.length <= g.padded < 1.13 * g.length + 256 for g in found.groups)
        rest = 0 if found.rest is None else sum(s.rows for s in found.rest.spans)
        assert sum(g.count * g.length for g in found.groups) + rest == sum(lengths)


def test_long_answers_to_a_shared_prompt_are_worth_dense_calls():
    found = Dense.plan(spans([100, 9500, 9500, 90, 8200, 5], [None, 0, 0, 0, 0, None]), CPU)
    assert found is not None
    assert found.groups == (Group(100, 2, 9500, 10240, (0, 100)), Group(19190, 1, 8200, 9216, (0, 100)))
    assert found.rest.spans == (Span(0, 100), Span(19100, 19190, (0, 100)), Span(27390, 27395))
    assert found.rest.cu_seqlens_q.tolist() == [0, 100, 190, 195]
    assert found.rest.cu_seqlens_k.tolist() == [0, 100, 290, 295]
    keys = [*range(100), *range(100), *range(19100, 19190), *range(27390, 27395)]
    assert found.rest.kv_index.tolist() == keys
    assert found.rest_rows.tolist() == [*range(100), *range(19100, 19190), *range(27390, 27395)]


def test_packing_of_a_microbatch():
    batch = pack(samples(), [[1.0] * len(u) for u in samples()])
    packed = attention.Segments.from_microbatch(batch, CPU).packing
    assert packed.spans[:3] == (Span(0, 63), Span(63, 67, (0, 63)), Span(67, 106, (0, 63)))
    own = Packing.of(packed.spans, CPU)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "kv_index"):
        found, expected = getattr(own, name), getattr(packed, name)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), name


def test_choice(monkeypatch):
    q, v = torch.zeros(1, 4, 64), torch.zeros(1, 2, 64)
    there = {"cudnn": True, "flash4": True, "right": True}
    monkeypatch.setattr(kernels, "cudnn_runs", lambda q: there["cudnn"])
    monkeypatch.setattr(kernels, "flash4_runs", lambda q: there["flash4"])
    monkeypatch.setattr(kernels, "is_right", lambda *_: there["right"])
    one, many = spans([8192]), spans([700, 50])
    short, long = spans([100, 700, 50], [None, 0, 0]), spans([100, 700, 9000], [None, 0, 0])

    def kind(of: tuple[Span, ...], window: int | None = None, sinks: bool = False) -> type:
        return type(choose(Packing.of(of, CPU), q, v, 0.1, window, sinks))

    assert [kind(x) for x in (one, many, short, long)] == [CudnnBody, Flash4Body, Flash4Body, CudnnBody]
    assert choose(Packing.of(long, CPU), q, v, 0.1, None, False).varlen is Flash4Body
    assert kind(one, window=8192) is CudnnBody  # as wide as the row
    assert kind(one, window=8191) is kind(one, sinks=True) is FlashBody
    there["flash4"] = False
    assert [kind(x) for x in (one, many, short, long)] == [CudnnBody, FlashBody, FlashBody, CudnnBody]
    there["right"] = False
    assert [kind(x) for x in (one, many, short, long)] == [FlashBody] * 4


# ----- the kernels' calls, with torch's CPU attention or plain arithmetic in their place


def cudnn_forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale):
    assert attn_bias is None
    assert (compute_log_sumexp, dropout_p, is_causal, return_debug_mask) == (True, 0.0, True, False)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
    return out, lse[..., None], None, None, 0, 0, torch.zeros(()), torch.zeros(()), None


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
        grad_out, query, key, value, out, logsumexp[..., 0].contiguous(), 0.0, True, scale=scale
    )
    return grads[0], *(g.unflatten(1, (heads, -1)).sum(2) for g in grads[1:])


def masked(q: Tensor, k: Tensor, borders_q: list[int], borders_k: list[int], causal: bool, scale: float) -> Tensor:
    """Scores [heads, rows, keys] of segments that end together."""
    allowed = torch.zeros(len(q), len(k), dtype=torch.bool)
    for (start_q, end_q), (start_k, end_k) in zip(pairwise(borders_q), pairwise(borders_k), strict=True):
        num_q, num_k = end_q - start_q, end_k - start_k
        seen = torch.ones(num_q, num_k, dtype=torch.bool)
        allowed[start_q:end_q, start_k:end_k] = seen.tril(num_k - num_q) if causal else seen
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~allowed, float("-inf"))


def flash_arguments(q: Tensor, k: Tensor, cum_seq_q, cum_seq_k, max_q: int, max_k: int, causal: bool):
    if cum_seq_q is None:  # dense: [1, rows, heads, D]
        assert q.shape[0] == 1
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        assert not causal
        return [0, max_q], [0, max_k]
    assert max_q == int(cum_seq_q.diff().max())
    assert max_k == int(cum_seq_k.diff().max())
    assert causal
    return cum_seq_q.tolist(), cum_seq_k.tolist()


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert (dropout_p, return_debug_mask) == (0.0, False)
    borders = flash_arguments(query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal)
    q, k, v = (x if x.ndim == 3 else x[0] for x in (query, key, value))
    scores = masked(q, k, *borders, is_causal, scale)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out, lse = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)
    dense = query.ndim == 4
    return out[None] if dense else out, lse[None] if dense else lse, torch.zeros(2), torch.zeros(0), None


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """From what it is given, as the kernel: probabilities exp(score - lse), and the product of output and gradient."""
    assert rng_state.shape == (2,)
    assert unused.shape == (0,)
    borders = flash_arguments(query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal)
    grad, q, k, v, o = (x if x.ndim == 3 else x[0] for x in (grad_out, query, key, value, out))
    lse = logsumexp if query.ndim == 3 else logsumexp[0]
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    p = (masked(q, k, *borders, is_causal, scale) - lse[..., None]).exp()
    dp = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(group, 1))
    ds = p * (dp - (grad * o).sum(-1).T[..., None]) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(group, 1))
    dk, dv = (torch.einsum("hqk,qhd->khd", x, y).unflatten(1, (heads, -1)).sum(2) for x, y in ((ds, q), (p, grad)))
    return tuple(x[None] if query.ndim == 4 else x for x in (dq, dk, dv))


class Replaced:
    """torch.ops.aten with some operations replaced."""

    def __init__(self, real) -> None:
        self.real = real
        self._scaled_dot_product_cudnn_attention = cudnn_forward
        self._scaled_dot_product_cudnn_attention_backward = cudnn_backward
        self._flash_attention_forward = flash_forward
        self._flash_attention_backward = flash_backward

    def __getattr__(self, name):
        return getattr(self.real, name)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", Replaced(torch.ops.aten))


def sdpa_by_segment(q: Tensor, k: Tensor, v: Tensor, of: tuple[Span, ...]) -> Tensor:
    out = []
    for span in of:
        keys = [*range(*(span.prefix or (0, 0))), *range(span.start, span.end)]
        mine = (x.transpose(0, 1)[None] for x in (q[span.start : span.end], k[keys], v[keys]))
        mask = torch.ones(span.rows, len(keys), dtype=torch.bool).tril(len(keys) - span.rows)
        out.append(F.scaled_dot_product_attention(*mine, attn_mask=mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


MIXED = spans([5, 40, 40, 1, 37, 50, 3, 9, 33], [None, 0, 0, 0, 0, None, None, 6, 6])


@pytest.mark.parametrize(
    ("of", "groups"),
    [
        (spans([63]), 1),
        (spans([21] * 3), 1),
        (spans([33, 40, 40, 32]), 3),
        (MIXED, 4),
        (MIXED, None),
    ],
    ids=["one", "equal", "several", "shared and short", "variable-length kernel"],
)
def test_bodies_equal_a_loop_over_segments(of, groups, stand_ins):
    """Padding is cut off again and adds to no gradient; halves with a prefix are one attention; prompts get all."""
    packed = Packing.of(of, CPU)
    body = FlashBody(packed, 0.3)
    if groups is not None:
        dense = Dense.plan(of, CPU, separate=32, uniform=1)
        assert len(dense.groups) == groups
        body = CudnnBody(dense, 0.3)
    g = torch.Generator().manual_seed(0)
    rows = of[-1].end
    q, cotangent = (torch.randn(rows, 4, 16, generator=g).requires_grad_() for _ in range(2))
    k, v = (torch.randn(rows, 2, 16, generator=g).requires_grad_() for _ in range(2))
    ours, expected = attend(q, k, v, body), sdpa_by_segment(q, k, v, of)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)
    found, wanted = (torch.autograd.grad((o * cotangent.detach()).sum(), (q, k, v)) for o in (ours, expected))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("check", [CudnnBody.checked, CudnnBody.checked_with_prefix])
@pytest.mark.parametrize("fault", [None, "value", "gradient", "error", "log-sum-exp"])
def test_a_body_is_looked_at_before_it_is_used(fault, check, stand_ins, caplog):
    """On the CPU, in float32: right as it is; not taken if it computes something else, or nothing."""
    real = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

    def broken(*args, **kwargs):
        if fault == "error":
            raise RuntimeError("no plan\nfor this")
        grads = real(*args, **kwargs)
        return grads[0], grads[1] * (1.1 if fault == "gradient" else 1.0), grads[2]

    torch.ops.aten._scaled_dot_product_cudnn_attention_backward = broken
    if fault == "value":
        torch.ops.aten._scaled_dot_product_cudnn_attention = lambda q, *rest, **kw: cudnn_forward(2 * q, *rest, **kw)
    if fault == "log-sum-exp":  # to another base, which its own backward would know

        def to_base_2(*args, **kwargs):
            out, lse, *others = cudnn_forward(*args, **kwargs)
            return out, lse / log(2), *others

        torch.ops.aten._scaled_dot_product_cudnn_attention = to_base_2
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward = lambda *args, **kwargs: real(
            *args[:5], args[5] * log(2), *args[6:], **kwargs
        )
    right = fault is None or (fault == "log-sum-exp" and check is CudnnBody.checked)
    kernels.is_right.cache_clear()
    assert kernels.is_right(check, CPU, torch.float32, 64, 2) == right
    kernels.is_right.cache_clear()
    name = "Cudnn" if check is CudnnBody.checked else "Cudnn with prefix"
    said = "" if right else f"{name} is off by"
    if fault == "error":
        said = f"{name} does not run here: no plan for this"
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_the_real_operations_take_these_arguments():
    """On the meta device, through torch's own schemas."""
    q, k = (torch.empty(300, heads, 64, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    for groups in ((Group(0, 1, 100, 256), Group(100, 2, 100, 100)), (Group(0, 3, 100, 256),)):
        body = CudnnBody(Dense(groups), 0.1)
        out, saved = body.forward(q, k, k)
        grads = body.backward(torch.empty_like(out), q, k, k, out, saved)
        assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, k.shape]


# ----- outputs that are kept for a block's recomputation


@dataclass(frozen=True)
class Counted:
    """A body, and how often it is called."""

    body: Body
    calls: list[str]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Saved]:
        self.calls.append("forward")
        return self.body.forward(*tensors)

    def backward(self, *tensors: Tensor) -> Grads:
        self.calls.append("backward")
        return self.body.backward(*tensors)


def some_body(packed: Packing, q: Tensor, v: Tensor, scale: float, window: int | None, sinks: bool) -> Body:
    assert (window, sinks) == (None, False)
    dense = Dense.plan(packed.spans, CPU, separate=30, uniform=30)
    return FlashBody(packed, scale) if dense is None else CudnnBody(dense, scale)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_text"])
@pytest.mark.parametrize("keep", [True, False])
def test_attention_is_computed_once_where_it_is_kept(family, keep, stand_ins, monkeypatch):
    counted: list[str] = []
    monkeypatch.setattr(attention, "_by_block", lambda q, *rest: attention._by_kernel(caller[0], q, *rest))
    monkeypatch.setattr(attention, "choose", lambda *of: Counted(some_body(*of), counted))
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
