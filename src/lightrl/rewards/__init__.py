"""Rewards: named rules, functions of your own, and the scorer that applies them.

Names load when they are used: worker processes import this package and must not import torch with it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.rewards.labels import check_labels
    from lightrl.rewards.scorer import RewardFailure, RewardStats, Scorer

__all__ = ["RewardFailure", "RewardStats", "Scorer", "check_labels"]

_HOME = {"check_labels": "labels"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'scorer')}"), name)
