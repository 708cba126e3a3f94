"""The gated delta rule over packed segments by Triton kernels, forward and backward; see `gated_delta.py` for the rule.

The same operation as `gated_delta.gated_delta_rule`, with a state handed in where one is wanted. Matrix products take
their factors in the type of the values, sums and states between chunks are float32. What a chunk needs of the state
before it is kept in the values' type. Backward computes the forward pass's intermediate results again, if not `keep`.

Shapes: `T` rows, `S` segments, `N` chunks, `Hk` and `Hv` key and value heads of `Dk` and `Dv` columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.kernels.delta_blocks import CHUNK, Blocks
from lightrl.kernels.gated_delta import Chains, DeltaInputs
from lightrl.kernels.short_conv import short_convolution

_WIDTHS = frozenset({16, 32, 64, 128})
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled: warps a program, stages of loops that prefetch, columns of a tile (0: all)."""

    warps: int
    stages: int = 1
    columns: int = 0

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How each kernel is launched; results are the same to rounding."""

    prepare: Launch = Launch(4)
    states: Launch = Launch(4, 2, 32)
    outputs: Launch = Launch(4, 1, 128)
    inner: Launch = Launch(4)
    state_gradients: Launch = Launch(4, 2, 32)
    query: Launch = Launch(4)
    key: Launch = Launch(4, 1, 32)
    system: Launch = Launch(4)
    last: Launch = Launch(4)
    keep: bool = False
    """Keep what the forward pass made of chunks and states for the backward pass: faster, and more memory."""


FAST = Plan()
SAFE = Plan(
    prepare=Launch(2),
    states=Launch(2, 1, 16),
    outputs=Launch(2, 1, 32),
    inner=Launch(2),
    state_gradients=Launch(2, 1, 16),
    query=Launch(2),
    key=Launch(2, 1, 32),
    system=Launch(2),
    last=Launch(2),
)
"""With two warps Triton leaves Hopper's wgmma instructions alone, around which it has compiled wrongly."""


class Heads(NamedTuple):
    """How many there are, and how wide. Each key head serves `value_heads / key_heads` value heads."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    def split(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, Hk, Dk] and v [T, Hv, Dv] of [T, C]: views."""
        keys = self.key_heads * self.key_dim
        q, k, v = channels.split([keys, keys, self.value_heads * self.value_dim], dim=1)
        q, k = (x.unflatten(1, (self.key_heads, self.key_dim)) for x in (q, k))
        return q, k, v.unflatten(1, (self.value_heads, self.value_dim))


def takes(heads: Heads, taps: int, activation: object, dtype: torch.dtype) -> bool:
    """Whether the kernels take such layers."""
    silu = activation is F.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")
    whole = heads.value_heads % heads.key_heads == 0
    return silu and whole and taps <= 7 and {heads.key_dim, heads.value_dim} <= _WIDTHS and dtype in _TYPES


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    chains: Chains,
    want_ends: bool = False,
    *,
    initial: Tensor | None = None,
    normalize: bool = True,
    plan: Plan = FAST,
) -> tuple[Tensor, Tensor | None]:
    """q, k [T, Hk, Dk], v [T, Hv, Dv], log_decay, beta [T, Hv] -> [T, Hv, Dv], and states [S, Hv, Dk, Dv] if wanted.

    `initial` [S, Hv, Dk, Dv] float32: states to start from; of segments that continue another one it is not read.
    `normalize`: q and k are divided by their lengths; without, only q by sqrt(Dk).
    """
    heads = Heads(*q.shape[1:], *v.shape[1:])
    channels = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    return rule_of_channels(
        channels, heads, log_decay, beta, chains, want_ends, initial=initial, normalize=normalize, plan=plan
    )


def rule_of_channels(
    channels: Tensor,
    heads: Heads,
    log_decay: Tensor,
    beta: Tensor,
    chains: Chains,
    want_ends: bool = False,
    *,
    initial: Tensor | None = None,
    normalize: bool = True,
    plan: Plan = FAST,
) -> tuple[Tensor, Tensor | None]:
    """The same of q, k and v side by side, [T, C], as a convolution leaves them: nothing is copied."""
    out, ends = _Rule.apply(channels, heads, log_decay, beta, initial, chains.blocks, want_ends, normalize, plan)
    return out, ends if want_ends else None


def mix(inputs: DeltaInputs, chains: Chains, plan: Plan = FAST) -> Tensor:
    """As `gated_delta.mix`, for inputs that `takes` says yes to."""
    channels = short_convolution(inputs.mixed, inputs.weight, inputs.bias, chains)
    heads = Heads(inputs.key_heads, inputs.key_dim, inputs.value_heads, inputs.value_dim)
    return rule_of_channels(channels, heads, inputs.log_decay, inputs.beta, chains, plan=plan)[0]


def gated_delta_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    chains: Chains,
    *,
    initial: Tensor | None = None,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same, token by token, in the type of its inputs (float64 for a reference); always with the states."""
    repeats = v.shape[1] // k.shape[1]
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    outputs: list[Tensor] = []
    ends: list[Tensor] = []
    row = 0
    for s, (length, parent) in enumerate(zip(chains.lengths, chains.parents, strict=True)):
        if parent >= 0:
            state = ends[parent]
        elif initial is not None:
            state = initial[s].to(v.dtype)
        else:
            state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for t in range(row, row + length):
            state = state * log_decay[t].exp()[:, None, None]
            error = beta[t, :, None] * (v[t] - (k[t, :, :, None] * state).sum(1))
            state = state + k[t, :, :, None] * error[:, None, :]
            outputs.append((q[t, :, :, None] * state).sum(1))
        ends.append(state)
        row += length
    return torch.stack(outputs), torch.stack(ends)


@dataclass(frozen=True)
class _Sizes:
    """Constants of the kernels."""

    rows: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> _Sizes:
        return cls(v.shape[0], v.shape[1], q.shape[1], q.shape[2], v.shape[2], v.dtype)

    @property
    def common(self) -> dict[str, Any]:
        """Half types are multiplied as they are; float32 is rebuilt from three products of tf32."""
        precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        return {"H": self.heads, "KD": self.key_dim, "VD": self.value_dim, "PRECISION": precision}

    @property
    def grouped(self) -> dict[str, Any]:
        return self.common | {"HK": self.key_heads, "CHUNK": CHUNK}


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What the forward pass makes of chunks and states."""

    decays: Tensor  # [Hv, T] float32, log decays summed up within chunks
    solved: Tensor  # [T, Hv, 64]: T, the inverse
    w: Tensor  # [T, Hv, Dk]
    u: Tensor  # [T, Hv, Dv]
    before: Tensor  # [N, Hv, Dk, Dv]: the states before chunks
    new: Tensor  # [T, Hv, Dv]: N, what rows write
    ends: Tensor | None  # float32: the states of segments that others continue; of all, if wanted


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        channels: Tensor,
        heads: Heads,
        log_decay: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        blocks: Blocks,
        want_ends: bool,
        normalize: bool,
        plan: Plan,
    ) -> tuple[Tensor, Tensor | None]:
        backward = any(ctx.needs_input_grad)
        rows = _Rows.build(channels, heads, log_decay, beta, normalize)
        work = _forward(rows, initial, blocks, want_ends, plan)
        out = _outputs(rows, work, blocks, plan)
        if backward:
            kept = [work.decays, work.solved, work.w, work.u, work.before, work.new] if plan.keep else []
            ctx.save_for_backward(*rows.tensors(), initial, *kept)
            ctx.constants = (blocks, plan, heads)
            ctx.set_materialize_grads(False)
        return out, work.ends if want_ends else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_ends: Tensor | None) -> tuple[Any, ...]:
        blocks, plan, heads = ctx.constants
        # asked for once: a block that is computed again gives its tensors out a single time
        q, k, q_inverse, k_inverse, v, log_decay, beta, initial, *kept = ctx.saved_tensors
        rows = _Rows(q, k, q_inverse, k_inverse, v, log_decay, beta)
        if kept:
            names = ("decays", "solved", "w", "u", "before", "new")
            work = _Work(**dict(zip(names, kept, strict=True)), ends=None)
        else:
            work = _forward(rows, initial, blocks, False, plan)
        grad = torch.zeros_like(work.new) if grad is None else grad.contiguous()
        channels = 2 * heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim
        out = torch.empty(len(rows.v), channels, dtype=rows.v.dtype, device=rows.v.device)
        d_log_decay, d_beta, d_initial = _backward(
            rows, work, grad, grad_ends, heads.split(out), blocks, plan, initial=initial is not None
        )
        return out, None, d_log_decay, d_beta, d_initial, None, None, None, None


@dataclass(frozen=True)
class _Rows:
    """Inputs as kernels read them."""

    q: Tensor  # [T, Hk, Dk], of length one, over sqrt(Dk)
    k: Tensor  # [T, Hk, Dk], of length one
    q_inverse: Tensor | None  # [T, Hk] float32: 1 / length of what q was made from; None: they were taken as they are
    k_inverse: Tensor | None
    v: Tensor  # [T, Hv, Dv], heads side by side, rows perhaps apart
    log_decay: Tensor  # [T, Hv]
    beta: Tensor  # [T, Hv]
    sizes: _Sizes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _Sizes.of(self.q, self.v))

    @classmethod
    def build(cls, channels: Tensor, heads: Heads, log_decay: Tensor, beta: Tensor, normalize: bool) -> _Rows:
        from lightrl.kernels import delta_triton

        q, k, v = heads.split(channels.contiguous())
        made: list[Tensor] = []
        inverses: list[Tensor | None] = []
        for x, scale in ((q, q.shape[-1] ** -0.5), (k, 1.0)):
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            inverse = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) if normalize else None
            delta_triton.unit(x, out, inverse, scale)
            made.append(out)
            inverses.append(inverse)
        (q, k), (q_inverse, k_inverse) = made, inverses
        return cls(q, k, q_inverse, k_inverse, v, log_decay.contiguous(), beta.contiguous())

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.q_inverse, self.k_inverse, self.v, self.log_decay, self.beta


def _forward(rows: _Rows, initial: Tensor | None, blocks: Blocks, want_ends: bool, plan: Plan) -> _Work:
    from lightrl.kernels import delta_triton

    z = rows.sizes
    device = rows.v.device

    def empty(*shape: int, dtype: torch.dtype = z.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    slots, count = blocks.parent_slots, blocks.num_parents
    if want_ends:
        slots, count = blocks.everyone, blocks.num_segments
    work = _Work(
        decays=empty(z.heads, z.rows, dtype=torch.float32),
        solved=empty(z.rows, z.heads, CHUNK),
        w=empty(z.rows, z.heads, z.key_dim),
        u=empty(z.rows, z.heads, z.value_dim),
        before=empty(blocks.num_chunks, z.heads, z.key_dim, z.value_dim),
        new=empty(z.rows, z.heads, z.value_dim),
        ends=empty(count, z.heads, z.key_dim, z.value_dim, dtype=torch.float32) if count else None,
    )
    delta_triton.prepare[(z.heads, blocks.num_chunks)](
        rows.k, rows.v, rows.log_decay, rows.beta, blocks.starts, blocks.sizes,
        work.decays, work.solved, work.w, work.u, z.rows, rows.v.stride(0),
        **z.common, HK=z.key_heads, HALF=CHUNK // 2, **plan.prepare.options(),
    )  # fmt: skip
    columns = plan.states.columns
    columns = min(columns or z.value_dim, z.value_dim)
    if initial is not None:
        initial = initial.float().contiguous()
    for number, wave in enumerate(blocks.waves):
        delta_triton.states[(z.value_dim // columns, z.heads, len(wave))](
            rows.k, work.w, work.u, work.decays, initial, work.ends, slots, work.before, work.new,
            wave, blocks.rows, blocks.lengths, blocks.chunks, blocks.parents, z.rows,
            **z.grouped, COLS=columns, INITIAL=initial is not None and number == 0, PARENTS=number > 0,
            ENDS=count > 0, **plan.states.options(),
        )  # fmt: skip
    return work


def _outputs(rows: _Rows, work: _Work, blocks: Blocks, plan: Plan) -> Tensor:
    from lightrl.kernels import delta_triton

    z = rows.sizes
    out = torch.empty_like(work.new)
    columns = min(plan.outputs.columns or z.value_dim, z.value_dim)
    delta_triton.outputs[(z.value_dim // columns, z.heads, blocks.num_chunks)](
        rows.q, rows.k, work.before, work.new, work.decays, out, blocks.starts, blocks.sizes, z.rows,
        **z.grouped, COLS=columns, **plan.outputs.options(),
    )  # fmt: skip
    return out


def _backward(
    rows: _Rows,
    work: _Work,
    grad: Tensor,
    grad_ends: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor],
    blocks: Blocks,
    plan: Plan,
    *,
    initial: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q, k and v into `out`; those of decays, rates and initial states."""
    from lightrl.kernels import delta_backward_triton as kernels

    z = rows.sizes
    of_heads, of_keys, cut = (
        (z.heads, blocks.num_chunks),
        (z.key_heads, blocks.num_chunks),
        (blocks.starts, blocks.sizes),
    )
    d_new = torch.empty_like(work.new)
    kernels.inner_gradients[of_heads](
        rows.q, rows.k, grad, work.decays, d_new, *cut, z.rows, **z.grouped, **plan.inner.options()
    )
    d_after, d_initial = _state_gradients(rows, work, grad, grad_ends, d_new, blocks, plan, initial)
    dq, dk, dv = out
    d_decays, part = torch.empty_like(work.decays), torch.empty(rows.k.shape, dtype=torch.float32, device=grad.device)
    normed = rows.q_inverse is not None
    kernels.query_gradients[of_keys](
        rows.q, rows.k, work.before, work.new, work.decays, grad, rows.q_inverse, dq, d_decays, *cut, z.rows,
        dq.stride(0), z.key_dim**-0.5, **z.grouped, NORM=normed, **plan.query.options(),
    )  # fmt: skip
    kernels.key_gradients[of_keys](
        rows.q, rows.k, work.before, d_after, work.new, work.decays, grad, part, d_decays, *cut, z.rows,
        **z.grouped, COLS=min(plan.key.columns or z.value_dim, z.value_dim), **plan.key.options(),
    )  # fmt: skip
    x, y = torch.empty_like(work.w), torch.empty_like(work.u)
    kernels.system_gradients[of_heads](
        work.before, d_new, work.solved, x, y, *cut, **z.common, CHUNK=CHUNK, **plan.system.options()
    )
    d_log_decay, d_beta = torch.empty_like(rows.log_decay), torch.empty_like(rows.beta)
    kernels.last_gradients[of_keys](
        rows.k, rows.v, work.w, work.u, x, y, rows.beta, work.decays, rows.k_inverse, part, d_decays,
        dk, dv, d_log_decay, d_beta, *cut, z.rows, rows.v.stride(0), dk.stride(0), dv.stride(0),
        **z.grouped, NORM=normed, **plan.last.options(),
    )  # fmt: skip
    return d_log_decay, d_beta, d_initial


def _state_gradients(
    rows: _Rows,
    work: _Work,
    grad: Tensor,
    grad_ends: Tensor | None,
    d_new: Tensor,
    blocks: Blocks,
    plan: Plan,
    initial: bool,
) -> tuple[Tensor, Tensor | None]:
    """Those after each chunk, and of the states that were handed in; completes `d_new`."""
    from lightrl.kernels import delta_backward_triton as kernels

    z = rows.sizes
    slots, count = (blocks.everyone, blocks.num_segments) if initial else (blocks.child_slots, blocks.num_children)
    starts = None
    if count:
        starts = torch.empty(count, z.heads, z.key_dim, z.value_dim, dtype=torch.float32, device=grad.device)
    if grad_ends is not None:
        grad_ends = grad_ends.float().contiguous()
    d_after = torch.empty_like(work.before)
    columns = min(plan.state_gradients.columns or z.value_dim, z.value_dim)
    for wave in reversed(blocks.waves):
        kernels.state_gradients[(z.value_dim // columns, z.heads, len(wave))](
            rows.q, rows.k, work.w, grad, work.decays, grad_ends, starts, slots, d_new, d_after,
            wave, blocks.rows, blocks.lengths, blocks.chunks, blocks.child_offsets, blocks.children, z.rows,
            **z.grouped, COLS=columns, ENDS=grad_ends is not None, CHILDREN=blocks.num_children > 0,
            STARTS=count > 0, **plan.state_gradients.options(),
        )  # fmt: skip
    if initial and starts is not None and blocks.num_children:
        starts[blocks.parents >= 0] = 0  # theirs went to the segments they continue
    return d_after, starts if initial else None
