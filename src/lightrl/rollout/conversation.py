"""Conversations token by token: what the model is given and trained on is what it sampled, never text read again.

A turn's ids stay as they were sampled, whatever the chat template would make of the turn later (drop its thoughts, trim
it, write its calls otherwise). Only what comes between two turns is rendered: the text that the template writes after
an answer that stands in for the real one, up to where the next answer begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.data.errors import one_line
from lightrl.data.turns import absent_word
from lightrl.errors import UserError

Message = dict[str, Any]
_QUESTION: Message = {"role": "user", "content": "a"}
_CALL = [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}]
_PROBE = "\ue0f3result\ue0f4"  # no template looks for characters of the private use area


class TemplateError(UserError):
    """A chat template that does not write what an episode needs."""


class ChatTemplate:
    """What a tokenizer's chat template writes around turns. `end_ids` end the model's turns (its EOS ids).

    Raises TemplateError for one that leaves out messages of `roles`, or cannot write them.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        kwargs: Mapping[str, Any] | None = None,
        end_ids: Sequence[int] = (),
        roles: Sequence[str] = ("user",),
        remedy: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        dropped = ("add_generation_prompt", "continue_final_message")
        self._kwargs = {k: v for k, v in (kwargs or {}).items() if k not in dropped}
        self.end_ids = frozenset(end_ids)
        self._added = {str(token): int(i) for i, token in tokenizer.added_tokens_decoder.items()}
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and len(str(t)) > 1]
        self._special = sorted(special, key=len, reverse=True)
        # Tokens that the template puts after an answer, by whether they only end it: GLM's name the next speaker.
        last, between = self._closing([]), self._closing([_QUESTION])
        self._closings = tuple(dict.fromkeys(t for t in (last, between) if t is not None))
        self._only_ends = last is not None
        for role in dict.fromkeys(roles):
            written = self._after([{"role": role, "content": _PROBE}])
            if _PROBE not in written:
                raise TemplateError(f"the chat template leaves out messages of the role {role!r}{remedy}")

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> tuple[str, list[int]]:
        """The text and ids of a conversation from its start to where the model answers."""
        text = self._render(messages, tools, open_turn=True)
        return text, self._encode(text)

    def between(self, turn: Sequence[int], text: str, messages: Sequence[Message], stop: Sequence[str]) -> list[int]:
        """Ids between a turn (`turn`, which decodes to `text`, special tokens included) and the next one.

        What ends the turn comes first, unless the model has sampled it: its end token, or a string of `stop`.
        """
        written = self._after(messages)
        ended = bool(turn) and turn[-1] in self.end_ids
        for closing in self._closings:
            lead = written[: len(written) - len(written.lstrip())]
            if not written.lstrip().startswith(closing):
                continue
            same = bool(turn) and self._added[closing] == turn[-1]
            if same or (ended and self._only_ends):
                return self._encode(written[len(lead) + len(closing) :])
        if turn and (last := self._token(turn[-1])) in self._added and written.startswith(last):
            return self._encode(written[len(last) :])
        for ending in stop:
            if text.endswith(ending) and written.startswith(ending):
                return self._encode(written[len(ending) :])
        return self._encode(written)

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Ids as text; with `special`, special tokens too."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

    def harmless(self, text: str) -> str:
        """A text that holds no special token: what a tool printed must not end its message, or begin another.

        An invisible space (U+200B) goes behind the first character of each that is spelt out in it.
        """
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[:1]}\u200b{token[1:]}")
        return text

    def clipped(self, text: str, limit: int) -> str:
        """A text of at most about `limit` tokens: a longer one loses its middle."""
        # a token is rarely less than one byte: no need to encode megabytes that are left out in any case
        text = text if len(text) <= 64 * limit else text[: 32 * limit] + text[-32 * limit :]
        ids = self._encode(text)
        if len(ids) <= limit:
            return text
        head = (limit + 1) // 2
        tail = limit - head
        end = self.text(ids[-tail:], special=True) if tail else ""
        return f"{self.text(ids[:head], special=True)}\n[… {len(ids) - limit} tokens left out …]\n{end}"

    # ---- what the template writes

    def _after(self, messages: Sequence[Message]) -> str:
        """What is written after an answer when `messages` follow it, up to where the next answer begins.

        The conversation has no system message and no tools here: they were said at its start.
        """
        stand_in = _stand_in(messages)
        answer: Message = {"role": "assistant", "content": stand_in}
        try:
            written = self._render([_QUESTION, answer, *messages], None, open_turn=True)
        except TemplateError:
            if not any(m.get("role") == "tool" for m in messages):
                raise
            return self._after_call(messages, stand_in)
        if stand_in not in written:
            raise TemplateError("the chat template leaves out answers that are followed by something")
        return written.rpartition(stand_in)[2]

    def _after_call(self, messages: Sequence[Message], stand_in: str) -> str:
        """For templates that write a result only after its call: what follows the call, whose own words are cut."""
        answer: Message = {"role": "assistant", "content": stand_in, "tool_calls": _CALL}
        try:
            written = self._render([_QUESTION, answer, *messages], None, open_turn=True)
        except TemplateError:  # one result, as one call has been made: several are told as one
            if len(messages) < 2 or any(m["role"] != "tool" for m in messages):
                raise
            whole = {**messages[0], "content": "\n\n".join(m["content"] for m in messages)}
            written = self._render([_QUESTION, answer, whole], None, open_turn=True)
        written = written.rpartition(stand_in)[2]
        places = [place for closing in self._closings if (place := written.find(closing)) >= 0]
        if not places:
            raise TemplateError("the chat template writes nothing that ends a call before its result")
        return written[min(places) :]

    def _closing(self, following: Sequence[Message]) -> str | None:
        """The added token that comes first after an answer, white space aside."""
        stand_in = _stand_in(following)
        try:
            written = self._render([_QUESTION, {"role": "assistant", "content": stand_in}, *following], None)
        except TemplateError:
            return None
        after = written.rpartition(stand_in)[2].lstrip()
        found = [token for token in self._added if token and after.startswith(token)]
        return max(found, key=len) if found and stand_in in written else None

    def _render(self, messages: Sequence[Message], tools: Any, *, open_turn: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=open_turn, **self._kwargs
                )
            )
        except Exception as error:  # templates are programs: they raise whatever they like
            raise TemplateError(f"the chat template failed: {one_line(error)}") from error

    def _encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # what tools are called may hold half a character
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _token(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def _stand_in(messages: Sequence[Message]) -> str:
    """A word that is in none of the messages."""
    return absent_word(json.dumps(list(messages), ensure_ascii=False, default=str))
