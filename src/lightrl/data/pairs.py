"""A set of preferences: pairs of a chosen and a rejected answer, read and checked, encoded, held to a length."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightrl.config.schema import DataConfig, DPOConfig, RMConfig
from lightrl.data.encoding import RowEncoder, usual
from lightrl.data.errors import BadRows, DataError
from lightrl.data.reading import read_all
from lightrl.data.render import RowError, RowReader, kind_of
from lightrl.data.turns import Message


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A prompt with one of its answers, encoded."""

    tokens: list[int]
    loss_mask: list[int]
    """1 for the answer's own tokens; for a reward model only for what it scores at, the last token."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One row, encoded."""

    index: int
    """Position in the set: stable over epochs and restarts."""
    chosen: Answer
    rejected: Answer
    prompt_length: int
    """Leading tokens that both have, before the first that counts in either."""
    margin: float = 0.0
    """By how much the chosen answer is to be ahead."""
    source: str = ""
    """`file:line` of the row, for messages."""
    reference: tuple[float, float] | None = None
    """The reference's log-probs of the two answers, where they are computed beforehand."""

    @property
    def tokens(self) -> list[int]:
        """Of both."""
        return self.chosen.tokens + self.rejected.tokens


@dataclass(frozen=True, kw_only=True)
class PairSet:
    """Pairs in file order, `[i].index == i`, and what is worth saying about them."""

    pairs: Sequence[Pair]
    notices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        return self.pairs[index]

    @property
    def fingerprint(self) -> str:
        """Hash over tokens, masks and margins of all rows, in order: two sets with the same one are the same data."""
        digest = hashlib.sha256()
        for pair in self.pairs:
            sides = [[side.tokens, side.loss_mask] for side in (pair.chosen, pair.rejected)]
            digest.update(json.dumps([*sides, pair.margin]).encode() + b"\n")
        return digest.hexdigest()


def load_pairs(
    data: DataConfig,
    config: DPOConfig | RMConfig,
    tokenizer: Any,
    *,
    context_length: int,
    end_ids: Sequence[int],
    pad_token_id: int | None = None,
) -> PairSet:
    """Read and encode `data.path` for `lightrl dpo`, or with `[rm]` for `lightrl rm`. Needs a tokenizer, no model.

    `end_ids` end a response; `pad_token_id` are what a reward model looks before for the last token. Raises DataError
    with `file:line`, for the first bad row and the number of others.
    """
    reader = _Reader(data, config, tokenizer, end_ids, pad_token_id)
    read, num_left_out = read_all(data, reader.rows, reader.read)
    found = [pair for pair in read if pair is not None]
    same = len(read) - len(found)
    if not found:
        path = data.path if isinstance(data.path, str) else ", ".join(data.path)
        raise DataError(f"{path}: in all {same} pairs both answers are the same: there is nothing to prefer")
    kept, notice = _hold_to_limit(found, data.overlong, context_length, config.max_tokens, reader.section)
    left_out = f"data: left out {same} of {same + len(found)} pairs whose answers are the same" if same else ""
    by_map = f"data.map left out {num_left_out} rows" if num_left_out else ""
    notices = tuple(text for text in (by_map, left_out, notice, *reader.encoder.notices()) if text)
    return PairSet(pairs=[replace(pair, index=i) for i, pair in enumerate(kept)], notices=notices)


class _Reader:
    """Turns rows into pairs under one `[data]` and one `[dpo]` or `[rm]` section."""

    def __init__(
        self,
        data: DataConfig,
        config: DPOConfig | RMConfig,
        tokenizer: Any,
        end_ids: Sequence[int],
        pad_token_id: int | None,
    ) -> None:
        self.data, self.config, self.pad_token_id = data, config, pad_token_id
        self.section = "rm" if isinstance(config, RMConfig) else "dpo"
        self.rows = RowReader(data, tokenizer)
        end_of_turn = config.end_of_turn if isinstance(config, DPOConfig) else None
        self.encoder = RowEncoder(data, tokenizer, end_ids, end_of_turn, f"{self.section}.end_of_turn")

    def read(self, source: str, row: Mapping[str, Any]) -> Pair | None:
        """The pair of a row; None if both answers are the same. Raises RowError or TurnError."""
        config = self.config
        chosen = self._answer(row, config.chosen_key, "chosen_key")
        rejected = self._answer(row, config.rejected_key, "rejected_key")
        if type(chosen) is not type(rejected):
            kinds = f"{kind_of(chosen)} and {kind_of(rejected)}"
            raise RowError(f"fields {config.chosen_key!r} and {config.rejected_key!r} are {kinds}: make them alike")
        prompt = row.get(config.prompt_key)
        if prompt is not None and not isinstance(prompt, str | list):
            text = f"must be text or a list of chat messages, found {kind_of(prompt)}"
            raise RowError(f"{self._name(config.prompt_key, 'prompt_key')} {text}")
        encode = self._chats if self.data.apply_chat_template else self._texts
        sides = encode(prompt, chosen, rejected, self.rows.parsed(row, "tool_key", list, "a list") or None)
        if isinstance(config, RMConfig):
            sides = [_scored(side.tokens, self.pad_token_id) for side in sides]
        if sides[0].tokens == sides[1].tokens:
            return None
        length = _common([side.tokens for side in sides])
        if isinstance(config, DPOConfig):
            length = min(length, *(side.loss_mask.index(1) for side in sides))
        if length == 0:
            raise RowError(self._unlike())
        return Pair(
            index=0,
            chosen=sides[0],
            rejected=sides[1],
            prompt_length=length,
            margin=self._margin(row),
            source=source,
        )

    def _answer(self, row: Mapping[str, Any], name: str, key: str) -> Any:
        value = self.rows.field(row, name, key, self.section)
        if not isinstance(value, str | list):
            raise RowError(f"{self._name(name, key)} must be text or a list of chat messages, found {kind_of(value)}")
        return value

    def _name(self, name: str, key: str) -> str:
        return f"field {name!r} ({self.section}.{key})"

    def _unlike(self) -> str:
        keys = f"fields {self.config.chosen_key!r} and {self.config.rejected_key!r}"
        return f"{keys} do not begin alike: answers to one prompt do; name it by {self.section}.prompt_key"

    def _margin(self, row: Mapping[str, Any]) -> float:
        name = self.config.margin_key if isinstance(self.config, RMConfig) else None
        if name is None:
            return 0.0
        value = self.rows.field(row, name, "margin_key", "rm")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            shown = value if isinstance(value, float) else kind_of(value)
            raise RowError(f"{self._name(name, 'margin_key')} must be a finite number, found {shown}")
        return float(value)

    # ---- text without roles

    def _texts(self, prompt: Any, chosen: Any, rejected: Any, _: Any) -> list[Answer]:
        """By the tokenizer alone: a prompt and its answers, or whole texts."""
        for value in (prompt, chosen):
            if isinstance(value, list):
                raise RowError("chat messages need the chat template: set data.apply_chat_template = true")
        if prompt is not None:
            name = self._name(self.config.prompt_key, "prompt_key")
            return [
                Answer(tokens=ids, loss_mask=mask)
                for ids, mask in (self.encoder.plain(prompt, text, name) for text in (chosen, rejected))
            ]
        both = [self.encoder.text(text) for text in (chosen, rejected)]
        start = _common(both)
        if start == 0 or (both[0] != both[1] and any(len(ids) == start for ids in both)):
            raise RowError(self._unlike())
        return [Answer(tokens=ids, loss_mask=[0] * start + [1] * (len(ids) - start)) for ids in both]

    # ---- conversations

    def _chats(self, prompt: Any, chosen: Any, rejected: Any, tools: list[Any] | None) -> list[Answer]:
        """By the chat template."""
        conversations, start = self._conversations(prompt, chosen, rejected)
        found = []
        for messages, key in zip(conversations, ("chosen_key", "rejected_key"), strict=True):
            full = self.rows.with_system_prompt(messages)
            first = start + len(full) - len(messages)
            trained = [i >= first and m["role"] == "assistant" for i, m in enumerate(full)]
            if not any(trained):
                name = self._name(getattr(self.config, key), key)
                raise RowError(f"{name} has no message of the assistant behind the prompt: remove the row")
            if isinstance(self.config, RMConfig):
                found.append(Answer(tokens=self.encoder.whole(full, tools), loss_mask=[]))
                continue
            ids, mask = self.encoder.chat(full, trained, tools)
            if not any(mask):
                raise RowError(f"{self._name(getattr(self.config, key), key)} has no token to train on: remove the row")
            found.append(Answer(tokens=ids, loss_mask=mask))
        return found

    def _conversations(self, prompt: Any, chosen: Any, rejected: Any) -> tuple[list[list[Message]], int]:
        """Both conversations, and how many of their first messages are the prompt."""
        if isinstance(chosen, str):
            if prompt is None:
                name = self.config.prompt_key
                raise RowError(
                    f"no field {name!r}, whose answers are text: set {self.section}.prompt_key to the right one"
                )
            given = self._prompt(prompt)
            return [[*given, {"role": "assistant", "content": text}] for text in (chosen, rejected)], len(given)
        config = self.config
        both = [
            self._messages(value, self._name(name, key))
            for value, name, key in (
                (chosen, config.chosen_key, "chosen_key"),
                (rejected, config.rejected_key, "rejected_key"),
            )
        ]
        given = [] if prompt is None else self._prompt(prompt)
        if isinstance(prompt, str) and any(m[0]["role"] != "assistant" for m in both):
            given = []  # the question again, as in UltraFeedback's rows
        if given and not all(m[: len(given)] == given for m in both):
            return [[*given, *messages] for messages in both], len(given)
        if both[0] == both[1]:  # left out by whoever looks at their tokens
            return both, len(both[0]) - 1
        start = _common(both)
        if start == 0:
            raise RowError(self._unlike())
        return both, start

    def _prompt(self, prompt: Any) -> list[Message]:
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return self._messages(prompt, self._name(self.config.prompt_key, "prompt_key"))

    def _messages(self, value: list[Any], name: str) -> list[Message]:
        return self.rows.messages([usual(m) for m in value], answered=True, name=name)


def _common(both: Sequence[Sequence[Any]]) -> int:
    """Elements that two lists have in common at their beginning."""
    length = 0
    for a, b in zip(*both, strict=False):
        if a != b:
            break
        length += 1
    return length


def _scored(tokens: list[int], pad_token_id: int | None) -> Answer:
    """Up to the token that transformers' sequence classifiers score at: the last that is not padding."""
    end = len(tokens)
    while end > 0 and tokens[end - 1] == pad_token_id:
        end -= 1
    if end == 0:
        raise RowError("a conversation of padding tokens alone: remove the row")
    return Answer(tokens=tokens[:end], loss_mask=[0] * (end - 1) + [1])


def _hold_to_limit(
    found: Sequence[Pair], overlong: str, context_length: int, max_tokens: int | None, section: str
) -> tuple[list[Pair], str]:
    """Pairs whose answers are both within the limit, and a line on the others."""
    limit = min(context_length, max_tokens or context_length)
    reason = "the model's context" if limit == context_length else f"{section}.max_tokens"
    kept = [p for p in found if max(len(p.chosen.tokens), len(p.rejected.tokens)) <= limit]
    long = len(found) - len(kept)
    if long and overlong == "error":
        bad = BadRows()
        for p in found:
            if (length := max(len(p.chosen.tokens), len(p.rejected.tokens))) > limit:
                text = f"a conversation has {length} tokens, the limit is {limit} ({reason})"
                bad.add(f"{p.source}: {text}: shorten it, or set data.overlong = 'drop'")
        bad.raise_if_any()
    if not kept:
        text = f"none of the {len(found)} pairs is within {limit} tokens ({reason}): raise the limit"
        raise DataError(f"{found[0].source}: {text}")
    return kept, f"data: dropped {long} of {len(found)} pairs longer than {limit} tokens" if long else ""
