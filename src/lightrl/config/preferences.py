"""The sections `[dpo]` and `[rm]`, and the rules of the commands that train on given rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Faults, NonNegative, PositiveFloat, PositiveInt
from lightrl.config.parallel import without_rollout_ranks
from lightrl.config.sft import of_given_rows, of_sft

if TYPE_CHECKING:
    from lightrl.config.schema import Config


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PairsConfig:
    """Pairs of a chosen and a rejected answer to the same prompt."""

    batch_size: PositiveInt = 32
    """Pairs an update, over all ranks; a step is one update."""
    epochs: PositiveFloat | None = None
    """Passes over the data, in place of `run.steps`."""
    prompt_key: str = "prompt"
    """Field with the prompt: text, or chat messages. Rows without it hold whole conversations, whose common beginning
    is the prompt."""
    chosen_key: str = "chosen"
    """Field with the better answer: text, chat messages, or the whole conversation."""
    rejected_key: str = "rejected"
    """Field with the worse one."""
    max_tokens: PositiveInt | None = None
    """Longest conversation; default: the model's context. A pair with a longer one is left out, or an error
    (`data.overlong`)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPOConfig(PairsConfig):
    """Direct preference optimization, `lightrl dpo` (docs/preferences.md)."""

    loss: Literal["sigmoid", "sigmoid_norm", "robust", "ipo", "simpo"] = "sigmoid"
    """`sigmoid` (DPO), `sigmoid_norm` (per token), `robust` (rDPO), `ipo`, or `simpo`, which has no reference."""
    beta: PositiveFloat | None = None
    """How far the policy may move: large holds it near the reference. Default: 0.1, `simpo` 2."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """How often the pairs' labels are taken to be wrong: `sigmoid`, `sigmoid_norm`, `simpo` (cDPO), `robust`."""
    simpo_margin: NonNegative | None = None
    """`simpo`: what the chosen answer's reward is to be ahead by; default: 0.5."""
    sft_coef: NonNegative = 0.0
    """Weight of the mean negative log-prob of the chosen answers' tokens (RPO)."""
    reference_path: str | None = None
    """Checkpoint of the frozen reference; default: the policy's own start."""
    precompute_reference: bool = False
    """Compute the reference's log-probs of all pairs first, and free its memory before the policy loads."""
    end_of_turn: str | None = None
    """As `sft.end_of_turn`."""

    @property
    def strength(self) -> float:
        """`beta`, or the loss's own."""
        return self.beta if self.beta is not None else (2.0 if self.loss == "simpo" else 0.1)

    @property
    def target_margin(self) -> float:
        """`simpo_margin`, or the default of the loss that has one."""
        return 0.5 if self.simpo_margin is None else self.simpo_margin

    @property
    def has_reference(self) -> bool:
        """Does the loss compare with a reference?"""
        return self.loss != "simpo"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RMConfig(PairsConfig):
    """A Bradley-Terry reward model, `lightrl rm` (docs/preferences.md)."""

    margin_key: str | None = None
    """Field with a number: how far the chosen answer's reward is to be ahead; default: 0."""
    center_coef: NonNegative = 0.0
    """Weight of the squared sum of a pair's two rewards, which holds them around 0 (0.01 in the paper)."""


def of_command(config: Config, command: str) -> Faults:
    """(key, what is wrong and what to do) for `lightrl COMMAND` alone: the other commands leave its section be."""
    found = {"sft": of_sft, "dpo": _of_dpo, "rm": _of_rm}.get(command)
    return [] if found is None else found(config) + without_rollout_ranks(config, command)


def _of_dpo(config: Config) -> Faults:
    dpo, problems = config.dpo, _of_pairs(config, "dpo")
    if dpo.label_smoothing and dpo.loss == "ipo":
        problems.append(("dpo.label_smoothing", "not used by dpo.loss = 'ipo': drop it, or choose 'sigmoid'"))
    if dpo.simpo_margin is not None and dpo.loss != "simpo":
        problems.append(("dpo.simpo_margin", "only used by dpo.loss = 'simpo': drop it, or choose that"))
    if not dpo.has_reference:
        for key in ("reference_path", "precompute_reference"):
            if getattr(dpo, key):
                problems.append((f"dpo.{key}", f"dpo.loss = {dpo.loss!r} has no reference: drop it"))
    return problems


def _of_rm(config: Config) -> Faults:
    problems = _of_pairs(config, "rm")
    if config.lora.rank:
        problems.append(("lora.rank", "lightrl rm trains all weights: set it to 0"))
    return problems


def _of_pairs(config: Config, command: str) -> Faults:
    problems = of_given_rows(config, command, "accuracies")
    data, section = config.data, getattr(config, command)
    keys = {"input_key": "prompt_key", "label_key": "chosen_key"}
    for key, ours in keys.items():
        if getattr(data, key) != getattr(type(data)(), key):
            problems.append((f"data.{key}", f"lightrl {command} reads pairs: set {command}.{ours}"))
        for i, spec in enumerate(config.eval.sets):
            if getattr(spec, key) is not None:
                problems.append((f"eval.sets.{i}.{key}", f"lightrl {command} reads pairs: set {command}.{ours}"))
    names = [section.prompt_key, section.chosen_key, section.rejected_key]
    if len(set(names)) < len(names):
        text = f"{', '.join(map(repr, names))} for prompt, chosen and rejected: name three different fields"
        problems.append((f"{command}.rejected_key", text))
    if data.overlong == "truncate":
        problems.append(("data.overlong", f"lightrl {command} compares whole answers: choose 'drop' or 'error'"))
    return problems
