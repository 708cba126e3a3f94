"""What differs between versions of SGLang, on stand-ins for its classes."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.engine import sglang_versions as versions


def test_supported_versions() -> None:
    assert versions.version_problem("0.5.17") is None
    assert versions.version_problem("0.5.23.post2") is None
    for text in ("0.5.16", "0.5.24", "0.4.9", "0.6.0", "nonsense"):
        assert f"SGLang {text} is installed; supported are 0.5.17 to 0.5.23" in str(versions.version_problem(text))
    assert not versions.needs_weight_session("0.5.20.post1")
    assert versions.needs_weight_session("0.5.21")


@dataclasses.dataclass
class Older:
    """`ServerArgs` up to 0.5.18: decisions are written back."""

    model_path: str
    tp_size: int = 1
    enable_deterministic_inference: bool = True


class Newer:
    """A struct of msgspec from 0.5.20 on: no dataclass, what was asked for stays."""

    def __init__(self, model_path: str, sampling_mask_max_tokens: int = 4096, _set: bool = False) -> None:
        self.enable_deterministic_inference = False

    def resolved_dict(self) -> dict[str, Any]:
        return {"enable_deterministic_inference": True}


def test_arguments_of_both_kinds() -> None:
    arguments = {"model_path": "m", "sampling_mask_max_tokens": 9}
    assert versions.present(arguments, versions.argument_names(Older)) == {"model_path": "m"}
    assert versions.present(arguments, versions.argument_names(Newer)) == arguments
    assert "_set" not in versions.argument_names(Newer)
    assert versions.present({"model_path": None}, {"model_path"}) == {}
    with pytest.raises(RuntimeError, match="has no argument tp_size, which LightRL must set"):
        versions.present({"tp_size": None}, versions.argument_names(Newer))
    for server_args in (Older("m"), Newer("m")):
        assert versions.in_effect(server_args, "enable_deterministic_inference") is True


class Manager:
    """From 0.5.21 on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def begin_weight_update(self, request: Any, _: None) -> tuple[bool, str]:
        already = self.calls[-1:] == ["begin"]
        self.calls.append(request)
        return not already, "a session is already open"

    async def end_weight_update(self, request: Any, _: None) -> tuple[bool, str]:
        self.calls.append(request)
        return True, ""


MESSAGES = SimpleNamespace(BeginWeightUpdateReqInput=lambda: "begin", EndWeightUpdateReqInput=lambda: "end")


async def _update(manager: Any, fails: bool = False) -> None:
    async with versions.weight_session(manager, MESSAGES):
        if fails:
            raise KeyError("a defect")
        if isinstance(manager, Manager):
            manager.calls.append("update")


def test_weight_sessions() -> None:
    manager = Manager()
    asyncio.run(_update(manager))
    assert manager.calls == ["begin", "update", "end"]
    with pytest.raises(KeyError):
        asyncio.run(_update(manager, fails=True))
    assert manager.calls[3:] == ["begin", "end"]  # or the next one would be refused
    manager.calls = ["begin"]
    with pytest.raises(RuntimeError, match="already open"):
        asyncio.run(_update(manager))
    assert manager.calls == ["begin", "begin"]
    asyncio.run(_update(object()))  # before 0.5.21 there are none
