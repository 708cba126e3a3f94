"""Counters and one message that two processes on one machine share: a small file in memory.

While weights pass through device memory, both sides must know how far the other is, bucket by bucket. A message through
the engine's own queues costs a millisecond; a counter in shared memory costs none.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Counter = Literal["filled", "drained", "state", "beat", "sender"]

_SIZE = 1 << 16
_OFFSETS: dict[Counter, int] = {"filled": 0, "drained": 8, "state": 16, "beat": 24, "sender": 32}
_TEXT = 40  # length (int64), then the text itself
_PENDING, _DONE, _FAILED = 0, 1, 2


class MailboxError(RuntimeError):
    """The other side failed, died or did not answer; the message says which."""


class MailboxTimeoutError(MailboxError):
    """The other side gave no sign."""


class Mailbox:
    """One pair of processes. The sender counts `filled`, the receiver `drained`, and reports once a round.

    `beat` counts what else the receiver gets done; `sender` is the sender's process id. One side makes it (`path`
    None), the other opens its `path`, while the first has not closed it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file: int | None = None
        self._left: Path | None = None
        if path is None:
            self._file, path, self._left = _make_file()
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def begin(self) -> None:
        """The sender's: a new round, all counters at 0, no report. The receiver must not be in a round."""
        self._map[:_TEXT] = bytes(_TEXT)
        self.set("sender", os.getpid())

    def get(self, counter: Counter) -> int:
        return int(struct.unpack_from("<q", self._map, _OFFSETS[counter])[0])

    def set(self, counter: Counter, value: int) -> None:
        struct.pack_into("<q", self._map, _OFFSETS[counter], value)

    def beat(self) -> None:
        """The receiver's: something is done, though no bucket."""
        self.set("beat", self.get("beat") + 1)

    def report(self, result: dict[str, Any]) -> None:
        """The receiver is done; `result` must be small."""
        self._post(_DONE, json.dumps(result))

    def fail(self, reason: str) -> None:
        """This side gives up; the other raises MailboxError where it waits."""
        self._post(_FAILED, reason)

    def wait(
        self, counter: Counter, least: int, *, timeout: float | None, check: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Return once `counter` is at least `least`; the report, when there is one.

        Raises MailboxError when the other side failed, MailboxTimeoutError when neither `counter` nor `beat` moved in
        `timeout` seconds (None: never). `check` is called now and then and may raise as well, where the other process
        can be seen to have died.
        """
        seen, turns = (0, 0), 0
        since = looked = time.monotonic()
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
                now, sign = time.monotonic(), (self.get(counter), self.get("beat"))
                if sign != seen or now - looked > 1:  # or this process was stopped itself
                    seen, since = sign, now
                looked = now
                if timeout is not None and now - since > timeout:
                    raise MailboxTimeoutError(f"nothing from the other side for {timeout:.0f} s")
            time.sleep(0 if turns < 64 else 5e-5)

    def check_sender(self) -> None:
        """Raise MailboxError if the sender's process is gone."""
        pid = self.get("sender")
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            raise MailboxError(f"the trainer (process {pid}) is gone") from None

    def close(self) -> None:
        """Unmap; with whoever made it, it is gone. Idempotent."""
        self._map.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._left is not None:
            self._left.unlink(missing_ok=True)

    def _post(self, state: int, text: str) -> None:
        data = text.encode()[: _SIZE - _TEXT - 8]
        struct.pack_into("<q", self._map, _TEXT, len(data))
        self._map[_TEXT + 8 : _TEXT + 8 + len(data)] = data
        self.set("state", state)  # last: it is what the other side looks at

    def _text(self) -> str:
        (length,) = struct.unpack_from("<q", self._map, _TEXT)
        return bytes(self._map[_TEXT + 8 : _TEXT + 8 + length]).decode(errors="replace")


def _make_file() -> tuple[int, Path, Path | None]:
    """Descriptor, and the path by which processes of the same user open it while this one runs.

    In no folder: nothing stays, however processes end. On systems without such files it is a temporary one, which is
    the third.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("lightrl_mailbox")
        os.ftruncate(file, _SIZE)
        path = Path(f"/proc/{os.getpid()}/fd/{file}")
        if path.exists():
            return file, path, None
        os.close(file)
    file, name = tempfile.mkstemp(prefix="lightrl_mailbox_")
    os.ftruncate(file, _SIZE)
    return file, Path(name), Path(name)
