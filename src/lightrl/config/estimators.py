"""The advantage estimators that `algorithm.advantage` can name: what each is, takes and needs.

A new one is a pure function and a line here. Functions are named, not imported: the config knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_HERE = "lightrl.algorithms.advantages"


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One estimator, as `package.module:function`."""

    function: str
    kind: Literal["group", "tokens"] = "group"
    """`group`: from the rewards of one prompt's answers, a number an answer or a number a token. `tokens`: from the
    rewards of an answer's tokens, a number a token; other answers have no part in it."""
    whiten: Literal["none", "batch", "group"] = "none"
    """What `algorithm.whiten` is when it is not set."""
    keys: tuple[str, ...] = ()
    """Keys of `[algorithm]` that the function takes, as arguments of the same names."""

    critic: bool = False
    """Needs a critic's values (`[critic]`)."""
    rewards: bool = True
    """Do rewards enter?"""

    @property
    def compares(self) -> bool:
        """Do equal rewards of a group, or a group of one, teach nothing? Not known of a function of the user's own."""
        return self.kind == "group" and self.rewards and self in ESTIMATORS.values()


ESTIMATORS = {
    "grpo": Estimator(function=f"{_HERE}:grpo", keys=("normalize_std",)),
    "rloo": Estimator(function=f"{_HERE}:rloo"),
    "reinforce_plus_plus": Estimator(
        function=f"{_HERE}:reinforce_plus_plus", kind="tokens", whiten="batch", keys=("gamma",)
    ),
    "gae": Estimator(function=f"{_HERE}:gae", kind="tokens", whiten="batch", keys=("gamma", "gae_lambda"), critic=True),
    "reinforce_plus_plus_baseline": Estimator(function=f"{_HERE}:reinforce_plus_plus_baseline", whiten="batch"),
    "none": Estimator(function=f"{_HERE}:none", rewards=False),
}


def estimator(name: str) -> Estimator:
    """The one of that name; any other name is that of a function of the user's own."""
    return ESTIMATORS.get(name) or Estimator(function=name)
