"""Attention over packed segments, registered with transformers as `lightrl_packed`.

A segment is a run of query rows with its own keys. Usually the keys are the same rows; a response whose prompt is
packed once for a whole group attends to the prompt's rows and its own (`kv_index`). Queries align with the end of
their keys, causally.

Transformers passes unknown keyword arguments of the model call down to the attention function, which is how the
segments get here; as the name is not in transformers' mask registry it builds no `[T, T]` mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightrl.types import Microbatch

NAME = "lightrl_packed"


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
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D].

    A sliding window of `w` sees the last `w` positions, the current one included (transformers' convention).
    """
    if segments is None:
        raise RuntimeError(f"{NAME} needs segments=…: call the model through PolicyModule")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise RuntimeError(f"{NAME} does not support {name} (attention of {type(module).__name__})")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, segments, scaling, sliding_window), None
    return _by_block(query, key, value, segments, scaling, sliding_window, dropout), None


def _varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float | None, window: int | None) -> Tensor:
    varlen_attn = _varlen_function()
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, heads, D]
    if segments.kv_index is not None:
        k, v = k.index_select(0, segments.kv_index), v.index_select(0, segments.kv_index)
    out: Tensor = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_seqlen_q,
        segments.max_seqlen_k,
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
    )
    return out[None]


@cache
def _varlen_function() -> Callable[..., Any]:
    """torch's variable-length attention; newer releases want grouped heads to be named."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return varlen_attn
    return lambda *args, **kwargs: varlen_attn(*args, **kwargs, enable_gqa=True)


def _by_block(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    outputs = []
    for block in segments.blocks:
        rows, mask = slice(block.start, block.end), block.mask(window)
        outputs.append(
            F.scaled_dot_product_attention(
                q[:, :, rows],
                k[:, :, rows],
                v[:, :, rows],
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)
