"""The gated delta rule and the short causal convolution before it, over packed segments, in plain torch.

A linear-attention layer of the Qwen3-Next kind keeps one matrix S [Dk, Dv] a head instead of keys and values. For each
token, with decay a = exp(g) and learning rate b, and q and k of length one:

    S <- a S;   S <- S + k (b (v - S^T k))^T;   output S^T q / sqrt(Dk)

Tokens are taken in chunks of up to 64. Within a chunk the updates are a triangular system (the UT transform of Yang et
al., 2024), solved for all chunks of all segments at once; then states pass from chunk to chunk, as many segments at a
time as there are. Nothing passes between segments, but for those that continue another one: answers go on from the
state and the last convolution inputs of a prompt that is there once. All of it is float32 inside and differentiable.

Shapes: `T` rows, `C` channels (q, k and v of all heads), `Hk` and `Hv` key and value heads, `N` chunks of `L` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.kernels.delta_blocks import Blocks, Tails

_CHUNK = 64
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaInputs:
    """What one layer computes of its rows, before anything mixes them."""

    mixed: Tensor  # [T, C]: q, k, v side by side, before the convolution
    weight: Tensor  # [C, taps], the last one for the row itself
    bias: Tensor | None  # [C]
    activation: Callable[[Tensor], Tensor]
    log_decay: Tensor  # [T, Hv] float32, at most 0
    beta: Tensor  # [T, Hv]
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, Hk, Dk] and v [T, Hv, Dv] of the convolved channels."""
        keys = self.key_heads * self.key_dim
        q, k, v = convolved.split([keys, keys, self.value_heads * self.value_dim], dim=-1)
        q, k = (x.unflatten(-1, (self.key_heads, self.key_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (self.value_heads, self.value_dim))


@dataclass(frozen=True)
class Level:
    """Chunks that are as far from the start of their sample: start:stop of all chunks."""

    start: int
    stop: int
    parents: Tensor | None  # [n] int64 within the level before; None: the same in the same order, or the first level
    ends: Tensor  # int64 within the level: chunks that end a segment


@dataclass(frozen=True)
class Generation:
    """Segments that do not wait for each other."""

    rows: Tensor | None  # [T'] int64; None: all rows
    cu_seqlens: Tensor  # [S' + 1] int64, borders within `rows`
    parents: Tensor | None  # [S'] int64, segment of the generation before that each continues; None: they start afresh


@dataclass(frozen=True, kw_only=True)
class Chains:
    """In which order rows follow each other: built once a microbatch, for all layers."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    """The segment that each one continues; -1 for one that starts afresh."""
    before: Tensor  # [T + 1] int64, the row before each in its sample; T, which is before itself: none
    places: Tensor  # [T] int64, place of each row among the N * L of the chunks
    chunk: int
    levels: tuple[Level, ...]
    end_order: Tensor  # [S] int64: segment s is the one that ends at this place of all ends, level by level
    _history: dict[int, list[Tensor]] = field(default_factory=dict)
    _stacked: dict[int, Tensor] = field(default_factory=dict)
    _tails: dict[int, Tails] = field(default_factory=dict)

    @classmethod
    def build(cls, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> Chains:
        """Segments of `lengths` rows (at least one each), one after the other; parents come first."""
        starts = [0, *accumulate(lengths)]
        total = starts[-1]
        before = torch.arange(-1, total)
        before[total] = total
        for s, parent in enumerate(parents):
            before[starts[s]] = total if parent < 0 else starts[parent + 1] - 1
        chunk = min(_CHUNK, 1 << (max(lengths) - 1).bit_length())
        levels, first_chunks, ended = _levels(lengths, parents, chunk, device)
        places = []
        for length, numbers in zip(lengths, first_chunks, strict=True):
            rows = torch.arange(length)
            places.append(torch.tensor(numbers)[rows // chunk] * chunk + rows % chunk)
        order = torch.tensor(ended).argsort()
        return cls(
            lengths=tuple(lengths),
            parents=tuple(parents),
            before=before.to(device),
            places=torch.cat(places).to(device),
            chunk=chunk,
            levels=levels,
            end_order=order.to(device),
        )

    @property
    def num_chunks(self) -> int:
        return self.levels[-1].stop

    @cached_property
    def generations(self) -> tuple[Generation, ...]:
        """For kernels that take whole segments: those that start afresh, then those that continue one of these, …"""
        depth: list[int] = []
        for parent in self.parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        starts = [0, *accumulate(self.lengths)]
        device = self.places.device
        generations: list[Generation] = []
        position: dict[int, int] = {}
        for number in range(max(depth) + 1):
            members = [s for s, d in enumerate(depth) if d == number]
            parents = [position[self.parents[s]] for s in members] if number else []
            position = {s: p for p, s in enumerate(members)}
            rows = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in members])
            borders = [0, *accumulate(self.lengths[s] for s in members)]
            generations.append(
                Generation(
                    None if len(members) == len(depth) else rows.to(device),
                    _indices(borders, device),
                    _indices(parents, device) if number else None,
                )
            )
        return tuple(generations)

    @cached_property
    def blocks(self) -> Blocks:
        """For the kernels of `delta.py`."""
        return Blocks.build(self.lengths, self.parents, self.places.device)

    def tails(self, taps: int) -> Tails:
        """For the convolution's backward kernels."""
        if taps not in self._tails:
            self._tails[taps] = Tails.build(self.lengths, self.parents, taps, self.places.device)
        return self._tails[taps]

    def stacked_history(self, taps: int) -> Tensor:
        """[taps, T] int64: `history` as one tensor."""
        if taps not in self._stacked:
            self._stacked[taps] = torch.stack(self.history(taps))
        return self._stacked[taps]

    def history(self, taps: int) -> list[Tensor]:
        """`taps` index tensors [T]: the row so many places (1, 2, …) before each; T for none."""
        if taps not in self._history:
            steps = [self.before]
            while len(steps) < taps:
                steps.append(self.before[steps[-1]])
            self._history[taps] = [step[:-1] for step in steps[:taps]]
        return self._history[taps]


def _levels(
    lengths: Sequence[int], parents: Sequence[int], chunk: int, device: torch.device
) -> tuple[tuple[Level, ...], list[list[int]], list[int]]:
    """The levels; the numbers of each segment's chunks; and segments in the order in which they end."""
    counts = [-(-length // chunk) for length in lengths]
    depth: list[int] = []  # level of each segment's first chunk
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + counts[parent])
    members: list[list[tuple[int, int]]] = [[] for _ in range(max(d + n for d, n in zip(depth, counts, strict=True)))]
    for s, count in enumerate(counts):
        for i in range(count):
            members[depth[s] + i].append((s, i))
    levels: list[Level] = []
    numbers: list[list[int]] = [[] for _ in lengths]
    ended: list[int] = []
    position: dict[int, int] = {}  # of each segment's newest chunk within its level
    stop = 0
    for level in members:
        start, stop = stop, stop + len(level)
        sources = [position[s] if i else position[parents[s]] for s, i in level if i or parents[s] >= 0]
        same = sources == list(range(len(position))) or not sources
        ends = [p for p, (s, i) in enumerate(level) if i == counts[s] - 1]
        position = {s: p for p, (s, _) in enumerate(level)}
        ended += [level[p][0] for p in ends]
        for p, (s, _) in enumerate(level):
            numbers[s].append(start + p)
        levels.append(Level(start, stop, None if same else _indices(sources, device), _indices(ends, device)))
    return tuple(levels), numbers, ended


def _indices(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)


def mix(inputs: DeltaInputs, chains: Chains) -> Tensor:
    """Convolution and delta rule over packed segments: [T, Hv, Dv] in the type of `mixed`."""
    return mix_with_ends(inputs, chains, want_ends=False)[0]


def mix_with_ends(inputs: DeltaInputs, chains: Chains, want_ends: bool = True) -> tuple[Tensor, Tensor | None]:
    """The same, with the state [S, Hv, Dk, Dv] after each segment."""
    convolved = short_convolution(inputs.mixed, inputs.weight, inputs.bias, inputs.activation, chains)
    q, k, v = inputs.heads(convolved)
    return gated_delta_rule(q, k, v, inputs.log_decay, inputs.beta, chains, want_ends)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor], chains: Chains
) -> Tensor:
    """Depthwise causal convolution [T, C] within each sample, and its activation."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    taps = weight.float()
    out = x.float() * taps[:, -1]
    for distance, rows in enumerate(chains.history(weight.shape[1] - 1), start=1):
        out = out + padded[rows].float() * taps[:, -1 - distance]
    if bias is not None:
        out = out + bias.float()
    return activation(out).to(x.dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chains: Chains, want_ends: bool = False
) -> tuple[Tensor, Tensor | None]:
    """q, k [T, Hk, Dk], v [T, Hv, Dv], log_decay, beta [T, Hv] -> [T, Hv, Dv], and states [S, Hv, Dk, Dv] if wanted."""
    dtype, value_heads = v.dtype, v.shape[1]
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    q, k = (x.repeat_interleave(value_heads // x.shape[1], dim=1) for x in (q, k))
    q, k, v = (_in_chunks(x, chains) for x in (q, k, v))
    b = _in_chunks(beta[..., None], chains)  # [N, Hv, L, 1]; rows of padding write nothing and decay nothing
    g = _in_chunks(log_decay[..., None], chains)[..., 0].cumsum(-1)
    outside = torch.ones(chains.chunk, chains.chunk, dtype=torch.bool, device=g.device).triu(1)
    between = (g[..., :, None] - g[..., None, :]).masked_fill(outside, float("-inf")).exp()  # decay from column to row
    system = (k * b @ k.mT) * between  # its diagonal is not read: it is one
    right = torch.cat([v * b, k * b * g.exp()[..., None]], dim=-1)
    writes, reads = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    within = (q @ k.mT) * between
    q = q * g.exp()[..., None]
    k = k * (g[..., -1:] - g).exp()[..., None]
    decay = g[..., -1].exp()[..., None, None]
    out, ends = _pass_states(chains.levels, q, k, writes, reads, within, decay, want_ends)
    rows = out.transpose(1, 2).flatten(0, 1)[chains.places]
    return rows.to(dtype), torch.cat(ends)[chains.end_order] if want_ends else None


def _in_chunks(x: Tensor, chains: Chains) -> Tensor:
    """[T, H, D] -> float32 [N, H, L, D], padded with zeros."""
    rows = x.new_zeros(chains.num_chunks * chains.chunk, *x.shape[1:], dtype=torch.float32)
    rows = rows.index_copy(0, chains.places, x.float())
    return rows.unflatten(0, (chains.num_chunks, chains.chunk)).transpose(1, 2).contiguous()


def _pass_states(
    levels: Sequence[Level],
    q: Tensor,
    k: Tensor,
    writes: Tensor,
    reads: Tensor,
    within: Tensor,
    decay: Tensor,
    want_ends: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The scan over chunks: output [N, Hv, L, Dv], and the states of segments that end, level by level."""
    outputs: list[Tensor] = []
    ends: list[Tensor] = []
    state: Tensor | None = None
    for level in levels:
        part = slice(level.start, level.stop)
        if state is None:
            new = writes[part]
            outputs.append(within[part] @ new)
            state = k[part].mT @ new
        else:
            if level.parents is not None:
                state = state[level.parents]
            new = writes[part] - reads[part] @ state
            outputs.append(q[part] @ state + within[part] @ new)
            state = state * decay[part] + k[part].mT @ new
        if want_ends:
            ends.append(state[level.ends])
    return torch.cat(outputs), ends


def unit(x: Tensor) -> Tensor:
    """Vectors of length one, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def step(inputs: DeltaInputs, recent: Tensor, state: Tensor) -> Tensor:
    """One further row of each of T sequences: [T, Hv, Dv]; the memory is updated in place.

    recent [T, taps - 1, C]: the last inputs of the convolution; state [T, Hv, Dk, Dv] float32.
    """
    window = torch.cat([recent, inputs.mixed[:, None].to(recent.dtype)], dim=1)
    recent.copy_(window[:, 1:])
    convolved = (window.float() * inputs.weight.float().T).sum(1)
    if inputs.bias is not None:
        convolved = convolved + inputs.bias.float()
    q, k, v = inputs.heads(inputs.activation(convolved).to(inputs.mixed.dtype))
    q, k = unit(q) * inputs.key_dim**-0.5, unit(k)
    q, k = (x.repeat_interleave(inputs.value_heads // inputs.key_heads, dim=1) for x in (q, k))
    state.mul_(inputs.log_decay.exp()[..., None, None])
    error = v.float() - (k[..., None, :] @ state)[..., 0, :]
    state.add_(k[..., :, None] * (error * inputs.beta.float()[..., None])[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :].to(v.dtype)


def last_inputs(mixed: Tensor, start: int, stop: int, count: int) -> Tensor:
    """[count, C]: the last convolution inputs of rows start:stop, zeros before the first."""
    rows = mixed[max(start, stop - count) : stop]
    return F.pad(rows, (0, 0, count - rows.shape[0], 0))
