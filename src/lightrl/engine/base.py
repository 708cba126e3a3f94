"""What every engine does. Rollouts, evaluation and weight sync know only this module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from lightrl.errors import LostError, UserError
from lightrl.types import Status

TAGS = ("weights", "kv_cache")
"""Kinds of memory that an engine releases and takes by name."""


def check_tags(tags: Iterable[str]) -> None:
    """ValueError for what is none of `TAGS`."""
    if unknown := set(tags) - set(TAGS):
        raise ValueError(f"unknown tags {sorted(unknown)}: known are {', '.join(TAGS)}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; kept in it, as their tokens were sampled."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, besides the model's own EOS ids; kept in it."""
    ignore_eos: bool = False
    top_logprobs: int = 0
    """Say at each place which so many tokens were the likeliest, and their log-probs; only where nothing is cut off by
    `top_p` or `top_k`, and nothing is greedy."""
    return_routing: bool = False
    """Say which experts the model chose for each token; only for mixtures of experts."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """`n` answers to one prompt.

    `seeds[i]` fixes the random draws of answer `i` whatever else is in the batch, so that sampling does not depend on
    the number of ranks, on batching, or on a restart.
    """

    id: str
    tokens: list[int]
    sampling: SamplingParams
    n: int = 1
    seeds: tuple[int, ...] | None = None
    resumed: int = 0
    """So many of the last `tokens` are the answer's own, sampled before: as many draws of its seed are used up, and a
    stop string may begin in them."""


@dataclass(kw_only=True)
class Completion:
    """One answer. `logprobs[t]` is the log-prob of `tokens[t]` under the distribution it was really sampled from,
    temperature and truncation included (greedy: of the untempered distribution)."""

    tokens: list[int]
    logprobs: list[float]
    status: Status
    policy_versions: list[int]
    version_tokens: list[int] = field(default_factory=list)
    """How many tokens each of `policy_versions` gave, where there are several."""
    error: str | None = None
    top_ids: list[list[int]] = field(default_factory=list)
    """With `SamplingParams.top_logprobs`: the likeliest tokens at each place."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """… and their log-probs, of the tempered distribution."""
    routing: Tensor | None = None
    """With `SamplingParams.return_routing`: the experts chosen, as `Sample.rollout_routing` has them. None for answers
    without tokens."""


@runtime_checkable
class Engine(Protocol):
    """Generation, and new weights. One instance a rank; calls come from one event loop at a time."""

    policy_version: int
    """Version of the weights that are loaded; -1 before the first load."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """All `n` answers of one request, in order. Call it concurrently: the engine batches what is in flight.

        Raises ValueError for a request that can never be served (prompt beyond the context, empty prompt …).
        """

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all: what was sampled so far returns with `Status.ABORTED`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, share: bool = False) -> None:
        """Take named tensors (Hugging Face names) as the weights of `version`.

        With `share=True` the caller lends its tensors until `offload`: an engine in the same process may use them
        without a copy. A name the engine does not know, or one that it misses, is a ValueError.
        """

    def flush_cache(self) -> None:
        """Forget cached prefixes; `load_weights` does so itself."""

    def offload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Release memory by tag; the engine is idle. Lent tensors are given back with `weights`.

        ValueError for an unknown tag, RuntimeError while requests are under way.
        """

    def onload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Take memory again before generating."""

    def close(self) -> None:
        """Free everything; idempotent."""


class NotFiniteError(LostError):
    """Logits of NaN or infinity: nothing can be drawn from them, and no new engine would change that."""

    def __init__(self, request: str) -> None:
        super().__init__(
            f"the model gave logits that are not finite (request {request!r}): its weights hold NaN or infinities, or "
            "overflow in compute precision. Look at model.path; after a step that went wrong, go on from an earlier "
            "checkpoint with a lower optim.lr"
        )


class EngineLostError(LostError):
    """The engine died or hung in the middle of work; the message holds the end of its log.

    `finished` are the complete answers of the request, by their place: only the others need be sampled again.
    """

    def __init__(self, message: str, finished: dict[int, Completion] | None = None) -> None:
        super().__init__(message)
        self.finished = finished or {}

    @property
    def line(self) -> str:
        return re.sub(r"\. The end of (.*):$", r" (log: \1)", super().line)


class EngineStartError(EngineLostError, UserError):
    """An engine did not even start: settings, or the machine, do not allow it."""


@runtime_checkable
class Restartable(Protocol):
    """An engine in processes that can be lost without the trainer's."""

    @property
    def lost(self) -> bool:
        """Whether this rank's engine process has died or hung; False on a rank that holds none."""

    def restart(self) -> None:
        """Put a new engine in the place of the old. Every rank that shares the engine calls it.

        The new one has no weights (`policy_version` is -1) and its memory taken. EngineLostError when it has been
        restarted too often or cannot start.
        """


@runtime_checkable
class TellsLoss(Protocol):
    """A `Restartable` that knows why it was lost, also where nobody had asked it anything."""

    @property
    def why_lost(self) -> str:
        """In one line; empty while it works."""


@runtime_checkable
class GroupLoader(Protocol):
    """An engine in another process, which takes weights a group at a time so that they need never all be whole."""

    def load_groups(self, groups: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> None:
        """As `load_weights`. A group's tensors are valid until the next is asked for; may be gone through twice.

        An engine that is lost raises EngineLostError only after all groups have been gone through as often as on the
        other ranks: making a group is a collective.
        """


@runtime_checkable
class Colocated(Protocol):
    """An engine in another process on the trainer's own GPUs."""

    def room(self, tag: str) -> int:
        """Bytes of this rank's GPU that `onload` of `tag` will take; 0 while they are taken, or not known yet."""
