"""The section `[correction]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Count, NonNegative, PositiveFloat


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CorrectionConfig:
    """For samples that another policy drew than the one that is trained: the engine's, or older weights. Ratios are of
    the trainer's probabilities, before the step's updates, to the engine's."""

    use_rollout_logprobs: bool = False
    """The engine's log-probs are the old ones of the loss (bypass): no pass of the trainer is spent on them."""
    use_tis: bool = False
    """Weigh the policy loss by the importance ratio, held to bounds."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of the token, product over the sample's tokens, or their geometric mean."""
    tis_mode: Literal["truncate", "clip", "mask", "icepop"] = "truncate"
    """Outside of the bounds: cap at the upper one (TIS); clip to both; leave out of the loss (MIS); weight 0
    (IcePop)."""
    tis_lower_bound: NonNegative | None = None
    """Lower bound, not used by `truncate`; default: 1 / tis_upper_bound."""
    tis_upper_bound: PositiveFloat = 2.0
    """Upper bound."""
    tis_batch_normalize: bool = False
    """Divide weights by their mean over the step, on all ranks together."""
    use_rs: bool = False
    """Rejection sampling: leave tokens or samples whose ratio is outside of the bounds out of the loss."""
    rs_level: Literal["token", "sequence", "geometric"] = "token"
    """As tis_level."""
    rs_lower_bound: NonNegative | None = None
    """Lower bound; default: that of `use_tis`, else 1 / rs_upper_bound."""
    rs_upper_bound: PositiveFloat | None = None
    """Upper bound; default: tis_upper_bound."""
    rs_veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Leave a sample out of the loss when one of its tokens has a lower ratio; works alone too."""
    opsm_delta: NonNegative | None = None
    """Leave a sample with a negative advantage out of the policy loss when the mean log of engine to present
    probabilities exceeds this (off-policy sequence masking)."""

    score_centering_top_k: Count = 0
    """Take the expected score under the engine off the policy's gradient, so that their mismatch does not add up
    (score centering): over so many of the engine's likeliest tokens at each place; 0 is off."""
    routing_replay: Literal["none", "trainer", "rollout"] = "none"
    """Routing replay, for mixtures of experts: `trainer` (R2): a step's updates choose the experts that the trainer
    chose before them; `rollout` (R3): the trainer chooses those that the engine chose."""

    @property
    def tis_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of weights."""
        low, high = self.tis_lower_bound, self.tis_upper_bound
        return (1.0 / high if low is None else low), high

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of what is not rejected."""
        high = self.tis_upper_bound if self.rs_upper_bound is None else self.rs_upper_bound
        if self.rs_lower_bound is not None:
            return self.rs_lower_bound, high
        return (self.tis_bounds[0] if self.use_tis else 1.0 / high), high

    @property
    def reads_rollout_logprobs(self) -> bool:
        """Whether the engine's log-probs enter the loss."""
        others = self.rejects or self.opsm_delta is not None or self.score_centering_top_k > 0
        return self.use_rollout_logprobs or self.use_tis or others

    @property
    def rejects(self) -> bool:
        """Whether tokens may leave the loss by their ratio."""
        return self.use_rs or self.rs_veto_threshold is not None or (self.use_tis and self.tis_mode == "mask")
