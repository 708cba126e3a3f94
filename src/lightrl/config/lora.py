"""The section `[lora]`, and its rules."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Count, Faults, PositiveFloat

if TYPE_CHECKING:
    from lightrl.config.schema import Config


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters of the policy, trained in place of its weights, by peft (docs/models.md#lora)."""

    rank: Count = 0
    """Rank of the adapters, at most that of the largest layer; 0 trains all weights."""
    alpha: PositiveFloat = 32.0
    """Adapters are scaled by alpha / rank."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of what adapters see, in forwards with a gradient only: in RL the first ratio is then not 1."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get adapters, by name, such as `["q_proj", "v_proj"]`; `all-linear`: all in the blocks, but
    for experts and routers."""
    sync: Literal["merged", "adapter"] | None = None
    """How the engine gets them: `merged` into copies of the weights, or each `adapter` as it is, beside the trainer's
    own weights. Default: `adapter` for the embedded engine, `merged` for SGLang, which takes no other."""

    @property
    def targets(self) -> list[str] | None:
        """Names of `target_modules`; None: all linear layers."""
        if self.target_modules == "all-linear":
            return None
        return [self.target_modules] if isinstance(self.target_modules, str) else self.target_modules

    @property
    def lent(self) -> bool:
        """Does an engine in this process compute with the adapters themselves?"""
        return self.sync != "merged"


_HEADS = ("lm_head", "embed_tokens")


def of_lora(config: Config) -> Faults:
    """(key, what is wrong and what to do)."""
    lora, engine = config.lora, config.engine.kind
    if lora.rank == 0:
        return [
            (f"lora.{key.name}", "only used with lora.rank > 0: set it, or drop this")
            for key in dataclasses.fields(lora)
            if getattr(lora, key.name) != getattr(LoraConfig(), key.name)
        ]
    problems = []
    if lora.sync == "adapter" and engine != "transformers":
        text = f"engine.kind = {engine!r} gets merged weights: set 'merged', or engine.kind = 'transformers'"
        problems.append(("lora.sync", text))
    if lora.targets is not None and not all([*lora.targets, len(lora.targets)]):
        problems.append(("lora.target_modules", "no layer is named: drop it for all linear ones, or set lora.rank = 0"))
    for name in _HEADS:
        if any(target.rpartition(".")[2] == name for target in lora.targets or ()):
            text = f"{name} has no adapters: drop it, or train all weights (lora.rank = 0)"
            problems.append(("lora.target_modules", text))
    return problems
