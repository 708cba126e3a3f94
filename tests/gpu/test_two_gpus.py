"""Two ranks on two GPUs over NCCL: gradients, other numbers of ranks, replication, failing ranks, idle waiting."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
import tiny_run
import torch
from distributed.test_gradients import CASES, gradients, make_models

pytestmark = pytest.mark.gpu2

BF16 = {f"bfloat16_{name}": {**CASES[name], "compute_dtype": "bfloat16"} for name in ("token_mean", "replicated")}
ALL_CASES = CASES | BF16


def test_two_ranks_equal_one(tmp_path: Path, run_distributed) -> None:
    """Every case of the gloo test: float32 against one GPU and against the CPU; bfloat16 against one GPU."""
    from safetensors.torch import save_file

    from lightrl.distributed.mesh import close_world

    make_models(tmp_path / "models")
    for device in ("cpu", "cuda"):
        try:
            for name, case in ALL_CASES.items():
                if device == "cpu" and name in BF16:
                    continue
                single = {k: v for k, v in case.items() if k != "shard_size"}
                whole, metrics = gradients(tmp_path / "models", single, device)
                save_file({k: v.contiguous() for k, v in whole.items()}, tmp_path / f"{device}_{name}.safetensors")
                (tmp_path / f"{device}_{name}.json").write_text(json.dumps(metrics))
        finally:
            close_world()
    print(run_distributed(compare_gradients, 2, tmp_path / "models", tmp_path, timeout=300))


def compare_gradients(models: str, reference: str) -> None:
    from safetensors.torch import load_file

    from lightrl.distributed.mesh import close_world

    for name, case in ALL_CASES.items():
        found, metrics = gradients(Path(models), case, "cuda")
        tolerance = 2e-2 if name in BF16 else 1e-4
        for device in ("cuda",) if name in BF16 else ("cuda", "cpu"):
            expected = load_file(f"{reference}/{device}_{name}.safetensors")
            assert found.keys() == expected.keys()
            largest = max(float(g.norm()) for g in expected.values())
            for parameter, gradient in expected.items():
                error = float((found[parameter] - gradient).norm())
                assert error <= tolerance * max(float(gradient.norm()), 1e-3 * largest), (name, device, parameter)
            wanted = json.loads(Path(reference, f"{device}_{name}.json").read_text())
            for metric, value in wanted.items():
                assert metrics[metric] == pytest.approx(value, abs=10 * tolerance), (name, device, metric)
    close_world()


def test_other_numbers_of_ranks(tmp_path: Path, run_distributed) -> None:
    """2 -> 1 -> 2 GPUs, sharded and replicated, against one GPU throughout; evaluation over two ranks as over one."""
    base = {"checkpoint": {"hf_every": 2, "async_save": True}, "optim": {"lr": 1e-4}}
    base["algorithm"] = {"minibatches_per_step": 2}
    plans = {"one": ((6, 1, None),), "many": ((2, 2, None), (4, 1, None), (6, 2, 1))}
    for name, stages in plans.items():
        (tmp_path / name).mkdir()
        tiny_run.make_model(tmp_path / name / "model")
        tiny_run.make_data(tmp_path / name / "data.jsonl")
        eval_set = {"name": "own", "path": str(tmp_path / name / "data.jsonl"), "temperature": 1.0}
        for until, ranks, shard_size in stages:
            sections = base | {
                "run": {"steps": until, "device": "cuda"},
                "parallel": {} if shard_size is None else {"shard_size": shard_size},
                "eval": {"every": 2, "sets": [eval_set]},
            }
            run_distributed(Path(tiny_run.__file__), ranks, tmp_path / name, json.dumps(sections), timeout=240)
    for step in (2, 4, 6):
        one, many = (tiny_run.exported(tmp_path / name, step) for name in plans)
        for name, tensor in one.items():
            torch.testing.assert_close(many[name], tensor, atol=1e-5, rtol=0, msg=f"step {step}: {name}")
    for metric in ("reward/mean", "eval/own/avg@1"):
        one, many = (tiny_run.metrics_of(tmp_path / name, metric) for name in plans)
        assert one
        assert one == [(s, pytest.approx(r, abs=1e-6)) for s, r in many]


def fail_on_one_rank(folder: str) -> None:
    """Rank 1 dies before it generates; rank 0 waits for it on the host."""
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(Path(folder), run={"device": "cuda"}))
    collect = trainer.collect

    def failing(*given):
        if os.environ["RANK"] == "1" and trainer.steps_done == 1:
            raise RuntimeError("this rank gives up")
        return collect(*given)

    trainer.collect = failing
    trainer.train()


def fail_in_the_update(folder: str) -> None:
    """Rank 1 dies before its backward pass; rank 0 waits for it in NCCL."""
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(Path(folder), run={"device": "cuda"}))
    pack = trainer.pack

    def failing(groups):
        batch = pack(groups)
        if os.environ["RANK"] == "1" and trainer.steps_done == 1:
            raise RuntimeError("this rank gives up")
        return batch

    trainer.pack = failing
    trainer.train()


@pytest.mark.parametrize("target", [fail_on_one_rank, fail_in_the_update])
def test_a_rank_that_fails_takes_the_run_down(tmp_path: Path, run_distributed, target) -> None:
    tiny_run.make_run(tmp_path)
    with pytest.raises(pytest.fail.Exception) as failure:
        run_distributed(target, 2, tmp_path, timeout=240)
    assert "this rank gives up" in str(failure.value)
    assert "not over after" not in str(failure.value)


def wait_on_the_host(folder: str) -> None:
    """Rank 1 generates until rank 0, which is done, has found its own GPU idle; with NCCL pending it would not be."""
    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    rank, signal = int(os.environ["RANK"]), Path(folder, "rank_0_is_idle")

    def reward(sample):
        if rank == 1 and sample.index == 0:
            deadline = time.monotonic() + 60
            while not signal.exists():
                assert time.monotonic() < deadline, "rank 0's GPU was never idle while rank 1 generated"
                time.sleep(0.05)
        return float(sample.index)

    sections = {"run": {"device": "cuda", "steps": 2}, "model": {"compute_dtype": "bfloat16"}}
    config = tiny_run.make_run(Path(folder), **sections, reward={"timeout": 90.0, "max_failure_rate": 0.0})
    trainer = Trainer(config, reward=reward)
    take_stats = trainer.scorer.take_stats

    def idle() -> None:
        time.sleep(1)  # by now the main thread waits for rank 1
        torch.cuda.synchronize()
        signal.touch()

    def done_generating():
        if rank == 0:
            threading.Thread(target=idle, daemon=True).start()
        return take_stats()

    trainer.scorer.take_stats = done_generating
    trainer.train()
    assert signal.exists()
    trainer.close()
    close_world()


def test_nobody_waits_in_nccl_while_others_generate(tmp_path: Path, run_distributed) -> None:
    tiny_run.make_run(tmp_path)
    run_distributed(wait_on_the_host, 2, tmp_path, timeout=240)
