"""OpenAI's chat completions as JSON: requests checked and read, errors and answers written."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from lightrl.rewards.values import BadReward, checked
from lightrl.rollout.conversation import Message
from lightrl.rollout.tools.parsers import whole_characters

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What is said about a request changes nothing of the answer; other settings may be sent with the value that means none.
_ABOUT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NONE = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "modalities": ["text"],
}
_MOST_CHOICES = 128


class ApiError(Exception):
    """An answer with an error in it, as OpenAI writes them."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "authentication_error" if self.status == 401 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request that was found to be in order; None is what was left out."""

    messages: list[Message]
    """As chat templates take them: content is text, arguments of calls are tables."""
    tools: list[dict[str, Any]] | None = None
    reads_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object; ApiError 400 for anything else."""
    try:
        value = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # bytes that are no text are a ValueError too
        raise ApiError(400, f"the body is not valid JSON: {error}"[:300], code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return value


def parse_chat(body: bytes) -> ChatRequest:
    """ApiError 400 that names the field for a wrong type or value, and for a parameter that is not served."""
    data = {key: value for key, value in parse_json(body).items() if value is not None}
    known = {*_ABOUT, *_NONE, "model", "messages", "tools", "tool_choice", "temperature", "top_p", "max_tokens"}
    known |= {"max_completion_tokens", "stop", "n", "logprobs", "stream", "stream_options"}
    for key, value in data.items():
        if key not in known or (key in _NONE and value != _NONE[key]):
            text = f"the parameter {key!r} is not supported" + (f" but as {_NONE[key]!r}" if key in _NONE else "")
            raise ApiError(400, text, param=key, code="unsupported_parameter")
    if not isinstance(data.get("model"), str) or not data["model"]:
        raise _wrong("model", "a name")
    choice = data.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        text = "tool_choice is 'auto' or 'none': what is sampled cannot be forced"
        raise ApiError(400, text, param="tool_choice", code="unsupported_parameter")
    limits = [_number(data, key, int, 1, None) for key in ("max_completion_tokens", "max_tokens")]
    options = data.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", "an object")
    return ChatRequest(
        messages=_messages(data.get("messages")),
        tools=_tools(data.get("tools")),
        reads_calls=choice == "auto",
        temperature=_number(data, "temperature", float, 0, 2),
        top_p=_number(data, "top_p", float, 0, 1),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=_stop(data.get("stop")),
        n=_number(data, "n", int, 1, _MOST_CHOICES) or 1,
        logprobs=_flag(data, "logprobs"),
        stream=_flag(data, "stream"),
        include_usage=_flag(options, "include_usage"),
    )


def parse_reward(body: bytes) -> tuple[float, dict[str, Any]]:
    """The number and what is said besides (`info`); ApiError 400 names the field."""
    data = parse_json(body)
    for key in data.keys() - {"reward", "info"}:
        raise ApiError(400, f"the parameter {key!r} is not supported", param=key, code="unsupported_parameter")
    reward = _number(data, "reward", float, None, None)
    if reward is None:
        raise _wrong("reward", "a number")
    try:
        reward = checked(reward, "the reward")
    except BadReward as error:
        raise ApiError(400, str(error), param="reward", code="invalid_value") from None
    info = data.get("info") or {}
    if not isinstance(info, dict):
        raise _wrong("info", "an object")
    return reward, info


def message_key(message: Message) -> str:
    """Two messages are the same if this is: white space around an answer and how its arguments are spaced are not
    looked at, as clients change them."""
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return json.dumps(
        [message["role"], content, message.get("name"), message.get("tool_call_id"), calls], sort_keys=True
    )


def answer_message(content: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """What the model said, for clients. Calls hold their arguments as tables; JSON goes out."""
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = [
            c | {"function": c["function"] | {"arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
            for c in calls
        ]
    return message


def chunks_of(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices of a whole answer as the choices of successive chunks of a stream: what was said, then why it ended."""
    found = []
    for choice in choices:
        said = {k: v for k, v in choice["message"].items() if k in ("role", "content")}
        if calls := choice["message"].get("tool_calls"):
            said["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        place = {"index": choice["index"], "logprobs": choice["logprobs"], "finish_reason": None}
        found.append(place | {"delta": said})
        found.append(place | {"logprobs": None, "delta": {}, "finish_reason": choice["finish_reason"]})
    return found


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "a list of at least one message")
    messages = [_message(item, f"messages[{place}]") for place, item in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        text = "the last message is the assistant's: going on with one is not supported"
        raise ApiError(400, text, param="messages", code="unsupported_value")
    return messages


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise _wrong(where, "an object")
    if not isinstance(value.get("role"), str) or value["role"] not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}")
    role = _ROLES[value["role"]]
    known = {"role", "content", "name"} | {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}.get(role, set())
    for key in value.keys() - known:
        if value[key]:  # clients send back fields that were empty
            raise ApiError(400, f"{where}.{key} is not supported", param=f"{where}.{key}", code="unsupported_parameter")
    calls = value.get("tool_calls") or []
    content = value.get("content")
    if content is None and not (role == "assistant" and calls):
        raise _wrong(f"{where}.content", "text")
    message: Message = {"role": role, "content": _text(content, f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if value.get(key) is not None:
            message[key] = _string(value[key], f"{where}.{key}")
    if not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls", "a list")
    if calls:
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise _wrong(where, "a call of a function")
    text = _string(function.get("arguments"), f"{where}.function.arguments")
    try:
        arguments = whole_characters(json.loads(text or "{}", parse_constant=_refuse))
    except (ValueError, RecursionError):
        raise _wrong(f"{where}.function.arguments", "JSON in a string") from None
    name, number = _string(function.get("name"), f"{where}.function.name"), _string(value.get("id"), f"{where}.id")
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(value: Any, where: str) -> str:
    """Text, or a list of parts that are."""
    if value is None:
        return ""
    if isinstance(value, list):
        for place, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise _wrong(f"{where}[{place}]", "a part of the type 'text': the model reads nothing else")
        return "".join(_string(part.get("text"), f"{where}[{i}].text") for i, part in enumerate(value))
    return _string(value, where)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "text")
    return value.encode("utf-8", "replace").decode()  # JSON can spell out half a character, which no tokenizer takes


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise _wrong("tools", "a list")
    for place, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"tools[{place}]", "{'type': 'function', 'function': {'name': …, …}}")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if found is None:
        return ()
    if not isinstance(found, list) or len(found) > 4 or not all(isinstance(s, str) and s for s in found):
        raise _wrong("stop", "a string, or up to four")
    return tuple(found)


def _number(data: dict[str, Any], key: str, kind: type, low: float | None, high: float | None) -> Any:
    value = data.get(key)
    if value is None:
        return None
    name = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise _wrong(key, name)
    if (low is not None and value < low) or (high is not None and value > high):
        raise _wrong(key, f"{name} of at least {low:g}" + (f" and at most {high:g}" if high is not None else ""))
    try:
        found = kind(value)
    except OverflowError:
        raise _wrong(key, name) from None
    if not math.isfinite(found):  # JSON can spell out 1e999
        raise _wrong(key, name)
    return found


def _flag(data: dict[str, Any], key: str) -> bool:
    value = data.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, "true or false")
    return bool(value)


def _wrong(param: str, expected: str) -> ApiError:
    return ApiError(400, f"{param}: expected {expected}", param=param, code="invalid_value")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")
