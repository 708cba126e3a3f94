"""Settings, environments and templates of agents that do not fit are refused."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import make_agent

from lightrl.config.load import ConfigError, load_config
from lightrl.errors import UserError


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"tools": ["pyton"]}, "agent.tools[0]: no tool 'pyton': did you mean 'python'?"),
        ({"tools": ["python", "python"]}, "agent.tools: a tool is listed twice"),
        ({"tools": ["python"], "parser": "hermse"}, "agent.parser: no parser 'hermse': did you mean 'hermes'?"),
        ({"tools": ["search"]}, "agent.search_corpus: not set; the tool 'search' needs a jsonl file"),
        ({"tools": ["search"], "search_url": "host:1"}, "agent.search_url: 'host:1' is not of the form"),
        ({"tools": ["search"], "search_url": "http://me:secret@host:1/x"}, "'http://…@host:1/x' is not of the form"),
        ({"tools": ["python"], "search_corpus": "x"}, "agent.search_corpus: only used by the tool 'search'"),
        ({"max_turns": 3}, "agent.max_turns: only used with agent.environment or agent.tools"),
        ({"environment": "Guess"}, "agent.environment: 'Guess': write a class as package.module:Class"),
        ({"tools": ["python"], "max_turn_tokens": 99999}, "agent.max_turn_tokens: 99999 exceeds rollout.max_resp"),
        ({"tools": ["python"], "tool_timeout": 90.0}, "agent.tool_timeout: 90 s of one call exceed agent.turn_timeout"),
    ],
    ids=range(11),
)
def test_config_mistakes(agent: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(agent=agent, data={"apply_chat_template": True})
    assert message in str(caught.value)


def test_more_config_mistakes() -> None:
    tools = {"tools": ["python"]}
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template: turns are written by the chat template"):
        load_config(agent=tools)
    with pytest.raises(ConfigError, match="play the episodes: drop one of the two"):
        load_config(agent=tools, rollout={"generate": "m:f"}, data={"apply_chat_template": True})
    with pytest.raises(ConfigError, match="results of tools have none: remove it"):
        load_config(agent=tools, correction={"score_centering_top_k": 4}, data={"apply_chat_template": True})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"environment": "test_agent:Ech"}, r"agent\.environment = 'test_agent:Ech'.*did you mean 'Echo'"),
        ({"environment": "test_agent:LengthScorer"}, "needs methods reset and step, or run"),
        (
            {"environment": "test_agent:Echo", "options": {"tmes": 1}},
            r"agent\.options: .*cannot be made with \['tmes'\]",
        ),
        ({"environment": "test_agent:Echo", "tools": ["python"]}, r"agent\.tools: the class .* does not take them"),
    ],
    ids=range(4),
)
def test_environments_that_do_not_fit(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_agent(**keys)


def test_templates_that_do_not_fit() -> None:
    silent = "{% for m in messages %}{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match=r"agent\.tool_role: .*leaves out messages of the role 'tool': set agent"):
        make_agent(silent, tools=["python"])
    make_agent(silent, tools=["python"], tool_role="user").close()
