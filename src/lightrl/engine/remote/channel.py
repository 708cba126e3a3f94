"""One connection between two ranks of a job on one machine: messages of JSON over a socket in a private folder.

Only processes of the same user can enter the folder, so nobody else can connect, and no port is opened.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightrl.engine import frames


class Channel:
    """`on_message` gets what comes, `on_end` is called once the other side is gone, both in a thread that reads.

    `send` may be called from any thread; when the other side is gone it does nothing, as `on_end` tells.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._reader: threading.Thread | None = None

    def receive(self) -> dict[str, Any]:
        """One message, before `read` takes over. ConnectionError when the other side is gone."""
        message = frames.read(self._connection)
        if message is None:
            raise ConnectionError("the other side has closed")
        return message

    def read(self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Begin to read."""

        def run() -> None:
            try:
                while (message := frames.read(self._connection)) is not None:
                    on_message(message)
            except OSError:
                pass  # closed here
            finally:
                on_end()

        self._reader = threading.Thread(target=run, name="lightrl-channel", daemon=True)
        self._reader.start()

    def send(self, message: dict[str, Any]) -> None:
        data = frames.encode(message)
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(data)

    def close(self) -> None:
        """Idempotent; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(5)
        self._connection.close()


class Listener:
    """Where the ranks that train find one that generates: a socket in a folder of its own, removed by `close`."""

    def __init__(self) -> None:
        base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 70 else "/tmp"  # paths of sockets are short
        self._folder = Path(tempfile.mkdtemp(prefix="lightrl_", dir=base))  # for its owner alone
        self.path = self._folder / "rank"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.path))
        self._socket.listen(1024)

    def accept(self, timeout: float) -> Channel:
        """TimeoutError when nobody comes."""
        self._socket.settimeout(timeout)
        connection, _ = self._socket.accept()
        connection.settimeout(None)
        return Channel(connection)

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def connect(path: str) -> Channel:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return Channel(connection)
