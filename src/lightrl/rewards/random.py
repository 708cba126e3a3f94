"""`random`: a fair coin. A control: a run that rises on it is broken."""

from __future__ import annotations

import random

from lightrl.rewards.answer import Answer


def grade_random(answer: Answer) -> float:
    """0 or 1, drawn from the sample's name, so that a resumed run draws the same."""
    return float(random.Random(answer.key).randint(0, 1))
