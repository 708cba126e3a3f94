"""On CUDA: fused norms, rotations and gates, and attention bodies, against float64 or float32; kept outputs."""

from __future__ import annotations

import copy
from itertools import accumulate

import pytest
import torch
from gpu.test_packed_gpu import build, relative_error
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from unit.test_packed_models import build as tiny
from unit.test_packed_models import samples

from lightrl.kernels import attention, gate, norm
from lightrl.kernels.attention import attend, choose
from lightrl.kernels.attention_dense import CudnnBody, Dense
from lightrl.kernels.attention_flash import Flash4Body, FlashBody, Packing, Span
from lightrl.kernels.norm import Norm
from lightrl.models import recompute, registry
from lightrl.models.attention import Segments
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import PolicyModule, to_device

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}  # one rounding


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def held_to(found: Tensor, reference, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """`reference` of float64 copies of the inputs: values and gradients, relative to the tensor's norm."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference(*exact)
    cotangent = torch.randn_like(expected).to(dtype)
    grads = torch.autograd.grad(found, inputs, cotangent)
    wanted = torch.autograd.grad(expected, exact, cotangent.double())
    for ours, truth in zip((found, *grads), (expected, *wanted), strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours.detach().double(), truth.detach()) < TOLERANCE[dtype]


def norm_in_float64(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, offset: float) -> Tensor:
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (offset + weight)
    if cos is None or sin is None:
        return x
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    partner = torch.cat([-second, first], -1)
    return torch.cat([turned * cos[:, None].double() + partner * sin[:, None].double(), rest], -1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("tokens", "heads", "width", "rotary"), [
    (1, 1, 64, 64), (63, 8, 128, 128), (257, 3, 256, 64), (4096, 16, 128, 128), (33, 2, 96, 48),
    (1, 1, 1024, 0), (257, 1, 2560, 0), (4096, 1, 1024, 0), (63, 1, 7168, 0), (5, 1, 16384, 0),
])  # fmt: skip
def test_norm_and_rotation(tokens, heads, width, rotary, offset, dtype):
    torch.manual_seed(0)
    x = normal(tokens, heads, width, dtype=dtype, scale=3).requires_grad_()
    weight = normal(width, dtype=dtype).requires_grad_()
    cos, sin = (None, None)
    if rotary:
        angle = torch.randn(tokens, rotary, device=DEVICE)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        found = norm.norm_rotate(x, Norm(weight=weight, eps=1e-6, offset=offset), cos, sin)
    else:
        found = norm.rms_norm(x, Norm(weight=weight, eps=1e-6, offset=offset))
    held_to(found, lambda a, w: norm_in_float64(a, w, cos, sin, offset), [x, weight], dtype)
    outputs = (norm._NormRotate.apply(x, weight, cos, sin, 1e-6, offset) for _ in range(2))
    (first,), (second,) = (torch.autograd.grad(y.float().square().sum(), [weight]) for y in outputs)
    assert torch.equal(first, second)  # summed without atomics


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rotary", [32, 128])
def test_rotation_of_queries_beside_their_gates(rotary, dtype):
    torch.manual_seed(0)
    both = normal(257, 4, 256, dtype=dtype).requires_grad_()
    angle = torch.randn(257, rotary, device=DEVICE)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    found = norm.norm_rotate(both[..., :128], None, cos, sin)
    held_to(found, lambda a: norm_in_float64(a[..., :128], None, cos, sin, 0.0), [both], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("shape", [(1, 1), (63, 3072), (257, 8, 128), (4096, 9728), (2, 2060)])
def test_gated_product(shape, activation, dtype):
    torch.manual_seed(0)
    both = normal(*shape[:-1], 2 * shape[-1], dtype=dtype, scale=3).requires_grad_()
    x = normal(*shape, dtype=dtype).requires_grad_()
    activate = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    found = gate.gated(both.chunk(2, -1)[1], x, activation)
    held_to(found, lambda b, y: activate(b.chunk(2, -1)[1]) * y, [both, x], dtype)


# ----- attention bodies


def packed(lengths: list[int], prefixes: list[int | None] | None = None) -> Packing:
    """Segments of these rows one after the other; `prefixes` names the segment that is before each one's own rows."""
    starts = list(accumulate(lengths, initial=0))
    before = [None if p is None else (starts[p], starts[p + 1]) for p in prefixes or [None] * len(lengths)]
    return Packing.of(tuple(map(Span, starts, starts[1:], before)), DEVICE)


def written_out(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    out, group = [], q.shape[1] // k.shape[1]
    for span in packing.spans:
        keys = [*range(*(span.prefix or (0, 0))), *range(span.start, span.end)]
        mine = (q[span.start : span.end], *(x[keys].repeat_interleave(group, 1) for x in (k, v)))
        a, b, c = (x.transpose(0, 1) for x in mine)
        seen = torch.ones(a.shape[1], b.shape[1], dtype=torch.bool, device=DEVICE).tril(b.shape[1] - a.shape[1])
        scores = (a @ b.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        out.append((scores.softmax(-1) @ c).transpose(0, 1))
    return torch.cat(out)


def check_body(body, packing: Packing, width: int = 128, heads: tuple[int, int] = (8, 2)) -> None:
    torch.manual_seed(0)
    rows = packing.spans[-1].end
    q = normal(rows, heads[0], width, dtype=torch.bfloat16, scale=2).requires_grad_()
    k, v = (normal(rows, heads[1], width, dtype=torch.bfloat16, scale=2).requires_grad_() for _ in range(2))
    cotangent = normal(rows, heads[0], width, dtype=torch.bfloat16)
    out = attend(q, k, v, body)
    grads = torch.autograd.grad(out, (q, k, v), cotangent)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    truth = written_out(*exact, packing, 0.09)
    wanted = torch.autograd.grad(truth, exact, cotangent.float())
    for name, ours, expected in zip("oqkv", (out, *grads), (truth, *wanted), strict=True):
        assert ours.is_contiguous()
        if float(expected.detach().abs().max()) < 1e-4:  # one key: nothing to choose, and rounding has no size
            assert float(ours.detach().abs().max()) < 1e-4, name
            continue
        assert relative_error(ours.detach().float(), expected.detach()) < 1e-2, name


VARLEN = [([1], None), ([63, 1, 257], None), ([700] * 3, None), ([2048], None), ([70, 1, 257, 5], [None, 0, 0, None])]
DENSE = [([700] * 3, None), ([2048], None), ([513], None), ([257, 1000, 1000, 64], None)]
DENSE += [([70, 300, 300, 257, 1, 90, 5, 200], [None, 0, 0, 0, 0, None, 5, 5])]


@pytest.mark.parametrize(("lengths", "prefixes"), VARLEN)
def test_torchs_flash_body(lengths, prefixes):
    packing = packed(lengths, prefixes)
    check_body(FlashBody(packing, 0.09), packing)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (16, 8)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("lengths", "prefixes"), DENSE)
def test_cudnn_body(lengths, prefixes, width, heads):
    packing = packed(lengths, prefixes)
    if not attention.cudnn_runs(normal(1, 2, width, dtype=torch.bfloat16)):
        pytest.skip("no Hopper, or no cuDNN 9.1")
    dense = Dense.plan(packing.spans, DEVICE, separate=100)
    assert dense is not None
    check_body(CudnnBody(dense, 0.09), packing, width, heads)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("lengths", "prefixes"), VARLEN)
def test_flash4_body(lengths, prefixes, width):
    if not attention.flash4_runs(normal(1, 2, width, dtype=torch.bfloat16)):
        pytest.skip("flash-attn-4 is not installed, or no Hopper")
    packing = packed(lengths, prefixes)
    check_body(Flash4Body(packing, 0.09), packing, width)


@pytest.mark.parametrize("check", [CudnnBody.checked, CudnnBody.checked_with_prefix, Flash4Body.checked])
@pytest.mark.parametrize(("width", "group"), [(64, 2), (128, 1), (128, 2), (128, 4)])
def test_bodies_that_run_are_right(check, width, group):
    """What is looked at before a run trusts them; a warning would say why not."""
    runs = attention.flash4_runs if check is Flash4Body.checked else attention.cudnn_runs
    if not runs(normal(1, 2, width, dtype=torch.bfloat16)):
        pytest.skip("not on this card, or not installed")
    assert attention.is_right(check, DEVICE, torch.bfloat16, width, group)


def test_long_rows_go_to_cudnn():
    q, v = (normal(1, heads, 128, dtype=torch.bfloat16) for heads in (16, 8))
    if not attention.cudnn_runs(q):
        pytest.skip("no Hopper, or no cuDNN 9.1")
    for lengths, prefixes in (([16384], None), ([2048] * 8, None), ([200, 5000, 9000], [None, 0, 0])):
        assert isinstance(choose(packed(lengths, prefixes), q, v, 0.1, None, False), CudnnBody)


# ----- whole models


def test_kept_outputs_change_no_gradient():
    """Blocks recomputed with attention's outputs kept, against all recomputed: same log-probs, same gradients."""
    model = build("qwen3", 128).to(torch.bfloat16)
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 97, (600,), generator=g).tolist()
    long = TrainSample(
        group_index=0, index=0, prompt=ids[:40], response=ids[40:], loss_mask=[1] * 560, rollout_logprobs=None,
        advantage=0.0,
    )  # fmt: skip
    for units in ([[long]], samples()):
        results = [recomputed(copy.deepcopy(model), units, keep) for keep in (True, False)]
        assert torch.equal(results[0][0], results[1][0])
        for name, gradient in results[0][1].items():
            assert relative_error(results[1][1][name], gradient) < 5e-3, name


@pytest.mark.parametrize("family", sorted(registry.FAMILIES))
def test_fused_equals_stock_code(family):
    """Every family in float32, packed, with and without the fused kernels: the zero-centred and gated ones too."""
    _, model = tiny(family)
    results = []
    for fuse in (False, True):
        ours = copy.deepcopy(model).to(DEVICE)
        registry.prepare_packed(ours, fuse=fuse)
        batch = pack(samples(), [[1.0] * len(u) for u in samples()])
        module = PolicyModule(ours, packed=True)
        logprobs, entropies = module(to_device(batch, DEVICE), Segments.from_microbatch(batch, DEVICE), 1.0)
        (logprobs + entropies).sum().backward()
        results.append((logprobs.detach(), {n: p.grad for n, p in ours.named_parameters()}))
    torch.testing.assert_close(results[1][0], results[0][0], atol=2e-5, rtol=1e-5)
    for name, gradient in results[0][1].items():
        assert relative_error(results[1][1][name], gradient) < 1e-4, name


def recomputed(model: torch.nn.Module, units, keep: bool) -> tuple[Tensor, dict[str, Tensor]]:
    registry.prepare_packed(model, fuse=True)
    for name, block in list(model.model.layers.named_children()):
        context_fn = recompute.contexts(block, keep_attention=keep)
        options = {} if context_fn is None else {"context_fn": context_fn}
        wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
        model.model.layers.register_module(name, wrapped)
    batch = pack(units, [[1.0] * len(u) for u in units])
    module = PolicyModule(model, packed=True)
    logprobs, _ = module(to_device(batch, DEVICE), Segments.from_microbatch(batch, DEVICE), 1.0)
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad.float() for n, p in model.named_parameters()}
