"""Which versions of SGLang work, and what differs between them as far as LightRL uses it. Imports nothing of SGLang.

From 0.5.19 on `ServerArgs` keeps what was asked for, and `resolved_dict` says what is in effect. From 0.5.20 on it is
no dataclass, and an answer whose truncated log-probs are wanted needs a top_k of at most `sampling_mask_max_tokens`
(4096 unless set). From 0.5.21 on weights are taken only between `begin_weight_update` and `end_weight_update`. Routed
experts are returned alike by all (`sglang_routing.py`).
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import AsyncIterator
from typing import Any

SUPPORTED = ((0, 5, 17), (0, 5, 23))
"""First and last version that works; docs/engines.md says what was run of them."""
_ON_GPUS = (0, 5, 17)
_SESSIONS = (0, 5, 21)
_LATER = {"sampling_mask_max_tokens"}
"""Arguments that some supported versions lack and do without."""


def version_problem(text: str) -> str | None:
    """What is wrong with this version of SGLang.

    >>> version_problem("0.5.17.post1") is None
    True
    """
    if SUPPORTED[0] <= _parse(text) <= SUPPORTED[1]:
        return None
    first, last = (".".join(map(str, v)) for v in SUPPORTED)
    return f"SGLang {text} is installed; supported are {first} to {last}: pip install 'sglang=={last}'"


def version_note(text: str) -> str:
    """What is known of a supported version.

    >>> version_note("0.5.17")
    'supported, and was run on GPUs'
    """
    if _parse(text) == _ON_GPUS:
        return "supported, and was run on GPUs"
    return f"supported, but run on CPUs only so far; on GPUs {'.'.join(map(str, _ON_GPUS))} was"


def needs_weight_session(text: str) -> bool:
    """Whether a server of this version takes broadcast weights only within a session.

    >>> needs_weight_session("0.5.20"), needs_weight_session("0.5.21")
    (False, True)
    """
    return _parse(text) >= _SESSIONS


def argument_names(server_args: type) -> set[str]:
    """Public names that `ServerArgs` takes, be it a dataclass or a struct of msgspec."""
    return {name for name in inspect.signature(server_args).parameters if not name.startswith("_")}


def present(arguments: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Those that this version has and that are set. RuntimeError if it lacks one that must not be lost silently."""
    if lost := arguments.keys() - known - _LATER:
        raise RuntimeError(f"this SGLang has no argument {', '.join(sorted(lost))}, which LightRL must set")
    return {name: value for name, value in arguments.items() if name in known and value is not None}


def in_effect(server_args: Any, name: str) -> Any:
    """The value of a setting after SGLang decided on what was left to it."""
    resolved = getattr(server_args, "resolved_dict", None)
    return getattr(server_args, name, None) if resolved is None else resolved().get(name)


@contextlib.asynccontextmanager
async def weight_session(manager: Any, messages: Any) -> AsyncIterator[None]:
    """Where `manager`, SGLang's tokenizer manager, takes weights; `messages` is its module `io_struct`."""
    if not hasattr(manager, "begin_weight_update"):
        yield
        return
    _check(await manager.begin_weight_update(messages.BeginWeightUpdateReqInput(), None))
    try:
        yield
    finally:
        ended = await manager.end_weight_update(messages.EndWeightUpdateReqInput(), None)
    _check(ended)


def _check(answer: tuple[bool, str]) -> None:
    done, text = answer
    if not done:
        raise RuntimeError(text)


def _parse(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
