"""Only names: SGLang imports its CUDA kernels by the dozen. The CPU engine calls none; a call says which it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"sgl_kernel.{name} runs on a GPU only")

    return kernel
