"""One row of data into one prompt: fields found and checked, chat template applied."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lightrl.config.schema import DataConfig
from lightrl.data.errors import DataError, nearest, one_line
from lightrl.types import Prompt

_RESERVED = (
    "tokenize",
    "tools",
    "conversation",
    "return_dict",
    "return_tensors",
    "padding",
    "truncation",
    "max_length",
)
_DEFAULTS = {field.name: field.default for field in fields(DataConfig)}


class RowError(Exception):
    """What is wrong with a row, without its place."""


class RowReader:
    """Turns rows into prompts under one `[data]` section. Tokens are filled in later, in batches."""

    def __init__(self, config: DataConfig, tokenizer: Any, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.config = config
        self._tools = list(tools)  # of every row, before its own
        self.tokenizer = tokenizer
        self._unseen = {k for k in ("metadata_key", "tool_key") if getattr(config, k) != _DEFAULTS[k]}
        if config.apply_chat_template:
            if not getattr(tokenizer, "chat_template", None):
                raise DataError(
                    "data.apply_chat_template = true, but the tokenizer has no chat template: set it to false, or name "
                    "a tokenizer that has one (model.tokenizer)"
                )
            for name in _RESERVED:
                if name in config.chat_template_kwargs:
                    raise DataError(f"data.chat_template_kwargs: {name!r} is set by LightRL itself: remove it")
        else:
            for key in ("system_prompt", "chat_template_kwargs"):
                if getattr(config, key):
                    raise DataError(f"data.{key} needs the chat template: set data.apply_chat_template = true")

    def check_optional_keys(self, path: str) -> None:
        """A key that was named in the config and that no row has is a typing error."""
        for key in sorted(self._unseen):
            name = getattr(self.config, key)
            raise DataError(f"{path}: no row has a field {name!r} (data.{key}): correct the name or leave the key out")

    def read(self, source: str, row: Mapping[str, Any]) -> Prompt:
        """The prompt of a row, without tokens. Raises RowError."""
        config = self.config
        value = self.field(row, config.input_key, "input_key")
        label = None if config.label_key is None else self.field(row, config.label_key, "label_key")
        if label is None and config.label_key is not None:
            raise RowError(f"field {config.label_key!r} (data.label_key) is null: give the row a label, or remove it")
        metadata = self.parsed(row, "metadata_key", dict, "an object") or {}
        tools = self._tools + (self.parsed(row, "tool_key", list, "a list") or []) or None
        messages: list[dict[str, Any]] | None = None
        if isinstance(value, str):
            if config.apply_chat_template:
                messages = [{"role": "user", "content": value}]
            text = value
        elif isinstance(value, list):
            messages = self.messages(value)
        else:
            raise RowError(
                f"field {config.input_key!r} (data.input_key) must be a string or a list of chat messages, "
                f"found {kind_of(value)}"
            )
        if messages is not None:
            text = self.render(messages := self.with_system_prompt(messages), tools)
        if not text:
            raise RowError(f"field {config.input_key!r} (data.input_key) is empty: remove the row")
        if not encodable(text):
            raise RowError(
                f"field {config.input_key!r} (data.input_key) holds half a character (a lone surrogate such as "
                "\\ud800), which no tokenizer takes: correct or remove the row"
            )
        return Prompt(
            index=0, tokens=[], text=text, messages=messages, label=label, metadata=metadata, tools=tools, source=source
        )

    def field(self, row: Mapping[str, Any], name: str, key: str, section: str = "data") -> Any:
        """A field that the row must have; `key` of `section` is the one that names it."""
        if name in row:
            return row[name]
        has = ", ".join(map(str, row)) or "none"
        raise RowError(
            f"no field {name!r}{nearest(name, row)}: set {section}.{key} to the right one; the row has: {has[:300]}"
        )

    def parsed(self, row: Mapping[str, Any], key: str, kind: type, kind_name: str) -> Any:
        """An optional dict or list; parquet files often hold it as a JSON string."""
        name = getattr(self.config, key)
        value = row.get(name)
        if name in row:
            self._unseen.discard(key)
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise RowError(f"field {name!r} (data.{key}) must be {kind_name}, found a string") from None
        if value is None or value == "":
            return None
        if not isinstance(value, kind):
            raise RowError(f"field {name!r} (data.{key}) must be {kind_name}, found {kind_of(value)}")
        return value

    def messages(
        self, value: list[Any], *, answered: bool = False, key: str = "input_key", name: str | None = None
    ) -> list[dict[str, Any]]:
        """The messages of a row, checked. `answered`: they may end with the assistant's, as those to train on do.

        Their field is that of `[data]`'s `key`, or called `name` in messages.
        """
        name = name or f"field {getattr(self.config, key)!r} (data.{key})"
        if not self.config.apply_chat_template:
            raise RowError(f"{name} holds chat messages: set data.apply_chat_template = true")
        if not value:
            raise RowError(f"{name} is an empty list of messages: remove the row")
        messages = []
        for number, message in enumerate(value, start=1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RowError(f"{name}: message {number} must be an object with 'role' and 'content'")
            if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
                raise RowError(f"{name}: message {number} has no text in 'content'")
            # columns of a table are the same for all messages: those a message does not have come as nulls
            messages.append({k: v for k, v in message.items() if v is not None or k == "content"})
        if answered:
            return messages
        if messages[-1]["role"] == "assistant" and not self.config.chat_template_kwargs.get("continue_final_message"):
            raise RowError(
                f"{name} ends with an assistant message, which would give the answer away: leave it out (lightrl sft "
                "learns from it; to have it continued, set data.chat_template_kwargs = {continue_final_message = true, "
                "add_generation_prompt = false})"
            )
        return messages

    def with_system_prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Only where the conversation has no system message of its own."""
        if self.config.system_prompt is None or messages[0]["role"] in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self.config.system_prompt}, *messages]

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """The prompt as the template writes it, the assistant's turn opened."""
        kwargs: dict[str, Any] = {"add_generation_prompt": True} | self.config.chat_template_kwargs
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs))
        except Exception as error:  # templates are programs: they raise whatever they like
            raise RowError(f"the chat template failed: {one_line(error)}") from error


def encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
