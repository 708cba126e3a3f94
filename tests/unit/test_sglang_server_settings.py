"""Settings of servers: which are refused, and which go."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config.schema import Config, EngineConfig


@pytest.mark.parametrize(
    ("engine", "key", "message"),
    [
        ({}, "engine.urls", "list the servers"),
        ({"urls": ["http://a:1", "http://a:1"]}, "engine.urls", "listed twice"),
        ({"urls": ["a:30000"]}, "engine.urls", "'a:30000' is not of the form http://HOST:PORT"),
        ({"urls": ["http://me:secret@a:1"]}, "engine.urls", "'http://…@a:1' is not"),
        ({"urls": ["http://a:1"], "tensor_parallel": 2}, "engine.tensor_parallel", "--tp-size"),
        ({"urls": ["http://a:1"], "args": {"x": 1}}, "engine.args", "where they are started"),
        ({"urls": ["http://a:1"], "kind": "sglang"}, "engine.urls", "engine.kind = 'sglang_server'"),
    ],
)
def test_settings(engine: dict[str, Any], key: str, message: str) -> None:
    ((found, text),) = Config(engine=EngineConfig(**({"kind": "sglang_server"} | engine))).validate()
    assert (found, message in text) == (key, True)
    assert "secret" not in text


def test_good_settings() -> None:
    urls = ["http://node7:30000", "https://[::1]:8443", "http://10.0.0.2", "http://gate/models/a"]
    assert not Config(engine=EngineConfig(kind="sglang_server", urls=urls)).validate()
