"""A process that grades: JSON lines in, JSON lines out. Started by `pool.py`; imports no torch and no user's code."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from lightrl.rewards.answer import Answer
from lightrl.rewards.registry import function_of

_MEMORY = 4 << 30  # bytes of address space: a response such as 9**9**9 must not eat the machine
_GRACE = 5.0  # seconds after which the kernel ends a call that nobody killed


def main(parent: int) -> None:
    """Serve until the parent closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit_memory()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its own timeouts are off; the pool has some
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not end up among the replies
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    for line in sys.stdin:
        request = json.loads(line)
        # The default action of SIGALRM ends the process from the kernel, even inside one long C call (a huge power),
        # where no Python code could: without the parent nothing else would.
        signal.setitimer(signal.ITIMER_REAL, request["timeout"] + _GRACE)
        reply = _serve(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    try:
        function = function_of(request["function"])
        if request["answer"] is None:  # warm-up: imports and first parse cost seconds that no answer should pay
            function(Answer(response=r"\boxed{2}", label="x + 1"))
            return {"value": None}
        return {"value": function(Answer(**request["answer"]))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()[-8000:]}


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY if hard < 0 else min(_MEMORY, hard), hard))


def _leave_with(parent: int) -> None:
    """End when the parent was killed: its pipe may be held open by a process that it forked."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)
