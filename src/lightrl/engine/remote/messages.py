"""Requests and answers as JSON, exactly: a float of Python's comes back as the same one."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from lightrl.engine.base import Completion, EngineLostError, GenerateRequest, SamplingParams
from lightrl.errors import LostError, UserError
from lightrl.types import Status


def pack_request(request: GenerateRequest) -> dict[str, Any]:
    return vars(request) | {"sampling": vars(request.sampling)}


def unpack_request(fields: dict[str, Any]) -> GenerateRequest:
    sampling: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields["sampling"].items()}
    seeds = None if fields["seeds"] is None else tuple(fields["seeds"])
    return GenerateRequest(**fields | {"sampling": SamplingParams(**sampling), "seeds": seeds})


def pack_completion(completion: Completion) -> dict[str, Any]:
    routing = completion.routing
    return vars(completion) | {
        "status": str(completion.status),
        "routing": None if routing is None else pack_tensor(routing),
    }


def unpack_completion(fields: dict[str, Any]) -> Completion:
    routing = fields["routing"]
    return Completion(
        **fields | {"status": Status(fields["status"]), "routing": None if routing is None else unpack_tensor(routing)}
    )


def pack_tensor(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().cpu()
    return {
        "shape": list(data.shape),
        "dtype": str(data.dtype).removeprefix("torch."),
        "data": base64.b64encode(data.numpy().tobytes()).decode(),
    }


def unpack_tensor(fields: dict[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(fields["data"]))
    dtype = getattr(torch, fields["dtype"])
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(fields["shape"])


def pack_error(error: BaseException) -> dict[str, Any]:
    """What is told of an error: its kind, as far as others act on it, and its text."""
    kinds = {"engine_lost": EngineLostError, "user": UserError, "lost": LostError, "value": ValueError}
    kind = next((name for name, kind in kinds.items() if isinstance(error, kind)), "other")
    text = str(error) if kind != "other" else f"{type(error).__name__}: {error}"
    finished = {}
    if isinstance(error, EngineLostError):
        finished = {str(place): pack_completion(completion) for place, completion in error.finished.items()}
        if isinstance(error, UserError):  # it did not even start
            kind = "user"
    return {"kind": kind, "text": text, "finished": finished}


def unpack_error(fields: dict[str, Any]) -> Exception:
    """The error that was told, as one of the same kind."""
    text = fields["text"]
    if fields["kind"] == "engine_lost":
        finished = {int(place): unpack_completion(found) for place, found in fields["finished"].items()}
        return EngineLostError(text, finished)
    kinds: dict[str, type[Exception]] = {"user": UserError, "lost": LostError, "value": ValueError}
    return kinds.get(fields["kind"], RuntimeError)(text)
