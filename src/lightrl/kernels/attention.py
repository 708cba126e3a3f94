"""Attention bodies for packed rows on a GPU, and the one autograd function around them.

A body has a forward that says what its backward needs, and that backward, both without autograd. So sinks can be put
around any of them, and a block that is computed again for its backward pass can take the output it had the first time
(`Outputs`) where a quarter of all attention would otherwise be done twice.

Which body (`choose`), by what was measured on an H200 at 16,384 causal rows, 16 heads of 128, in TFLOP/s forward and
forward + backward:

| rows | body | TFLOP/s |
|---|---|---|
| sequences of one length (one among them), or all of 4,096 rows and more | cuDNN, a call a length | 629 / 554 |
| others, and all with shared prompts | flash-attn-4, where it is installed and right | 422 / 335 |
| others | torch's variable-length FlashAttention-2 | 213 / 182 |

cuDNN plans each new shape on the host, which takes a tenth of a second and more: lengths are padded to few sizes.
Its own variable-length form plans every call anew in torch up to 2.14.

Shapes: q [T, heads, D], k and v [K, kv_heads, D]; query heads share keys in groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

Saved = tuple[Tensor | None, ...]
Grads = tuple[Tensor, Tensor, Tensor]

SEPARATE_ROWS = 4096  # sequences this long are worth a call each
UNIFORM_ROWS = 512  # sequences of one length, and this long, are worth a plan
_MAX_CUDNN_WIDTH = 128


class Body(Protocol):
    """One kernel, for one packing and one layer's rule."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        """Output [T, heads, D] and what the backward needs; where sinks are supported, first of it the log-sum-exp of
        each row's scores [heads, T]."""

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        """Gradients of q, k and v, given that of the output."""


@dataclass(frozen=True)
class Packing:
    """Where segments begin and end, on the device and on the host."""

    cu_seqlens_q: Tensor  # [S + 1] int32
    cu_seqlens_k: Tensor  # [S + 1] int32
    max_seqlen_q: int
    max_seqlen_k: int
    lengths: tuple[int, ...] | None
    """Rows of each segment, where all attend to themselves only; None where some have keys before their own rows."""


def choose(packing: Packing, q: Tensor, v: Tensor, scale: float, window: int | None, sinks: bool) -> Body:
    """The fastest body that computes this; no look at the device's data."""
    if window is not None and window >= packing.max_seqlen_k:
        window = None
    plain = window is None and not sinks and q.shape[-1] == v.shape[-1]
    if plain and (groups := dense_groups(packing.lengths)) is not None and cudnn_runs(q):
        return CudnnBody(groups, scale)
    if plain and flash4_is_right(q.device, q.dtype, q.shape[-1], q.shape[1] // v.shape[1]):
        return Flash4Body(packing, scale)
    return FlashBody(packing, scale, window)


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


# ----- torch's FlashAttention-2


@dataclass(frozen=True)
class FlashBody:
    """The two halves of torch's variable-length attention. Takes all: windows, shared prompts, sinks around it."""

    packing: Packing
    scale: float
    window: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        out, lse, *kept, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._lengths, 0.0, self.window is None, False, scale=self.scale, **self._window
        )
        return out, (lse, *kept)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        lse, *kept = saved
        grads: Grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *self._lengths, 0.0, self.window is None, *kept, scale=self.scale, **self._window
        )
        return grads

    @property
    def _lengths(self) -> tuple[Tensor, Tensor, int, int]:
        p = self.packing
        return p.cu_seqlens_q, p.cu_seqlens_k, p.max_seqlen_q, p.max_seqlen_k

    @property
    def _window(self) -> dict[str, int]:
        return {"window_size_left": -1 if self.window is None else self.window - 1, "window_size_right": 0}


# ----- cuDNN


@dataclass(frozen=True)
class Group:
    """Consecutive sequences of one length, for one call."""

    start: int  # first row
    count: int
    length: int  # rows of each
    padded: int
    """Rows of each in the call. Added rows come after all others, which therefore do not see them."""

    def dense(self, rows: Tensor) -> Tensor:
        """[T, heads, D] -> [count, heads, padded, D], a view where nothing is added."""
        mine = rows[self.start : self.start + self.count * self.length].unflatten(0, (self.count, self.length))
        if self.padded > self.length:
            mine = F.pad(mine, (0, 0, 0, 0, 0, self.padded - self.length))
        return mine.transpose(1, 2)

    def rows(self, dense: Tensor) -> Tensor:
        """[count, heads, padded, D] -> [count * length, heads, D]."""
        return dense.transpose(1, 2)[:, : self.length].flatten(0, 1)


def dense_groups(lengths: Sequence[int] | None) -> tuple[Group, ...] | None:
    """Calls that cover sequences of these lengths without many plans, or much padding; None where there are none."""
    if not lengths or min(lengths) < (UNIFORM_ROWS if len(set(lengths)) == 1 else SEPARATE_ROWS):
        return None
    starts = accumulate(lengths, initial=0)
    runs = [(length, list(run)) for length, run in groupby(zip(lengths, starts, strict=False), key=lambda x: x[0])]
    return tuple(Group(run[0][1], len(run), length, _padded(length)) for length, run in runs)


def _padded(length: int) -> int:
    """Eight sizes an octave."""
    step = max(256, 2 ** (length.bit_length() - 1) // 8)
    return -(-length // step) * step


def cudnn_runs(q: Tensor) -> bool:
    """Hopper or newer (older cards do as well with FlashAttention-2), and not switched off in torch."""
    return (
        q.is_cuda
        and q.shape[-1] <= _MAX_CUDNN_WIDTH
        and q.shape[-1] % 8 == 0
        and _has_cudnn(q.device)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


@cache
def _has_cudnn(device: torch.device) -> bool:
    version = torch.backends.cudnn.version()
    return version is not None and version >= 90100 and torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True)
class CudnnBody:
    """cuDNN's attention over dense batches. Plainly causal; widths of q, k and v are the same."""

    groups: tuple[Group, ...]
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        outputs, saved = [], []
        for group in self.groups:
            out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *map(group.dense, (q, k, v)), None, True, 0.0, True, False, scale=self.scale
            )
            outputs.append(group.rows(out))
            saved += [lse, seed, offset]
        return _joined(outputs), tuple(saved)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        parts = []
        for number, group in enumerate(self.groups):
            lse, seed, offset = saved[3 * number : 3 * number + 3]
            # added rows have gradient 0, and so give none to any key
            tensors = map(group.dense, (grad, q, k, v, out))
            grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *tensors, lse, seed, offset, None, None, None, group.padded, group.padded, 0.0, True, scale=self.scale
            )
            parts.append([group.rows(g) for g in grads])
        grad_q, grad_k, grad_v = (_joined(p) for p in zip(*parts, strict=True))
        return grad_q, grad_k, grad_v


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


# ----- flash-attn-4


@dataclass(frozen=True)
class Flash4Body:
    """flash-attn-4's kernels (CuTe), under their autograd function. Plainly causal."""

    packing: Packing
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **self._options)
        return out, (lse,)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        from flash_attn.cute.interface import _flash_attn_bwd

        grad_q, grad_k, grad_v, *_ = _flash_attn_bwd(q, k, v, out, grad, saved[0], **self._options)
        return grad_q, grad_k, grad_v

    @property
    def _options(self) -> dict[str, Any]:
        p = self.packing
        return {
            "softmax_scale": self.scale,
            "causal": True,
            "cu_seqlens_q": p.cu_seqlens_q,
            "cu_seqlens_k": p.cu_seqlens_k,
            "max_seqlen_q": p.max_seqlen_q,
            "max_seqlen_k": p.max_seqlen_k,
        }


@cache
def flash4_is_right(device: torch.device, dtype: torch.dtype, width: int, group: int) -> bool:
    """Is flash-attn-4 installed, and does it compute what torch's kernel does, gradients too? Looked at once.

    It is young and its lower functions, which are called here, are not promised: one that fails or errs is not used.
    `group` query heads share a key head; the first call compiles for seconds.
    """
    if width not in (64, 128) or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        import flash_attn.cute.interface  # noqa: F401
    except Exception:  # not installed, or not with this torch or compiler
        return False
    try:
        error = _difference(lambda packing: Flash4Body(packing, 0.1), device, dtype, width, group)
    except Exception as problem:
        logger.warning("flash-attn-4 cannot run here, torch's kernel does: %s", " ".join(str(problem).split())[:300])
        return False
    if not error < 0.02:
        logger.warning("flash-attn-4 is off by %.3g of torch's kernel, which runs in its place", error)
    return error < 0.02


def _difference(
    body: Callable[[Packing], Body], device: torch.device, dtype: torch.dtype, width: int, group: int
) -> float:
    """Largest relative error of output and gradients against torch's kernel; one segment has keys before its rows."""
    rows, keys = (torch.tensor(b, dtype=torch.int32, device=device) for b in ([0, 70, 71, 200], [0, 70, 141, 400]))
    packing = Packing(rows, keys, 129, 259, None)
    g = torch.Generator(device).manual_seed(0)
    q, grad = (torch.randn(200, 2 * group, width, generator=g, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(400, 2, width, generator=g, device=device).to(dtype) for _ in range(2))
    results = []
    for kernel in (body(packing), FlashBody(packing, 0.1)):
        out, saved = kernel.forward(q, k, v)
        results.append((out, *kernel.backward(grad, q, k, v, out, saved)))
    pairs = zip(*results, strict=True)
    return max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
