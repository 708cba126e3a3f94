"""`parallel.rollout_ranks`: some ranks train and others generate, in runs like those of engines beside the trainer."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import sglang_stand_in
import tiny_run
import torch
from test_schedule_ranks import of_episodes

ONE = {"parallel": {"rollout_ranks": 1}}
SYNC: dict[str, Any] = {"checkpoint": {"every": 2, "hf_every": 4}}
OFF: dict[str, Any] = {
    "rollout": {"schedule": "one_step_off"},
    "correction": {"use_tis": True},
    "checkpoint": {"every": 0, "hf_every": 4},
}
ASYNC: dict[str, Any] = {
    "run": {"steps": 6},
    "rollout": {"schedule": "async", "max_staleness": 2, "max_response_tokens": 60},
    "correction": {"use_tis": True},
}


def noted_run(folder: Path, overrides: dict[str, Any], stop_after: int | None = None) -> None:
    """Train, and write what this rank collected to `groups_RANK.json`; nothing on a rank that generates."""
    from lightrl.training.rollout_ranks import serve_rollouts
    from lightrl.training.trainer import Trainer

    config = tiny_run.make_run(folder, **overrides)
    if serve_rollouts(config):
        return
    trainer = Trainer(config)
    found: list[Any] = []
    collect = trainer.collect

    def noting(*given: Any) -> Any:
        groups = collect(*given)
        for sample in (s for g in groups for s in g.samples):
            row = (trainer.policy_version, sample.group_index, sample.prompt.index, sample.index, sample.tokens)
            found.append([*row, sample.rollout_logprobs, sample.policy_versions, sample.version_tokens])
        if trainer.policy_version == stop_after:
            raise KeyboardInterrupt
        return groups

    trainer.collect = noting  # type: ignore[method-assign]
    try:
        trainer.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    finally:
        trainer.close()
    (folder / f"groups_{trainer.world.rank}.json").write_text(json.dumps(found))


def runs(parent: str, *jobs: str) -> None:
    """One run after the other in the same processes: `NAME OVERRIDES [LAST STEP]` each, as JSON."""
    from lightrl.distributed.mesh import close_world

    for job in jobs:
        name, overrides, *stop = json.loads(job)
        noted_run(Path(parent) / name, overrides, *stop)
    close_world()


def mortal_runs(parent: str, *jobs: str) -> None:
    """The same with engines that die twice."""
    from fake_engine import MortalEngine

    from lightrl.training import rollout_ranks

    build = rollout_ranks.build_engine

    def mortal(*given: Any, **more: Any) -> Any:
        engine = build(*given, **more)
        engine.__class__ = MortalEngine
        engine.deaths = (3, 13)
        return engine

    rollout_ranks.build_engine = mortal
    runs(parent, *jobs)


def rows_of(folder: Path, count: int = 1) -> list[Any]:
    return sorted(row for rank in range(count) for row in json.loads((folder / f"groups_{rank}.json").read_text()))


def without_logprobs(rows: list[Any]) -> list[Any]:
    return [row[:5] + row[6:] for row in rows]


def check_same_weights(folder: Path, other: Path) -> None:
    theirs = tiny_run.exported(other, 4)
    assert all(torch.equal(ours, theirs[name]) for name, ours in tiny_run.exported(folder, 4).items())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `sync`, `off` and `turns` of one rank, which has its engine beside it."""
    from lightrl.distributed.mesh import close_world

    folder = tmp_path_factory.mktemp("alone")
    for name, overrides in (("sync", SYNC), ("off", OFF), ("turns", of_episodes(OFF))):
        (folder / name).mkdir()
        noted_run(folder / name, overrides)
    close_world()
    return folder


def prepared(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir()
        tiny_run.make_run(folder / name)
    return folder


def test_one_trains_and_one_generates(tmp_path: Path, alone: Path, run_distributed: Any) -> None:
    prepared(tmp_path, "sync", "off", "turns", "async", "episodes", "half")
    jobs = [["sync", SYNC | ONE], ["off", OFF | ONE], ["turns", of_episodes(OFF) | ONE], ["async", ASYNC | ONE]]
    jobs += [["episodes", of_episodes(ASYNC) | ONE], ["half", SYNC | ONE, 3]]
    run_distributed(runs, 2, tmp_path, *map(json.dumps, jobs))
    # the same batches by the same weights: to the last bit
    for name in ("sync", "off", "turns"):
        assert rows_of(tmp_path / name) == rows_of(alone / name)
        check_same_weights(tmp_path / name, alone / name)
    ages = [row[0] - min(row[6]) for row in rows_of(tmp_path / "off")]
    assert max(ages) == 1
    # every prompt in its order, and nothing older than allowed, though answers and episodes outlive their weights
    for name in ("async", "episodes"):
        rows = rows_of(tmp_path / name)
        assert [(row[1], row[3]) for row in rows] == [(group, i) for group in range(24) for i in range(4)]
        ages = [row[0] - min(row[6]) for row in rows]
        assert min(ages) >= 0
        assert 0 < max(ages) <= 2
    shares = tiny_run.metrics_of(tmp_path / "async", "engine/idle_share", "time/wait_for_rollouts")
    assert len(shares) == 6
    # stopped in its last step; three ranks go on where two were
    run_distributed(runs, 3, tmp_path, json.dumps(["half", SYNC | {"parallel": {"rollout_ranks": 2}}]))
    assert without_logprobs(rows_of(tmp_path / "half")) == without_logprobs(rows_of(alone / "sync"))[2 * 16 :]
    check_same_weights(tmp_path / "half", alone / "sync")


def test_two_train_and_one_generates(tmp_path: Path, alone: Path, run_distributed: Any) -> None:
    """Which answers share a batch depends on time: the last bits of their log-probs do, and nothing else."""
    prepared(tmp_path, "sync")
    run_distributed(runs, 3, tmp_path, json.dumps(["sync", SYNC | ONE]))
    assert without_logprobs(rows_of(tmp_path / "sync", 2)) == without_logprobs(rows_of(alone / "sync"))
    theirs = tiny_run.exported(alone / "sync", 4)
    for name, ours in tiny_run.exported(tmp_path / "sync", 4).items():
        torch.testing.assert_close(ours, theirs[name], atol=2e-4, rtol=0, msg=name)


def test_an_engine_that_dies_is_replaced_and_only_its_answers_are_sampled_again(
    tmp_path: Path, alone: Path, run_distributed: Any
) -> None:
    prepared(tmp_path, "sync", "async")
    jobs = [["sync", SYNC | ONE], ["async", ASYNC | ONE]]
    output = run_distributed(mortal_runs, 3, tmp_path, *map(json.dumps, jobs))
    assert output.count("an engine died and is started anew") == 4, output
    rows = rows_of(tmp_path / "sync", 2)
    assert without_logprobs(rows) == without_logprobs(rows_of(alone / "sync"))
    rows = rows_of(tmp_path / "async", 2)
    assert [(row[1], row[3]) for row in rows] == [(group, i) for group in range(24) for i in range(4)]
    assert max(row[0] - min(row[6]) for row in rows) <= 2


def shared_engine(folder: str) -> None:
    """One rank trains; two hold one engine, which dies as it takes its first weights."""
    import asyncio

    from lightrl.distributed.mesh import close_world
    from lightrl.engine import sglang, sglang_arguments
    from lightrl.engine.base import EngineLostError, GenerateRequest, SamplingParams
    from lightrl.sync.buckets import BucketSender
    from lightrl.sync.weights import sync_weights
    from lightrl.training.rollout_ranks import serve_rollouts
    from lightrl.training.trainer import Trainer

    sglang.check_platform = sglang_arguments.check_installed = sglang_arguments.check = lambda *_: None
    BucketSender.introduction = sglang_stand_in.introduction  # type: ignore[method-assign]
    restart = sglang.SGLangEngine.restart

    def healed(self: Any) -> None:
        os.environ.pop("STAND_IN_DIES_IN")
        restart(self)

    sglang.SGLangEngine.restart = healed  # type: ignore[method-assign]
    os.environ["STAND_IN_DIES_IN"] = "receive"
    engine_config = {"kind": "sglang", "tensor_parallel": 2, "hang_timeout": sglang_stand_in.HANG}
    here = {"device": "auto"}  # no GPU is to be seen; "cpu" refuses to split an engine
    config = tiny_run.make_run(Path(folder), run=here, engine=engine_config, parallel={"rollout_ranks": 2})
    if serve_rollouts(config):
        close_world()
        return
    trainer = Trainer(config)
    try:
        engine: Any = trainer.engine
        with pytest.raises(EngineLostError, match="exit code"):
            sync_weights(trainer.policy, engine, 7)
        assert (engine.lost, engine.policy_version) == (True, -1)
        engine.restart()
        assert not engine.lost
        sync_weights(trainer.policy, engine, 7)
        request = GenerateRequest(id="a", tokens=[4], sampling=SamplingParams(max_new_tokens=5), n=3)
        assert [answer.tokens for answer in asyncio.run(engine.generate(request))] == [[0, 1, 2, 3, 4]] * 3
    finally:
        trainer.close()
        close_world()


def test_an_engine_over_two_ranks_is_lost_and_restarted_on_both(tmp_path: Path, run_distributed: Any) -> None:
    (tmp_path / "run").mkdir()
    tiny_run.make_run(tmp_path / "run")
    path = os.pathsep.join([str(sglang_stand_in.install(tmp_path)), os.environ["PYTHONPATH"]])
    run_distributed(
        shared_engine, 3, tmp_path / "run", env={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}, timeout=120
    )
    logs = [file.read_text() for file in (tmp_path / "run" / "run" / "engine").glob("*.log")]
    assert len(logs) == 1
    found = [line.split()[1] for line in logs[0].splitlines() if line.startswith("loader ")]
    assert found == ["open_buffers", "receive", "open_buffers", "receive", "verify", "close_buffers"]


def endless(folder: str) -> None:
    runs(
        folder,
        json.dumps(
            ["a", ASYNC | ONE | {"run": {"steps": 10**6}, "checkpoint": {"every": 0}} | {"engine": {"hang_timeout": 4}}]
        ),
    )


def test_a_training_rank_that_is_killed_ends_those_that_generate(tmp_path: Path) -> None:
    prepared(tmp_path, "a")
    log, metrics = tmp_path / "log", tmp_path / "a" / "run" / "metrics.jsonl"
    with ranks.started_ranks(endless, 2, [str(tmp_path)], log, {}) as processes:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 1):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        processes[0].kill()
        processes[1].join(60)
        assert processes[1].exitcode == 1, log.read_text()
    assert "training rank 0 left the job: its own error says why" in log.read_text()


def struck_in_a_sync(folder: str, number: str) -> None:
    """The rank that generates gets a signal where it is to take its third weights."""
    from lightrl.sync import ranks as sync_ranks

    send, count = sync_ranks.broadcast, 0

    def striking(group: Any, flat: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if os.environ["RANK"] == "1" and count == 3:
            os.kill(os.getpid(), int(number))
        send(group, flat)

    sync_ranks.broadcast = striking
    endless(folder)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "left the job: its own error says why"), (signal.SIGSTOP, "gave no sign of life for ")],
)
def test_a_rank_that_is_killed_or_stopped_in_a_sync(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    """The other one waits in a broadcast by then."""
    prepared(tmp_path, "a")
    log = tmp_path / "log"
    with ranks.started_ranks(struck_in_a_sync, 2, [str(tmp_path), str(int(number))], log, {}) as processes:
        processes[0].join(60)
        processes[1].kill()
        assert processes[0].exitcode == 1, log.read_text()
    assert reason in log.read_text()
