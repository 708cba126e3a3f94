"""Several agents on one model: solvers answer, each answer is rewritten in the light of the others, one is selected."""

from __future__ import annotations

import asyncio
import re

from lightrl.rollout.episode import Episode

SYSTEM = {"role": "system", "content": "Answer with a number only."}


def grade(text: str, label: object) -> float:
    return float(re.findall(r"-?\d+", text)[-1:] == [str(label)])


class SolveRewriteSelect:
    """Each role is graded by what it says, and compared with the same role in the group's other episodes."""

    gives_reward = True

    def __init__(self, solvers: int = 2) -> None:
        self._solvers = solvers

    async def run(self, episode: Episode) -> None:
        question = (episode.prompt.messages or [])[-1]["content"]
        label = episode.prompt.label

        solvers = [episode.start([SYSTEM, {"role": "user", "content": question}], agent="solver")
                   for _ in range(self._solvers)]  # fmt: skip
        answers = await asyncio.gather(*(solver.generate() for solver in solvers))  # side by side
        for solver, answer in zip(solvers, answers, strict=True):
            solver.reward = grade(answer.text, label)

        others = "\n".join(f"{i}: {answer.text}" for i, answer in enumerate(answers))
        rewriters = [solver.fork(agent="rewriter") for solver in solvers if not solver.why]  # goes on from its answer
        told = [r for r in rewriters if r.append([{"role": "user", "content": f"Others said:\n{others}\nAgain?"}])]
        rewrites = await asyncio.gather(*(rewriter.generate() for rewriter in told))
        for rewriter, rewrite in zip(told, rewrites, strict=True):
            rewriter.reward = grade(rewrite.text, label)

        choices = [turn.text for turn in (*answers, *rewrites)]
        listed = "\n".join(f"{i}: {text}" for i, text in enumerate(choices))
        selector = episode.start(
            [{"role": "user", "content": f"{question}\n{listed}\nWhich is right? Answer with its number."}],
            agent="selector",
        )
        picked = re.findall(r"\d+", (await selector.generate()).text)
        chosen = choices[int(picked[0])] if picked and int(picked[0]) < len(choices) else ""
        selector.reward = grade(chosen, label)
        episode.final = selector
