"""Does each algorithm learn the quickstart? `configs/quickstart.toml` on the CPU, one run for every recipe and seed.

Prints a table in Markdown as well: reward of the first five steps and of the last five. Wants
`lightrl fetch smollm2-135m` and `lightrl fetch arithmetic`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

PACKAGES = ("transformers",)
GOAL = 1.5  # times the reward of the first five steps
RECIPES: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": ["--algorithm.normalize_std=false", "--algorithm.aggregation=constant"],
    "rloo": ["--algorithm.advantage=rloo"],
    "reinforce_plus_plus": ["--algorithm.advantage=reinforce_plus_plus"],
    "reinforce_plus_plus_baseline": ["--algorithm.advantage=reinforce_plus_plus_baseline"],
    "gae": ["--algorithm.advantage=gae", "--critic_optim.lr=4e-5"],
    "rloo, KL in the reward": [
        *("--algorithm.advantage=rloo", "--algorithm.kl_coef=0.01"),
        *("--algorithm.kl_in=reward", "--algorithm.kl_estimator=k1"),
    ],
    **{
        f"grpo, {loss}, 4 updates a step": ["--algorithm.minibatches_per_step=4", f"--algorithm.loss={loss}", *flags]
        for loss, flags in {
            "ppo": ["--algorithm.clip_high=0.28"],
            "gspo": ["--algorithm.aggregation=sequence_mean"],
            "cispo": ["--optim.lr=1e-5"],  # a wide bound, and none: the quickstart's rate is too high for four updates
            "sapo": ["--algorithm.aggregation=sequence_mean"],
            "reinforce": ["--optim.lr=1e-5"],
            "dppo_tv": ["--correction.use_rollout_logprobs=true"],
            "dppo_kl": ["--correction.use_rollout_logprobs=true"],
        }.items()
    },
    "grpo, truncated and vetoed": ["--correction.use_tis=true", "--correction.rs_veto_threshold=1e-4"],
    "grpo, score centering": ["--correction.score_centering_top_k=20", "--correction.use_tis=true"],
    "grpo, overlong punishment": ["--algorithm.overlong_buffer=4", "--algorithm.overlong_penalty=0.5"],
}
"""What each changes of the quickstart."""


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--only", help=f"recipes, separated by ';': {'; '.join(RECIPES)}")
    parser.add_argument("--seeds", default="0,1,2", help="of the run; one run each")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, OMP_NUM_THREADS threads each")
    parser.add_argument("--logs", type=Path, help="folder for what the runs print; else it is shown")
    parser.add_argument(
        "--curves", type=Path, help="folder for rewards of runs; those that are there are not run again"
    )
    parser.add_argument("flags", nargs="*", help="of `lightrl train`, behind a `--`")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a recipe: how often the reward of the last five steps is that of the first five, a measurement a seed."""
    names = [n.strip() for n in args.only.split(";")] if args.only else list(RECIPES)
    if unknown := [n for n in names if n not in RECIPES]:
        raise SystemExit(f"--only: no recipe {unknown[0]!r}; there are {'; '.join(RECIPES)}")
    seeds = [int(s) for s in args.seeds.split(",")]
    runs = [(name, seed) for seed in seeds for name in names]
    with ThreadPoolExecutor(args.jobs) as pool:
        curves = dict(zip(runs, pool.map(lambda r: curve(*r, args), runs), strict=True))
    rows, lines = [], ["| recipe | " + " | ".join(f"seed {s}" for s in seeds) + " |", "|---" * (len(seeds) + 1) + "|"]
    for name in names:
        ends = [(sum(c[:5]) / 5, sum(c[-5:]) / 5) for c in (curves[name, seed] for seed in seeds)]
        cells = [f"{first:.2f} → {last:.2f}" for first, last in ends]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        rows.append(common.result_row(f"{name}: reward, last 5 steps over first 5", "times",
                                      [last / max(first, 1e-6) for first, last in ends], better="higher", limit=GOAL,
                                      note="; ".join(cells)))  # fmt: skip
    print("\n".join(["", *lines, ""]))
    return rows


def curve(name: str, seed: int, args: argparse.Namespace) -> list[float]:
    """Mean reward of each step: of a run now, or of one before."""
    file = args.curves and args.curves / f"{file_name(name, seed)}.json"
    if file and file.exists():
        return json.loads(file.read_text())
    rewards = train(name, seed, args)
    if file:
        args.curves.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rewards))
    return rewards


def file_name(name: str, seed: int) -> str:
    return f"{name.replace(' ', '_').replace(',', '')}_{seed}"


def train(name: str, seed: int, args: argparse.Namespace) -> list[float]:
    """Mean reward of each step of one run."""
    path = os.pathsep.join([str(common.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="lightrl_algorithms_") as folder:
        command = [sys.executable, "-m", "lightrl", "train", "configs/quickstart.toml", "--run.dir", f"{folder}/run"]
        command += ["--run.seed", str(seed), "--checkpoint.every", "0", "--eval.every", "0", "--log.save_samples=false"]
        log = None
        if args.logs is not None:
            args.logs.mkdir(parents=True, exist_ok=True)
            log = (args.logs / f"{file_name(name, seed)}.log").open("wb")
        subprocess.run([*command, *RECIPES[name], *args.flags], check=True, cwd=common.ROOT,
                       env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log)  # fmt: skip
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [m["reward/mean"] for m in map(json.loads, lines) if "reward/mean" in m]
