"""Log-probs and entropies of chosen tokens straight from hidden states, without the `[N, V]` logits in memory.

Shapes: `N` response tokens, `H` hidden, `V` vocabulary. Everything after the matrix product is float32, whatever the
inputs are: bfloat16 logits alone put a mean error of 2e-2 on log-probs.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_KEEP_BYTES = 256 << 20  # up to here the softmax is kept for the backward pass instead of being computed again
_CHUNK_BYTES = 64 << 20  # float32 logits computed at a time
_CUDA_CHUNK_BYTES = 256 << 20  # measured on an H200: 1.8 times as fast as 64 MiB, 1 GiB only 1.2 times faster still


def linear_logprobs_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What `linear_logprobs` computes, in three lines with all logits in memory."""
    logits = hidden.float() @ weight.float().T
    logprobs = ((logits if bias is None else logits + bias.float()) / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    kernels: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, `softmax((hidden @ weight.T + bias) / temperature)`.

    hidden [N, H], weight [V, H], targets [N] int64, bias [V] -> logprobs [N], entropy [N], float32, in nats. Both
    outputs are differentiable in hidden, weight and bias. Logits exist for a part of the rows or words at a time.
    With `kernels`, on a GPU with Triton, this is `logprob_triton` where that `fits`.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if kernels and hidden.is_cuda and _has_triton():
        from lightrl.kernels.logprob_triton import fits, linear_logprobs_triton

        if fits(hidden, weight):
            return linear_logprobs_triton(hidden, weight, targets, bias=bias, temperature=temperature)
    return linear_logprobs_torch(hidden, weight, targets, bias=bias, temperature=temperature)


def linear_logprobs_torch(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`linear_logprobs` in plain torch, a chunk of rows at a time: on CPUs, and where there is no Triton."""
    result: tuple[Tensor, Tensor] = _LinearLogprobs.apply(hidden, weight, targets, bias, temperature)
    return result


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def linear_logits(rows: Tensor, weight: Tensor, bias: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """`(rows @ weight.T + bias) / temperature` in float32 `[n, V]`, never rounded to the inputs' precision.

    A bfloat16 product on CUDA accumulates and returns float32.
    """
    if rows.dtype == torch.float32 and weight.dtype == torch.float32:
        logits = rows @ weight.T
    elif rows.is_cuda and rows.dtype == weight.dtype:
        logits = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:
        logits = rows.float() @ weight.float().T
    if bias is not None:
        logits += bias
    return logits.div_(temperature) if temperature != 1.0 else logits


def _normalize_(logits: Tensor, lse: Tensor) -> Tensor:
    """Log-probs `[n, V]` in the place of logits. Where these are -inf (a masked vocabulary) the least float stands: the
    probability is 0, and 0 * inf would be nan."""
    return logits.sub_(lse[:, None]).clamp_min_(torch.finfo(logits.dtype).min)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # no gradient of the entropy, no work for it
        num_rows, vocab = hidden.shape[0], weight.shape[0]
        chunk = max(1, (_CUDA_CHUNK_BYTES if hidden.is_cuda else _CHUNK_BYTES) // (4 * vocab))
        keep = num_rows * vocab * 4 <= _KEEP_BYTES and any(ctx.needs_input_grad)
        logprobs = hidden.new_empty(num_rows, dtype=torch.float32)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        kept: list[Tensor] = []
        for start in range(0, num_rows, chunk):
            rows = slice(start, start + chunk)
            z = linear_logits(hidden[rows], weight, bias, temperature)
            lse[rows] = z.logsumexp(-1)
            logprobs[rows] = z.gather(-1, targets[rows, None])[:, 0] - lse[rows]
            log_p = _normalize_(z, lse[rows])
            entropy[rows] = -log_p.exp().mul_(log_p).sum(-1)
            if keep:
                kept.append(log_p)
        ctx.save_for_backward(hidden, weight, targets, bias, lse, entropy, *kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, bias, lse, entropy, *kept = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        need_hidden, need_weight, _, need_bias, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for i, start in enumerate(range(0, hidden.shape[0], ctx.chunk)):
            rows = slice(start, start + ctx.chunk)
            if kept:
                log_p = kept[i]
            else:
                log_p = _normalize_(linear_logits(hidden[rows], weight, bias, ctx.temperature), lse[rows])
            # d logp_y = onehot(y) - p;  d entropy = -p (log p + entropy). In place: fresh memory is what costs
            dz = log_p.exp()
            if grad_entropy is None:
                dz.mul_(-grad_logprobs[rows, None])
            else:
                outer = (log_p + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(grad_logprobs[rows, None])
                dz.mul_(outer.neg_())
            dz.scatter_add_(-1, targets[rows, None], grad_logprobs[rows, None])
            if ctx.temperature != 1.0:
                dz.div_(ctx.temperature)
            if grad_hidden is not None:
                grad_hidden[rows] = dz.to(weight.dtype) @ weight
            if grad_weight is not None and hidden.dtype == torch.float32:
                grad_weight.addmm_(dz.T, hidden[rows])
            elif grad_weight is not None:
                grad_weight += (dz.to(hidden.dtype).T @ hidden[rows]).float()
            if grad_bias is not None:
                grad_bias += dz.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )
