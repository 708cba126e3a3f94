"""Memory that the trainer fills and the engine's process reads: by CUDA IPC handles on a GPU, mapped files on a CPU.

The only place that knows how. Either way the engine's side gets one message and the buffers (`open_shared`), which
arrive with SGLang's own request for an update of weights: a list of named tensors, pickled.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

EMPTY_PAYLOAD = base64.b64encode(pickle.dumps([], protocol=4)).decode()
"""No tensors: the buffers are open already."""


class SharedBuffers:
    """`count` buffers of `num_bytes` (uint8) on `device`, owned by the process that makes them.

    On a CPU (Linux) they are files in memory that have no name: nothing is left behind, however processes end, and only
    those of the same user can open them, while this one runs.
    """

    def __init__(self, count: int, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self._files: list[int] = []
        if device.type == "cpu":
            self._files = [_make_file(num_bytes) for _ in range(count)]
            self.buffers = [_map(_path(file)) for file in self._files]
        else:
            self.buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]

    def payload(self, message: dict[str, Any]) -> str:
        """`message` (JSON) and what opens the buffers, for SGLang's `update_weights_from_tensor`."""
        text = json.dumps(message | {"files": [_path(file) for file in self._files]})
        if self.device.type == "cpu":
            return _encode([(text, _Call(torch.Tensor, ()))])  # SGLang wants a tensor with every name
        return ipc_payload([(text, self.buffers[0]), *(("", buffer) for buffer in self.buffers[1:])])

    def close(self) -> None:
        """Give the memory back; the other side has let go of it."""
        self.buffers.clear()
        while self._files:
            os.close(self._files.pop())
        release_shared()


def open_shared(named_tensors: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], list[Tensor]]:
    """The engine's side: message and buffers of `SharedBuffers.payload`, as SGLang hands them over."""
    message = json.loads(named_tensors[0][0])
    files = message.pop("files")
    return message, [_map(path) for path in files] if files else [tensor for _, tensor in named_tensors]


def release_shared() -> None:
    """After letting go of opened buffers: return CUDA's own hold on them."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def synchronize(device: torch.device) -> None:
    """Wait until what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _make_file(num_bytes: int) -> int:
    """Descriptor of a file in memory."""
    file = os.memfd_create("lightrl_weights")
    try:
        os.posix_fallocate(file, 0, num_bytes)  # an error now, where there is no room: later, a signal
    except OSError:
        os.close(file)
        raise
    return file


def _path(file: int) -> str:
    """Where processes of the same user open it, as long as this one keeps it open."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _map(path: str) -> Tensor:
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


class _Call:
    """Pickles as a call of a function of torch."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def ipc_payload(named: Sequence[tuple[str, Tensor]]) -> str:
    """Names and CUDA IPC handles of tensors, as base64 of a pickle that holds only torch's own types.

    The device goes by its UUID, which SGLang's side translates: its processes may number devices differently. Memory
    of expandable segments cannot be exported; callers refuse it beforehand.
    """
    from torch.multiprocessing import reductions

    handles = []
    for name, tensor in named:
        function, arguments = reductions.reduce_tensor(tensor)
        assert function is reductions.rebuild_cuda_tensor, f"{name!r} is not on a CUDA device"
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        handles.append((name, _Call(function, (*arguments[:6], uuid, *arguments[7:]))))
    return _encode(handles)


def _encode(named: Sequence[tuple[str, _Call]]) -> str:
    return base64.b64encode(pickle.dumps(named, protocol=4)).decode()
