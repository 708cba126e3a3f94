"""The quickstart with SGLang on the trainer's GPUs: does it learn, and how long does a step take?

`torchrun --nproc-per-node N -m lightrl train configs/quickstart.toml configs/quickstart_sglang.toml`, once for every
number of GPUs and seed, evaluated before and after on sums it was not trained on. Wants `lightrl fetch smollm2-135m`
and `lightrl fetch arithmetic`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402

PACKAGES = ("transformers", "sglang")
CONFIGS = ("configs/quickstart.toml", "configs/quickstart_sglang.toml")
GOAL = 1.5  # times the reward of the first five steps
WARM = 5  # steps that do not count in times


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--ranks", default="1,2", help="numbers of GPUs")
    parser.add_argument("--seeds", default="0", help="of the run; one run each")
    parser.add_argument("--logs", type=Path, help="folder for what the runs print; else it is shown")
    parser.add_argument("flags", nargs="*", help="of `lightrl train`, behind a `--`")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Three rows a run: the rise of the reward with all rewards, held-out accuracy, a step's seconds."""
    rows: list[dict[str, Any]] = []
    for ranks in map(int, args.ranks.split(",")):
        for seed in map(int, args.seeds.split(",")):
            with tempfile.TemporaryDirectory(prefix="lightrl_quickstart_") as folder:
                train(Path(folder), ranks, seed, args)
                metrics = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
            rows += make_rows(f"{ranks} GPU{'s' if ranks > 1 else ''}, seed {seed}", metrics)
            print(json.dumps(rows[-3]), flush=True)
    return rows


def train(folder: Path, ranks: int, seed: int, args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "lightrl", "train", *CONFIGS, "--run.dir", str(folder / "run"), "--run.seed", str(seed)]
    command += ["--checkpoint.every", "0", *args.flags]
    path = os.pathsep.join([str(common.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = None
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
        log = (args.logs / f"quickstart_{ranks}_{seed}.log").open("wb")
    subprocess.run(command, check=True, cwd=common.ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log)


def make_rows(case: str, metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = [m for m in metrics if "reward/mean" in m]
    rewards = [m["reward/mean"] for m in steps]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    mismatch = [m["mismatch/logprob_abs_diff"] for m in steps if "mismatch/logprob_abs_diff" in m]
    accuracy = [m["eval/held_out/avg@1"] for m in metrics if "eval/held_out/avg@1" in m]
    late = steps[WARM:]
    middle = {k: sorted(m[f"time/{k}"] for m in late)[len(late) // 2] for k in ("generate", "train", "sync")}
    note = f"{first:.2f} -> {last:.2f}; |log-prob of trainer - engine| {mismatch[0]:.4f} -> {mismatch[-1]:.4f}"
    rise = last / max(first, 1e-6)
    learnt = common.result_row(
        f"{case}: reward, last 5 steps over first 5", "times", [rise], better="higher", limit=GOAL, note=note
    )
    return [
        learnt | {"rewards": [round(r, 4) for r in rewards], "mismatch": [round(m, 5) for m in mismatch]},
        common.result_row(f"{case}: held-out sums right", "of 1", accuracy[-1:], better="higher",
                          note=f"greedily; before training {accuracy[0]:.3f}"),
        common.result_row(f"{case}: step", "s", [m["time/total"] for m in late], better="lower",
                          note=", ".join(f"{k} {v:.3f}" for k, v in middle.items()) + f" s; the first {WARM} left out"),
    ]  # fmt: skip
