"""Attention bodies for packed rows on a GPU, and the one autograd function around them.

A body has a forward that says what its backward needs, and that backward, both without autograd. So sinks can be put
around any of them, and a block that is computed again for its backward pass can take the output it had the first time
(`Outputs`) where a quarter of all attention would otherwise be done twice.

Which body (`choose`), by TFLOP/s on an H200 with torch 2.11, 16,384 rows, forward, and forward and backward (`--op
attention`; those of flash-attn-4 of the kernel alone, its forward and its backward):

| rows | body | 1 sequence | 8 of one length | 20 of many |
|---|---|---|---|---|
| one length, or 8,192 rows and more | cuDNN, a call each | 608, 582 | 472, 388 | 151, 119 |
| others | flash-attn-4, where it is installed | | | 422, 310 |
| others | torch's variable-length FlashAttention-2 | 312, 304 | 266, 209 | 220, 168 |

The 151 and 119 are of calls from 2,048 rows on: gathering and padding took more than cuDNN gave.

cuDNN plans each new shape on the host, which takes a tenth of a second and more: lengths are padded to few sizes.
Its own variable-length form plans every call anew, in torch up to 2.14 at least.

All but the last are compared with it, once, before they are used (`is_right`).

Shapes: q [T, heads, D], k and v [T, kv_heads, D], rows of the packing; query heads share keys in groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from lightrl.kernels.attention_dense import CudnnBody, cudnn_runs
from lightrl.kernels.attention_flash import Body, Flash4Body, FlashBody, Packing, Saved, Span, flash4_runs

logger = logging.getLogger(__name__)

_TOLERANCE = 0.02  # relative error between two kernels in bfloat16; what is wrong is off by its own size


def choose(packing: Packing, q: Tensor, v: Tensor, scale: float, window: int | None, sinks: bool) -> Body:
    """The fastest body that computes this; no look at the device's data."""
    if window is not None and window >= packing.max_seqlen_k:
        window = None
    if window is not None or sinks:
        return FlashBody(packing, scale, window)
    key = (q.device, q.dtype, q.shape[-1], q.shape[1] // v.shape[1])
    varlen: type[FlashBody] = Flash4Body if flash4_runs(q) and is_right(Flash4Body.checked, *key) else FlashBody
    if packing.dense is not None and cudnn_runs(q):
        check = CudnnBody.checked_with_prefix if packing.dense.prefixed else CudnnBody.checked
        if is_right(check, *key):
            return CudnnBody(packing.dense, scale, varlen)
    return varlen(packing, scale)


# ----- the autograd function


class Outputs(Protocol):
    """Attention outputs of a block's forward, for its recomputation."""

    def next(self) -> tuple[Tensor, Saved] | None:
        """What was kept, while the block is computed again."""

    def keep(self, out: Tensor, saved: Saved) -> None: ...


def attend(
    q: Tensor, k: Tensor, v: Tensor, body: Body, sinks: Tensor | None = None, outputs: Outputs | None = None
) -> Tensor:
    """[T, heads, D], differentiable in q, k, v and sinks [heads]."""
    out: Tensor = _Attend.apply(q, k, v, sinks, body, outputs)
    return out


class _Attend(torch.autograd.Function):
    """A body, perhaps with sinks, which it need not know.

    A sink makes each row's softmax sum larger: the log-sum-exp becomes `l = logaddexp(lse, sink)`, the output shrinks
    by exp(lse - l). A body's backward computes probabilities as exp(score - l) and the product of output and its
    gradient from what it is given. Given the new output and `l` it therefore returns exact gradients; the sink's own is
    minus its probability times that product.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, body: Body, outputs: Outputs | None
    ) -> Tensor:
        known = None if outputs is None else outputs.next()
        if known is None:
            out, saved = body.forward(q, k, v)
            if sinks is not None:
                lse, *others = saved
                assert lse is not None
                total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
                out = (out * (lse - total).exp().T[..., None]).to(q.dtype)
                saved = (total, *others)
            if outputs is not None:
                outputs.keep(out.detach(), saved)
        else:
            out, saved = known[0].detach(), known[1]
        ctx.save_for_backward(q, k, v, sinks, out, *saved)
        ctx.body = body
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, *saved = ctx.saved_tensors
        grad = grad.contiguous()
        grads = ctx.body.backward(grad, q, k, v, out, tuple(saved))
        grad_sinks = None
        if sinks is not None:
            total = saved[0]
            product = (grad.to(total.dtype) * out).sum(-1).T  # [heads, T]
            share = (sinks.to(total.dtype)[:, None] - total).exp()
            grad_sinks = -(share * product).sum(-1).to(sinks.dtype)
        return *grads, grad_sinks, None, None


# ----- are they right?


@cache
def is_right(
    make: Callable[[Packing, float], Body], device: torch.device, dtype: torch.dtype, width: int, group: int
) -> bool:
    """Does a body compute here what torch's variable-length kernel does, gradients too? Looked at once.

    flash-attn-4 is young, and all of these are called below the functions that their makers promise: one that fails or
    errs is not used, and a warning says so. `group` query heads share a key head.
    """
    name = make.__qualname__.replace("Body.checked", "").replace("_", " ")
    spans = (Span(0, 70), Span(70, 71, (0, 70)), Span(71, 200, (0, 70)), Span(200, 300))
    packing = Packing.of(spans, device)
    g = torch.Generator(device).manual_seed(0)
    q, grad = (torch.randn(300, 2 * group, width, generator=g, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(300, 2, width, generator=g, device=device).to(dtype) for _ in range(2))
    try:
        results = []
        for body in (make(packing, 0.1), FlashBody(packing, 0.1)):
            out, saved = body.forward(q, k, v)
            results.append((out, *body.backward(grad, q, k, v, out, saved)))
        error = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(*results, strict=True))
    except Exception as problem:
        logger.warning("attention by %s does not run here: %s", name, " ".join(str(problem).split())[:300])
        return False
    if not error < _TOLERANCE:
        logger.warning("attention by %s is off by %.2g of torch's kernel, which runs in its place", name, error)
    return error < _TOLERANCE
