"""A prompt set: rows read, rendered through the chat template, tokenized, and held to a length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightrl.config.schema import DataConfig
from lightrl.data.errors import BadRows, DataError
from lightrl.data.mapping import RowMap
from lightrl.data.reading import read_all
from lightrl.data.render import RowReader
from lightrl.types import Prompt

_BATCH = 1024  # texts tokenized in one call


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts in file order, `prompts[i].index == i`, and what became of those that were too long."""

    prompts: Sequence[Prompt]
    limit: int
    """Longest prompt, in tokens."""
    dropped: int = 0
    truncated: int = 0
    left_out: int = 0
    """Rows that `data.map` left out."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    @property
    def notice(self) -> str:
        """One line on prompts that were left out, dropped or truncated; empty when none was."""
        total = len(self.prompts) + self.dropped
        parts = [f"data.map left out {self.left_out} of {total + self.left_out} rows"] if self.left_out else []
        if self.dropped:
            parts.append(f"dropped {self.dropped} of {total} prompts longer than {self.limit} tokens")
        if self.truncated:
            parts.append(f"truncated {self.truncated} of {total} prompts to their last {self.limit} tokens")
        return f"data: {'; '.join(parts)}" if parts else ""

    @property
    def fingerprint(self) -> str:
        """Hash over tokens, labels and metadata of all rows, in order: two sets with the same one are the same data."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            row = [prompt.tokens, prompt.label, prompt.metadata, prompt.tools]
            digest.update(json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()


def load_prompts(
    config: DataConfig,
    tokenizer: Any,
    *,
    context_length: int,
    max_response_tokens: int,
    row_map: RowMap | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> PromptSet:
    """Read, render and tokenize `config.path`. Needs a tokenizer, no model. `row_map` stands in for `config.map`;
    `tools` are every row's.

    A prompt may have `context_length - max_response_tokens` tokens, or `config.max_prompt_tokens` if that is less.
    Raises DataError with `file:line`, for the first bad row and the number of others.
    """
    limit = _limit(config, context_length, max_response_tokens)
    reader = RowReader(config, tokenizer, tools)
    prompts, left_out = read_all(config, reader, reader.read, row_map)
    prompts = _tokenize(prompts, tokenizer)
    return replace(_hold_to_limit(prompts, tokenizer, config, limit), left_out=left_out)


@dataclass(frozen=True)
class _Limit:
    """Longest prompt in tokens, why it is that, and what makes it at most `reach`."""

    tokens: int
    reason: str
    remedy: str
    reach: int

    def advice(self, length: int) -> str:
        """For a prompt of `length` tokens: the limit, and how to raise it if that can be enough."""
        return f"{self.tokens} ({self.reason}): " + (f"{self.remedy}, or " if length <= self.reach else "")


def _limit(config: DataConfig, context_length: int, max_response_tokens: int) -> _Limit:
    room = context_length - max_response_tokens
    if room < 1:
        raise DataError(
            f"no room for a prompt: rollout.max_response_tokens = {max_response_tokens} of the model's context of "
            f"{context_length} tokens: lower it (an evaluation set has its own max_response_tokens)"
        )
    if config.max_prompt_tokens is not None and config.max_prompt_tokens < room:
        return _Limit(config.max_prompt_tokens, "data.max_prompt_tokens", "raise it", reach=room)
    reason = f"the model's context of {context_length} less rollout.max_response_tokens = {max_response_tokens}"
    return _Limit(room, reason, "lower rollout.max_response_tokens", reach=context_length - 1)


def _tokenize(prompts: list[Prompt], tokenizer: Any) -> list[Prompt]:
    """Rendered chats already hold their special tokens as text; plain strings get the tokenizer's own."""
    done: list[Prompt] = []
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        for special in (False, True):
            texts = [p.text for p in batch if (p.messages is None) is special]
            ids = iter(tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else ())
            batch = [replace(p, tokens=list(next(ids))) if (p.messages is None) is special else p for p in batch]
        done += batch
    bad = BadRows()
    for prompt in done:
        if not prompt.tokens:
            bad.add(f"{prompt.source}: the prompt has no tokens: remove the row")
    bad.raise_if_any()
    return done


def _hold_to_limit(prompts: list[Prompt], tokenizer: Any, config: DataConfig, limit: _Limit) -> PromptSet:
    long = [p for p in prompts if len(p.tokens) > limit.tokens]
    if long and config.overlong == "error":
        bad = BadRows()
        for p in long:
            bad.add(
                f"{p.source}: the prompt has {len(p.tokens)} tokens, the limit is {limit.advice(len(p.tokens))}set "
                "data.overlong = 'drop' or 'truncate'"
            )
        bad.raise_if_any()
    if len(long) == len(prompts) and config.overlong == "drop":
        shortest = min(long, key=lambda p: len(p.tokens))
        least = len(shortest.tokens)
        raise DataError(
            f"{prompts[0].source}: all {len(prompts)} prompts are too long: the shortest, {shortest.source}, has "
            f"{least} tokens, the limit is {limit.advice(least)}set data.overlong = 'truncate'"
        )
    kept: list[Prompt] = []
    for prompt in prompts:
        if len(prompt.tokens) > limit.tokens:
            if config.overlong == "drop":
                continue
            tokens = prompt.tokens[-limit.tokens :]
            prompt = replace(prompt, tokens=tokens, text=tokenizer.decode(tokens, skip_special_tokens=False))
        kept.append(replace(prompt, index=len(kept)))
    truncate = config.overlong == "truncate"
    return PromptSet(
        prompts=kept, limit=limit.tokens, dropped=0 if truncate else len(long), truncated=len(long) if truncate else 0
    )
