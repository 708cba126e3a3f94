"""Messages between two processes of a job, over a socket: JSON with its length, 8 bytes, in front."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">Q")


def encode(message: dict[str, Any]) -> bytes:
    """The bytes to send."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


def read(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the other side has closed."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    data = _exactly(connection, _LENGTH.unpack(head)[0])
    return None if data is None else dict(json.loads(data))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        try:
            part = connection.recv(min(count, 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
