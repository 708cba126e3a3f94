"""Rollouts beside training on two ranks: servers whose weights change under requests, and embedded engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # environments are there

FAKE = Path(__file__).parents[1] / "engine" / "fake_sglang.py"
ASYNC = {
    "run": {"steps": 5},
    "rollout": {"schedule": "async", "max_staleness": 2, "max_response_tokens": 60},
    "correction": {"use_tis": True},
    "sync": {"timeout": 30},
}
OFF = {
    "run": {"steps": 3},
    "rollout": {"schedule": "one_step_off"},
    "correction": {"use_tis": True},
    "checkpoint": {"every": 0, "hf_every": 3},
}


def of_episodes(settings: dict[str, Any]) -> dict[str, Any]:
    """Of several turns: many tokens end one."""
    turns = {"stop_token_ids": [3, 4, 5, 6, 7], "max_response_tokens": 60}
    agent = {"environment": "test_agent_schedules:Slow", "max_turns": 3}
    rollout = settings["rollout"] | turns
    return settings | {"rollout": rollout, "agent": agent, "data": {"apply_chat_template": True}}


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """URL of a server, in a process of its own, for the model of a tiny run in `tmp_path`."""
    tiny_run.make_run(tmp_path / "a")
    command = [sys.executable, str(FAKE), str(tmp_path / "a" / "model")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.wait()


def noted_run(folder: Path, overrides: dict[str, Any], name: str = "run", rank_of_failure: int | None = None) -> None:
    """Train in `folder/name`, and write what this rank collected to `groups_RANK.json` there."""
    from lightrl.training.trainer import Trainer

    overrides = overrides | {"run": overrides["run"] | {"dir": str(folder / name)}}
    trainer = Trainer(tiny_run.make_run(folder, **overrides))
    found: list[Any] = []
    collect = trainer.collect

    def noting(*given: Any) -> Any:
        groups = collect(*given)
        for sample in (s for g in groups for s in g.samples):
            row = (trainer.policy_version, sample.group_index, sample.prompt.index, sample.index, sample.tokens)
            found.append([*row, sample.policy_versions, sample.version_tokens, sample.metadata.get("turns")])
        return groups

    def failing(*given: Any) -> Any:
        raise RuntimeError("the generator of rank 1 broke")

    trainer.collect = noting  # type: ignore[method-assign]
    if rank_of_failure == trainer.world.rank:
        trainer.engine._forward = failing  # type: ignore[attr-defined]
    trainer.train()
    (folder / name / f"groups_{trainer.world.rank}.json").write_text(json.dumps(found))
    trainer.close()


def all_runs(folder: str, server: str) -> None:
    """On each rank: asynchronous runs with servers, then one_step_off with embedded engines, in one process group."""
    from lightrl.distributed.mesh import close_world

    on_server = {"engine": {"kind": "sglang_server", "urls": [server]}}
    noted_run(Path(folder) / "a", ASYNC | on_server)
    noted_run(Path(folder) / "a", of_episodes(ASYNC) | on_server, "episodes")
    noted_run(Path(folder) / "b", OFF)
    noted_run(Path(folder) / "b", of_episodes(OFF), "episodes")
    close_world()


def failing_run(folder: str) -> None:
    noted_run(Path(folder), OFF, rank_of_failure=1)


def rows_of(folder: Path, ranks: int) -> list[Any]:
    return sorted(row for rank in range(ranks) for row in json.loads((folder / f"groups_{rank}.json").read_text()))


def test_two_ranks_with_servers_and_with_embedded_engines(tmp_path: Path, server: str, run_distributed: Any) -> None:
    from lightrl.distributed.mesh import close_world

    for name in "bc":
        (tmp_path / name).mkdir()
        tiny_run.make_run(tmp_path / name)
    run_distributed(all_runs, 2, tmp_path, server, timeout=240)
    # servers: every prompt in its order, and nothing older than allowed, though answers and episodes outlived weights
    for name in ("run", "episodes"):
        rows = rows_of(tmp_path / "a" / name, 2)
        assert any((row[7] or 0) > 1 for row in rows) == (name == "episodes")
        assert [(row[1], row[3]) for row in rows] == [(group, i) for group in range(20) for i in range(4)]
        assert [row[0] for row in rows] == [version for version in range(5) for _ in range(16)]
        ages = [row[0] - min(row[5]) for row in rows]
        assert min(ages) >= 0
        assert 0 < max(ages) <= 2
        for row in rows:
            assert row[6] is None or (len(row[6]) == len(row[5]) and row[5] == sorted(set(row[5])))
    # embedded engines: two ranks sample and train as one does
    noted_run(tmp_path / "c", OFF)
    noted_run(tmp_path / "c", of_episodes(OFF), "episodes")
    close_world()
    for name in ("run", "episodes"):
        assert any((row[7] or 0) > 1 for row in rows_of(tmp_path / "c" / name, 1)) == (name == "episodes")
        assert rows_of(tmp_path / "b" / name, 2) == rows_of(tmp_path / "c" / name, 1)
        ours, theirs = (tiny_run.exported(tmp_path / folder, 3, name) for folder in "bc")
        for key, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[key], atol=2e-4, rtol=0, msg=f"{name}: {key}")


def test_a_generator_that_breaks_on_one_rank_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    tiny_run.make_run(tmp_path / "a")
    script = tmp_path / "script.py"
    paths = [str(Path(__file__).parent), str(Path(tiny_run.__file__).parent)]
    call = f"from test_schedule_ranks import failing_run\nfailing_run({str(tmp_path / 'a')!r})\n"
    script.write_text(f"import sys\nsys.path[:0] = {paths!r}\n{call}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert ended.returncode != 0
    assert "the generator of rank 1 broke" in ended.stderr + ended.stdout
