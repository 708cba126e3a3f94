"""The section `[endpoint]`: agents outside, which talk chat completions to a server in the run."""

from __future__ import annotations

from dataclasses import field, fields
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Code, Faults, PositiveInt

if TYPE_CHECKING:
    from lightrl.config.schema import Config

OUTSIDE = "outside"
_PROGRAMS = ("command", "function", "url")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EndpointConfig:
    """An OpenAI-compatible server in the run, with `agent.environment = "outside"` (docs/agents.md#agents-outside). The
    agent is one of `command`, `function` and `url`; each episode is a session of its own."""

    command: list[str] = field(default_factory=list)
    """A program and its arguments, started for each episode: where to talk to is in its environment, the prompt on its
    standard input."""
    function: Code = ""
    """`package.module:function`, called for each episode with an `OutsideSession`; async, or run in a thread. What it
    returns is the reward, unless None."""
    url: str | None = None
    """A service that gets a POST for each episode, such as `http://node7:9000/episode`."""
    concurrency: PositiveInt | None = None
    """Agents under way at once, a rank; default: those of all episodes."""
    foreign_sampling: Literal["refuse", "ignore"] = "refuse"
    """What becomes of a request with another `temperature` or `top_p` than the run's, under which all is trained.
    Evaluations always ignore them; `lightrl serve` samples as it is asked, unless they are to be ignored."""
    host: str = "127.0.0.1"
    """Address to listen on. Others than this machine's programs reach it only where that is set to another."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the first rank; the others take those that follow. 0 takes a free one each."""
    address: str | None = None
    """Host name that agents are told; default: `host`, or this machine's name where that is a wildcard."""
    key_env: str | None = None
    """Name of the environment variable that holds the endpoint's key; default: a random one. Each session has its own,
    made of it."""
    max_body_mib: PositiveInt = 16
    """Longest request, MiB."""


def of_endpoints(config: Config) -> Faults:
    """Rules: (key, what is wrong and what to do)."""
    endpoint, agent = config.endpoint, config.agent
    if agent.environment != OUTSIDE:
        return [
            (f"endpoint.{f.name}", f"only used with agent.environment = '{OUTSIDE}': set that, or drop this")
            for f in fields(EndpointConfig)
            if getattr(endpoint, f.name) != getattr(EndpointConfig(), f.name)
        ]
    problems = []
    given = [name for name in _PROGRAMS if getattr(endpoint, name)]
    if not given:
        text = f"not set; agent.environment = '{OUTSIDE}' needs the agent: set command, function or url"
        problems.append(("endpoint.command", text))
    problems += [(f"endpoint.{name}", f"endpoint.{given[0]} is the agent: drop one of the two") for name in given[1:]]
    if endpoint.function and ":" not in endpoint.function:
        problems.append(("endpoint.function", f"{endpoint.function!r}: write a function as package.module:function"))
    if endpoint.url is not None and not endpoint.url.startswith(("http://", "https://")):
        problems.append(("endpoint.url", f"{endpoint.url!r} is not of the form http://HOST:PORT/PATH"))
    if agent.options:
        problems.append(("agent.options", "an agent outside takes none: drop this"))
    if agent.tools:
        problems.append(("agent.tools", "an agent outside brings tools of its own, with its requests: drop this"))
    return problems
