"""The sections `[eval]` and `[evaluator]`, and their rules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Code, Count, Faults, NonNegative, PositiveInt, Seconds

if TYPE_CHECKING:
    from lightrl.config.schema import Config


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalSetConfig:
    """One evaluation set. Keys left out are taken from `[data]` and `[reward]`."""

    name: str
    """Name in metrics: `eval/NAME/…`."""
    path: str
    """As `data.path`."""
    split: str | None = None
    """As `data.split`."""
    input_key: str | None = None
    """As `data.input_key`."""
    label_key: str | None = None
    """As `data.label_key`."""
    apply_chat_template: bool | None = None
    """As `data.apply_chat_template`."""
    system_prompt: str | None = None
    """As `data.system_prompt`."""
    map: Code | None = None
    """As `data.map`; `none` takes the rows as they are."""
    reward: Code | None = None
    """As `reward.type`."""
    samples_per_prompt: PositiveInt = 1
    """k of avg@k and pass@k."""
    max_response_tokens: PositiveInt | None = None
    """As `rollout.max_response_tokens`."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: Count = 0
    """0 is off."""
    pass_threshold: float = 0.5
    """A sample passes when its reward is above this."""
    gate: float | None = None
    """Lowest `eval/NAME/avg@k` that is good enough: `lightrl train` and `lightrl eval` end with status 1 when their
    last evaluation is below."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalConfig:
    """Evaluation during training and by `lightrl eval`."""

    every: Count = 0
    """Steps between evaluations; 0 is off."""
    at_start: bool = True
    """Evaluate before the first step (only if `every` is set)."""
    sets: list[EvalSetConfig] = field(default_factory=list)
    """`[[eval.sets]]` tables."""

    def missed_gates(self, metrics: Mapping[str, float]) -> list[str]:
        """A line for each set whose `gate` an evaluation's metrics do not reach; none where it was not evaluated.

        >>> sets = [EvalSetConfig(name="gsm8k", path="test.jsonl", gate=0.71)]
        >>> EvalConfig(sets=sets).missed_gates({"eval/gsm8k/prompts": 9, "eval/gsm8k/avg@1": 0.7})
        ['eval/gsm8k/avg@1 = 0.7000 is below its gate of 0.71']
        >>> EvalConfig(sets=sets).missed_gates({"eval/gsm8k/prompts": 9, "eval/gsm8k/avg@1": 0.71})
        []
        """
        missed = []
        for spec in self.sets:
            name = f"eval/{spec.name}/avg@{spec.samples_per_prompt}"
            if spec.gate is None or f"eval/{spec.name}/prompts" not in metrics:
                continue
            value = metrics.get(name, float("nan"))  # no answer could be scored
            if not value >= spec.gate:
                missed.append(f"{name} = {value:.4f} is below its gate of {spec.gate:g}")
        return missed


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluatorConfig:
    """An evaluator elsewhere: it is sent a checkpoint's place by POST, answers with metrics, and training goes on
    meanwhile (docs/inspect.md#an-evaluator-elsewhere)."""

    url: str | None = None
    """Where it is, such as `http://node9:8000/evaluate`."""
    every: Count = 0
    """Steps between its checkpoints, exported in Hugging Face format to `dir/hf`; the last step is one too."""
    timeout: Seconds = 3600.0
    """Seconds one answer may take."""
    retries: Count = 3
    """Further attempts when it cannot be reached, is busy or has failed; pauses double from one second on."""
    api_key_env: str | None = None
    """Name of the environment variable with its key, sent as a bearer token."""


def of_evaluation(config: Config) -> Faults:
    """(key, what is wrong and what to do)."""
    problems = _of_sets(config) + _of_evaluator(config)
    if config.eval.every and not config.eval.sets:
        problems.append(("eval.every", "no [[eval.sets]] to evaluate: add one or set eval.every = 0"))
    return problems


def _of_sets(config: Config) -> Faults:
    """Names of sets are in metrics and, with other characters replaced, in files."""
    names = [s.name for s in config.eval.sets]
    problems = [("eval.sets", f"two sets are named {n!r}") for n in sorted({n for n in names if names.count(n) > 1})]
    if any(not 0 < len(n.strip()) <= 80 for n in names):
        problems.append(("eval.sets", "a set's name has 1 to 80 characters"))
    files: dict[str, str] = {}
    for name in dict.fromkeys(names):
        other = files.setdefault(re.sub(r"[^\w.-]+", "-", name), name)
        if other != name:
            problems.append(("eval.sets", f"{other!r} and {name!r} would write the same files; rename one"))
    return problems


_URL = r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[^\s@]*)?"


def _of_evaluator(config: Config) -> Faults:
    spec = config.evaluator
    if spec.url is None:
        return [
            (f"evaluator.{key.name}", "only used with evaluator.url: set it, or drop this")
            for key in dataclasses.fields(spec)
            if getattr(spec, key.name) != getattr(EvaluatorConfig(), key.name)
        ]
    problems = []
    if re.fullmatch(_URL, spec.url) is None:
        shown = re.sub(r"//.*@", "//…@", spec.url)
        text = f"{shown!r} is not of the form http://HOST:PORT/PATH (keys: evaluator.api_key_env)"
        problems.append(("evaluator.url", text))
    if spec.every == 0:
        problems.append(("evaluator.url", "it is never asked: set evaluator.every"))
    return problems
