"""Any name, for `from torchvision… import NAME`: what it stands for fails when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"torchvision's {name} is not here: these tests know no images")

    return function
