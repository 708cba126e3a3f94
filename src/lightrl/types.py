"""Records that travel between the stages of a step.

prompts -> groups of samples -> packed microbatches -> metrics. Shapes: `T` packed tokens fed to the model, `N`
response tokens (the ones a log-prob exists for), `S` attention segments, `K` packed keys, `M` samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

NOT_RECORDED = {torch.uint8: 255, torch.int16: -1}
"""In the place of experts' numbers that are not known, by the dtype of a routing record."""


class Status(StrEnum):
    """How a sample ended."""

    COMPLETED = "completed"  # the model stopped by itself (EOS or a stop string)
    TRUNCATED = "truncated"  # ran into the length limit; no EOS is invented
    ABORTED = "aborted"  # cut off from outside; its tokens are kept
    FAILED = "failed"  # generation or reward failed; never part of a baseline or a loss


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt set, tokenized.

    >>> Prompt(index=7, tokens=[1, 2, 3], text="2+2=", label="4").label
    '4'
    """

    index: int
    """Position in the (sliced) prompt set: stable over epochs and restarts."""
    tokens: list[int]
    """Token ids fed to the engine, chat template applied."""
    text: str
    """The same as text: what the model sees."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages the text was rendered from, when it was."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    source: str = ""
    """`file:line` of the row, for messages."""


@dataclass(kw_only=True)
class Sample:
    """One sampled answer to a prompt. Per-token lists align with the response, not with the prompt."""

    prompt: Prompt
    group_index: int
    """Samples that share a baseline share this number; unique within a run."""
    index: int
    """Number of the sample within its group."""
    tokens: list[int]
    """Prompt and response token ids."""
    response_length: int
    response: str = ""
    """The response as text, special tokens left out."""
    answer: str | None = None
    """What rules grade, where that is not the whole response: of several turns, the last."""
    loss_mask: list[int] | None = None
    """1 for tokens the model sampled, 0 for tool output and other given tokens; None means all ones."""
    rollout_logprobs: list[float | None] | None = None
    """Engine's log-prob of each response token, under the distribution it was really sampled from; None for tokens that
    were given."""
    rollout_top_ids: list[list[int]] | None = None
    """The engine's likeliest tokens at each place of the response, as many everywhere; only where a loss asks for
    them (`correction.score_centering_top_k`)."""
    rollout_top_logprobs: list[list[float]] | None = None
    """… and their log-probs."""
    teacher_logprobs: list[float] | None = None
    """A teacher's log-prob of each response token, where it is a server (`teacher.url`)."""
    teacher_top_ids: list[list[int]] | None = None
    """… and its likeliest tokens at each place (`teacher.form = "top_k"`) …"""
    teacher_top_logprobs: list[list[float]] | None = None
    """… with their log-probs."""
    rollout_routing: Tensor | None = None
    """The experts that the engine's routers chose for each token but the last, prompt included: [tokens - 1, L, k] of
    the L layers with a router, uint8 or int16; only with `correction.routing_replay = "rollout"`."""
    policy_versions: list[int] = field(default_factory=list)
    """Policy versions that produced tokens of this response, in the order of the tokens: oldest first."""
    version_tokens: list[int] | None = None
    """How many tokens of the response each of `policy_versions` gave, where weights changed in the middle. Tokens that
    were given count with the turn before them."""
    status: Status = Status.COMPLETED
    reward: float | None = None
    """None until scored, and for a failed sample."""
    advantage: float | list[float] | None = None
    """Of every token of the response, or of each, before whitening. Estimators of tokens (docs/algorithms.md) have
    theirs where the sample is trained; here is the reward that they start from, and None once they are known."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Free-form: what the reward returned besides its number, failure reasons, …"""

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def response_tokens(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.response_length :]

    @property
    def graded(self) -> str:
        """The text that rules grade."""
        return self.response if self.answer is None else self.answer

    @property
    def mask(self) -> list[int]:
        return [1] * self.response_length if self.loss_mask is None else self.loss_mask


@dataclass(kw_only=True)
class SampleGroup:
    """All answers to one prompt. Groups may have any size: samples fail, or are filtered."""

    prompt: Prompt
    group_index: int
    samples: list[Sample]

    @property
    def scored(self) -> list[Sample]:
        """Samples that count: scored and not failed."""
        return [s for s in self.samples if s.reward is not None and s.status is not Status.FAILED]

    @property
    def compared(self) -> list[list[Sample]]:
        """Those that count, in the parts that share a baseline: all, or with several agents those of each."""
        parts: dict[Any, list[Sample]] = {}
        for sample in self.scored:
            parts.setdefault(sample.metadata.get("agent"), []).append(sample)
        return list(parts.values())


@dataclass(kw_only=True)
class RoutingRecord:
    """The experts chosen for the rows of a microbatch, which forwards of the policy choose again (routing replay)."""

    experts: Tensor  # [T, L, k] uint8 or int16, of L layers with a router; NOT_RECORDED where none are known
    due: int = 1
    """Forwards that have yet to use it."""

    def take(self) -> Tensor:
        """The experts, for one forward. RuntimeError for one too many."""
        if self.due < 1:
            raise RuntimeError("a routing record is used once more than it belongs")
        self.due -= 1
        return self.experts


@dataclass(kw_only=True)
class Microbatch:
    """Packed samples for one forward. A prompt shared by several samples may be packed once (`kv_index`).

    Two answers `x y` and `z` to the prompt `a b`, prompt shared: the model is fed `a b x` (the last token of a response
    predicts nothing, so it is not fed). Segments: the prompt (rows 0-1) and the first answer's row 2, which attends to
    rows 0-2. Row 1 (token `b`) predicts both `x` and `z`, row 2 predicts `y`:

    input_ids [a b x], position_ids [0 1 2], cu_seqlens_q [0 2 3], cu_seqlens_k [0 2 5], kv_index [0 1 0 1 2],
    logit_rows [1 2 1], targets [x y z], sample_ids [0 0 1].

    Where ranks share the rows (`parallel.context_parallel`), rows and response tokens are this rank's, borders and keys
    those of all (`training.packing.share_rows`).
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    cu_seqlens_q: Tensor  # [S + 1] int32, segment borders in the packed rows
    cu_seqlens_k: Tensor  # [S + 1] int32, segment borders in the packed keys
    kv_index: Tensor | None  # [K] int64, packed row of each key; None: keys are the rows themselves
    max_seqlen_q: int
    max_seqlen_k: int
    logit_rows: Tensor  # [N] int64, packed row whose output predicts response token n
    targets: Tensor  # [N] int64
    sample_ids: Tensor  # [N] int64, sample (0..M-1) of response token n
    loss_mask: Tensor  # [N] float32, 0 or 1
    loss_weights: Tensor  # [N] float32, share of token n in the loss of the whole update; sums to 1 over all ranks
    advantages: Tensor  # [N] float32
    rollout_logprobs: Tensor | None = None  # [N] float32
    rollout_top_ids: Tensor | None = None  # [N, k] int64
    rollout_top_logprobs: Tensor | None = None  # [N, k] float32
    routing: RoutingRecord | None = None
    old_logprobs: Tensor | None = None  # [N] float32
    ref_logprobs: Tensor | None = None  # [N] float32
    teacher_logprobs: Tensor | None = None  # [N] float32
    teacher_top_ids: Tensor | None = None  # [N, k] int64, the tokens of `teacher.form = "top_k"`
    teacher_top_logprobs: Tensor | None = None  # [N, k] float32, the teacher's
    teacher_hidden: Tensor | None = None  # [N, G], what the teacher's head makes its distribution of (`full`)
    values: Tensor | None = None  # [N] float32, the critic's, before the step's updates
    returns: Tensor | None = None  # [N] float32, what they should have been
    sample_keys: list[tuple[int, int]] = field(default_factory=list)
    """(group_index, index) of sample 0..M-1."""
    weight_mean: float = 1.0
    """Importance weights are divided by it (`correction.tis_batch_normalize`)."""

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.numel())
