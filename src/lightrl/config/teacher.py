"""The section `[teacher]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, NonNegative, PositiveFloat, PositiveInt, Seconds

Form = Literal["sampled", "top_k", "full"]
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
TOP_K = 64


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig:
    """On-policy distillation: a frozen model that the policy is drawn to, on the answers that the policy samples. With
    any advantage, or `algorithm.advantage = "none"` (docs/algorithms.md#on-policy-distillation)."""

    path: str | None = None
    """Hub name or folder of a causal LM with the policy's tokenizer. Runs on the trainer's ranks, sharded, and leaves
    the GPU as the policy does (`parallel.offload`)."""
    revision: str | None = None
    """Branch, tag or commit of `path` on the hub."""
    url: str | None = None
    """In place of `path`: an SGLang server of the teacher, such as `http://node7:30000`."""
    api_key_env: str | None = None
    """`url`: name of the environment variable that holds its API key."""
    request_timeout: Seconds = 600.0
    """`url`: seconds that one answer may take."""
    coef: NonNegative = 1.0
    """Weight of the teacher's term, in the advantage (`sampled`) or in the loss; 0 only measures."""
    form: Form = "sampled"
    """What the policy is held to: `sampled`, the teacher's log-prob of each sampled token, as a term of its advantage;
    `top_k`, its distribution over k likely tokens and all others as one, in the loss; `full`, over the whole
    vocabulary, in the loss (`path` alone)."""
    divergence: Divergence | None = None
    """`top_k`, `full`: KL(policy || teacher), `reverse_kl`; KL(teacher || policy), `forward_kl`; generalised
    Jensen-Shannon, `jsd` (GKD). Default: `reverse_kl`."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """`jsd`: the teacher's share of the mixture; default: 0.5."""
    top_k: PositiveInt | None = None
    """`top_k`: number of tokens at each place; default: 64."""
    top_k_from: Literal["teacher", "student"] | None = None
    """`top_k`: whose likeliest tokens they are; the student's are those that the engine names as it samples. Default:
    `teacher`."""
    temperature: PositiveFloat | None = None
    """The teacher's log-probs are of its logits over this. Default: `rollout.temperature`, as the policy's are."""

    @property
    def enabled(self) -> bool:
        """Is there a teacher?"""
        return self.path is not None or self.url is not None

    @property
    def kind(self) -> Divergence:
        """The divergence in force."""
        return self.divergence or "reverse_kl"

    @property
    def beta(self) -> float:
        """`jsd_beta`, or its default."""
        return 0.5 if self.jsd_beta is None else self.jsd_beta

    @property
    def k(self) -> int:
        """Tokens of the teacher's distribution that are asked for at each place; 0 with another form."""
        return (self.top_k or TOP_K) if self.form == "top_k" else 0

    @property
    def student_k(self) -> int:
        """Likeliest tokens that the engine is to name for it."""
        return self.k if self.top_k_from == "student" else 0
