"""A reward of your own: right answers earn 1, and brevity a little more.

In a run, name it in the config (from the folder that holds this file):

    [reward]
    type = "custom_reward:right_and_brief"
    key = "total"

or pass it: `Trainer(config, reward=right_and_brief).train()`. Here it scores a few made-up answers, on any machine:

    python examples/custom_reward.py
"""

from __future__ import annotations

import asyncio
import re

from lightrl.config.schema import RewardConfig
from lightrl.rewards import Scorer
from lightrl.types import Prompt, Sample

FREE_TOKENS = 20


def right_and_brief(sample: Sample) -> dict[str, float]:
    """`total` is trained on (`reward.key`); others land in `sample.metadata["reward"]`, their means in the logs.

    A function may return a plain number, be `async`, or, with `reward.batched`, take and return lists. If it raises,
    takes longer than `reward.timeout`, or returns no finite number, its sample is left out of the update.
    """
    numbers = re.findall(r"-?\d+", sample.response)
    right = float(bool(numbers) and numbers[-1] == sample.prompt.label)
    brevity = min(1.0, FREE_TOKENS / max(sample.response_length, 1))
    return {"total": right * (0.8 + 0.2 * brevity), "right": right, "brevity": brevity}


def made_up_samples() -> list[Sample]:
    """Three answers to one prompt, as an engine would return them (one token a word here)."""
    prompt = Prompt(index=0, tokens=[0], text="What is 17 + 25?", label="42", source="made up")
    answers = ["42", "Let me think. " * 13 + "It is 42", "It is 43"]
    samples = []
    for i, answer in enumerate(answers):
        tokens = list(range(len(answer.split())))
        samples.append(
            Sample(
                prompt=prompt,
                group_index=0,
                index=i,
                tokens=prompt.tokens + tokens,
                response_length=len(tokens),
                response=answer,
            )
        )
    return samples


def main() -> None:
    scorer = Scorer(RewardConfig(key="total"), custom=right_and_brief)
    samples = made_up_samples()
    asyncio.run(scorer.score(samples))
    for sample in samples:
        print(f"{sample.reward:.3f}  {sample.metadata['reward']}  {sample.response[:40]!r}")
    scorer.close()


if __name__ == "__main__":
    main()
