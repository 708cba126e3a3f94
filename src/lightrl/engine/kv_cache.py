"""Keys and values of the running sequences, and the attention function that reads and writes them.

Each layer holds two tensors [slots, KV heads, capacity, head dim]; sequence r of the batch lives in slot r. They grow
by need. Heads before positions, so that what one head reads lies together. Layers that keep a state instead have theirs
in `KVCache.recurrent`. transformers calls `cached_attention`
through its registry of attention functions; the cache travels there as a keyword argument of the model's forward.

Shapes: `R` running sequences, `T` packed prompt tokens, `H` query heads, `h` KV heads, `D` head dim, `L` keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.engine.recurrent import RecurrentStates
from lightrl.kernels.gated_delta import DeltaInputs

ATTENTION_NAME = "lightrl_cached"
_ROUND = 64  # positions: growth step, and what GPU kernels like as alignment of a mask

# What starting one more attention call costs, in padded keys and values read instead (bytes of one layer). Measured: a
# call takes about 80 us on a CPU that reads 10 GB/s, and 15 us on a GPU that reads 3 TB/s.
_CALL_BYTES = {"cpu": 800_000, "cuda": 45_000_000}


def register_attention() -> None:
    """Make `attn_implementation="lightrl_cached"` known to transformers; idempotent."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, cached_attention)


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kv_cache: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention over cached and new keys, in the signature of transformers' attention functions.

    query [B, H, Q, D], key and value [B, h, Q, D]; returns [B, Q, H, D]. `softcap` squashes scores (Gemma 2), `s_aux`
    [H] are attention sinks (gpt-oss).
    """
    if kv_cache is None:
        raise RuntimeError("this model was built for the embedded engine: it runs only with its kv_cache")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale=scale, window=sliding_window or None, softcap=softcap, sinks=s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return kv_cache.attend(layer, query, key, value, rule), None


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """How one layer attends."""

    scale: float
    window: int | None = None
    """Only the last so many keys, the query's own included."""
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One prompt of a packed prefill: rows start:stop of the pack, written to every one of `slots`."""

    start: int
    stop: int
    slots: Tensor  # [n] int64


class KVCache:
    """Slots of keys and values. Say what the next forward is (`begin_prefill`, `begin_decode`), then run the model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_slots = 0
        self.capacity = 0
        self.recurrent = RecurrentStates(device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._segments: list[Segment] | None = None
        self._decode: _DecodeBatch | None = None

    @property
    def num_layers(self) -> int:
        """Layers that have written keys or states so far."""
        return len(self._layers) + self.recurrent.num_layers

    @property
    def num_bytes(self) -> int:
        keys = sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)
        return keys + self.recurrent.num_bytes

    def reserve(self, num_slots: int, capacity: int, *, max_slots: int, max_capacity: int) -> None:
        """Have room for so many slots of so many positions; takes half as much again, up to the maxima."""
        if num_slots <= self.num_slots and capacity <= self.capacity:
            return
        if num_slots > self.num_slots:
            self.num_slots = max(num_slots, min(max_slots, self.num_slots * 3 // 2))
        if capacity > self.capacity:
            wanted = max(capacity, min(max_capacity, capacity * 3 // 2))
            self.capacity = -(-wanted // _ROUND) * _ROUND
        for index, (keys, values) in list(self._layers.items()):
            # one layer at a time: old and new never lie side by side for the whole model
            self._layers[index] = (self._grown(keys), self._grown(values))
        self.recurrent.reserve(self.num_slots)

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.num_slots, old.shape[1], self.capacity, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def free(self) -> None:
        """Give all memory back."""
        self._layers.clear()
        self.recurrent.free()
        self.num_slots = self.capacity = 0
        self._segments = self._decode = None

    def copy_slot(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of one slot to others, and its present state where layers keep one."""
        index = torch.tensor(targets, device=self.device)
        for pair in self._layers.values():
            for cache in pair:
                content = cache[source : source + 1, :, :length].clone()
                cache[:, :, :length].index_copy_(0, index, content.expand(len(targets), -1, -1, -1))
        self.recurrent.copy_slot(source, targets)

    def begin_prefill(self, segments: list[Segment]) -> None:
        """The next forward packs these prompts into one row."""
        self._segments, self._decode = segments, None
        self.recurrent.begin_prefill([(s.stop - s.start, s.slots) for s in segments])

    def begin_decode(self, lengths: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
        """The next forward takes one token of each of the slots 0..R-1, which hold `lengths` keys with the new one.

        `spans` (see `plan_spans`) split the slots into runs that one call attends for.
        """
        self._segments, self._decode = None, _DecodeBatch(lengths, spans, self.device, self.capacity)
        self.recurrent.begin_decode(len(lengths))

    def mix(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """What a gated delta layer does instead of `attend`."""
        return self.recurrent.mix(layer, inputs)

    def bytes_per_position(self) -> int:
        """Bytes of keys and values one position takes in one layer (0 before the first forward)."""
        for keys, values in self._layers.values():
            return keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()
        return 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Write the new keys and values of one layer and attend; shapes as `cached_attention`."""
        if layer not in self._layers:
            # zeros, not empty: masked keys still enter the products, where a NaN would survive a weight of zero
            self._layers[layer] = (
                key.new_zeros(self.num_slots, key.shape[1], self.capacity, key.shape[3]),
                value.new_zeros(self.num_slots, value.shape[1], self.capacity, value.shape[3]),
            )
        keys, values = self._layers[layer]
        if self._decode is not None:
            return self._decode.attend(keys, values, query, key, value, rule)
        if self._segments is None:
            raise RuntimeError("begin_prefill or begin_decode comes before the forward")
        outputs = []
        for segment in self._segments:
            rows, length = slice(segment.start, segment.stop), segment.stop - segment.start
            q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
            copies = len(segment.slots)
            keys[:, :, :length].index_copy_(0, segment.slots, k.expand(copies, -1, -1, -1))
            values[:, :, :length].index_copy_(0, segment.slots, v.expand(copies, -1, -1, -1))
            outputs.append(_attend_prompt(q, k, v, rule))
        return torch.cat(outputs, dim=2).transpose(1, 2)


class _DecodeBatch:
    """One decode step: where its keys go, how far each slot is read, the masks that all layers share."""

    def __init__(
        self, lengths: Sequence[int], spans: Sequence[tuple[int, int]], device: torch.device, capacity: int
    ) -> None:
        self.num_rows = len(lengths)
        self.lengths = torch.tensor(lengths, device=device)
        self.slots = torch.arange(self.num_rows, device=device)
        self.positions = self.lengths - 1
        self.spans: list[tuple[int, int, int, bool]] = []
        for start, stop in spans:
            longest = max(lengths[start:stop])
            ragged = min(lengths[start:stop]) < longest
            padded = min(-(-longest // _ROUND) * _ROUND, capacity) if ragged and device.type != "cpu" else longest
            self.spans.append((start, stop, padded, ragged))
        longest = max(padded for _, _, padded, _ in self.spans)
        self.max_length = -(-longest // _ROUND) * _ROUND
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        keys[self.slots, :, self.positions] = key[:, :, 0]
        values[self.slots, :, self.positions] = value[:, :, 0]
        # The query heads that share a KV head become query rows: plain attention, no repeated keys.
        num_kv = keys.shape[1]
        folded = query.reshape(self.num_rows, num_kv, -1, query.shape[-1])
        sinks = None if rule.sinks is None else rule.sinks.view(1, num_kv, -1, 1)
        outputs = []
        for start, stop, length, ragged in self.spans:
            windowed = rule.window is not None and rule.window < length
            mask = None
            if ragged or windowed:
                mask = self._mask(rule.window if windowed else None, query.dtype)[start:stop, :, :, :length]
            k, v = keys[start:stop, :, :length], values[start:stop, :, :length]
            outputs.append(_attend(folded[start:stop], k, v, mask, rule, sinks))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.reshape(self.num_rows, 1, query.shape[1], values.shape[-1])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[R, 1, 1, L] added to scores: 0 for keys a sequence may see, -inf for the rest."""
        if window not in self._masks:
            position = torch.arange(self.max_length, device=self.lengths.device)
            hidden = position >= self.lengths[:, None]
            if window is not None:
                hidden |= position < self.lengths[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


def _attend_prompt(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    """Causal attention within one prompt: query [1, H, P, D], key and value [1, h, P, D]; returns [1, H, P, D]."""
    num_heads, length, num_kv = query.shape[1], query.shape[2], key.shape[1]
    windowed = rule.window is not None and rule.window < length
    if rule.softcap is None and rule.sinks is None:
        mask = _causal_mask(length, rule.window, query.dtype, query.device) if windowed else None
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=rule.scale, enable_gqa=num_heads != num_kv
        )
    mask = _causal_mask(length, rule.window if windowed else None, query.dtype, query.device)
    group = num_heads // num_kv
    folded = query.reshape(1, num_kv, group * length, query.shape[-1])
    sinks = None
    if rule.sinks is not None:
        sinks = rule.sinks.view(num_kv, group, 1).expand(-1, -1, length).reshape(1, num_kv, group * length, 1)
    out = _attend(folded, key, value, mask.repeat(group, 1), rule, sinks)
    return out.view(1, num_heads, length, value.shape[-1])


def _causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[P, P] added to scores."""
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    if window is not None:
        allowed.triu_(1 - window)
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: AttentionRule, sinks: Tensor | None
) -> Tensor:
    """query [B, h, M, D], key and value [B, h, L, D]; `mask` and `sinks` broadcast to [B, h, M, L or 1]."""
    special = rule.softcap is not None or sinks is not None
    if not special and (query.device.type != "cpu" or query.dtype != torch.float32):
        if mask is not None:
            mask = mask.expand(*query.shape[:3], key.shape[2])
        return F.scaled_dot_product_attention(query, key, value, mask, scale=rule.scale)
    # Few query rows in float32 on a CPU: two batched products beat the fused kernel by up to 2x on short keys.
    scores = torch.matmul(query * rule.scale, key.transpose(2, 3))
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1).to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights[..., : key.shape[2]], value)


def plan_spans(lengths: Sequence[int], bytes_per_position: int, device_type: str) -> list[tuple[int, int]]:
    """Split slots into runs that share one attention call, padded to the longest of the run.

    A run grows while the padding it reads costs less than another call would.

    >>> plan_spans([10, 11, 10, 900, 901], 1536, "cpu")
    [(0, 3), (3, 5)]
    """
    limit = _CALL_BYTES.get(device_type, _CALL_BYTES["cuda"]) / max(bytes_per_position, 1)
    spans: list[tuple[int, int]] = []
    start, longest, total = 0, lengths[0], lengths[0]
    for stop in range(1, len(lengths)):
        new_longest = max(longest, lengths[stop])
        padding = new_longest * (stop + 1 - start) - (total + lengths[stop])
        old_padding = longest * (stop - start) - total
        if padding - old_padding > limit:
            spans.append((start, stop))
            start, longest, total = stop, lengths[stop], lengths[stop]
        else:
            longest, total = new_longest, total + lengths[stop]
    spans.append((start, len(lengths)))
    return spans
