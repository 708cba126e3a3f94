"""Advantage estimators: pure functions of a `GroupRewards` or a `TokenRewards` (docs/algorithms.md).

Which names they have, and which keys they take, is in `lightrl.config.estimators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.kernels.scan import reverse_scan
from lightrl.types import Sample

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """The scored answers to one prompt, any number of them; failed ones are not among them."""

    rewards: Tensor
    """[G] float64: as scored, less what `algorithm.overlong_buffer` and a KL in the reward take off."""
    samples: Sequence[Sample] = ()
    """The G answers, in the same order."""

    @property
    def without_spread(self) -> bool:
        """One answer, or equal rewards: the rounding of a mean must not be taken for a difference."""
        return self.rewards.numel() < 2 or bool((self.rewards == self.rewards[0]).all())


@dataclass(frozen=True, kw_only=True)
class TokenRewards:
    """The loss tokens of whole answers, answer after answer. Tokens that were given, not sampled, are left out."""

    rewards: Tensor
    """[N] float64: an answer's reward on its last token; with the KL in the reward, each token loses its own."""
    ends: Tensor
    """[N] bool: the last token of its answer."""
    values: Tensor | None = None
    """[N] float64: what a critic expects from each token on."""


# ----- of a group: [G]


def grpo(group: GroupRewards, *, normalize_std: bool = True) -> Tensor:
    """(r - mean(r)) / (std(r) + 1e-6) with the unbiased standard deviation (DeepSeekMath, arXiv:2402.03300, eq. 3).

    Without `normalize_std` only centred (Dr.GRPO, arXiv:2503.20783). A group without spread has advantages 0.

    >>> grpo(GroupRewards(rewards=torch.tensor([1.0, 0.0, 0.0, 1.0])), normalize_std=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    r = group.rewards
    if group.without_spread:
        return torch.zeros_like(r)
    centred = r - r.mean()
    return centred / (r.std(unbiased=True) + EPSILON) if normalize_std else centred


def rloo(group: GroupRewards) -> Tensor:
    """r_i - mean of the others' rewards = G / (G - 1) (r_i - mean(r)) (arXiv:2402.14740, eq. 3); 0 without others.

    >>> rloo(GroupRewards(rewards=torch.tensor([3.0, 0.0, 0.0]))).tolist()
    [3.0, -1.5, -1.5]
    """
    r = group.rewards
    if group.without_spread:
        return torch.zeros_like(r)
    return (r - r.mean()) * (r.numel() / (r.numel() - 1))


def reinforce_plus_plus_baseline(group: GroupRewards) -> Tensor:
    """r_i - mean(r), to be whitened over the batch (arXiv:2501.03262, REINFORCE++-baseline); 0 for a group of one."""
    return grpo(group, normalize_std=False)


def none(group: GroupRewards) -> Tensor:
    """0, whatever the rewards: what is learned is a teacher's (`[teacher]`), or a KL or entropy term's."""
    return torch.zeros_like(group.rewards)


# ----- of tokens: [N]


def reinforce_plus_plus(tokens: TokenRewards, *, gamma: float = 1.0) -> Tensor:
    """Sum of the rewards from a token on, `gamma` a token, to be whitened over the batch (arXiv:2501.03262).

    With gamma 1: the answer's reward less the KL from this token to its end.
    """
    goes_on = (~tokens.ends).to(tokens.rewards.dtype)
    return reverse_scan(gamma * goes_on, tokens.rewards)


def gae(tokens: TokenRewards, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), to be whitened over the batch.

    A_t = d_t + gamma lambda A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t; A and V are 0 behind an answer's last token.
    What the critic should have said is A_t + V_t. Axes may come before N; each row then ends with an answer's end.
    """
    assert tokens.values is not None, "GAE needs a critic's values"
    values = tokens.values.double()  # d_t of 10^5 tokens add up their rounding
    goes_on = gamma * (~tokens.ends).double()
    deltas = tokens.rewards + goes_on * values.roll(-1, -1) - values
    return reverse_scan(gae_lambda * goes_on, deltas).to(tokens.values.dtype)


# ----- rewards of answers that are nearly too long


def overlong_penalty(length: int, *, limit: int, buffer: int, penalty: float) -> float:
    """What an answer of `length` tokens loses: 0 up to `limit - buffer`, rising evenly to `penalty` at `limit`.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), with `penalty` 1.

    >>> [overlong_penalty(n, limit=100, buffer=20, penalty=1.0) for n in (80, 90, 100, 120)]
    [0.0, 0.5, 1.0, 1.0]
    """
    return penalty * min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)
