"""Environments of other projects, against fakes with their interface (verifiers 0.1.14, reasoning-gym 0.1.25)."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
from scripted import ScriptedEngine, make_agent, make_prompt, sampler_for

from lightrl.errors import UserError
from lightrl.rollout.adapters import ReasoningGym, reasoning_gym_rows, verifiers_environment, verifiers_rows
from lightrl.rollout.collect import Work, run_async
from lightrl.types import Prompt, SampleGroup

ENTRY = {"question": "1 + 2?", "answer": "3", "metadata": {"source_dataset": "chain_sum", "source_index": 0}}


def score_of(name: str) -> Any:
    """As `reasoning_gym.get_score_answer_fn`."""
    assert name == "chain_sum"
    return lambda answer, entry: 1.0 if answer == entry["answer"] else 0.01


class Rubric:
    """As newer ones: the score goes into the state."""

    async def score_rollout(self, state: dict[str, Any]) -> None:
        said = [m["content"] for m in state["completion"] if m["role"] == "assistant"]
        state["reward"] = float(said[-1] == state["answer"]) - 0.1 * (len(said) - 1)
        state["metrics"] = {"turns": len(said)}


class Doubles:
    """As `MultiTurnEnv`: asks again, at most twice."""

    rubric: Any = Rubric()

    def __init__(self, asks: int = 2) -> None:
        self.asks = asks

    async def setup_state(self, state: dict[str, Any]) -> None:
        state["asked"] = 0

    async def is_completed(self, state: dict[str, Any], **kwargs: Any) -> bool:
        return state["asked"] >= self.asks or state["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages: list[Any], state: dict[str, Any], **kwargs: Any) -> Any:
        assert messages[-1]["role"] == "assistant"
        state["asked"] += 1
        if state["info"].get("gives_up"):
            state["final_env_response"] = [{"role": "user", "content": "bye"}]
        return [types.SimpleNamespace(model_dump=lambda: {"role": "user", "content": f"try {state['asked']}"})]


class OldRubric:
    async def score_rollout(self, state: dict[str, Any]) -> Any:
        return types.SimpleNamespace(reward=0.75, metrics={"m": 1.0})


class Old(Doubles):
    """As older ones: messages first, and the state comes back."""

    rubric = OldRubric()

    async def is_completed(self, messages: list[Any], state: dict[str, Any], **kwargs: Any) -> bool:  # type: ignore[override]
        return len(messages) > 3

    async def env_response(self, messages: list[Any], state: dict[str, Any], **kwargs: Any) -> Any:
        return [{"role": "user", "content": "again"}], state


def play(options: dict[str, Any], script: Any, *, kind: str, prompt: dict[str, Any]) -> SampleGroup:
    agent = make_agent(environment=f"lightrl.rollout.adapters:{kind}", options=options)
    engine = ScriptedEngine(agent.template.tokenizer, script)
    sampler = sampler_for(agent, engine, group_size=1)
    given = make_prompt(agent)
    row = Prompt(index=0, tokens=given.tokens, text=given.text, messages=given.messages, source="f:1", **prompt)
    work = Work(group_index=0, prompt=row)
    run_async(sampler.complete(work))
    agent.close()
    assert work.group is not None
    return work.group


def test_reasoning_gym() -> None:
    (row,) = reasoning_gym_rows([ENTRY])
    assert row == {"input": "1 + 2?", "label": "3", "metadata": {"entry": ENTRY}}
    options = {"scorer": "test_agent_adapters:score_of", "attempts": 2}
    prompt = {"label": "3", "metadata": row["metadata"]}
    right = play(options, lambda said, seed: "so <answer> 3 </answer>", kind="ReasoningGym", prompt=prompt).samples[0]
    assert (right.reward, right.metadata["turns"]) == (1.0, 1)
    wrong = play(options, lambda said, seed: "4", kind="ReasoningGym", prompt=prompt).samples[0]
    assert (wrong.reward, wrong.metadata["turns"], wrong.metadata["info"]) == (0.01, 2, {"attempts": 2})
    with pytest.raises(UserError, match=r"f:1: metadata\.entry is no entry"):
        ReasoningGym().reset(Prompt(index=0, tokens=[1], text="", source="f:1"))


def test_the_real_reasoning_gym() -> None:
    gym = pytest.importorskip("reasoning_gym")
    (row,) = reasoning_gym_rows(gym.create_dataset("chain_sum", size=1, seed=1))
    prompt = {"label": row["label"], "metadata": json.loads(json.dumps(row["metadata"]))}
    sample = play({}, lambda said, seed: row["label"], kind="ReasoningGym", prompt=prompt).samples[0]
    assert sample.reward == 1.0


def test_verifiers() -> None:
    options = {"load": "test_agent_adapters:Doubles", "args": {"asks": 2}}
    prompt: dict[str, Any] = {"label": "yes", "metadata": {"info": {}, "task": "t"}}
    sample = play(
        options, lambda said, seed: "yes" if "try 1" in said else "no", kind="Verifiers", prompt=prompt
    ).samples[0]
    assert (sample.reward, sample.metadata["turns"]) == (0.9, 2)
    assert sample.metadata["info"] == {"metrics": {"turns": 2}}
    sample = play(options, lambda said, seed: "no", kind="Verifiers", prompt=prompt).samples[0]
    assert (sample.reward, sample.metadata["turns"]) == (pytest.approx(-0.1), 2)
    prompt["metadata"]["info"] = {"gives_up": True}
    sample = play(options, lambda said, seed: "no", kind="Verifiers", prompt=prompt).samples[0]
    assert sample.metadata["turns"] == 1
    options = {"load": "test_agent_adapters:Old"}
    sample = play(options, lambda said, seed: "no", kind="Verifiers", prompt=prompt).samples[0]
    assert (sample.reward, sample.metadata["turns"], sample.metadata["info"]) == (0.75, 2, {"metrics": {"m": 1.0}})
    rows = list(verifiers_rows([{"prompt": [{"role": "user", "content": "q"}], "answer": "a", "info": {"k": 1}}]))
    assert rows == [{"input": [{"role": "user", "content": "q"}], "label": "a", "metadata": {"info": {"k": 1}}}]
    with pytest.raises(UserError, match="by one of `id` and `load`"):
        verifiers_environment("", "", "{}")
