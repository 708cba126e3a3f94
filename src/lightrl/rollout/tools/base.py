"""What a tool is, and a box of them that answers calls under limits, whatever a tool does."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from lightrl import hooks
from lightrl.config.schema import AgentConfig, SandboxConfig
from lightrl.errors import UserError
from lightrl.rewards.calls import Caller
from lightrl.rewards.sandbox import Sandbox
from lightrl.rollout.tools.parsers import Call, Definition

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class ToolError(Exception):
    """A tool's own failure. `kind` names the metric `agent/tool_failures_KIND`; the message goes to the model, with
    `output`, what it had given before it failed."""

    def __init__(self, message: str, kind: str = "error", output: str = "") -> None:
        super().__init__(message)
        self.kind, self.output = kind, output


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    definition: Definition
    """As chat templates and OpenAI write it: `{"type": "function", "function": {name, description, parameters}}`."""
    function: Callable[..., Any]
    """Called with the call's arguments by name; async, or run in a thread. Returns text; anything else is written as
    JSON. Raises ToolError, or anything."""
    concurrency: int | None = None
    """Most calls at once, a rank; waiting for a place is not the call's time. None: the tool box's."""

    @property
    def name(self) -> str:
        return str(self.definition["function"]["name"])

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A tool from a function's name, docstring and annotations. ValueError for one that takes what JSON has not."""
        return cls(definition=definition_of(function), function=function)


@dataclass(frozen=True, kw_only=True)
class Called:
    """What became of a call."""

    name: str
    content: str
    """For the model."""
    failure: str | None = None
    """Why it failed, in a word: `timeout`, `error`, `arguments`, `unknown`, `memory`, `output`, `binary`, …"""
    seconds: float = 0.0


class ToolBox:
    """The tools of a run. Each call has `timeout` seconds; up to `concurrency` are under way."""

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        timeout: float = 30.0,
        concurrency: int = 32,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise UserError(f"agent.tools: two tools have the same name; they are {', '.join(t.name for t in tools)}")
        self.timeout = timeout
        self.sandbox = sandbox
        self._concurrency = concurrency
        self._caller = Caller()
        self._slots: tuple[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] | None = None

    @property
    def definitions(self) -> list[Definition]:
        """For the chat template."""
        return [tool.definition for tool in self.tools.values()]

    async def call_all(self, calls: Sequence[Call], timeout: float | None = None) -> list[Called]:
        """The calls of one turn, side by side; results in their order. Those that are not done after `timeout` seconds,
        waiting included, are ended and have failed."""
        tasks = [asyncio.ensure_future(self.call(call)) for call in calls]
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, timeout=timeout)
            late = [task for task in tasks if not task.done()]
        finally:
            for task in tasks:
                task.cancel()
        content, seconds = f"Error: took longer than {timeout or 0.0:g} s", timeout or 0.0
        return [
            Called(name=call.name, content=content, failure="timeout", seconds=seconds)
            if task in late
            else task.result()
            for call, task in zip(calls, tasks, strict=True)
        ]

    async def call(self, call: Call) -> Called:
        """Answer a call. Whatever goes wrong is told to the model and named in `failure`."""
        tool, began = self.tools.get(call.name), time.monotonic()
        if call.error is not None:
            return Called(name=call.name, content=f"Error: {call.error}", failure="arguments")
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return Called(
                name=call.name, content=f"Error: no tool {call.name!r}; there are: {known}", failure="unknown"
            )
        if (fault := _fault(tool, call.arguments)) is not None:
            return Called(name=call.name, content=f"Error: {fault}", failure="arguments")
        failure: str | None = None
        try:
            async with self._slot(tool):
                began = time.monotonic()
                value = await self._caller.call(_bound(tool.function), call.arguments, self.timeout)
            content, failure = _written(value)
        except TimeoutError as error:
            content, failure = f"Error: {error or 'timed out'}", "timeout"
        except ToolError as error:
            content, failure = f"{error.output}\nError: {error}".strip(), error.kind
        except Exception as error:
            content, failure = f"Error: {type(error).__name__}: {error}"[:2000], "error"
        return Called(name=call.name, content=content, failure=failure, seconds=time.monotonic() - began)

    def close(self) -> None:
        """End what runs in the sandbox, and the loop of async tools; idempotent."""
        if self.sandbox is not None:
            self.sandbox.close()
        self._caller.close()

    def _slot(self, tool: Tool) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            places = {name: t.concurrency or self._concurrency for name, t in self.tools.items()}
            self._slots = (loop, {name: asyncio.Semaphore(count) for name, count in places.items()})
        return self._slots[1][tool.name]


def load_tools(config: AgentConfig, sandbox: SandboxConfig) -> ToolBox:
    """What `agent.tools` names. UserError for what is not there, before any model loads."""
    tools, box = [], Sandbox(sandbox)
    for name in config.tools:
        if name == "python":
            from lightrl.rollout.tools.python import python_tool

            tools.append(python_tool(box, config.tool_timeout))
        elif name == "search":
            from lightrl.rollout.tools.search import search_tool

            tools.append(search_tool(config))
        else:
            function = hooks.load(name, "agent.tools", arguments=None)
            try:
                tools.append(function if isinstance(function, Tool) else Tool.of(function))
            except ValueError as error:
                raise UserError(f"agent.tools = {name!r}: {error}") from error
    return ToolBox(tools, timeout=config.tool_timeout, concurrency=config.concurrency, sandbox=box)


def definition_of(function: Callable[..., Any]) -> Definition:
    """
    >>> def add(a: int, b: int = 0) -> int:
    ...     "Adds."
    >>> found = definition_of(add)["function"]["parameters"]
    >>> found["properties"], found["required"]
    ({'a': {'type': 'integer'}, 'b': {'type': 'integer'}}, ['a'])
    """
    name = getattr(function, "__name__", type(function).__name__)
    hints = get_type_hints(function if hasattr(function, "__name__") else type(function).__call__)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{name}: {parameter.name} is positional only, and arguments are given by name")
        properties[parameter.name] = _schema(hints.get(parameter.name), f"{name}: {parameter.name}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    about = {"name": name, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": about}


def _schema(hint: Any, what: str) -> dict[str, Any]:
    members = [m for m in get_args(hint) if m is not type(None)] if type(None) in get_args(hint) else [hint]
    origin = get_origin(members[0]) or members[0]
    if len(members) > 1 or origin not in _TYPES:
        raise ValueError(f"{what}: annotate it as one of {', '.join(t.__name__ for t in _TYPES)}")
    schema: dict[str, Any] = {"type": _TYPES[origin]}
    if origin is list and get_args(members[0]):
        schema["items"] = _schema(get_args(members[0])[0], what)
    return schema


def _fault(tool: Tool, arguments: dict[str, Any]) -> str | None:
    """Why a function cannot take these arguments."""
    try:
        inspect.signature(tool.function).bind(**arguments)
    except TypeError as error:
        return f"{tool.name}: {error}"
    except ValueError:  # some of C's have no signature
        return None
    return None


def _bound(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        async def later(arguments: dict[str, Any]) -> Any:
            return await function(**arguments)

        return later
    return lambda arguments: function(**arguments)


def _written(value: Any) -> tuple[str, str | None]:
    """A result as text, and what is wrong with it."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"Error: {len(bytes(value))} bytes that are no text", "binary"
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError) as error:
            return f"Error: the result cannot be written: {error}"[:300], "error"
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character, which no tokenizer takes
        return value.encode("utf-8", "replace").decode(), "binary"
    return value, None
