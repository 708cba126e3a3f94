"""Conversations of rows, and prompts with their answers, as token ids and masks of what is learnt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lightrl.config.schema import DataConfig
from lightrl.data.errors import DataError
from lightrl.data.render import RowError, encodable, kind_of
from lightrl.data.turns import ConversationEncoder, Message, TurnError

# Names of the other usual shape, {"from": "human", "value": "…"}, that of ShareGPT and OpenHermes.
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_HALF = "holds half a character (a lone surrogate such as \\ud800): correct or remove the row"


class RowEncoder:
    """Encodes under one `[data]` section. `end_ids` end a response; `key` names `end_of_turn` in the config."""

    def __init__(
        self, data: DataConfig, tokenizer: Any, end_ids: Sequence[int], end_of_turn: str | None, key: str
    ) -> None:
        self.tokenizer, self.key = tokenizer, key
        self.turns: ConversationEncoder | None = None
        if data.apply_chat_template:
            kwargs, appended = data.chat_template_kwargs, _token_id(tokenizer, end_of_turn, key)
            try:
                self.turns = ConversationEncoder(tokenizer, kwargs, end_ids=end_ids, end_of_turn=appended)
            except TurnError as error:
                raise DataError(f"model.tokenizer: {error}") from error
        elif end_of_turn is not None:
            raise DataError(f"{key}: only used with data.apply_chat_template = true: remove it")

    def chat(
        self, messages: Sequence[Message], trained: Sequence[bool], tools: list[Any] | None
    ) -> tuple[list[int], list[int]]:
        """Ids and mask of a conversation; `trained` aligns with its messages. Raises RowError or TurnError."""
        return self._turns(_bare(messages), trained, tools)

    def whole(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """Ids of a conversation alone. Raises RowError or TurnError."""
        return self._turns.ids(_bare(messages), tools)

    @property
    def _turns(self) -> ConversationEncoder:
        assert self.turns is not None, "only with data.apply_chat_template"
        return self.turns

    def plain(self, text: Any, answer: Any, name: str) -> tuple[list[int], list[int]]:
        """Without a template: the prompt as the tokenizer writes it, the answer, and its end-of-sequence token.

        `name` is the prompt's, for messages. Raises RowError.
        """
        if isinstance(text, list) or isinstance(answer, list):
            raise RowError("chat messages need the chat template: set data.apply_chat_template = true")
        if not (encodable(text) and encodable(answer)):
            raise RowError(_HALF)
        prompt = list(self.tokenizer(text, verbose=False)["input_ids"])
        response = list(self.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
        if self.tokenizer.eos_token_id is not None:
            response.append(self.tokenizer.eos_token_id)
        if not prompt:
            raise RowError(f"{name} has no tokens: remove the row")
        return prompt + response, [0] * len(prompt) + [1] * len(response)

    def text(self, text: str) -> list[int]:
        """Ids of a text as the tokenizer writes it, and its end-of-sequence token. Raises RowError."""
        if not encodable(text):
            raise RowError(_HALF)
        ids, end = list(self.tokenizer(text, verbose=False)["input_ids"]), self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def notices(self) -> list[str]:
        """What the template does that is worth knowing."""
        found = []
        if self.turns is not None and self.turns.unended:
            found.append(
                f"data: in {self.turns.unended} conversations the chat template writes no token that ends the last "
                f"answer, so stopping there is not learned: name one by {self.key}"
            )
        if self.turns is not None and self.turns.unlike_prompts:
            found.append(
                f"data: before {self.turns.unlike_prompts} turns the chat template writes something else in a "
                "conversation than in a prompt (thoughts, system message): the model learns to answer the former"
            )
        return found


def usual(message: Any) -> Any:
    """{"from", "value"} as {"role", "content"}; anything else as it is."""
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    if speaker not in _SPEAKERS:
        raise RowError(f"a message is from {speaker!r}: known are {', '.join(_SPEAKERS)}")
    if not isinstance(message["value"], str | list):
        raise RowError(f"a message's 'value' must be text, found {kind_of(message['value'])}")
    others = {k: v for k, v in message.items() if k not in ("from", "value")}
    return {"role": _SPEAKERS[speaker], "content": message["value"], **others}


def _bare(messages: Sequence[Message]) -> list[Message]:
    """Messages as the template knows them."""
    if not encodable(json.dumps(messages, ensure_ascii=False, default=str)):
        raise RowError(_HALF)
    return [{k: v for k, v in m.items() if k not in ("train", "weight")} for m in messages]


def _token_id(tokenizer: Any, token: str | None, key: str) -> int | None:
    if token is None:
        return None
    ids = list(tokenizer(token, add_special_tokens=False)["input_ids"])
    if len(ids) != 1:
        raise DataError(f"{key}: {token!r} is {len(ids)} tokens of this tokenizer: name one that is one")
    return int(ids[0])
