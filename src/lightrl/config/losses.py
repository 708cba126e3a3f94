"""The policy losses that `algorithm.loss` can name: what each is and takes.

A new one is a pure function and a line here. Functions are named, not imported: the config knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

_HERE = "lightrl.algorithms.losses"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss, as `package.module:function`."""

    function: str
    keys: tuple[str, ...] = ()
    """Keys of `[algorithm]` that the function takes, as arguments of the same names; its defaults are theirs."""
    has_ratio: bool = True
    """Does it correct for old log-probs that are not the present ones? Importance weights to them would do so twice."""


LOSSES = {
    "ppo": Loss(function=f"{_HERE}:ppo_loss", keys=("clip_low", "clip_high", "dual_clip")),
    "gspo": Loss(function=f"{_HERE}:gspo_loss", keys=("clip_low", "clip_high")),
    "cispo": Loss(function=f"{_HERE}:cispo_loss", keys=("clip_low", "clip_high")),
    "sapo": Loss(function=f"{_HERE}:sapo_loss", keys=("tau_pos", "tau_neg")),
    "reinforce": Loss(function=f"{_HERE}:reinforce_loss", has_ratio=False),
    "dppo_tv": Loss(function=f"{_HERE}:dppo_tv_loss", keys=("clip_low", "clip_high", "ratio_cap")),
    "dppo_kl": Loss(function=f"{_HERE}:dppo_kl_loss", keys=("clip_low", "clip_high", "ratio_cap")),
}
