"""Two GPUs under torchrun, of which one trains and the other generates with SGLang (`parallel.rollout_ranks = 1`)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

STEPS = 30
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}  # no NVLink multicast: it is not to be had everywhere
ENGINE = {"kind": "sglang", "memory_fraction": 0.5}
SHAPE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 512}


def sections(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"device": "cuda", "steps": STEPS},
        "model": {"compute_dtype": "bfloat16"},
        "engine": ENGINE,
        "parallel": {"rollout_ranks": 1},
        "rollout": {"prompts_per_step": 8, "group_size": 8},
        "optim": {"lr": 1e-2},
        "sync": {"verify_every": 1},  # the run ends where the engine holds anything else than the trainer
        "checkpoint": {"every": 0},
        "log": {"trackers": ["jsonl"], "print_samples": 0, "save_samples": False},
    }
    for name, section in more.items():
        base[name] = base.get(name, {}) | section
    return base


def schedulers() -> list[int]:
    """Process ids of SGLang's schedulers below this job."""
    import psutil

    family = psutil.Process(os.getppid()).children(recursive=True)
    return [p.pid for p in family if "sglang::scheduler" in " ".join(p.cmdline()) or "scheduler" in p.name()]


# ---- in the ranks


def learn(folder: str, overrides: str, kill_in: str = "") -> None:
    """A whole run; in step `kill_in` the engine's scheduler is killed in the middle of the rollout."""
    from lightrl.distributed.mesh import close_world
    from lightrl.training.rollout_ranks import serve_rollouts
    from lightrl.training.trainer import Trainer

    config = tiny_run.make_run(Path(folder), **json.loads(overrides))
    if serve_rollouts(config):
        return
    trainer = Trainer(config)
    found: list[Any] = []
    collect = trainer.collect

    def noting(*given: Any) -> Any:
        if kill_in and trainer.steps_done + 1 == int(kill_in):
            pids = schedulers()
            assert pids, "no scheduler found"
            threading.Timer(0.05, os.kill, (pids[0], signal.SIGKILL)).start()
            start = time.monotonic()
        groups = collect(*given)
        if kill_in and trainer.steps_done + 1 == int(kill_in):
            print(f"rollout with a killed scheduler took {time.monotonic() - start:.0f} s", flush=True)
        for sample in (s for g in groups for s in g.samples):
            found.append((trainer.policy_version, sample.group_index, sample.index, sample.policy_versions))
        return groups

    trainer.collect = noting  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    (Path(folder) / "groups.json").write_text(json.dumps(found))
    close_world()


# ---- the tests


def values(folder: Path, name: str) -> list[float]:
    return [value for _, value in tiny_run.metrics_of(folder, name)]


def make_files(folder: Path) -> None:
    tiny_run.make_model(folder / "model", **SHAPE)
    tiny_run.make_data(folder / "data.jsonl")


def test_it_learns_and_an_engine_that_dies_is_replaced(tmp_path: Path, run_distributed: Any) -> None:
    """`sync`: all weights are compared after each sync, and lost answers are sampled again."""
    make_files(tmp_path)
    output = run_distributed(learn, 2, tmp_path, json.dumps(sections()), "3", timeout=420, env=ENVIRONMENT)
    print(*(line for line in output.splitlines() if "killed scheduler" in line or "started anew" in line))
    assert "started anew" in output
    rows = json.loads((tmp_path / "groups.json").read_text())
    assert sorted((row[1], row[2]) for row in rows) == [(g, i) for g in range(8 * STEPS) for i in range(8)]
    assert all(row[3] == [row[0]] for row in rows)
    rewards = values(tmp_path, "reward/mean")
    print([round(r, 2) for r in rewards], "sync", [round(s, 3) for s in values(tmp_path, "time/sync")][-5:])
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    assert max(values(tmp_path, "mismatch/logprob_abs_diff")) < 0.03


def test_an_asynchronous_run(tmp_path: Path, run_distributed: Any) -> None:
    """New weights under answers that are under way; nothing older than allowed, nothing lost or doubled."""
    make_files(tmp_path)
    more = sections(
        rollout={"schedule": "async", "max_staleness": 2, "max_response_tokens": 200},
        correction={"use_tis": True},
        optim={"lr": 1e-4},
    )
    run_distributed(learn, 2, tmp_path, json.dumps(more), timeout=420, env=ENVIRONMENT)
    rows = json.loads((tmp_path / "groups.json").read_text())
    assert sorted((row[1], row[2]) for row in rows) == [(g, i) for g in range(8 * STEPS) for i in range(8)]
    ages = [row[0] - min(row[3]) for row in rows]
    assert min(ages) >= 0
    assert 0 < max(ages) <= 2
    several = sum(len(row[3]) > 1 for row in rows)
    print(f"{several} of {len(rows)} answers have tokens of several versions")
    assert several
    idle, waited = (values(tmp_path, name) for name in ("engine/idle_share", "time/wait_for_rollouts"))
    print("idle", [round(v, 2) for v in idle[-5:]], "waited", [round(v, 2) for v in waited[-5:]])
