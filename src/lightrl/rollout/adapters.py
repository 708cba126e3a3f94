"""Environments of other projects: `verifiers` (its multi-turn protocol of 0.1) and `reasoning-gym`.

Neither is imported by name where it can be helped: what is used is their interface, so that another that has it works.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from lightrl import hooks
from lightrl.errors import UserError
from lightrl.rollout.conversation import Message
from lightrl.rollout.environment import Step, Turn
from lightrl.types import Prompt, Status

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """A task of reasoning-gym: its own scorer grades, in `attempts` turns at most.

    A row's `metadata.entry` is the dataset's entry (`reasoning_gym_rows` writes such rows). What stands in the last
    `<answer>` counts, or else the whole turn. `scorer`, `package.module:function`, stands in for
    `reasoning_gym.get_score_answer_fn`: a dataset's name -> a function of (answer, entry).
    """

    gives_reward = True

    def __init__(self, attempts: int = 1, scorer: str = "reasoning_gym:get_score_answer_fn") -> None:
        self._attempts, self._scorer = attempts, scorer
        self._entry: dict[str, Any] = {}

    def reset(self, prompt: Prompt) -> None:
        entry = prompt.metadata.get("entry")
        if not isinstance(entry, dict) or "source_dataset" not in entry.get("metadata", {}):
            raise UserError(f"{prompt.source}: metadata.entry is no entry of a reasoning-gym dataset")
        self._entry = entry

    def step(self, turn: Turn) -> Step:
        answer = (_ANSWER.findall(turn.text) or [turn.text])[-1].strip()
        score_of = hooks.load(self._scorer, "agent.options")(self._entry["metadata"]["source_dataset"])
        score = float(score_of(answer, self._entry))
        if score >= 1.0 or turn.number + 1 >= self._attempts or turn.status is not Status.COMPLETED:
            return Step(done=True, reward=score, info={"attempts": turn.number + 1})
        return Step(messages=[{"role": "user", "content": "That is not right. Try again."}])


def reasoning_gym_rows(dataset: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows for `data.path`, from the entries of a reasoning-gym dataset (`reasoning_gym.create_dataset(…)`)."""
    for entry in dataset:
        yield {"input": entry["question"], "label": entry["answer"], "metadata": {"entry": json.loads(_json(entry))}}


class Verifiers:
    """An environment of verifiers 0.1 (`MultiTurnEnv`): its `env_response` answers, its rubric grades.

    `load`, `package.module:function`, is called with `args` and returns the environment; default: the environment
    `id` by `verifiers.load_environment`. Rows are the environment's own (`verifiers_rows` writes them). Used of it:
    `setup_state`, `is_completed`, `env_response`, `rubric.score_rollout`, async or not, in their older and newer forms.
    Groups are scored sample by sample; rubrics that compare the samples of a group are not served.
    """

    gives_reward = True

    def __init__(self, id: str = "", load: str = "", args: dict[str, Any] | None = None) -> None:
        self._env = verifiers_environment(id, load, json.dumps(args or {}, sort_keys=True))
        self._state: dict[str, Any] = {}
        self._prompt: list[Message] = []

    async def reset(self, prompt: Prompt) -> None:
        self._prompt = list(prompt.messages or [{"role": "user", "content": prompt.text}])
        about = prompt.metadata
        self._state = {
            "prompt": list(self._prompt),
            "completion": [],
            "answer": prompt.label,
            "info": about.get("info") or {},
            "task": about.get("task", "default"),
            "example_id": prompt.index,
            "trajectory": [],
            "turn": 0,
            "reward": None,
            "metrics": None,
            "is_completed": False,
        }
        if hasattr(self._env, "setup_state"):
            self._state = await _awaited(self._env.setup_state(self._state)) or self._state

    async def step(self, turn: Turn) -> Step:
        state = self._state
        before = [*self._prompt, *state["completion"]]
        said: Message = {"role": "assistant", "content": turn.text}
        if turn.calls:
            said["tool_calls"] = [_tool_call(number, call) for number, call in enumerate(turn.calls)]
        state["completion"] = [*state["completion"], said]
        state["trajectory"].append({"prompt": before, "completion": [said], "reward": None, "extras": {}})
        state["turn"] += 1
        if turn.status is not Status.COMPLETED or await self._is_completed():
            return await self._score()
        messages = [*self._prompt, *state["completion"]]
        told = await _awaited(self._env.env_response(messages, state))
        if isinstance(told, tuple):  # older ones return the state as well
            told, self._state = told
            state = self._state
        final = state.get("final_env_response")
        told = [_plain(message) for message in (told if final is None else final) or []]
        state["completion"] = [*state["completion"], *told]
        if not told or final is not None or await self._is_completed():
            return await self._score()
        return Step(messages=told)

    async def _is_completed(self) -> bool:
        check = getattr(self._env, "is_completed", None)
        if check is None:
            return False
        names = list(inspect.signature(check).parameters)
        messages = [*self._prompt, *self._state["completion"]]
        given = [self._state] if names[0] == "state" else [messages, self._state]
        return bool(await _awaited(check(*given)))

    async def _score(self) -> Step:
        state = self._state
        state["is_completed"] = True
        score = await _awaited(self._env.rubric.score_rollout(state))
        reward = getattr(score, "reward", None) if score is not None else state.get("reward")
        metrics = getattr(score, "metrics", None) if score is not None else state.get("metrics")
        return Step(done=True, reward=reward, info={"metrics": dict(metrics or {})})


def verifiers_rows(dataset: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows for `data.path`, from a verifiers environment's `get_dataset()`."""
    for row in dataset:
        kept = {key: row[key] for key in ("info", "task") if row.get(key) is not None}
        yield {"input": row["prompt"], "label": row.get("answer", ""), "metadata": json.loads(_json(kept))}


@lru_cache
def verifiers_environment(id: str, load: str, args: str) -> Any:
    """One for all episodes of a process: it holds no episode's state. UserError where it cannot be loaded."""
    if bool(id) == bool(load):
        raise UserError("agent.options: name the environment by one of `id` and `load`")
    key = "agent.options"
    if load:
        return hooks.load(load, key, arguments=None)(**json.loads(args))
    return hooks.load("verifiers:load_environment", key, arguments=None)(id, **json.loads(args))


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _plain(message: Any) -> Message:
    """A message as a dict of role and text; newer versions have objects."""
    found = message if isinstance(message, dict) else message.model_dump()
    return {"role": found["role"], "content": str(found.get("content") or "")}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _json(value: Any) -> str:
    return json.dumps(value, default=str)
