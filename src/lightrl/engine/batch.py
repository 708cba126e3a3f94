"""Bookkeeping of requests and of the sequences that run: no model, no event loop."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrl.engine.base import Completion, GenerateRequest
from lightrl.engine.recurrent import Snapshot
from lightrl.types import Status

Decode = Callable[[list[int]], str]


@dataclass(kw_only=True, eq=False)
class Job:
    """A request under way."""

    request: GenerateRequest
    future: asyncio.Future[list[Completion]]
    stop_ids: frozenset[int]
    max_tokens: int
    """Most tokens of one answer: the request's limit, or what the context leaves."""
    waiting: deque[int] = field(init=False)
    """Numbers of the answers that have not started."""
    results: dict[int, Completion] = field(default_factory=dict)
    logits: Tensor | None = None  # [V] after the prompt's last token, kept while answers wait
    states: Snapshot = field(default_factory=dict)
    """Of layers that keep no keys, after the prompt's last token, as long."""
    routing: Tensor | None = None  # [P, L, k] of the prompt's tokens, as long, where the request asks for it

    def __post_init__(self) -> None:
        self.waiting = deque(range(self.request.n))

    def forget_prompt(self) -> None:
        """Answers that have not started compute the prompt anew."""
        self.logits = self.routing = None
        self.states = {}

    def settle(self, number: int, completion: Completion) -> None:
        """Record one answer; the last one resolves the request."""
        self.results[number] = completion
        if len(self.results) == self.request.n and not self.future.done():
            self.future.set_result([self.results[i] for i in range(self.request.n)])


@dataclass(kw_only=True, eq=False)
class Row:
    """One answer that runs."""

    job: Job
    number: int
    rng: random.Random
    """Answer `i` draws its uniforms here: seeded, they do not depend on the batch it happens to run in."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    routing: list[Tensor] = field(default_factory=list)
    """[n, L, k] each: of the prompt's tokens, then of every token that was fed; empty where nobody asked."""

    @classmethod
    def start(cls, job: Job, number: int) -> Row:
        seeds = job.request.seeds
        # Random() takes entropy from the system
        rng = random.Random(seeds[number]) if seeds else random.Random()
        for _ in range(job.request.resumed):
            rng.random()
        return cls(job=job, number=number, rng=rng)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included; the last one has no keys and values yet."""
        return len(self.job.request.tokens) + len(self.tokens)

    @property
    def _answer(self) -> list[int]:
        """Its tokens, with those of before it was resumed."""
        before = self.job.request.resumed
        return self.job.request.tokens[-before:] + self.tokens if before else self.tokens

    def append(self, token: int, logprob: float, version: int, decode: Decode | None) -> Status | None:
        """Take one sampled token; how the answer ended, if it did."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)
        if token in self.job.stop_ids:
            return Status.COMPLETED
        stops = self.job.request.sampling.stop
        if stops and decode is not None and _ends_with_stop(self._answer, stops, decode):
            return Status.COMPLETED
        return Status.TRUNCATED if len(self.tokens) >= self.job.max_tokens else None

    def completion(self, status: Status) -> Completion:
        return Completion(
            tokens=self.tokens,
            logprobs=self.logprobs,
            status=status,
            policy_versions=self.versions,
            top_ids=self.top_ids,
            top_logprobs=self.top_logprobs,
            routing=torch.cat(self.routing) if self.routing else None,
        )


def _ends_with_stop(tokens: list[int], stops: Sequence[str], decode: Decode) -> bool:
    """Whether the newest token completed a stop string.

    A token stands for at least a byte, so a stop string lies within as many of the last tokens as it has bytes. A few
    more are decoded because tokenizers treat the start of a text differently.
    """
    window = max(len(s.encode()) for s in stops) + 4
    text = decode(tokens[-window:])
    return any(s in text for s in stops)


class Slots:
    """Which sequence lives in which slot of the cache, and which prompt's keys each slot still holds.

    Running rows fill the slots 0..R-1 between steps; `take` and `release` make and fill holes, `compact` closes them.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.rows: list[Row | None] = []
        self._prompts: list[Job | None] = []

    @property
    def num_running(self) -> int:
        return sum(row is not None for row in self.rows)

    @property
    def num_free(self) -> int:
        return self.max_rows - self.num_running

    def running(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    def take(self, row: Row) -> int:
        """Put a row into the first free slot."""
        slot = next((i for i, old in enumerate(self.rows) if old is None), len(self.rows))
        if slot == len(self.rows):
            self.rows.append(row)
        else:
            self.rows[slot] = row
        if slot == len(self._prompts):
            self._prompts.append(row.job)
        else:
            self._prompts[slot] = row.job
        return slot

    def release(self, slot: int) -> None:
        """The row is done; its keys stay readable until another row takes the slot."""
        self.rows[slot] = None

    def find_prompt(self, job: Job) -> int | None:
        """A slot that holds the keys of this job's prompt."""
        return next((slot for slot, owner in enumerate(self._prompts) if owner is job), None)

    def compact(self) -> list[tuple[int, int]]:
        """Close the holes with rows from the end: the moves (from, to) the cache has to copy."""
        moves = []
        for hole in range(len(self.rows)):
            while self.rows and self.rows[-1] is None:
                self.rows.pop()
            if hole < len(self.rows) and self.rows[hole] is None:
                source = len(self.rows) - 1
                self.rows[hole] = self.rows.pop()
                self._prompts[hole] = self._prompts[source]
                moves.append((source, hole))
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        return moves

    def forget_prompts(self) -> None:
        """Keys of finished or running rows no longer serve new ones."""
        self._prompts = [None] * len(self._prompts)

    def clear(self) -> None:
        self.rows, self._prompts = [], []
