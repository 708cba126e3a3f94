"""What is left of one GPU's rate where more train together, each on as many tokens: `train_step` on 1 GPU, then on 2.

Ours and the peer are those of `train_step`, at the same rows on each GPU; more GPUs share parameters and optimizer
(FSDP2). Efficiency is tokens/s/GPU of many over those of one, medians, in the same run on the same host; 1 is what is
possible. What takes time beside the GPU's own work is gathering parameters and summing gradients, as far as it is not
hidden behind it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402
import train_step  # noqa: E402

PACKAGES = train_step.PACKAGES
AIM = 0.98


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--shapes", default="Qwen3-4B", help=f"of {', '.join(train_step.SHAPES)}")
    parser.add_argument("--rows", default="16384x1", help="LENGTHxCOUNT, …: rows of a step, on each GPU")
    parser.add_argument("--variants", default="kept", help="of train_step")
    parser.add_argument("--repeats", type=int, default=7, help="measured steps of each, taking turns")
    parser.add_argument("--gpus", default="1,2", help="numbers of ranks; the first is what others are held against")
    parser.add_argument(
        "--peer", default="stock", choices=("stock", "none"), help="none: ours alone, in half the memory"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rates for each number of GPUs, then the efficiency of all but the first."""
    rows: list[dict[str, Any]] = []
    first, *others = (int(count) for count in args.gpus.split(","))
    for shape in args.shapes.split(","):
        options = {k: getattr(args, k) for k in ("rows", "variants", "repeats", "device", "peer")}
        options |= {"shape": shape, "kernels": "auto", "profile": False}
        measured = {count: train_step.run_ranks(options, count) for count in (first, *others)}
        print(json.dumps(measured), flush=True)
        for count, cases in measured.items():
            rows += [row | {"goal": None} for case in cases for row in train_step.make_rows(shape, count, case)]
        for count in others:
            pairs = zip(measured[first], measured[count], strict=True)
            rows += [efficiency(shape, first, count, one, many) for one, many in pairs]
    return rows


def efficiency(shape: str, first: int, count: int, one: dict[str, Any], many: dict[str, Any]) -> dict[str, Any]:
    """Each step on many GPUs against the median on the first number of them."""

    def shares(who: str) -> list[float]:
        if not one["seconds"][who]:
            return []
        base = statistics.median(one["seconds"][who])
        return [base / seconds for seconds in many["seconds"][who]]

    rows = f"{one['count']} x {one['length']} a GPU, {train_step.VARIANTS[one['variant']]}"
    return common.result_row(
        f"{shape}, {rows}, {first} -> {count} GPUs",
        "of one's rate",
        shares("ours"),
        shares("peer"),
        better="higher",
        peer_name=train_step.PEER if one["seconds"]["peer"] else None,
        limit=1.0,
        goal=1.0,
        note=f"aim: at least {AIM}",
    )
