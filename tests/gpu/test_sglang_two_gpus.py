"""Two GPUs under torchrun: an engine a rank, and one over both; ranks and engines that die."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from gpu.sglang_tools import ENGINE, LONG, MIB, living, make_files, sections, settled

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

STEPS = 30
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}  # no NVLink multicast: it is not to be had everywhere


@pytest.fixture
def in_use() -> list[int]:
    """Of both GPUs before the test, this process's contexts included."""
    for device in range(2):
        torch.zeros(1, device=f"cuda:{device}")
    return [settled(0, device, seconds=0) for device in range(2)]


def check_nothing_is_left(folder: Path, in_use: list[int]) -> None:
    pids = [pid for file in folder.glob("pids_*.json") for pid in json.loads(file.read_text())]
    assert pids
    assert not living(pids)
    for device, before in enumerate(in_use):
        after = settled(before, device)
        print(f"GPU {device}: in use before {before / MIB:.0f}, after {after / MIB:.0f} MiB")
        assert abs(after - before) <= 64 * MIB


def rewards_of(folder: Path) -> list[float]:
    rewards = [reward for _, reward in tiny_run.metrics_of(folder, "reward/mean")]
    print([round(r, 2) for r in rewards])
    return rewards


# ---- in the ranks


def note_processes(folder: str, trainer: Any) -> None:
    from gpu.sglang_tools import processes

    pids = [os.getpid(), *(processes(trainer.engine) if trainer.engine._host is not None else ())]
    Path(folder, f"pids_{trainer.world.rank}_{trainer.engine._restarts}.json").write_text(json.dumps(pids))


def learn_then_lose_a_rank(folder: str, overrides: str) -> None:
    """A whole run; then rank 1 is gone in the middle of one more sync, while rank 0 gathers weights with it."""
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(Path(folder), **json.loads(overrides)))
    trainer.train()
    note_processes(folder, trainer)
    trainer.world.barrier()
    stream = trainer.policy.stream()

    class Dying:
        def __iter__(self) -> Iterator[Any]:
            for number, group in enumerate(stream):
                if number == 1 and trainer.world.rank == 1:
                    Path(folder, "killed_at").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                yield group

    trainer.engine.onload(("weights",))
    trainer.engine.load_groups(Dying(), STEPS + 1)
    raise AssertionError("the sync went on without rank 1")


def learn_and_lose_the_engine(folder: str, overrides: str) -> None:
    """A run whose only engine, of both ranks, is killed in the middle of its first rollout."""
    from gpu.sglang_tools import kill, schedulers, set_learning_rate, unwatch, watch

    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(Path(folder), **json.loads(overrides)))
    engine, collect = trainer.engine, trainer.collect
    note_processes(folder, trainer)

    def collecting(*given: Any) -> Any:
        if trainer.steps_done > 0:
            set_learning_rate(trainer, trainer.config.optim.lr)
            return collect(*given)
        set_learning_rate(trainer, 0.0)  # such long answers are not what it learns from
        sampling, trainer.sampling = trainer.sampling, replace(trainer.sampling, max_new_tokens=LONG)
        strike: Callable[[], None] | None = None
        if engine._host is not None:
            strike = kill(schedulers(engine)[0], signal.SIGKILL)
        seen = watch(engine, strike, after=12)
        try:
            groups = collect(*given)
        finally:
            unwatch(engine)
            trainer.sampling = sampling
        check_all_parts(trainer, seen)
        note_processes(folder, trainer)
        if engine._host is not None:
            answers = f"{len(seen.answered[0])} of {len(seen.asked[0])} answers were complete"
            print(f"noticed after {seen.seconds:.1f} s; {answers}, {len(seen.asked[1])} asked again", flush=True)
            assert 0 < len(seen.answered[0]) < len(seen.asked[0])
            assert len(seen.asked[1]) == len(seen.asked[0]) - len(seen.answered[0])
        return groups

    trainer.collect = collecting  # type: ignore[method-assign]
    trainer.train()
    assert engine._restarts == 1
    trainer.close()
    close_world()


def check_all_parts(trainer: Any, seen: Any) -> None:
    """Each rank's part of the new engine was compared; all have the norms."""
    from gpu.sglang_tools import num_values

    (sent, _), (compared, report) = seen.passes[1][:2]
    assert (sent, compared, report["differing"]) == ("receive", "verify", {})
    norms = sum(torch.Size(shape).numel() for _, shape, _ in trainer.engine._model.layout if len(shape) == 1)
    again = norms * (trainer.config.engine.tensor_parallel - 1)
    assert sum(trainer.world.gather(report["compared"])) == num_values(trainer) + again


# ---- the tests


def test_two_engines_learn_then_a_rank_is_killed_in_a_sync(
    tmp_path: Path, run_distributed: Any, in_use: list[int]
) -> None:
    """The other rank does not wait for ever: torchrun says why and all of it is over soon, both engines included."""
    make_files(tmp_path)
    more = sections(run={"device": "cuda", "steps": STEPS}, sync={"verify_every": 5}, checkpoint={"every": 0})
    with pytest.raises(pytest.fail.Exception) as failure:
        run_distributed(learn_then_lose_a_rank, 2, tmp_path, json.dumps(more), timeout=420, env=ENVIRONMENT)
    text = str(failure.value)
    assert "not over after" not in text, text
    assert (tmp_path / "killed_at").exists(), text
    seconds = time.time() - float((tmp_path / "killed_at").read_text())
    print(f"over {seconds:.1f} s after the rank was killed")
    assert seconds < 90  # torchrun gives the other rank 30 s to end by itself
    assert "SIGKILL" in text, text
    assert "went on without" not in text
    rewards = rewards_of(tmp_path)
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    check_nothing_is_left(tmp_path, in_use)


def test_an_engine_over_both_learns_and_is_killed(tmp_path: Path, run_distributed: Any, in_use: list[int]) -> None:
    make_files(tmp_path)
    engine = ENGINE | {"tensor_parallel": 2}
    more = sections(
        run={"device": "cuda", "steps": STEPS}, engine=engine, sync={"verify_every": 5}, checkpoint={"every": 0}
    )
    output = run_distributed(learn_and_lose_the_engine, 2, tmp_path, json.dumps(more), timeout=480, env=ENVIRONMENT)
    print(*(line for line in output.splitlines() if "noticed after" in line))
    rewards = rewards_of(tmp_path)
    assert sum(rewards[-5:]) > 2 * sum(rewards[1:6])
    check_nothing_is_left(tmp_path, in_use)
