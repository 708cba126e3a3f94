"""The sections `[agent]` and `[sandbox]`: rollouts of several turns, with tools."""

from __future__ import annotations

import difflib
import re
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass

from lightrl.config.endpoint import OUTSIDE
from lightrl.config.kinds import STRICT, Code, Faults, PositiveInt, Seconds

if TYPE_CHECKING:
    from lightrl.config.schema import Config

TOOLS = ("python", "search")
PARSERS = ("auto", "hermes", "code")
SGLANG = "sglang:"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AgentConfig:
    """Rollouts of several turns (docs/agents.md): on with an `environment`, or with `tools` alone."""

    environment: Code = ""
    """`package.module:Class` with `reset` and `step` (or `run`), one instance an episode; `outside`: a program of yours
    that talks to `[endpoint]`. Default with `tools`: the model calls them until it answers without a call."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""
    tools: list[Code] = field(default_factory=list)
    """`python` (runs code in the sandbox), `search` (local documents, or a URL), or functions of your own as
    `package.module:function`."""
    parser: str = "auto"
    """How calls are written: `hermes` (`<tool_call>{json}</tool_call>`, also Qwen's), `code` (a block of Python),
    `auto` (both), or `sglang:NAME`, a parser of SGLang's."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role of messages that hold a tool's result; `user` for chat templates without tools."""
    max_turns: PositiveInt = 8
    """Most turns of the model in an episode."""
    max_turn_tokens: PositiveInt | None = None
    """Longest turn of the model; default: what is left of `rollout.max_response_tokens`, which holds for all turns and
    results together."""
    max_observation_tokens: PositiveInt = 1024
    """A longer message of the environment's loses its middle."""
    tool_timeout: Seconds = 30.0
    """Seconds one tool call may take."""
    turn_timeout: Seconds = 60.0
    """Seconds one answer of the environment may take, its tool calls together."""
    episode_timeout: Seconds = 1800.0
    """Seconds one episode may take, generation included; what it has by then is kept."""
    concurrency: PositiveInt = 32
    """Tool calls and environments' answers under way at once, a rank."""
    search_corpus: str | None = None
    """`search`: jsonl file of documents, each with `text` (or `contents`), maybe `title` and `id`, ranked by BM25."""
    search_url: str | None = None
    """`search`: a service instead, given `{"queries": […], "topk": k}` as Search-R1's."""
    search_top_k: PositiveInt = 3
    """`search`: documents a query gets."""

    @property
    def enabled(self) -> bool:
        """Whether rollouts have turns."""
        return bool(self.environment or self.tools)

    @property
    def is_outside(self) -> bool:
        """Whether a program outside plays the episodes."""
        return self.environment == OUTSIDE


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SandboxConfig:
    """Limits of Python code that a model wrote (docs/agents.md#the-sandbox)."""

    timeout: Seconds = 10.0
    """Seconds one run may take."""
    memory_mib: PositiveInt = 1024
    """Address space of each of its processes, MiB."""
    file_mib: PositiveInt = 16
    """Largest file, and with namespaces all files together, MiB."""
    processes: PositiveInt = 16
    """Processes and threads of one run."""
    output_kib: PositiveInt = 64
    """Output after which a run is ended, KiB."""
    concurrency: PositiveInt = 8
    """Runs at once, a rank."""


def of_agents(config: Config) -> Faults:
    """Rules: (key, what is wrong and what to do)."""
    agent, problems = config.agent, []
    if not agent.enabled:
        return [
            (f"{name}.{f.name}", "only used with agent.environment or agent.tools: set one, or drop this")
            for name, section in (("agent", agent), ("sandbox", config.sandbox))
            for f in fields(section)
            if getattr(section, f.name) != getattr(type(section)(), f.name)
        ]
    if agent.environment not in ("", OUTSIDE) and ":" not in agent.environment:
        problems.append(("agent.environment", f"{agent.environment!r}: write a class as package.module:Class"))
    for i, name in enumerate(agent.tools):
        if name not in TOOLS and ":" not in name:
            near = difflib.get_close_matches(name, TOOLS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "choose 'python', 'search' or package.module:function"
            problems.append((f"agent.tools.{i}", f"no tool {name!r}: {hint}"))
    if len(set(agent.tools)) < len(agent.tools):
        problems.append(("agent.tools", "a tool is listed twice"))
    problems += of_parsers(agent)
    problems += _of_search(agent) + _of_lengths(config)
    if config.correction.score_centering_top_k:
        text = "wants the likeliest tokens at each place, and results of tools have none: remove it"
        problems.append(("correction.score_centering_top_k", text))
    if config.teacher.student_k:
        text = "wants the student's likeliest tokens at each place, and results of tools have none: choose 'teacher'"
        problems.append(("teacher.top_k_from", text))
    if config.rollout.generate != "none":
        problems.append(("rollout.generate", "agent.environment or agent.tools play the episodes: drop one of the two"))
    if not config.data.apply_chat_template:
        problems.append(("data.apply_chat_template", "turns are written by the chat template: set it to true"))
    return problems


def of_serving(config: Config) -> Faults:
    """Rules of `lightrl serve`, which takes what `[agent]` says of turns, and `[endpoint]`: agents are its clients."""
    problems = of_parsers(config.agent)
    if config.engine.tensor_parallel > 1:
        text = f"{config.engine.tensor_parallel}: lightrl serve runs in one process: set it to 1, or start SGLang with "
        problems.append(("engine.tensor_parallel", f"{text}--tp-size and name it in engine.urls"))
    return problems


def of_parsers(agent: AgentConfig) -> Faults:
    """Names that are none."""
    if agent.parser in PARSERS or agent.parser.startswith(SGLANG):
        return []
    near = difflib.get_close_matches(agent.parser, PARSERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(map(repr, PARSERS))} or 'sglang:NAME'"
    return [("agent.parser", f"no parser {agent.parser!r}: {hint}")]


def _of_search(agent: AgentConfig) -> Faults:
    given = [key for key in ("search_corpus", "search_url") if getattr(agent, key) is not None]
    if "search" not in agent.tools:
        return [
            (f"agent.{key}", "only used by the tool 'search': add it to agent.tools, or drop this") for key in given
        ]
    if len(given) == 2:
        return [("agent.search_url", "agent.search_corpus is searched already: drop one of the two")]
    if not given:
        return [("agent.search_corpus", "not set; the tool 'search' needs a jsonl file, or agent.search_url")]
    if agent.search_url is not None and re.fullmatch(r"https?://[^\s@/?#]+([/?]\S*)?", agent.search_url) is None:
        shown = re.sub(r"//.*@", "//…@", agent.search_url)
        return [("agent.search_url", f"{shown!r} is not of the form http://HOST:PORT/PATH")]
    return []


def _of_lengths(config: Config) -> Faults:
    agent, limit = config.agent, config.rollout.max_response_tokens
    problems = []
    if agent.max_turn_tokens is not None and agent.max_turn_tokens > limit:
        text = (
            f"{agent.max_turn_tokens} exceeds rollout.max_response_tokens = {limit}, which is for all turns: lower it"
        )
        problems.append(("agent.max_turn_tokens", text))
    if agent.tool_timeout > agent.turn_timeout:
        text = f"{agent.tool_timeout:g} s of one call exceed agent.turn_timeout = {agent.turn_timeout:g}: lower it"
        problems.append(("agent.tool_timeout", text))
    return problems
