"""Losses on pairs of a chosen and a rejected answer: DPO and its kin, and Bradley-Terry. `P` pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

PreferenceKind = Literal["sigmoid", "sigmoid_norm", "robust", "ipo", "simpo"]
_PER_TOKEN = ("sigmoid_norm", "ipo", "simpo")


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Of one side of the pairs, summed over its answers' tokens."""

    policy: Tensor  # [P]
    reference: Tensor | None  # [P]
    lengths: Tensor  # [P] tokens that were summed over


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """Of P pairs."""

    loss: Tensor  # [P]
    chosen: Tensor  # [P] implicit rewards, beta times what the loss compares; no gradient
    rejected: Tensor  # [P]


def preference_loss(
    chosen: Logprobs,
    rejected: Logprobs,
    *,
    kind: PreferenceKind,
    beta: float,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
) -> PreferenceLoss:
    """The loss of each pair. With s = log p - log p_ref, summed over an answer's tokens, and d = s_chosen - s_rejected:

    - `sigmoid`: -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d); e = `label_smoothing` = 0 is DPO
      (arXiv:2305.18290), above it cDPO.
    - `robust`: (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e): rDPO (arXiv:2403.00409).
    - `sigmoid_norm`: as `sigmoid`, of s a token (s / length).
    - `ipo`: (d - 1 / (2 beta))², of s a token (arXiv:2310.12036; its authors' experiments divide by the length).
    - `simpo`: as `sigmoid` of beta d - `margin`, with s = log p a token and no reference (arXiv:2405.14734).
    """
    scores = []
    for side in (chosen, rejected):
        if (side.reference is None) != (kind == "simpo"):
            raise ValueError(f"{kind} is {'without' if kind == 'simpo' else 'with'} a reference")
        score = side.policy if side.reference is None else side.policy - side.reference
        scores.append(score / side.lengths if kind in _PER_TOKEN else score)
    difference = scores[0] - scores[1]
    if kind == "ipo":
        loss = (difference - 1 / (2 * beta)).square()
    else:
        logits = beta * difference - (margin if kind == "simpo" else 0.0)
        right, flipped = -logsigmoid(logits), -logsigmoid(-logits)
        if kind == "robust":
            loss = ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)
        else:
            loss = (1 - label_smoothing) * right + label_smoothing * flipped
    return PreferenceLoss(loss=loss, chosen=beta * scores[0].detach(), rejected=beta * scores[1].detach())


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, center: float = 0.0
) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)², [P].

    The first is the negative log-likelihood that the chosen answer wins (Bradley and Terry 1952), with the margin of
    Llama 2 (arXiv:2307.09288); the second holds rewards, of which only differences matter otherwise, around 0
    (Eisenstein et al. 2023, arXiv:2312.09244).
    """
    return -logsigmoid(chosen - rejected - margin) + center * (chosen + rejected).square()
