"""A set of conversations to learn from: rows read and checked, encoded with their loss masks, held to a length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightrl.config.schema import DataConfig, SFTConfig
from lightrl.data.encoding import RowEncoder, usual
from lightrl.data.errors import BadRows, DataError
from lightrl.data.reading import read_all
from lightrl.data.render import RowError, RowReader, kind_of
from lightrl.data.turns import Message


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row, encoded."""

    index: int
    """Position in the set: stable over epochs and restarts."""
    tokens: list[int]
    loss_mask: list[int]
    """1 for the tokens that are trained, aligned with `tokens`; never the first, which nothing predicts."""
    source: str = ""
    """`file:line` of the row, for messages."""


@dataclass(frozen=True, kw_only=True)
class ConversationSet:
    """Conversations in file order, `[i].index == i`, and what is worth saying about them."""

    conversations: Sequence[Conversation]
    limit: int
    """Longest conversation, in tokens."""
    notices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.conversations)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self.conversations[index]

    @property
    def fingerprint(self) -> str:
        """Hash over tokens and masks of all rows, in order: two sets with the same one are the same data."""
        digest = hashlib.sha256()
        for conversation in self.conversations:
            digest.update(json.dumps([conversation.tokens, conversation.loss_mask]).encode() + b"\n")
        return digest.hexdigest()


def load_conversations(
    data: DataConfig, sft: SFTConfig, tokenizer: Any, *, context_length: int, end_ids: Sequence[int]
) -> ConversationSet:
    """Read and encode `data.path`. Needs a tokenizer, no model; `end_ids` end a response.

    Raises DataError with `file:line`, for the first bad row and the number of others.
    """
    reader = _Reader(data, sft, tokenizer, end_ids)
    found, num_left_out = read_all(data, reader.rows, reader.read)
    limit = min(context_length, sft.max_tokens or context_length)
    reason = "the model's context" if limit == context_length else "sft.max_tokens"
    kept, notice = _hold_to_limit(found, limit, reason, data.overlong)
    left_out = f"data.map left out {num_left_out} rows" if num_left_out else ""
    notices = tuple(text for text in (left_out, notice, *reader.notices()) if text)
    return ConversationSet(conversations=kept, limit=limit, notices=notices)


class _Reader:
    """Turns rows into ids and masks under one `[data]` and `[sft]` section."""

    def __init__(self, data: DataConfig, sft: SFTConfig, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self.data, self.sft, self.tokenizer = data, sft, tokenizer
        self.rows = RowReader(data, tokenizer)
        self.encoder = RowEncoder(data, tokenizer, end_ids, sft.end_of_turn, "sft.end_of_turn")
        self.empty = 0

    def read(self, source: str, row: Mapping[str, Any]) -> Conversation:
        """The conversation of a row; its place in the set is yet to be said. Raises RowError or TurnError."""
        tokens, mask = self._encoded(row)
        return Conversation(index=0, tokens=tokens, loss_mask=mask, source=source)

    def _encoded(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        data = self.data
        value = self.rows.field(row, data.input_key, "input_key")
        label = None if data.label_key is None else self.rows.field(row, data.label_key, "label_key")
        if data.label_key is not None and not (isinstance(label, str | list) and label):
            found = f"an empty {'string' if label == '' else 'list'}" if label in ("", []) else kind_of(label)
            raise RowError(
                f"field {data.label_key!r} (data.label_key) must be the answer, as text or as messages, found {found}"
            )
        tools = self.rows.parsed(row, "tool_key", list, "a list") or None
        if not isinstance(value, str | list):
            raise RowError(
                f"field {data.input_key!r} (data.input_key) must be a list of chat messages, or a string whose answer "
                f"is in data.label_key, found {kind_of(value)}"
            )
        if isinstance(value, str) and label is None:
            raise RowError(f"field {data.input_key!r} (data.input_key) is a string: name its answer by data.label_key")
        if not data.apply_chat_template:
            return self.encoder.plain(value, label, f"field {data.input_key!r} (data.input_key)")
        given: list[Any] = [{"role": "user", "content": value}] if isinstance(value, str) else value
        messages = self.rows.messages([usual(m) for m in given], answered=label is None)
        answer: list[Any] = [{"role": "assistant", "content": label}] if isinstance(label, str) else label or []
        if answer:
            messages += self.rows.messages([usual(m) for m in answer], answered=True, key="label_key")
        messages = self.rows.with_system_prompt(messages)
        trained = _trained(messages, self.sft.train_on, first=len(messages) - len(answer) if answer else 0)
        self.empty += any(t and _is_empty(m) for t, m in zip(trained, messages, strict=True))
        return self.encoder.chat(messages, trained, tools)

    def notices(self) -> list[str]:
        """What is worth knowing of the rows and the template."""
        empty = (
            f"data: in {self.empty} conversations an answer to train on is empty, so that the model learns to say "
            "nothing: remove the rows, or set train = false in the message"
        )
        return [empty] * (self.empty > 0) + self.encoder.notices()


def _is_empty(message: Message) -> bool:
    """No text, and nothing else (tool calls, thoughts) that a template could write."""
    content = message.get("content")
    blank = not content or (isinstance(content, str) and not content.strip())
    return blank and not any(v for k, v in message.items() if k not in ("role", "content", "train", "weight"))


def _trained(messages: Sequence[Message], train_on: str, first: int = 0) -> list[bool]:
    """Which messages are trained: the assistant's, or its last, unless they say otherwise (`train`, or `weight`).

    Those before the `first` one are the prompt of an answer in a field of its own.
    """
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    wanted = {i for i in (answers if train_on == "assistant" else answers[-1:]) if i >= first}
    for number, message in enumerate(messages):
        for name in ("train", "weight"):
            value = message.get(name)
            if value is None:
                continue
            if value not in (0, 1) or not isinstance(value, bool if name == "train" else int | float):
                kind = "true or false" if name == "train" else "0 or 1"
                raise RowError(f"message {number + 1}: {name!r} must be {kind}, found {value!r}")
            if value and number not in answers:
                raise RowError(f"message {number + 1}: {name!r}: only messages of the assistant can be trained")
            wanted = wanted | {number} if value else wanted - {number}
    if not wanted:
        raise RowError("no message to train on: remove the row")
    return [i in wanted for i in range(len(messages))]


def _hold_to_limit(
    found: Sequence[Conversation], limit: int, reason: str, overlong: str
) -> tuple[list[Conversation], str]:
    """Those to train on, and a line on the others. What is cut has no end invented."""
    long = [c for c in found if len(c.tokens) > limit]
    if long and overlong == "error":
        bad = BadRows()
        for c in long:
            bad.add(
                f"{c.source}: the conversation has {len(c.tokens)} tokens, the limit is {limit} ({reason}): shorten "
                "it, or set data.overlong = 'drop' or 'truncate'"
            )
        bad.raise_if_any()
    kept: list[Conversation] = []
    cut = 0
    for c in found:
        if len(c.tokens) > limit:
            if overlong == "drop" or not any(c.loss_mask[:limit]):
                continue
            c = replace(c, tokens=c.tokens[:limit], loss_mask=c.loss_mask[:limit])
            cut += 1
        kept.append(replace(c, index=len(kept)))
    if not kept:
        raise DataError(
            f"{found[0].source}: none of the {len(found)} conversations has a token to train on within {limit} tokens "
            f"({reason}): raise the limit, or set data.overlong = 'truncate'"
        )
    parts = [f"dropped {len(found) - len(kept)}"] * (len(kept) < len(found)) + [f"truncated {cut}"] * (cut > 0)
    told = f"data: {' and '.join(parts)} of {len(found)} conversations longer than {limit} tokens" if parts else ""
    return kept, told
