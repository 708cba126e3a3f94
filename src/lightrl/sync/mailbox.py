"""Counters and one message that two processes on one machine share: a small memory-mapped file.

While weights pass through device memory, both sides must know how far the other is, bucket by bucket. A message through
the engine's own queues costs a millisecond; a counter in shared memory costs none.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Counter = Literal["filled", "drained", "state"]

_SIZE = 1 << 16
_OFFSETS: dict[Counter, int] = {"filled": 0, "drained": 8, "state": 16}
_TEXT = 32  # length (int64), then the text itself
_PENDING, _DONE, _FAILED = 0, 1, 2


class MailboxError(RuntimeError):
    """The other side failed, died or did not answer; the message says which."""


class Mailbox:
    """One pair of processes. The sender counts `filled`, the receiver `drained`, and reports once a round."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if create:
            with path.open("wb") as file:
                file.truncate(_SIZE)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def begin(self) -> None:
        """A new round: all counters at 0, no report. The other side must not be in a round."""
        self._map[:_TEXT] = bytes(_TEXT)

    def get(self, counter: Counter) -> int:
        return int(struct.unpack_from("<q", self._map, _OFFSETS[counter])[0])

    def set(self, counter: Counter, value: int) -> None:
        struct.pack_into("<q", self._map, _OFFSETS[counter], value)

    def report(self, result: dict[str, Any]) -> None:
        """The receiver is done; `result` must be small."""
        self._post(_DONE, json.dumps(result))

    def fail(self, reason: str) -> None:
        """This side gives up; the other raises MailboxError where it waits."""
        self._post(_FAILED, reason)

    def wait(
        self, counter: Counter, least: int, *, timeout: float, check: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Return once `counter` is at least `least`; the report, when there is one.

        Raises MailboxError when the other side failed or nothing came in `timeout` seconds. `check` is called now and
        then and may raise as well, where the other process can be seen to have died.
        """
        deadline = time.monotonic() + timeout
        turns = 0
        while True:
            state = self.get("state")
            if state == _FAILED:
                raise MailboxError(self._text())
            if self.get(counter) >= least:
                return dict(json.loads(self._text())) if state == _DONE else {}
            turns += 1
            if turns % 256 == 0:  # about every 20 ms
                if check is not None:
                    check()
                if time.monotonic() > deadline:
                    raise MailboxError(f"nothing from the other side for {timeout:.0f} s")
            time.sleep(0 if turns < 64 else 5e-5)

    def close(self) -> None:
        """Unmap; the file goes when whoever made it removes it."""
        self._map.close()

    def _post(self, state: int, text: str) -> None:
        data = text.encode()[: _SIZE - _TEXT - 8]
        struct.pack_into("<q", self._map, _TEXT, len(data))
        self._map[_TEXT + 8 : _TEXT + 8 + len(data)] = data
        self.set("state", state)  # last: it is what the other side looks at

    def _text(self) -> str:
        (length,) = struct.unpack_from("<q", self._map, _TEXT)
        return bytes(self._map[_TEXT + 8 : _TEXT + 8 + length]).decode(errors="replace")
