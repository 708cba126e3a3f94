"""A teacher on two gloo ranks against one process: gradients of every form, odd microbatches, a rank without work,
spread rows and experts; and what a server said of samples that change rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_gradients import make_models, make_samples
from families import make_family
from safetensors.torch import load_file, save_file
from torch import Tensor

FULL = {"form": "full", "divergence": "jsd", "jsd_beta": 0.3}
STUDENT = {"form": "top_k", "top_k": 4, "top_k_from": "student"}
CASES: dict[str, dict[str, Any]] = {
    "sampled": {"teacher": {}, "max_tokens": 24},
    "top_k": {"teacher": {"form": "top_k", "top_k": 5}, "max_tokens": 24},
    "student_top_k": {"teacher": STUDENT, "max_tokens": 24},
    "full": {"teacher": FULL, "max_tokens": 24, "temperature": 1.2},
    "one_sample": {"teacher": FULL, "only": 1},
    "replicated": {"teacher": FULL, "parallel": {"shard_size": 1}},
    "server": {"teacher": {"form": "top_k", "top_k": 4}, "max_tokens": 24, "said": True},
    "rows": {"teacher": FULL, "parallel": {"context_parallel": 2}},
    "rows_server": {"teacher": {"form": "top_k", "top_k": 4}, "said": True, "parallel": {"context_parallel": 2}},
    "rows_student": {"teacher": STUDENT, "parallel": {"context_parallel": 2}},
    "experts": {"teacher": FULL, "model": "qwen3_moe", "as": "qwen3_moe", "parallel": {"expert_parallel": 2}},
    "experts_of_the_policy": {"teacher": {}, "model": "qwen3_moe", "parallel": {"expert_parallel": 2}},
}


def gradients(models: Path, case: dict[str, Any], *, alone: bool = False) -> dict[str, Tensor]:
    """Of one update's loss, whole, and its metrics."""
    from lightrl.config.schema import AlgorithmConfig, Config, ModelConfig, RolloutConfig, TeacherConfig
    from lightrl.distributed.fsdp import set_gradient_sync
    from lightrl.distributed.mesh import init_world
    from lightrl.models.shards import whole_tensor
    from lightrl.observe.metrics import Tally
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.objective import Objective
    from lightrl.training.policy import Policy, to_device
    from lightrl.training.teacher import Teacher
    from lightrl.training.update import microbatch_loss
    from lightrl.wrappers import clean_name

    parallel = {} if alone else case.get("parallel", {})
    world = init_world(
        "cpu",
        parallel.get("shard_size"),
        expert_parallel=parallel.get("expert_parallel", 1),
        context_parallel=parallel.get("context_parallel", 1),
    )
    config = Config(
        model=ModelConfig(path=str(models / case.get("model", "llama")), compute_dtype="float32"),
        rollout=RolloutConfig(temperature=0.9),
        teacher=TeacherConfig(path=str(models / case.get("as", "qwen3_untied")), coef=0.7, **case["teacher"]),
    )
    policy = Policy.load(config.model, world)
    teacher = Teacher.build(config, world, 97)
    samples = make_samples(case.get("only"))
    for s in samples:
        g = torch.Generator().manual_seed(100 * s.group_index + s.index)
        ids = torch.stack([torch.randperm(97, generator=g)[:4] for _ in s.response]).tolist()
        logprobs = torch.rand(len(s.response), 4, generator=g).mul(0.2).log().tolist()
        s.rollout_top_ids, s.rollout_top_logprobs = ids, logprobs
        if case.get("said"):
            s.teacher_logprobs = (-torch.rand(len(s.response), generator=g)).tolist()
            s.teacher_top_ids, s.teacher_top_logprobs = ids, logprobs
        if not config.teacher.student_k:
            s.rollout_top_ids = s.rollout_top_logprobs = None
    (minibatch,) = build_minibatches(
        samples[world.rank :: world.size],
        world,
        minibatches=1,
        max_tokens=case.get("max_tokens", 1000),
        share_prompts=True,
        skip_zero_advantage=False,
        aggregation="token_mean",
        constant_length=16,
        cost=CostModel.from_config(policy.hf_config),
    )
    tally, objective = Tally(), Objective.of(AlgorithmConfig(), None, config.teacher)
    if not case.get("said"):
        teacher.add_targets([minibatch])
    head = teacher.head()
    for i, batch in enumerate(minibatch):
        set_gradient_sync(policy.module, i == len(minibatch) - 1)
        logprobs, entropy, *more = policy(batch, 0.9, teacher=head)
        microbatch_loss(logprobs, entropy, to_device(batch, world.device), objective, tally, *more).backward()
    teacher.reclaim()
    found = {clean_name(n): whole_tensor(p.grad).clone() for n, p in policy.module.named_parameters()}
    metrics = Tally.merged(world.gather(tally.to_dict())).result()
    return found | {f"metric {name}": torch.tensor(value) for name, value in metrics.items()}


def make_run(folder: Path, ranks: int) -> list[tuple[float, ...]]:
    """Two steps with a teacher beside GRPO, whole distributions, rows shared by the ranks: numbers of each."""
    import tiny_run

    from lightrl.training.trainer import Trainer

    sections = {
        "run": {"dir": str(folder / f"run_{ranks}"), "steps": 2},
        "teacher": {"path": str(folder / "tiny_teacher"), "form": "full", "coef": 0.5},
        "algorithm": {"minibatches_per_step": 2},
        "parallel": {"context_parallel": ranks},
    }
    trainer = Trainer(tiny_run.make_run(folder, **sections))
    names = ("distill/divergence", "distill/reverse_kl", "loss/total", "optim/grad_norm")
    found = []
    for _ in range(2):
        metrics = trainer.step(trainer.source.next(4))
        found.append(tuple(metrics[name] for name in names))
    trainer.close()
    return found


def compare(root: str) -> None:
    from lightrl.distributed.mesh import close_world

    folder = Path(root)
    for name, case in CASES.items():
        found, expected = gradients(folder, case), load_file(folder / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            message = f"{name}: {key}"
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=1e-5, msg=lambda m, t=message: f"{t}: {m}")
    for step, row in zip(make_run(folder, 2), json.loads((folder / "run.json").read_text()), strict=True):
        assert step == pytest.approx(tuple(row), abs=2e-5)
    close_world()


def test_two_ranks_equal_one(tmp_path: Path, run_distributed) -> None:
    import tiny_run

    from lightrl.distributed.mesh import close_world

    make_models(tmp_path)
    make_family(tmp_path / "qwen3_moe", "qwen3_moe")
    tiny_run.make_model(tmp_path / "model")
    tiny_run.make_data(tmp_path / "data.jsonl")
    tiny_run.make_model(tmp_path / "tiny_teacher", seed=5)
    try:
        for name, case in CASES.items():
            found = gradients(tmp_path, case, alone=True)
            assert any(bool(t.abs().max() > 1e-4) for n, t in found.items() if not n.startswith("metric"))
            assert "metric distill/reverse_kl" in found
            save_file({n: t.contiguous() for n, t in found.items()}, tmp_path / f"{name}.safetensors")
        (tmp_path / "run.json").write_text(json.dumps(make_run(tmp_path, 1)))
    finally:
        close_world()
    run_distributed(compare, 2, tmp_path)


if __name__ == "__main__":
    compare(*sys.argv[1:])
