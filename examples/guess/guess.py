"""A tiny environment: the model guesses a number and is told higher or lower."""

from __future__ import annotations

import random
import re

from lightrl.rollout.environment import Step, Turn
from lightrl.types import Prompt


class Guess:
    """A whole number between `low` and `high`; the reward is 1 for the first guess right, less for each further one."""

    gives_reward = True

    def __init__(self, seed: int, low: int = 1, high: int = 9) -> None:
        self._target = random.Random(seed).randint(low, high)  # the same for all episodes of a group
        self._low, self._high = low, high
        self._guesses = 0

    def reset(self, prompt: Prompt) -> list[dict[str, str]]:
        text = f"Guess my number between {self._low} and {self._high}. Answer with a number only."
        return [{"role": "user", "content": text}]

    def step(self, turn: Turn) -> Step:
        self._guesses += 1
        numbers = re.findall(r"\d+", turn.text)
        if not numbers:
            return Step(done=True, reward=-0.1, info={"guesses": self._guesses})
        guess = int(numbers[-1])
        if guess == self._target:
            return Step(done=True, reward=1.0 / self._guesses, info={"guesses": self._guesses})
        hint = "higher" if guess < self._target else "lower"
        return Step(messages=[{"role": "user", "content": hint}], info={"guesses": self._guesses})
