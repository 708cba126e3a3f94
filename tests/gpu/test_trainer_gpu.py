"""On one GPU: whole runs in miniature; their numbers, their checkpoints, their export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from lightrl.distributed.mesh import close_world
from lightrl.observe.metrics import Tally
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training.advantage import set_advantages
from lightrl.training.trainer import Trainer
from lightrl.training.update import update

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "bfloat16")


@pytest.fixture
def trainer_for(tmp_path: Path):
    made = []

    def build(**sections: Any) -> Trainer:
        run = {"device": "cuda"} | sections.pop("run", {})
        made.append(Trainer(tiny_run.make_run(tmp_path, run=run, **sections)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reward_rises(trainer_for, dtype: str) -> None:
    trainer = trainer_for(
        run={"steps": 30},
        model={"compute_dtype": dtype, "activation_checkpointing": True},
        rollout={"prompts_per_step": 8, "group_size": 8},
        optim={"lr": 1e-2},
        log={"save_samples": False},
    )
    rewards = []
    for _ in range(30):
        metrics = trainer.step(trainer.source.next(8))
        rewards.append(metrics["reward/mean"])
        assert metrics["optim/skipped_updates"] == 0
        assert metrics["perf/peak_memory_gib"] > 0
    print(dtype, [round(r, 2) for r in rewards])
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_update_is_exactly_on_policy(trainer_for, dtype: str) -> None:
    """L1 on CUDA: the pass without gradients and the one with them give the same bits."""
    trainer = trainer_for(
        model={"compute_dtype": dtype},
        rollout={"group_size": 8},
        parallel={"max_tokens_per_microbatch": 60},
        algorithm={"minibatches_per_step": 2, "skip_zero_advantage": False},
    )
    sync_weights(trainer.policy, trainer.engine, 0)
    groups = trainer.collect(trainer.source.next(4))
    release_engine(trainer.policy, trainer.engine)
    set_advantages(groups, trainer.advantages)
    batch = trainer.pack(groups)
    trainer.add_logprobs(batch, Tally())
    tally = Tally()
    update(
        trainer.policy, trainer.optimizer, trainer.schedule, batch[0], trainer.objective,
        temperature=1.0, max_grad_norm=1.0, tally=tally,
    )  # fmt: skip
    metrics = tally.result()
    assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0
    assert metrics["policy/clip_fraction"] == 0.0


def test_float32_trainer_and_engine_agree(trainer_for) -> None:
    trainer = trainer_for(rollout={"temperature": 0.6, "group_size": 6}, algorithm={"minibatches_per_step": 2})
    metrics = trainer.step(trainer.source.next(4))
    assert 0 < metrics["mismatch/logprob_abs_diff_max"] < 1e-4


UNPACKED = {
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", UNPACKED)
def test_families_that_run_stock(trainer_for, tmp_path: Path, family: str, dtype: str) -> None:
    tiny_run.make_model(tmp_path / "model", family=family, **UNPACKED[family])
    tiny_run.make_data(tmp_path / "data.jsonl")
    trainer = trainer_for(model={"compute_dtype": dtype}, algorithm={"skip_zero_advantage": False})
    assert not trainer.policy.module.packed
    for _ in range(2):
        metrics = trainer.step(trainer.source.next(4))
        assert metrics["optim/grad_norm"] > 0
        assert metrics["optim/skipped_updates"] == 0
        # experts: where bfloat16 rounds differently, a token may go another way
        assert metrics["mismatch/logprob_abs_diff"] < (1e-4 if dtype == "float32" else 0.03)


def test_engine_borrows_and_memory_is_returned(trainer_for) -> None:
    trainer = trainer_for(model={"compute_dtype": "bfloat16"})
    trainer.step(trainer.source.next(4))
    torch.cuda.synchronize()
    settled = torch.cuda.memory_allocated()
    sync_weights(trainer.policy, trainer.engine, 1)
    lent = {n: t.data_ptr() for n, t in trainer.policy.lend()}
    for name, parameter in trainer.engine._model.module.named_parameters():
        assert lent[name] == parameter.data_ptr()
        assert parameter.dtype == torch.bfloat16
    release_engine(trainer.policy, trainer.engine)
    assert torch.cuda.memory_allocated() <= settled
    trainer.step(trainer.source.next(4))
    assert torch.cuda.memory_allocated() <= settled


@pytest.mark.parametrize("dtype", DTYPES)
def test_run_with_everything(trainer_for, tmp_path: Path, dtype: str) -> None:
    """Reference, evaluation, async checkpoints; plain transformers loads from the export what was trained."""
    from transformers import AutoModelForCausalLM

    eval_set = {"name": "own", "path": str(tmp_path / "data.jsonl"), "samples_per_prompt": 2, "temperature": 1.0}
    eval_set["pass_threshold"] = 0.0
    trainer = trainer_for(
        run={"steps": 4},
        model={"compute_dtype": dtype},
        algorithm={"kl_coef": 0.01, "entropy_coef": 0.001, "minibatches_per_step": 2},
        checkpoint={"every": 2, "async_save": True, "hf_every": 4},
        eval={"every": 2, "sets": [eval_set]},
    )
    metrics = trainer.train()
    assert 0 <= metrics["eval/own/avg@2"] <= metrics["eval/own/pass@2"] <= 1
    assert metrics["loss/kl"] >= 0
    trained = {n: t.float().cpu().clone() for n, t in trainer.policy.lend()}
    trainer.policy.reclaim()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf/step_000004", dtype=torch.float32)
    tolerance = 0.0 if dtype == "float32" else 8e-3  # lent in bfloat16, exported from the float32 masters
    for name, tensor in model.state_dict().items():
        if name in trained:
            torch.testing.assert_close(trained[name], tensor, atol=0, rtol=tolerance, msg=name)
    assert tiny_run.metrics_of(tmp_path, "mismatch/logprob_abs_diff")[-1][0] == 4


def test_deterministic_runs_repeat_and_resume_to_the_bit(tmp_path: Path, run_distributed) -> None:
    """`run.deterministic` in bfloat16: killed after 3 of 6 steps and resumed, the weights are those of an unbroken run.

    In processes of their own: cuBLAS must be asked before its first product.
    """
    base = {
        "model": {"compute_dtype": "bfloat16"},
        "rollout": {"top_p": 0.9},
        "checkpoint": {"every": 1, "async_save": True, "hf_every": 6},
        "algorithm": {"minibatches_per_step": 2, "kl_coef": 0.01},
    }
    script = Path(tiny_run.__file__)
    for name, stops in (("whole", (6,)), ("broken", (3, 6))):
        (tmp_path / name).mkdir()
        tiny_run.make_model(tmp_path / name / "model")
        tiny_run.make_data(tmp_path / name / "data.jsonl")
        for steps in stops:
            run = {"steps": steps, "device": "cuda", "deterministic": True}
            run_distributed(script, 1, tmp_path / name, json.dumps(base | {"run": run}), timeout=240)
    whole, broken = (tiny_run.exported(tmp_path / name, 6) for name in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, broken[name]), name
    names = ("reward/mean", "loss/policy", "optim/grad_norm", "mismatch/logprob_abs_diff")
    assert tiny_run.metrics_of(tmp_path / "whole", *names) == tiny_run.metrics_of(tmp_path / "broken", *names)
