"""cuDNN's attention for packed rows: long segments in dense calls, the rest through a variable-length kernel.

A segment with a prefix is two attentions: its own rows causally (cuDNN), and all of the prefix (a dense call of torch's
FlashAttention-2). With `l1`, `l2` the log-sum-exp of a row's scores in each and `l = logaddexp(l1, l2)`, the output is
`o1 exp(l1 - l) + o2 exp(l2 - l)`. A kernel's backward computes probabilities as exp(score - l) and the product of
output and its gradient from what it is given: given the whole output and `l`, each half returns its exact share.

Shapes as in `attention_flash.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.kernels.attention_flash import Body, FlashBody, Grads, Packing, Saved, Span

SEPARATE_ROWS = 8192  # segments this long are worth a call each: below, padding and gathering take what cuDNN gives
UNIFORM_ROWS = 512  # segments of one length, and this long, are worth a plan
_MAX_WIDTH = 128
_SAVED = 5  # tensors of a group: cuDNN's log-sum-exp, seed and offset, and the prefix kernel's two


def cudnn_runs(q: Tensor) -> bool:
    """Hopper or newer (older cards do as well with FlashAttention-2), and not switched off in torch."""
    return (
        q.is_cuda
        and q.shape[-1] <= _MAX_WIDTH
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
class Group:
    """Consecutive segments of one length, and with one prefix, for one call."""

    start: int  # first row
    count: int
    length: int  # rows of each
    padded: int
    """Rows of each in the call. Added rows come after all others, which therefore do not see them."""
    prefix: tuple[int, int] | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count * self.length)

    def dense(self, rows: Tensor) -> Tensor:
        """[T, heads, D] -> [count, heads, padded, D], a view where nothing is added."""
        mine = rows[self.rows].unflatten(0, (self.count, self.length))
        if self.padded > self.length:
            mine = F.pad(mine, (0, 0, 0, 0, 0, self.padded - self.length))
        return mine.transpose(1, 2)

    def flat(self, dense: Tensor) -> Tensor:
        """[count, heads, padded, D] -> [count * length, heads, D]."""
        return dense.transpose(1, 2)[:, : self.length].flatten(0, 1)


@dataclass(frozen=True)
class Dense:
    """Dense calls for some segments of a packing; what is left of it."""

    groups: tuple[Group, ...]
    rest: Packing | None = None
    rest_rows: Tensor | None = None  # [n] int64

    @property
    def prefixed(self) -> bool:
        """Are there dense calls whose outputs are to be joined with those of a prefix?"""
        return any(group.prefix is not None for group in self.groups)

    @classmethod
    def plan(
        cls,
        spans: Sequence[Span],
        device: torch.device,
        separate: int = SEPARATE_ROWS,
        uniform: int = UNIFORM_ROWS,
        prefixes: bool = True,
    ) -> Dense | None:
        """Few plans and little padding; None where nothing is worth a call. Segments with prefixes can be left out."""
        alike = len({(s.rows, s.prefix) for s in spans}) == 1 and spans[0].prefix is None
        least = uniform if alike else separate

        def is_long(span: Span) -> bool:
            return span.rows >= least and (prefixes or span.prefix is None)

        long, left = ([s for s in spans if is_long(s) == wanted] for wanted in (True, False))
        if not long:
            return None
        groups: list[Group] = []
        for span in long:
            last = groups[-1] if groups else None
            if last and (last.length, last.prefix, last.rows.stop) == (span.rows, span.prefix, span.start):
                groups[-1] = Group(last.start, last.count + 1, last.length, last.padded, last.prefix)
            else:
                groups.append(Group(span.start, 1, span.rows, _padded(span.rows), span.prefix))
        if not left:
            return cls(tuple(groups))
        rows = torch.cat([torch.arange(s.start, s.end) for s in left])
        return cls(tuple(groups), Packing.of(tuple(left), device), rows.to(device, non_blocking=True))


def _padded(length: int) -> int:
    """Eight sizes an octave."""
    step = max(256, 2 ** (length.bit_length() - 1) // 8)
    return -(-length // step) * step


@dataclass(frozen=True)
class CudnnBody:
    """Plainly causal; widths of q, k and v are the same."""

    dense: Dense
    scale: float
    varlen: type[FlashBody] = FlashBody
    """For the rest."""

    @staticmethod
    def checked(packing: Packing, scale: float) -> Body:
        """For `is_right`, on short segments: dense calls and a rest."""
        dense = Dense.plan(packing.spans, packing.cu_seqlens_q.device, separate=70, prefixes=False)
        assert dense is not None
        return CudnnBody(dense, scale)

    @staticmethod
    def checked_with_prefix(packing: Packing, scale: float) -> Body:
        """The same with a prefix, which also takes cuDNN's log-sum-exp to be what it should."""
        dense = Dense.plan(packing.spans, packing.cu_seqlens_q.device, separate=100)
        assert dense is not None
        assert dense.prefixed
        return CudnnBody(dense, scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        if self._is_whole(q):
            out, saved = self._group_forward(self.dense.groups[0], q, k, v)
            return out.contiguous(), saved
        out = torch.empty_like(q)
        kept: list[Tensor | None] = []
        for group in self.dense.groups:
            out[group.rows], saved = self._group_forward(group, q, k, v)
            kept += saved
        if self.dense.rest is not None and self.dense.rest_rows is not None:
            rows = self.dense.rest_rows
            rest, saved = self.varlen(self.dense.rest, self.scale).forward(q.index_select(0, rows), k, v)
            out.index_copy_(0, rows, rest)
            kept += saved
        return out, tuple(kept)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved) -> Grads:
        if self._is_whole(q):
            grads, _ = self._group_backward(self.dense.groups[0], grad, q, k, v, out, saved)
            return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()
        grad_q = torch.empty_like(q)
        # a prompt's rows are read by all of its answers
        totals = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
        for number, group in enumerate(self.dense.groups):
            mine = saved[_SAVED * number : _SAVED * (number + 1)]
            grads, prefix_grads = self._group_backward(group, grad, q, k, v, out, mine)
            grad_q[group.rows] = grads[0]
            for total, own in zip(totals, grads[1:], strict=True):
                total[group.rows] += own
            if group.prefix is not None:
                for total, theirs in zip(totals, prefix_grads, strict=True):
                    total[slice(*group.prefix)] += theirs
        if self.dense.rest is not None and self.dense.rest_rows is not None:
            rows = self.dense.rest_rows
            grad_rest, q_rest, out_rest = (x.index_select(0, rows) for x in (grad, q, out))
            body, mine = self.varlen(self.dense.rest, self.scale), saved[_SAVED * len(self.dense.groups) :]
            rest = body.backward(grad_rest, q_rest, k, v, out_rest, mine)
            grad_q.index_copy_(0, rows, rest[0])
            for total, theirs in zip(totals, rest[1:], strict=True):
                total += theirs
        return grad_q, totals[0].to(k.dtype), totals[1].to(v.dtype)

    def _is_whole(self, q: Tensor) -> bool:
        """One group is all there is."""
        first, *others = self.dense.groups
        return not others and self.dense.rest is None and first.prefix is None

    def _group_forward(self, group: Group, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        """Output [rows of the group, heads, D] and `_SAVED` tensors."""
        dense, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *map(group.dense, (q, k, v)), None, True, 0.0, True, False, scale=self.scale
        )
        out = group.flat(dense)
        if group.prefix is None:
            return out, (lse, seed, offset, None, None)
        theirs, prefix_lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            *self._with_prefix(group, q, k, v), *self._lengths(group), 0.0, False, False, scale=self.scale
        )
        own_lse = _per_row(lse, group)
        total = torch.logaddexp(own_lse, prefix_lse[0])
        shares = (((one - total).exp().T[..., None]) for one in (own_lse, prefix_lse[0]))
        out = sum(part * share for part, share in zip((out, theirs[0]), shares, strict=True)).to(q.dtype)
        lse = lse.clone()
        by_sequence = total.unflatten(1, (group.count, group.length)).transpose(0, 1)
        lse.view(lse.shape[:3])[:, :, : group.length] = by_sequence
        return out, (lse, seed, offset, rng, unused)

    def _group_backward(
        self, group: Group, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of the group's q, k and v; of its prefix's k and v."""
        lse, seed, offset, rng, unused = saved
        # added rows have gradient 0, and so give none to any key
        tensors = map(group.dense, (grad, q, k, v, out))
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, lse, seed, offset, None, None, None, group.padded, group.padded, 0.0, True, scale=self.scale
        )
        own = [group.flat(g) for g in grads]
        if group.prefix is None:
            return own, []
        assert lse is not None
        queries, keys, values = self._with_prefix(group, q, k, v)
        total = _per_row(lse, group)[None].contiguous()
        theirs = torch.ops.aten._flash_attention_backward(
            grad[group.rows][None], queries, keys, values, out[group.rows][None], total,
            *self._lengths(group), 0.0, False, rng, unused, scale=self.scale,
        )  # fmt: skip
        own[0] = own[0].float() + theirs[0][0]
        return own, [g[0] for g in theirs[1:]]

    @staticmethod
    def _with_prefix(group: Group, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the group and keys of its prefix, [1, rows, heads, D] each."""
        assert group.prefix is not None
        prefix = slice(*group.prefix)
        return q[group.rows][None], k[prefix][None], v[prefix][None]

    @staticmethod
    def _lengths(group: Group) -> tuple[None, None, int, int]:
        assert group.prefix is not None
        return None, None, group.count * group.length, group.prefix[1] - group.prefix[0]


def _per_row(lse: Tensor, group: Group) -> Tensor:
    """cuDNN's [count, heads, padded, 1] -> [heads, rows of the group]."""
    return lse.view(lse.shape[:3])[:, :, : group.length].transpose(0, 1).flatten(1)
