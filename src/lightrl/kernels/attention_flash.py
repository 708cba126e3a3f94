"""Variable-length attention kernels under their autograd functions, and what all attention bodies have in common.

Shapes: q [T, heads, D], k and v [T, kv_heads, D], rows of the packing; query heads share keys in groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightrl.kernels.attention_dense import Dense

Saved = tuple[Tensor | None, ...]
Grads = tuple[Tensor, Tensor, Tensor]


class Body(Protocol):
    """One kernel, for one packing and one layer's rule."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        """Output [T, heads, D] and what the backward needs; where sinks are supported, first of it the log-sum-exp of
        each row's scores [heads, T]."""

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        """Gradients of q, k and v, given that of the output."""


@dataclass(frozen=True)
class Span:
    """Rows of a segment, which see their own rows before them and all of a prefix (an answer's prompt)."""

    start: int
    end: int
    prefix: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Packing:
    """Where segments begin and end, on the device and, in `spans`, on the host."""

    cu_seqlens_q: Tensor  # [S + 1] int32
    cu_seqlens_k: Tensor  # [S + 1] int32
    max_seqlen_q: int
    max_seqlen_k: int
    kv_index: Tensor | None  # [K] int64, rows of each segment's keys; None: its own
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, spans: tuple[Span, ...], device: torch.device) -> Packing:
        """From the host's side alone; spans need not cover all rows: theirs are counted from 0 then."""
        keys = [s.rows + (0 if s.prefix is None else s.prefix[1] - s.prefix[0]) for s in spans]
        borders = (list(accumulate(x, initial=0)) for x in ([s.rows for s in spans], keys))
        cu_q, cu_k = (torch.tensor(b, dtype=torch.int32).to(device, non_blocking=True) for b in borders)
        parts = [r for s in spans for r in (s.prefix, (s.start, s.end)) if r is not None]
        index = torch.cat([torch.arange(*part) for part in parts]).to(device, non_blocking=True)
        return cls(cu_q, cu_k, max(s.rows for s in spans), max(keys), index, spans)

    @cached_property
    def dense(self) -> Dense | None:
        """Dense calls for this packing, where they are worth it; planned once for all layers."""
        from lightrl.kernels.attention_dense import Dense

        return Dense.plan(self.spans, self.cu_seqlens_q.device)


# ----- torch's FlashAttention-2


@dataclass(frozen=True)
class FlashBody:
    """The two halves of torch's variable-length attention. Takes all: windows, shared prompts, sinks around it."""

    packing: Packing
    scale: float
    window: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        return self._forward(q, self._keys(k), self._keys(v))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        grad_q, grad_k, grad_v = self._backward(grad, q, self._keys(k), self._keys(v), out, saved)
        return grad_q, self._added_up(grad_k, k), self._added_up(grad_v, v)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        """k and v: the keys of each segment, [K, kv_heads, D]."""
        out, lse, *kept, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._lengths, 0.0, self.window is None, False, scale=self.scale, **self._window
        )
        return out, (lse, *kept)

    def _backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        lse, *kept = saved
        grads: Grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *self._lengths, 0.0, self.window is None, *kept, scale=self.scale, **self._window
        )
        return grads

    def _keys(self, rows: Tensor) -> Tensor:
        index = self.packing.kv_index
        return rows if index is None else rows.index_select(0, index)

    def _added_up(self, grad: Tensor, rows: Tensor) -> Tensor:
        """A row gets the gradients of all places it was read at, added in float32."""
        index = self.packing.kv_index
        if index is None:
            return grad
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        return total.index_add_(0, index, grad.float()).to(rows.dtype)

    @property
    def _lengths(self) -> tuple[Tensor, Tensor, int, int]:
        p = self.packing
        return p.cu_seqlens_q, p.cu_seqlens_k, p.max_seqlen_q, p.max_seqlen_k

    @property
    def _window(self) -> dict[str, int]:
        return {"window_size_left": -1 if self.window is None else self.window - 1, "window_size_right": 0}


# ----- flash-attn-4


@dataclass(frozen=True)
class Flash4Body(FlashBody):
    """flash-attn-4's kernels (CuTe), under their autograd function. Plainly causal."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **self._options)
        return out, (lse,)

    def _backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        from flash_attn.cute.interface import _flash_attn_bwd

        grad_q, grad_k, grad_v, *_ = _flash_attn_bwd(q, k, v, out, grad, saved[0], **self._options)
        return grad_q, grad_k, grad_v

    @property
    def _options(self) -> dict[str, Any]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return {"softmax_scale": self.scale, "causal": True} | {n: getattr(self.packing, n) for n in names}

    @staticmethod
    def checked(packing: Packing, scale: float) -> Body:
        return Flash4Body(packing, scale)


@cache
def _has_flash4(device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        import flash_attn.cute.interface  # noqa: F401
    except Exception:  # not installed, or not for this torch or compiler
        return False
    return True


def flash4_runs(q: Tensor) -> bool:
    """Hopper or newer, with the package."""
    return q.is_cuda and q.shape[-1] in (64, 128) and _has_flash4(q.device)
