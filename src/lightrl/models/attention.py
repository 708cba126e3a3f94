"""Attention over packed segments, registered with transformers as `lightrl_packed`.

A segment is a run of query rows with its own keys. Usually the keys are the same rows; a response whose prompt is
packed once for a whole group attends to the prompt's rows and its own (`kv_index`). Queries align with the end of
their keys, causally. Heads may have sinks (one more logit in the softmax, without a value), and values another width
than queries and keys. On a GPU in bfloat16 one of several kernels computes it (`kernels/attention.py`).

Transformers passes unknown keyword arguments of the model call down to the attention function, which is how the
segments get here; as the name is not in transformers' mask registry it builds no `[T, T]` mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrl.kernels.attention import attend, choose
from lightrl.kernels.attention_flash import FlashBody, Packing, Span
from lightrl.kernels.gated_delta import Chains
from lightrl.models import context_parallel
from lightrl.models.context_parallel import SharedSegments

if TYPE_CHECKING:
    from lightrl.types import Microbatch

NAME = "lightrl_packed"
OUTPUTS = "kept_outputs"
"""Attribute of an attention module: a `kernels.attention.Outputs`, while its block is recomputed or will be."""


def register() -> str:
    """Make the function known to transformers (its own extension point); returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME


@dataclass(frozen=True)
class Segments:
    """Which rows attend to which, once a microbatch, for all layers."""

    cu_seqlens_q: Tensor  # [S + 1] int32
    cu_seqlens_k: Tensor  # [S + 1] int32
    kv_index: Tensor | None  # [K] int64; None: keys are the rows
    max_seqlen_q: int
    max_seqlen_k: int
    blocks: tuple[_Block, ...]
    """The same for attention kernels without segments: row ranges that attend only within themselves."""

    @classmethod
    def from_microbatch(cls, batch: Microbatch, device: torch.device) -> Segments:
        """Built on the host: the microbatch's index tensors must be on the CPU."""
        return cls(
            batch.cu_seqlens_q.to(device, non_blocking=True),
            batch.cu_seqlens_k.to(device, non_blocking=True),
            None if batch.kv_index is None else batch.kv_index.to(device, non_blocking=True),
            batch.max_seqlen_q,
            batch.max_seqlen_k,
            tuple(_blocks(batch, device)),
        )

    @cached_property
    def packing(self) -> Packing:
        """The same for kernels that know segments."""
        spans = [_span(block, *segment) for block in self.blocks for segment in block.segments]
        borders = (self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k)
        return Packing(*borders, self.kv_index, tuple(spans))

    @cached_property
    def chains(self) -> Chains:
        """The same for layers that keep a state instead of keys: which segment goes on where another ends."""
        lengths: list[int] = []
        parents: list[int] = []
        for block in self.blocks:
            first = len(lengths)
            for number, (start, end, _) in enumerate(block.segments):
                lengths.append(end - start)
                parents.append(first if number else -1)
        return Chains.build(lengths, parents, self.cu_seqlens_q.device)


@dataclass(frozen=True)
class _Block:
    start: int
    end: int
    segments: tuple[tuple[int, int, Tensor], ...]  # (first row, end row, keys counted from `start`)
    device: torch.device
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[rows, rows] bool, True where attention is allowed; None: plainly causal."""
        if len(self.segments) == 1 and window is None:
            return None
        if window not in self._masks:
            size = self.end - self.start
            mask = torch.zeros(size, size, dtype=torch.bool)
            for first, end, keys in self.segments:
                num_q, num_k = end - first, keys.numel()
                allowed = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
                if window is not None:
                    allowed = allowed.triu(num_k - num_q - window + 1)
                mask[first - self.start : end - self.start, keys] = allowed
            self._masks[window] = mask.to(self.device)
        return self._masks[window]


def _span(block: _Block, first: int, end: int, keys: Tensor) -> Span:
    """A segment of a block as kernels take it: what is before its own rows among its keys is one run of rows."""
    before = keys.numel() - (end - first)
    start = block.start + int(keys[0])
    if before and int(keys[before - 1]) + 1 != int(keys[0]) + before:
        raise ValueError(f"the keys of rows {first} to {end} are no run of rows before their own")
    return Span(first, end, (start, start + before) if before else None)


def _blocks(batch: Microbatch, device: torch.device) -> list[_Block]:
    """Group consecutive segments that share rows."""
    borders_q, borders_k = batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.tolist()
    blocks: list[_Block] = []
    current: list[tuple[int, int, Tensor]] = []
    for s, first in enumerate(borders_q[:-1]):
        end = borders_q[s + 1]
        keys = torch.arange(first, end) if batch.kv_index is None else batch.kv_index[borders_k[s] : borders_k[s + 1]]
        if current and int(keys[0]) == first:  # this segment starts afresh
            blocks.append(_close(current, device))
            current = []
        current.append((first, end, keys))
    if current:
        blocks.append(_close(current, device))
    return blocks


def _close(segments: list[tuple[int, int, Tensor]], device: torch.device) -> _Block:
    start = segments[0][0]
    return _Block(start, segments[-1][1], tuple((a, b, keys - start) for a, b, keys in segments), device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | SharedSegments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D], key [1, kv_heads, T, D], value [1, kv_heads, T, Dv] -> [1, T, heads, Dv].

    A sliding window of `w` sees the last `w` positions, the current one included (transformers' convention); `s_aux`
    [heads] are the heads' sinks.
    """
    if isinstance(segments, SharedSegments):
        group = segments.group
        query, key, value, sinks = context_parallel.to_heads(query, key, value, s_aux, group)
        rest = (attention_mask, scaling, dropout, sliding_window, sinks)
        out, _ = packed_attention(module, query, key, value, *rest, segments.whole, **kwargs)
        return context_parallel.to_rows(out, group), None
    if segments is None:
        raise RuntimeError(f"{NAME} needs segments=…: call the model through PolicyModule")
    if kwargs.get("softcap") is not None:
        raise RuntimeError(f"{NAME} does not support softcap (attention of {type(module).__name__})")
    if dropout:
        raise RuntimeError(f"{NAME} does not support dropout: put {type(module).__name__} into evaluation mode")
    rule = _Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, s_aux)
    kernel_runs = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if kernel_runs and max(query.shape[-1], value.shape[-1]) <= _MAX_HEAD_DIM:
        return _by_kernel(module, query, key, value, segments, rule), None
    return _by_block(query, key, value, segments, rule), None


_MAX_HEAD_DIM = 256  # of torch's variable-length kernel, which every other falls back to


@dataclass(frozen=True)
class _Rule:
    """How a layer attends."""

    scale: float
    window: int | None
    sinks: Tensor | None  # [heads]


# ----- kernels (CUDA)


def _by_kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: _Rule) -> Tensor:
    value_dim = v.shape[-1]
    width = -(-max(q.shape[-1], value_dim) // 8) * 8  # kernels want one width for all three, in steps of 8
    # squeezed, not indexed: the gradient of an index is a tensor of zeros and a copy into it
    q, k, v = (_widened(x.squeeze(0).transpose(0, 1), width) for x in (q, k, v))  # [T, heads, width]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if getattr(module, "fuse", False):
        body = choose(segments.packing, q, v, rule.scale, rule.window, rule.sinks is not None)
    else:
        body = FlashBody(segments.packing, rule.scale, rule.window)
    out = attend(q, k, v, body, rule.sinks, getattr(module, OUTPUTS, None))
    return out[None, ..., :value_dim]


def _widened(x: Tensor, width: int) -> Tensor:
    """Zeros added to the last dimension: they add nothing to a score, and columns to values that are cut off again."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


# ----- a call a block (everywhere else)


def _by_block(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: _Rule) -> Tensor:
    outputs = []
    for block in segments.blocks:
        rows, mask = slice(block.start, block.end), block.mask(rule.window)
        mine = q[:, :, rows], k[:, :, rows], v[:, :, rows]
        if rule.sinks is not None:
            outputs.append(_with_sinks(*mine, mask, rule.scale, rule.sinks))
            continue
        outputs.append(
            F.scaled_dot_product_attention(
                *mine,
                attn_mask=mask,
                is_causal=mask is None,
                scale=rule.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    """Attention written out, with a column of sinks beside the scores; softmax in float32."""
    rows, kv_heads = q.shape[2], k.shape[1]
    if mask is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
    q = q.unflatten(1, (kv_heads, -1))  # [1, kv_heads, group, rows, D]: a group of heads shares keys
    scores = (q @ k[:, :, None].transpose(-1, -2) * scale).float().masked_fill(~mask, float("-inf"))
    column = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (weights.to(v.dtype) @ v[:, :, None]).flatten(1, 2)
