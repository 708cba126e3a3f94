"""`lightrl sft` on two gloo ranks equals one, and a run that is killed ends with the same weights (A1, A2, D1)."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
import ranks
import tiny_run
import tiny_sft
import torch

MOMENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.scandir"}


CASES = {
    "packed": {},
    "ragged": {"parallel": {"max_tokens_per_microbatch": 70}},
    "replicated": {"parallel": {"shard_size": 1, "max_tokens_per_microbatch": 70}},
    "one_for_two": {"sft": {"batch_size": 1}},
}


def first_updates(folder: str) -> None:
    """For each case the gradients of the first update, whole, and its metrics and the evaluation's, to `RANKS.pt`."""
    from lightrl.distributed.mesh import close_world
    from lightrl.training.sft import SFTTrainer
    from lightrl.wrappers import clean_name

    sets = {"sets": [{"name": "a", "path": f"{folder}/data.jsonl@[2:5]"}]}
    results = {}

    def look(*_) -> None:
        for name, p in trainer.policy.module.named_parameters():
            gradients[clean_name(name)] = p.grad.full_tensor().clone()

    for case, changes in CASES.items():
        more = {"sft": {"batch_size": 11}, "optim": {"max_grad_norm": 0.0}, "eval": sets} | changes
        if os.environ.get("WORLD_SIZE", "1") == "1":
            more.pop("parallel", None)
        trainer = SFTTrainer(tiny_sft.make_run(Path(folder), **more))
        metrics, gradients = trainer.evaluate(), {}
        trainer.optimizer.register_step_pre_hook(look)
        metrics |= trainer.step(trainer.source.next(trainer.config.sft.batch_size))
        results[case] = {"gradients": gradients, "metrics": metrics}
        trainer.close()
    if trainer.world.is_main:
        torch.save(results, f"{folder}/{trainer.world.size}.pt")
    close_world()


def test_two_ranks_equal_one(tmp_path, run_distributed):
    """Packed and not, sharded and replicated, and one conversation for two ranks: the other still takes part."""
    tiny_sft.make_model(tmp_path / "model")
    tiny_sft.make_data(tmp_path / "data.jsonl", rows=11)
    first_updates(str(tmp_path))
    run_distributed(first_updates, 2, tmp_path)
    ones, twos = (torch.load(tmp_path / f"{ranks}.pt", weights_only=True) for ranks in (1, 2))
    names = ("loss/total", "sft/trained_tokens", "sft/tokens", "optim/grad_norm", "loss/entropy", "eval/a/loss")
    for case in CASES:
        one, two = ones[case], twos[case]
        for name in names:
            assert two["metrics"][name] == pytest.approx(one["metrics"][name], abs=1e-6), f"{case}: {name}"
        assert one["gradients"].keys() == two["gradients"].keys()
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(two["gradients"][name], gradient, atol=1e-6, rtol=0, msg=f"{case}: {name}")


def killed_at(folder: str, overrides: str, moment: int) -> None:
    """Train until so many file operations, then be killed from another thread, in whatever is under way."""
    over = threading.Event()
    seen = [0]

    def count(event: str, _) -> None:
        seen[0] += event in MOMENTS
        if seen[0] == moment:
            over.set()

    def kill() -> None:
        over.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    sys.addaudithook(count)
    tiny_sft.train(folder, overrides)
    Path(folder, "moments").write_text(str(seen[0]))


def test_killed_at_random_moments_ends_with_the_same_weights(tmp_path):
    """KILL_SEED=… repeats the moments of a run of this test that failed."""
    seed = int(os.environ.get("KILL_SEED", random.SystemRandom().getrandbits(32)))
    print(f"repeat with KILL_SEED={seed}")
    rng, steps = random.Random(seed), 12
    context = ranks.preloaded()
    overrides = {
        "sft": {"epochs": steps * 5 / 12, "batch_size": 5},
        "checkpoint": {"every": 1, "hf_every": steps, "async_save": True},
        "optim": {"schedule": "cosine", "warmup_steps": 3},
    }

    def train(name: str, moment: int) -> int:
        child = context.Process(target=killed_at, args=(str(tmp_path / name), json.dumps(overrides), moment))
        child.start()
        child.join(180)
        assert child.exitcode is not None, "a run hangs"
        return child.exitcode

    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        tiny_sft.make_run(tmp_path / name)
    assert train("whole", -1) == 0
    moments = int((tmp_path / "whole" / "moments").read_text())
    kills = 0
    for _ in range(4):
        kills += train("killed", rng.randint(moments // 3, moments * 2 // 3)) == -signal.SIGKILL
    assert kills > 1
    assert train("killed", -1) == 0
    whole, killed = (tiny_run.exported(tmp_path / name, steps) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name
    names = ("loss/total", "optim/grad_norm", "sft/epoch", "sft/trained_tokens")
    assert tiny_run.metrics_of(tmp_path / "killed", *names) == tiny_run.metrics_of(tmp_path / "whole", *names)


def test_two_ranks_resume_as_one(tmp_path, run_distributed):
    """Two steps on two ranks and two on one, against four on one."""
    base = {"checkpoint": {"hf_every": 2}, "optim": {"lr": 1e-4}}
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
        tiny_sft.make_run(tmp_path / name)
    two_steps = json.dumps({**base, "run": {"steps": 2}})
    run_distributed(tiny_sft.train, 2, tmp_path / "many", two_steps)
    for name in ("one", "many"):
        tiny_sft.train(str(tmp_path / name), json.dumps(base))
    for step in (2, 4):
        one, many = (tiny_run.exported(tmp_path / name, step) for name in ("one", "many"))
        for name, tensor in one.items():
            torch.testing.assert_close(many[name], tensor, atol=1e-5, rtol=0, msg=f"step {step}: {name}")
    assert [step for step, _ in tiny_run.metrics_of(tmp_path / "many", "loss/total")] == [1, 2, 3, 4]
