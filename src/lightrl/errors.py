"""Errors that are the user's to fix, and which of two errors is told."""

from __future__ import annotations

import sys
from collections.abc import Callable


class UserError(ValueError):
    """Wrong input: the message names the key, file:line or sample, and the fix. The command line exits with 2."""


class LostError(RuntimeError):
    """What a run needs and is no part of it (an engine, a server) is gone or fails: told without a traceback, which
    would only show who waited for it. The command line exits with 1."""

    @property
    def line(self) -> str:
        """The message alone, where it goes on with the end of a log."""
        return str(self).partition("\n")[0]


def end(part: Callable[[], object]) -> None:
    """Call what ends a part of a run. Where another error is on its way, which is why it ends, what fails here becomes
    its note: the first reason is the one to be seen.

    Ranks end each on its own. Where several share an engine, the GPUs of all but the first are still full of it, and
    training state that was away finds no room to come back to.
    """
    first = sys.exception()
    try:
        part()
    except Exception as error:
        if first is None:
            raise
        first.add_note(f"(while that ended: {type(error).__name__}: {error})")
