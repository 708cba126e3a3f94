"""The section `[sft]`, and the rules of `lightrl sft`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Faults, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from lightrl.config.schema import Config


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTConfig:
    """Supervised fine-tuning on conversations, `lightrl sft` (docs/sft.md)."""

    batch_size: PositiveInt = 32
    """Conversations an update, over all ranks; a step is one update."""
    epochs: PositiveFloat | None = None
    """Passes over the data, in place of `run.steps`."""
    train_on: Literal["assistant", "last"] = "assistant"
    """Messages that are trained: all of the assistant, or its last one. A message's own `train` wins."""
    max_tokens: PositiveInt | None = None
    """Longest conversation; default: the model's context. `data.overlong` says what happens to longer ones."""
    end_of_turn: str | None = None
    """Token appended where the chat template ends a conversation without one that ends the turn, as GLM's do."""


_SET_KEYS = ("reward", "max_response_tokens", "gate")  # what a set of conversations has no use for, and its default
_SET_DEFAULTS = {"samples_per_prompt": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "pass_threshold": 0.5}


def of_sft(config: Config) -> Faults:
    """(key, what is wrong and what to do) for `lightrl sft` alone: the other commands leave `[sft]` be."""
    return of_given_rows(config, "sft", "logprob")


def of_given_rows(config: Config, command: str, metric: str) -> Faults:
    """What holds for all commands that train on given rows; their evaluation has a `metric` to choose the best by."""
    problems = []
    if config.data.max_prompt_tokens is not None:
        text = f"lightrl {command} limits whole conversations: set {command}.max_tokens"
        problems.append(("data.max_prompt_tokens", text))
    if config.parallel.context_parallel > 1:
        text = f"lightrl {command} keeps a conversation on one rank: set it to 1"
        problems.append(("parallel.context_parallel", text))
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in config.data.chat_template_kwargs:
            problems.append(("data.chat_template_kwargs", f"a conversation is rendered without {name}: remove it"))
    for i, spec in enumerate(config.eval.sets):
        for key, default in {**dict.fromkeys(_SET_KEYS), **_SET_DEFAULTS}.items():
            if getattr(spec, key) != default:
                text = f"lightrl {command} measures the loss on a set and samples nothing: remove {key}"
                problems.append((f"eval.sets.{i}.{key}", text))
    if config.checkpoint.keep_best and config.checkpoint.best_metric.startswith("reward/"):
        text = f"lightrl {command} samples nothing: name eval/SET/{metric}, where higher is better"
        problems.append(("checkpoint.best_metric", text))
    return problems
