"""A conversation as the chat template writes it, and which of its tokens the assistant wrote.

The ids are always those of the whole conversation, rendered once. Where a turn lies in that text is found by rendering
again with another text in its place: what stays the same before and after is not the turn's. No template is taken
apart, so it may trim, merge, drop earlier thoughts, or write a system message of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.data.errors import one_line

Message = dict[str, Any]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TurnError(Exception):
    """What the template made of a conversation cannot be divided into turns: what, and what to do."""


@dataclass(frozen=True)
class Turn:
    """A message of the assistant in the rendered text: characters [start, end), without what closes it."""

    start: int
    end: int


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text with the characters each stands for; `begins` and `ends` never fall."""

    ids: list[int]
    begins: list[int]
    ends: list[int]

    @classmethod
    def of(cls, text: str, tokenizer: Any) -> Encoded:
        """The template has written the special tokens as text, so none is added."""
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begins, ends, reached = [], [], 0
        for begin, end in found["offset_mapping"]:
            # some tokenizers leave white space out of a token's offsets: it is the token's that follows
            begins.append(min(begin, reached))
            reached = max(reached, end)
            ends.append(reached)
        return cls(list(found["input_ids"]), begins, ends)


class ConversationEncoder:
    """Conversations into ids and a mask of the tokens to train, by one tokenizer's chat template.

    `end_ids` are the tokens that end a response (the model's and the tokenizer's EOS). `end_of_turn`, an id, is
    appended where a trained turn ends the conversation and the template writes none of them. Needs a fast tokenizer:
    TurnError otherwise.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        end_ids: Sequence[int] = (),
        end_of_turn: int | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TurnError("the tokenizer does not say which characters its tokens stand for: name a fast one")
        self.tokenizer, self.kwargs, self.end_of_turn = tokenizer, dict(template_kwargs or {}), end_of_turn
        self.added = set(tokenizer.added_tokens_decoder)
        self.ends = {*end_ids, *self._closing_ids()} | ({end_of_turn} if end_of_turn is not None else set())
        self.opens = self._opens_turns()
        self.unended = 0
        """Conversations so far whose last, trained turn has no token that ends it."""
        self.unlike_prompts = 0
        """Turns so far that do not begin as the prompt does from which the model would answer."""

    def __call__(
        self, messages: Sequence[Message], trained: Sequence[bool], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """(ids, mask): mask 1 for each token of a trained message, and the token that ends it.

        `trained` aligns with `messages`; only those of the assistant can be. Raises TurnError.
        """
        text = self._render(messages, tools)
        encoded = Encoded.of(text, self.tokenizer)
        assistant = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        marked = _MARKED.search(str(self.tokenizer.get_chat_template(None, tools))) is not None
        chosen = [i for i in assistant if trained[i]]
        mask = [0] * len(encoded.ids)
        if not marked or len(chosen) < len(assistant):
            for number in chosen:
                turn = self._turn(messages, tools, number, text)
                self._mark(mask, encoded, text, turn)
        if marked:
            theirs = self._marked(messages, tools, encoded, text)
            mask = theirs if len(chosen) == len(assistant) else [a & b for a, b in zip(mask, theirs, strict=True)]
        mask[:1] = [0] * len(mask[:1])  # nothing comes before the first token to predict it from
        if mask and mask[-1] and encoded.ids[-1] not in self.ends:
            if self.end_of_turn is None:
                self.unended += 1
            else:
                return [*encoded.ids, self.end_of_turn], [*mask, 1]
        return encoded.ids, mask

    def ids(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """Ids of a conversation, whatever of it is trained. Raises TurnError."""
        text = self._render(messages, tools)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # ---- where a turn lies

    def _turn(self, messages: Sequence[Message], tools: list[Any] | None, number: int, text: str) -> Turn:
        stand_in = absent_word(text)
        around = self._around(messages, tools, number, text, stand_in)
        prompt = self._prompt(messages, tools, number)
        start = self._start(text, prompt, around)
        if start is None:
            written = text if around is None else around[0]
            differs = next((i for i, (a, b) in enumerate(zip(text, written, strict=False)) if a != b), 0)
            raise TurnError(
                f"message {number + 1}: the chat template writes this turn so that its beginning cannot be found "
                f"(near {text[max(0, differs - 20) : differs + 20]!r}): mark it with {{% generation %}} in the "
                "template, or leave out what it treats differently (thoughts, enable_thinking, unanswered tool calls)"
            )
        if messages[number - 1]["role"] != "assistant" and prompt is not None and not text.startswith(prompt):
            self.unlike_prompts += 1
        end = self._end(messages, tools, number, text, around)
        if end is None or end < start:
            raise TurnError(
                f"message {number + 1}: the chat template writes this turn so that its end cannot be found: mark it "
                "with {% generation %} in the template"
            )
        return Turn(start, end)

    def _around(
        self, messages: Sequence[Message], tools: list[Any] | None, number: int, text: str, stand_in: str
    ) -> tuple[str, str] | None:
        """What is written before and after a message's text, from a rendering with `stand_in` as the text."""
        plain = {"role": "assistant", "content": _like(messages[number].get("content"), stand_in)}
        other = [*messages[:number], plain, *messages[number + 1 :]]
        try:
            before, found, after = self._render(other, tools).partition(stand_in)
        except TurnError:  # such as results of tools that nobody called
            return None
        return (before, after) if found and stand_in not in after else None

    def _prompt(self, messages: Sequence[Message], tools: list[Any] | None, number: int) -> str | None:
        """What the model would be given to write this turn."""
        try:
            return self._render(messages[:number], tools, open_turn=True) if number else None
        except TurnError:
            return None

    def _start(self, text: str, prompt: str | None, around: tuple[str, str] | None) -> int | None:
        """After the prompt that the model would be given, if the conversation begins so; else where its words begin.

        A template may write a prompt otherwise than a conversation: with a system message in the last question, a
        thought opened, or, where it ignores `add_generation_prompt`, without the role.
        """
        before = None if around is None or not text.startswith(around[0]) else around[0]
        if self.opens and prompt is not None and text.startswith(prompt):
            return len(prompt)
        return None if before is None else len(before)

    def _end(
        self, messages: Sequence[Message], tools: list[Any] | None, number: int, text: str, around: Any
    ) -> int | None:
        """Before what follows whatever the turn says; else where the conversation up to here ends."""
        if around is not None and text.endswith(around[1]):
            return len(text) - len(around[1])
        try:
            until = self._render(messages[: number + 1], tools)
        except TurnError:
            return None
        if not text.startswith(until):
            return None
        closed = until.rstrip()
        return len(closed if any(closed.endswith(self._written(i)) for i in self.ends) else until)

    # ---- from characters to tokens

    def _mark(self, mask: list[int], encoded: Encoded, text: str, turn: Turn) -> None:
        """Every token that holds some of the turn, and with white space between the token that ends it.

        A special token that begins before the turn is not the turn's, though some take white space after them along.
        """
        position = bisect_left(encoded.ends, turn.start + 1)
        while position < len(mask) and encoded.begins[position] < turn.end:
            if encoded.begins[position] >= turn.start or encoded.ids[position] not in self.added:
                mask[position] = 1
            position += 1
        self._close(mask, encoded, text, position)

    def _close(self, mask: list[int], encoded: Encoded, text: str, position: int) -> None:
        """From `position` on: white space and a token that ends the turn, if that is what follows."""
        last = position
        while last < len(mask) and encoded.ids[last] not in self.added:
            if text[encoded.begins[last] : encoded.ends[last]].strip():
                return
            last += 1
        if last < len(mask) and encoded.ids[last] in self.ends:
            mask[position : last + 1] = [1] * (last + 1 - position)

    def _marked(self, messages: Sequence[Message], tools: list[Any] | None, encoded: Encoded, text: str) -> list[int]:
        """The mask of a template that says itself what is generated, completed by the tokens that end turns."""
        try:
            found = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True, **self.kwargs
            )
        except Exception as error:  # templates are programs: they raise whatever they like
            raise TurnError(f"the chat template failed: {one_line(error)}") from error
        mask = list(found["assistant_masks"])
        if list(found["input_ids"]) != encoded.ids or not any(mask):
            raise TurnError(
                "the chat template has {% generation %} marks, but no token lies between them: correct it, or the "
                "empty answer"
            )
        for position in [i for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]:
            if encoded.ids[position - 1] not in self.ends:
                self._close(mask, encoded, text, position)
        return mask

    # ---- what is learnt of the template beforehand

    def _closing_ids(self) -> set[int]:
        """Added tokens right after an answer: at the end, and if there is one, also before the next question."""
        stand_in = absent_word("")
        answer = {"role": "assistant", "content": stand_in}
        found = [self._following([_QUESTION, answer], stand_in)]
        if found[0] is not None:
            found.append(self._following([_QUESTION, answer, _QUESTION, _ANSWER], stand_in))
        return {token for token in found if token is not None}

    def _following(self, messages: list[Message], stand_in: str) -> int | None:
        try:
            text = self._render(messages, None)
        except TurnError:  # not the conversation it is made for; the end ids must do
            return None
        after = text.partition(stand_in)[2]
        encoded = Encoded.of(after, self.tokenizer)
        for position, token in enumerate(encoded.ids):
            if token in self.added:
                return token
            if after[encoded.begins[position] : encoded.ends[position]].strip():
                return None
        return None

    def _opens_turns(self) -> bool:
        """Whether a prompt ends where an answer begins: the template opens the turn, or writes nothing to open it."""
        stand_in = absent_word("")
        try:
            prompt = self._render([_QUESTION], None)
            if self._render([_QUESTION], None, open_turn=True) != prompt:
                return True
            answered = self._render([_QUESTION, {"role": "assistant", "content": stand_in}], None)
        except TurnError:
            return True
        before = answered.partition(stand_in)[0]
        return not before.startswith(prompt) or not before[len(prompt) :].strip()

    def _written(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: list[Any] | None, *, open_turn: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=open_turn, **self.kwargs
                )
            )
        except Exception as error:  # templates are programs: they raise whatever they like
            raise TurnError(f"the chat template failed: {one_line(error)}") from error


_QUESTION: Message = {"role": "user", "content": "a"}
_ANSWER: Message = {"role": "assistant", "content": "b"}


def absent_word(text: str) -> str:
    """A word that is not in the text: characters of the private use area, which no template looks for."""
    number = 0
    while (word := f"\ue0f0{number}\ue0f1") in text:
        number += 1
    return word


def _like(content: Any, text: str) -> Any:
    """`text` in the form of a message's content: a string, or a list of parts."""
    return [{"type": "text", "text": text}] if isinstance(content, list) else text
