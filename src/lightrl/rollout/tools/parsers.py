"""Tool calls in a model's text: Hermes' and Qwen's `<tool_call>{json}</tool_call>`, blocks of code, SGLang's kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.config.schema import AgentConfig
from lightrl.errors import UserError

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
# A block that is not closed was cut off, or stopped at its fence: no call. The fence closes at the start of a line.
_BLOCK = re.compile(r"^[ \t]*```(?:python|py|tool_code)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.I)
_TAGGED = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_SGLANG = "sglang:"
Definition = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, as the model wrote it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """What is wrong with it; it is then answered with this, and counts as a failure."""


Parser = Callable[[str], list[Call]]
"""The text of a turn, special tokens included -> its calls, in order."""


def parse_hermes(text: str) -> list[Call]:
    """
    >>> parse_hermes('so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    [Call(name='f', arguments={'x': 1}, error=None)]
    >>> parse_hermes('<tool_call>{"name": "f", </tool_call>')[0].error
    'the call is not valid JSON'
    """
    return [_hermes(body) for body in _HERMES.findall(_spoken(text))]


def parse_code(text: str) -> list[Call]:
    r"""Each closed block of Python, fenced or in `<code>` tags, as a call of the tool `python`.

    >>> parse_code('try\n```python\nprint(1)\n```\n')
    [Call(name='python', arguments={'code': 'print(1)\n'}, error=None)]
    """
    spoken = _spoken(text)
    found = [(m.start(), m[1]) for pattern in (_BLOCK, _TAGGED) for m in pattern.finditer(spoken)]
    codes = []
    for _, code in sorted(found):
        inner = re.fullmatch(r"\s*```\w*[ \t]*\n(.*?)```\s*", code, re.DOTALL)  # a fence within tags
        codes.append(inner[1] if inner else code)
    return [Call(name="python", arguments={"code": code}) for code in codes]


def load_parser(config: AgentConfig, definitions: Sequence[Definition]) -> Parser:
    """What `agent.parser` names. UserError for a parser of SGLang's that is not there."""
    has_python = any(_name(d) == "python" for d in definitions)
    if config.parser == "hermes":
        return parse_hermes
    if config.parser == "code":
        return parse_code
    if config.parser.startswith(_SGLANG):
        return _sglang_parser(config.parser.removeprefix(_SGLANG), definitions)

    def either(text: str) -> list[Call]:
        return parse_hermes(text) or (parse_code(text) if has_python else [])

    return either


def _spoken(text: str) -> str:
    """Without thoughts: a call that is thought of is not made."""
    return text.rpartition("</think>")[2] if "</think>" in text else text


def _hermes(body: str) -> Call:
    try:
        value = json.loads(body.strip())
    except (ValueError, RecursionError):
        return Call(name="", error="the call is not valid JSON")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(name="", error='a call is {"name": …, "arguments": {…}}')
    return _checked(value["name"], value.get("arguments", value.get("parameters", {})))


def _checked(name: str, arguments: Any) -> Call:
    if isinstance(arguments, str):  # encoded twice
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return Call(name=name, error="the arguments are not valid JSON")
    if not isinstance(arguments, dict):
        return Call(name=name, error="the arguments are not an object")
    try:
        return Call(name=name, arguments=whole_characters(arguments))
    except RecursionError:
        return Call(name=name, error="the arguments are nested too deep")


def whole_characters(value: Any) -> Any:
    """JSON in which each half of a character that it spells out (`"\\ud83d"`) is a question mark: no tokenizer, file
    or process takes one."""
    text = json.dumps(value, ensure_ascii=False)
    replaced = text.encode("utf-8", "replace")
    return json.loads(replaced) if replaced != text.encode("utf-8", "surrogatepass") else value


def _sglang_parser(name: str, definitions: Sequence[Definition]) -> Parser:
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise UserError(
            f"agent.parser = '{_SGLANG}{name}': SGLang is not installed ({error}): install the extra 'gpu', or choose "
            "'hermes' or 'code'"
        ) from error
    tools = [Tool.model_validate(definition) for definition in definitions]
    try:
        FunctionCallParser(tools, name)
    except (ValueError, KeyError) as error:
        known = ", ".join(sorted(getattr(FunctionCallParser, "ToolCallParserEnum", {})))
        raise UserError(f"agent.parser = '{_SGLANG}{name}': SGLang has no such parser; it has {known}") from error

    def parse(text: str) -> list[Call]:
        try:
            _, calls = FunctionCallParser(tools, name).parse_non_stream(_spoken(text))
        except Exception as error:  # detectors raise whatever JSON or regular expressions do
            return [Call(name="", error=f"the call cannot be read: {error}"[:200])]
        return [_checked(call.name or "", call.parameters) for call in calls]

    return parse


def _name(definition: Definition) -> str:
    return str(definition.get("function", {}).get("name", ""))
