"""Divergences between a student's and a teacher's distribution of the next token, by chunks of rows, without the
`[N, V]` logits of either in memory.

Shapes: `N` rows, `H` and `G` the student's and the teacher's hidden size, `V` ids that both know. With q the student's
probabilities and p the teacher's:

    reverse_kl  KL(q || p) = sum q (log q - log p)
    forward_kl  KL(p || q) = sum p (log p - log q)
    jsd         beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q   (GKD, arXiv:2306.13649, eq. 1)

Nothing is differentiated through the teacher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrl.kernels.logprob import linear_logits

KINDS = ("reverse_kl", "forward_kl", "jsd")
_CHUNK_BYTES = 32 << 20  # float32 logits of one of the two computed at a time
_CUDA_CHUNK_BYTES = 128 << 20
_FLOOR = -1e6  # stands for log 0, so that 0 times it is 0; far below what a temperature of 0.01 makes of any logits


@dataclass(frozen=True, kw_only=True)
class Head:
    """An output layer, whole, and what is made of its logits."""

    weight: Tensor  # [V or more, G]
    bias: Tensor | None = None  # [V or more]
    temperature: float = 1.0


def divergence(log_q: Tensor, log_p: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Of whole distributions: log-probs [..., K] of student and teacher -> [...], differentiable in `log_q`."""
    if kind == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if kind == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "jsd":
        log_m = _mixture(log_q, log_p, beta)
        of_teacher, of_student = (log_p.exp() * (log_p - log_m)).sum(-1), (log_q.exp() * (log_q - log_m)).sum(-1)
        return beta * of_teacher + (1.0 - beta) * of_student
    raise ValueError(f"unknown divergence {kind!r}; known: {', '.join(KINDS)}")


def head_logprobs(rows: Tensor, head: Head, size: int) -> Tensor:
    """Log-probs [N, size] of the first `size` ids, normalised over them, float32; all in memory."""
    bias = None if head.bias is None else head.bias[:size]
    logits = linear_logits(rows, head.weight[:size], bias, head.temperature)
    return logits.sub_(logits.logsumexp(-1, keepdim=True)).clamp_min_(_FLOOR)


def linear_divergence(
    hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher: Head, *, size: int, kind: str, beta: float = 0.5
) -> Tensor:
    """`divergence` of the two softmaxes over the first `size` ids, [N] float32.

    hidden [N, H] and teacher_hidden [N, G] with their heads. Differentiable in `hidden` and in the student's weight and
    bias; logits are computed a chunk of rows at a time, in the backward pass again.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown divergence {kind!r}; known: {', '.join(KINDS)}")
    settings = _Settings(head.temperature, teacher.temperature, size, kind, beta)
    found: Tensor = _LinearDivergence.apply(
        hidden, head.weight, head.bias, teacher_hidden.detach(), teacher.weight.detach(), teacher.bias, settings
    )
    return found


@dataclass(frozen=True)
class _Settings:
    temperature: float
    teacher_temperature: float
    size: int
    kind: str
    beta: float

    def chunk(self, hidden: Tensor) -> int:
        """Rows computed at a time."""
        return max(1, (_CUDA_CHUNK_BYTES if hidden.is_cuda else _CHUNK_BYTES) // (4 * self.size))


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        tensors = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
        ctx.save_for_backward(*tensors)
        ctx.settings = settings
        out = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        chunk = settings.chunk(hidden)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            out[rows] = divergence(*_both(tensors, rows, settings), settings.kind, settings.beta)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        settings: _Settings = ctx.settings
        hidden, weight, bias, *_ = tensors = ctx.saved_tensors
        need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        chunk, size = settings.chunk(hidden), settings.size
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            dz = _slope(*_both(tensors, rows, settings), settings.kind, settings.beta)
            dz.mul_(grad[rows, None] / settings.temperature)
            if grad_hidden is not None:
                grad_hidden[rows] = dz.to(weight.dtype) @ weight[:size]
            if grad_weight is not None:
                grad_weight[:size] += (dz.to(hidden.dtype).T @ hidden[rows]).float()
            if grad_bias is not None:
                grad_bias[:size] += dz.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _both(tensors: tuple[Any, ...], rows: slice, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Log-probs [n, V] of student and teacher, whose tensors are as `_LinearDivergence` has them."""
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = tensors
    student = Head(weight=weight, bias=bias, temperature=settings.temperature)
    teacher = Head(weight=teacher_weight, bias=teacher_bias, temperature=settings.teacher_temperature)
    log_q = head_logprobs(hidden[rows], student, settings.size)
    return log_q, head_logprobs(teacher_hidden[rows], teacher, settings.size)


def _slope(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> Tensor:
    """Of the divergence by the student's logits over its temperature, [n, V].

    q - p for the forward KL. The others are sums of q times something, g = log q - log p, or (1 - beta) (log q - log m)
    where what m changes by adds up to nothing: q (g - sum q g).
    """
    q = log_q.exp()
    if kind == "forward_kl":
        return q.sub_(log_p.exp())
    g = log_q - (log_p if kind == "reverse_kl" else _mixture(log_q, log_p, beta))
    if kind == "jsd":
        g.mul_(1.0 - beta)
    return g.sub_((q * g).sum(-1, keepdim=True)).mul_(q)


def _mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """log(beta p + (1 - beta) q)."""
    return torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))


@torch.no_grad()
def linear_top_logprobs(rows: Tensor, head: Head, k: int, size: int) -> tuple[Tensor, Tensor]:
    """The k likeliest of the first `size` ids, and their log-probs under the softmax over all of the head's:
    rows [N, G] -> [N, k] int64, [N, k] float32. Logits exist for a part of the rows at a time."""
    ids = torch.empty(rows.shape[0], k, dtype=torch.int64, device=rows.device)
    logprobs = torch.empty(rows.shape[0], k, dtype=torch.float32, device=rows.device)
    chunk = max(1, (_CUDA_CHUNK_BYTES if rows.is_cuda else _CHUNK_BYTES) // (4 * head.weight.shape[0]))
    for start in range(0, rows.shape[0], chunk):
        part = slice(start, start + chunk)
        logits = linear_logits(rows[part], head.weight, head.bias, head.temperature)
        top = logits[:, :size].topk(k, dim=-1)
        ids[part], logprobs[part] = top.indices, top.values - logits.logsumexp(-1, keepdim=True)
    return ids, logprobs.clamp_min_(_FLOOR)
