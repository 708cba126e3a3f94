"""Reading tool calls, answering them under limits, and what is searched."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightrl.config.schema import AgentConfig, SandboxConfig
from lightrl.errors import UserError
from lightrl.rollout.tools import Call, Tool, ToolBox, ToolError, load_parser, load_tools
from lightrl.rollout.tools.base import definition_of
from lightrl.rollout.tools.parsers import parse_code, parse_hermes
from lightrl.rollout.tools.search import BM25, Document, ask, read_corpus

F = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>\n{F}\n</tool_call>", [("f", {"x": 1}, None)]),
        (f"a<tool_call>{F}</tool_call>b<tool_call>{F}</tool_call>", [("f", {"x": 1}, None)] * 2),
        (f"<tool_call>{F}", [("f", {"x": 1}, None)]),  # a stop string took the end
        (f"<tool_call>{F}<tool_call>{F}</tool_call>", [("f", {"x": 1}, None)] * 2),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", {}, None)]),
        ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', [("f", {"x": 1}, None)]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [("f", {"x": 1}, None)]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [("f", {}, "the arguments are not an object")]),
        ('<tool_call>{"name": 1}</tool_call>', [("", {}, 'a call is {"name": …, "arguments": {…}}')]),
        ("<tool_call>{'x'}</tool_call>", [("", {}, "the call is not valid JSON")]),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", [("", {}, "the call is not valid JSON")]),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\u00e9\\ud83d"}}', [("f", {"x": "é?"}, None)]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\\\ud83d\\"}"}', [("f", {"x": "?"}, None)]),
        (f"<think><tool_call>{F}</tool_call></think>no", []),
        ("no call", []),
    ],
    ids=range(15),
)
def test_hermes(text: str, calls: list[tuple[str, dict[str, Any], str | None]]) -> None:
    assert [(c.name, c.arguments, c.error) for c in parse_hermes(text)] == calls


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("so\n```python\nprint(1)\n```\nand\n```py\n2\n```", ["print(1)\n", "2\n"]),
        ("```python\nprint('```')\n```", ["print('```')\n"]),
        ("```python\nprint(1)", []),
        ("```\nprint(1)\n```", []),
        ("<code>print(1)</code>", ["print(1)"]),
        ("<code>\n```python\nprint(1)\n```\n</code>", ["print(1)\n"]),
        ("<think>\n```python\n1\n```\n</think>\n```python\n2\n```", ["2\n"]),
    ],
    ids=range(7),
)
def test_blocks_of_code(text: str, codes: list[str]) -> None:
    found = parse_code(text)
    assert [c.arguments["code"] for c in found][: len(codes)] == codes
    assert all(c.name == "python" for c in found)
    if "<code>" not in text:
        assert len(found) == len(codes)


def test_parsers_by_name() -> None:
    python = [{"type": "function", "function": {"name": "python"}}]
    block = "```python\n1\n```"
    assert load_parser(AgentConfig(tools=["python"]), python)(block) == parse_code(block)
    assert load_parser(AgentConfig(tools=["search"]), [])(block) == []
    assert load_parser(AgentConfig(tools=["python"], parser="hermes"), python)(block) == []
    assert len(load_parser(AgentConfig(tools=["python"], parser="code"), python)(f"{block}<tool_call>{F}")) == 1


def test_sglangs_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their interface, as SGLang 0.5.17 has it: `FunctionCallParser(tools, name).parse_non_stream(text)`."""
    config = AgentConfig(tools=["python"], parser="sglang:qwen25")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(UserError, match=r"agent\.parser = 'sglang:qwen25': SGLang is not installed"):
        load_parser(config, [])

    class FunctionCallParser:
        ToolCallParserEnum: ClassVar[dict[str, None]] = {"qwen25": None, "llama3": None}

        def __init__(self, tools: list[Any], tool_call_parser: str) -> None:
            if tool_call_parser not in self.ToolCallParserEnum:
                raise ValueError(f"Unsupported tool_call_parser: {tool_call_parser}")
            self.tools = tools

        def parse_non_stream(self, text: str) -> tuple[str, list[Any]]:
            if "bad" in text:
                raise RuntimeError("bad")
            return "", [types.SimpleNamespace(name=t["function"]["name"], parameters='{"x": 1}') for t in self.tools]

    names = ["sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"]
    for name in [*names, "sglang.srt.function_call"]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    protocol = types.ModuleType("protocol")
    protocol.Tool = types.SimpleNamespace(model_validate=lambda value: value)  # type: ignore[attr-defined]
    module = types.ModuleType("parser")
    module.FunctionCallParser = FunctionCallParser  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.openai.protocol", protocol)
    monkeypatch.setitem(sys.modules, "sglang.srt.function_call.function_call_parser", module)
    parse = load_parser(config, [definition_of(test_blocks_of_code) | {"function": {"name": "f"}}])
    assert parse("text") == [Call(name="f", arguments={"x": 1})]
    assert parse("bad")[0].error == "the call cannot be read: bad"
    with pytest.raises(UserError, match="SGLang has no such parser; it has llama3, qwen25"):
        load_parser(AgentConfig(tools=["python"], parser="sglang:nope"), [])


# ---- answering


def add(a: int, b: int = 0) -> int:
    """Adds two numbers."""
    return a + b


async def slow(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "done"


def blocked(seconds: float) -> str:
    """Blocks its thread."""
    time.sleep(seconds)
    return "done"


def breaks(how: str) -> Any:
    """Fails in some way."""
    if how == "exit":
        sys.exit(1)
    if how == "known":
        raise ToolError("no such page", "missing", "page 1")
    if how == "bytes":
        return b"\xff\x00"
    if how == "half":
        return "a\ud800"
    if how == "odd":
        return {1: {2}}
    raise ValueError(how)


def called(box: ToolBox, *calls: Call, timeout: float | None = None) -> list[tuple[str, str | None]]:
    return [(c.content, c.failure) for c in asyncio.run(box.call_all(calls, timeout))]


def call(name: str, **arguments: Any) -> Call:
    return Call(name=name, arguments=arguments)


@pytest.fixture
def box() -> Iterator[ToolBox]:
    box = ToolBox([Tool.of(f) for f in (add, slow, blocked, breaks)], timeout=1.0)
    yield box
    box.close()


def test_calls_are_answered_in_order(box: ToolBox) -> None:
    found = called(box, call("slow", seconds=0.1), call("add", a=1, b=2), call("add", a=1))
    assert found == [("done", None), ("3", None), ("1", None)]


def test_failures_are_named(box: ToolBox) -> None:
    assert called(box, Call(name="", error="no JSON")) == [("Error: no JSON", "arguments")]
    assert called(box, call("ad")) == [("Error: no tool 'ad'; there are: add, slow, blocked, breaks", "unknown")]
    assert called(box, call("add", c=1))[0][1] == "arguments"
    assert called(box, call("slow", seconds=9.0))[0] == ("Error: took longer than 1 s", "timeout")
    assert called(box, call("blocked", seconds=2.0))[0] == ("Error: took longer than 1 s", "timeout")
    assert called(box, call("breaks", how="x"))[0] == ("Error: ValueError: x", "error")
    assert called(box, call("breaks", how="exit"))[0] == ("Error: RuntimeError: SystemExit: 1", "error")
    assert called(box, call("breaks", how="known"))[0] == ("page 1\nError: no such page", "missing")
    assert called(box, call("breaks", how="bytes"))[0] == ("Error: 2 bytes that are no text", "binary")
    assert called(box, call("breaks", how="half"))[0] == ("a?", "binary")
    assert called(box, call("breaks", how="odd"))[0] == ('{"1": "{2}"}', None)


def test_a_turns_calls_end_together(box: ToolBox) -> None:
    box.timeout = 60.0
    found = called(box, call("add", a=1), call("slow", seconds=30.0), timeout=0.2)
    assert found == [("1", None), ("Error: took longer than 0.2 s", "timeout")]


def test_places_are_waited_for_without_losing_time() -> None:
    running, most = 0, 0

    async def counted(n: int) -> int:
        """Counts."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return n

    box = ToolBox([Tool(definition=definition_of(counted), function=counted, concurrency=2)], timeout=1.0)
    assert called(box, *(call("counted", n=n) for n in range(24))) == [(str(n), None) for n in range(24)]
    assert most == 2
    box.close()


def test_definitions() -> None:
    def tool(words: list[str], exact: bool | None = None, **others: Any) -> str:
        """Looks up words."""
        return ""

    assert definition_of(tool)["function"] == {
        "name": "tool",
        "description": "Looks up words.",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"type": "string"}}, "exact": {"type": "boolean"}},
            "required": ["words"],
        },
    }

    def odd(x: bytes) -> None: ...

    with pytest.raises(ValueError, match="odd: x: annotate it as one of str, int, float, bool, list, dict"):
        definition_of(odd)


def test_tools_by_name(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"title": "Cats", "text": "They sleep."}\n{"contents": "Dogs bark."}\n')
    config = AgentConfig(tools=["python", "search", "test_agent_tools:add"], search_corpus=str(corpus), search_top_k=1)
    box = load_tools(config, SandboxConfig(timeout=5.0))
    assert list(box.tools) == ["python", "search", "add"]
    found = called(box, call("python", code="print(2)\n3"), call("search", query="dogs"), call("search", query="sleep"))
    assert found == [("2\n3\n", None), ("[1] Dogs bark.", None), ("[1] Cats\nThey sleep.", None)]
    found = called(box, call("python", code="1/0"), call("search", query="fish"), call("python", code="x = 1"))
    assert found[0][1] == "error"
    assert "ZeroDivisionError" in found[0][0]
    assert found[1:] == [("(nothing found)", None), ("(no output)", None)]
    box.close()
    with pytest.raises(UserError, match=r"agent\.tools = 'test_agent_tools:ad'.*did you mean 'add'"):
        load_tools(AgentConfig(tools=["test_agent_tools:ad"]), SandboxConfig())
    with pytest.raises(UserError, match=r"agent\.tools = 'json:loads'"):
        load_tools(AgentConfig(tools=["json:loads"]), SandboxConfig())


# ---- search


def test_bm25_by_hand() -> None:
    """Two documents of 2 and 4 words; `b` is in one, once: idf = log(1 + 1.5 / 1.5), tf with k1 = 1.5, b = 0.75."""
    index = BM25([Document(text="a b", id="1"), Document(text="a a c d", id="2")])
    ((score, document),) = index.search("B!", 5)
    assert document.id == "1"
    assert score == pytest.approx(0.6931471805599453 * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 2 / 3)))
    assert [d.id for _, d in index.search("a", 5)] == ["2", "1"]  # twice in the second outweighs its length
    assert index.search("zebra", 5) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"txt": 1}\n', "c.jsonl:2: a document needs a string 'text'"),
        ("{\n", "c.jsonl:1: not JSON"),
        ("\n", "holds no documents"),
    ],
)
def test_bad_corpora(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        read_corpus(str(tmp_path / "c.jsonl"))
    with pytest.raises(UserError, match="cannot be read"):
        read_corpus(str(tmp_path / "none.jsonl"))


class Service(BaseHTTPRequestHandler):
    """As Search-R1's: the query says how it answers."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        query = asked["queries"][0]
        if query == "slow":
            time.sleep(1.0)
        body = json.dumps({"result": [[{"document": {"contents": f"about {query}"}, "score": 1.0}, "plain"]]})
        body = {"broken": "{", "empty": "{}"}.get(query, body)
        self.send_response(500 if query == "fails" else 200)
        self.end_headers()
        self.wfile.write(b"x" * (5 << 20) if query == "flood" else body.encode())

    def log_message(self, *_: Any) -> None: ...


def test_a_service() -> None:
    server = HTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert ask(url, "cats", 1, 5.0) == ["about cats"]
    assert ask(url, "cats", 5, 5.0) == ["about cats", "plain"]
    for query, kind in {
        "fails": "error",
        "broken": "error",
        "empty": "error",
        "flood": "output",
        "slow": "timeout",
    }.items():
        with pytest.raises(ToolError) as caught:
            ask(url, query, 1, 0.3)
        assert caught.value.kind == kind, query
    server.shutdown()
    server.server_close()
    with pytest.raises(ToolError, match="the search service failed"):
        ask(url, "gone", 1, 0.5)
