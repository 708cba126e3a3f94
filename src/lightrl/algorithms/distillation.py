"""On-policy distillation: a teacher's word on what the policy itself sampled. Pure functions on packed tensors.

The forms (`teacher.form`) differ in how much of the teacher's distribution they know: of the sampled token alone, of k
likely tokens, of all (`lightrl.kernels.divergence`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.losses import kl_divergence
from lightrl.kernels.divergence import divergence

MIN_TAIL = 1e-6  # of the probability outside of k tokens: 1 - sum rounds to 0, or below


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """log policy - log teacher of sampled tokens, [N]: the k1 estimate of KL(policy || teacher), within ±20.

    Minus a coefficient times this is an advantage a token, whose policy gradient is that of the KL (Thinking Machines,
    "On-Policy Distillation", 2025): what a token does to later ones is left out.
    """
    return kl_divergence(logprobs, teacher_logprobs, "k1")


def with_rest(logprobs: Tensor) -> Tensor:
    """Log-probs of k tokens and of "any other", [N, k] -> [N, k + 1].

    >>> with_rest(torch.tensor([[0.5, 0.3]]).log()).exp()
    tensor([[0.5000, 0.3000, 0.2000]])
    """
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(MIN_TAIL)
    return torch.cat([logprobs, rest.log()], -1)


def top_k_divergence(logprobs: Tensor, teacher_logprobs: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """`divergence` of the distributions over k tokens and "any other", [N, k] twice -> [N], with gradient in the first.

    Putting tokens together never makes a divergence larger: it is at most that of the whole vocabulary, 0 where the
    two agree on the k tokens, and rises with k.
    """
    return divergence(with_rest(logprobs), with_rest(teacher_logprobs), kind, beta)
