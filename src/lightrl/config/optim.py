"""The sections `[optim]`, `[critic]` and `[critic_optim]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Count, Fraction, NonNegative, PositiveFloat


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimConfig:
    """AdamW and its schedule."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay of matrices; norms and biases have none."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm here; 0 is off."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warm-up. `wsd`: constant, then linear decay over the last `decay_steps` updates."""
    warmup_steps: Count = 0
    """Updates of linear warm-up."""
    decay_steps: Count = 0
    """Length of the decay of `wsd`, in updates."""
    min_lr_ratio: Fraction = 0.0
    """Where decays end, as a share of `lr`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticConfig:
    """The critic of `algorithm.advantage = "gae"`: a second model with a value head, sharded as the policy is."""

    path: str | None = None
    """Checkpoint it starts from: a causal LM, which gets a new value head, or a sequence classifier of one label (a
    reward model, an exported critic). Default: `model.path`."""
    value_clip: PositiveFloat | None = None
    """Clip values to this distance from those before the step's updates in the loss (PPO); default: off."""
    pretrain_steps: Count = 0
    """First steps of the run in which the critic alone learns and the policy stays as it is."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticOptimConfig(OptimConfig):
    """As `[optim]`, for the critic."""

    lr: NonNegative = 1e-5
    """Peak learning rate."""
