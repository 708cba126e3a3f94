"""How OpenMP's threads wait for work. Imports no torch, as it has to come first."""

from __future__ import annotations

import os
import sys


def sleep_while_waiting() -> None:
    """Let threads without work sleep (`OMP_WAIT_POLICY=passive`), unless the user has chosen.

    Threads that spin take the cores from other processes: steps on a shared CPU are up to three times slower. OpenMP
    reads the variable once, when torch loads it: afterwards this does nothing.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
