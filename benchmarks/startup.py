"""Seconds until `lightrl --help`, a config error and `import lightrl` are done, as whole processes.

Peers: the same of TRL, where it is installed. `limit` is the second that help and errors must stay under.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, result_row

PACKAGES = ("trl",)
LIMIT = 1.0
BAD_CONFIG = '[optim]\nlrr = 1e-6\nbetas = [0.9]\n[rollout]\ntemperature = "hot"\n'


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--repeats", type=int, default=7, help="processes a case")


def run(args: argparse.Namespace | None = None) -> list[dict[str, Any]]:
    """Rows for help, help of one command, a config error, and import; ours and the peer's take turns."""
    repeats = 7 if args is None else args.repeats
    trl = shutil.which("trl", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    ours = [sys.executable, "-m", "lightrl"]
    empty, _ = measure([sys.executable, "-c", "pass"], None, repeats)
    rows = []
    with tempfile.TemporaryDirectory(prefix="lightrl-startup-") as folder:
        bad = Path(folder, "bad.toml")
        bad.write_text(BAD_CONFIG, encoding="utf-8")
        bad_trl = Path(folder, "bad.yaml")
        bad_trl.write_text("learning_rat: 1.0e-6\n", encoding="utf-8")
        cases: list[tuple[str, list[str], list[str] | None, int]] = [
            ("lightrl --help", [*ours, "--help"], [trl, "--help"] if trl else None, 0),
            ("lightrl train --help", [*ours, "train", "--help"], [trl, "grpo", "--help"] if trl else None, 0),
            (
                "config error, 3 problems",
                [*ours, "train", str(bad)],
                [trl, "grpo", "--config", str(bad_trl)] if trl else None,
                2,
            ),
            (
                "import lightrl",
                [sys.executable, "-c", "from lightrl import Config, load_config"],
                [sys.executable, "-c", "from trl import GRPOConfig"] if trl else None,
                0,
            ),
        ]
        for case, mine, peer, status in cases:
            taken, other = measure(mine, peer, repeats, status)
            rows.append(
                result_row(
                    case,
                    "s",
                    taken,
                    other,
                    better="lower",
                    peer_name="trl" if other else None,
                    limit=LIMIT,
                    note=f"of it {sorted(empty)[len(empty) // 2]:.3f} s for Python itself",
                )
            )
    return rows


def measure(
    ours: Sequence[str], peer: Sequence[str] | None, repeats: int, status: int = 0
) -> tuple[list[float], list[float]]:
    """Seconds of each process, in turns; the first of both is a warm-up and left out.

    Raises RuntimeError when ours ends with another status than it should: a failed start is not a fast one.
    """
    mine, other = [], []
    for _ in range(repeats + 1):
        seconds, code = timed(ours)
        if code != status:
            raise RuntimeError(f"{' '.join(ours)} ended with {code}, not {status}")
        mine.append(seconds)
        if peer is not None:
            other.append(timed(peer)[0])
    return mine[1:], other[1:]


def timed(command: Sequence[str]) -> tuple[float, int]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=300)
    return time.perf_counter() - start, done.returncode
