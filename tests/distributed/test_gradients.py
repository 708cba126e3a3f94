"""Two gloo ranks against one process: gradients of every aggregation, loss and kind of correction, odd microbatches,
empty ranks (A1-A3, HSDP)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from families import make_family

CASES = {
    "token_mean": {"aggregation": "token_mean"},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "constant": {"aggregation": "constant"},
    "small_microbatches": {"aggregation": "token_mean", "max_tokens": 24},
    "alone": {"aggregation": "token_mean", "share_prompts": False, "max_tokens": 30},
    "one_sample": {"aggregation": "token_mean", "only": 1},
    "masked": {"aggregation": "token_mean", "mask_all_but": 3},
    "checkpointing": {"aggregation": "token_mean", "activation_checkpointing": True},
    "kept_whole": {
        "aggregation": "token_mean",
        "reshard_after_forward": False,
        "activation_checkpointing": True,
        "max_tokens": 24,
    },
    "replicated": {"aggregation": "token_mean", "shard_size": 1},
    "zero_advantage": {
        "aggregation": "token_mean",
        "zero": (1, 4),
        "skip": True,
        "entropy_coef": 0.0,
        "max_tokens": 24,
    },
    "nothing_to_learn": {"aggregation": "token_mean", "zero": range(5), "skip": True, "entropy_coef": 0.0},
    # stale: old and engine's log-probs differ from the present ones; whole samples, wherever they are
    "gspo": {
        "aggregation": "sequence_mean",
        "max_tokens": 24,
        "stale": True,
        "loss": {"loss": "gspo", "clip_low": 0.1},
    },
    "cispo": {"aggregation": "token_mean", "max_tokens": 24, "stale": True, "loss": {"loss": "cispo"}},
    "dppo": {
        "aggregation": "constant",
        "stale": True,
        "loss": {"loss": "dppo_kl"},
        "correction": {"use_rollout_logprobs": True},
    },
    "sapo_tis_normalized": {
        "aggregation": "token_mean",
        "max_tokens": 24,
        "stale": True,
        "loss": {"loss": "sapo"},
        "correction": {"use_tis": True, "tis_upper_bound": 1.1, "tis_batch_normalize": True},
    },
    "sequence_normalized": {
        "aggregation": "sequence_mean",
        "max_tokens": 24,
        "stale": True,
        "correction": {
            "use_tis": True,
            "tis_level": "sequence",
            "tis_mode": "clip",
            "tis_batch_normalize": True,
            "use_rs": True,
            "rs_level": "geometric",
            "rs_upper_bound": 1.3,
            "rs_veto_threshold": 0.3,
            "opsm_delta": 0.05,
        },
    },
    "score_centering": {
        "aggregation": "token_mean",
        "max_tokens": 24,
        "top": 5,
        "correction": {"score_centering_top_k": 5, "use_tis": True, "tis_upper_bound": 1.1},
    },
    "untied": {"aggregation": "token_mean", "model": "qwen3_untied"},
    # ranks whose tokens go to different experts, and (small microbatches) a rank that has a single row at times
    "qwen3_moe": {"aggregation": "token_mean", "model": "qwen3_moe", "max_tokens": 24},
    "deepseek_v3": {"aggregation": "token_mean", "model": "deepseek_v3", "activation_checkpointing": True},
    "gpt_oss": {"aggregation": "token_mean", "model": "gpt_oss", "only": 1},
}


def make_models(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    for name, family, tied in (("llama", "llama", True), ("qwen3_untied", "qwen3", False)):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **common, tie_word_embeddings=tied)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    for family in ("qwen3_moe", "deepseek_v3", "gpt_oss"):
        make_family(folder / family, family)


def make_samples(only: int | None = None, mask_all_but: int | None = None, zero=()):
    from lightrl.training.packing import TrainSample

    g = torch.Generator().manual_seed(3)
    samples = []
    for group in range(5):
        prompt = torch.randint(3, 97, (int(torch.randint(1, 9, (1,), generator=g)),), generator=g).tolist()
        for index in range(group % 3 + 1):
            n = int(torch.randint(1, 14, (1,), generator=g))
            mask = torch.randint(0, 2, (n,), generator=g).tolist()
            if mask_all_but is not None and group != mask_all_but:
                mask = [0] * n
            sample = TrainSample(
                group_index=group,
                index=index,
                prompt=prompt,
                response=torch.randint(3, 97, (n,), generator=g).tolist(),
                loss_mask=mask,
                rollout_logprobs=[-1.0] * n,
                advantage=float(torch.randn(1, generator=g)) * (group not in zero),
            )
            samples.append(sample)
    if only is not None:
        samples = [s for s in samples if sum(s.loss_mask)][:only]
    return samples


def age(batch, policy) -> None:
    """Old and engine's log-probs at random distances from the present ones, a stream of numbers a sample."""
    now = policy.logprobs(batch, 0.9)
    distances = torch.zeros(2, now.numel())
    for number, (group, index) in enumerate(batch.sample_keys):
        mine = batch.sample_ids == number
        g = torch.Generator().manual_seed(100 * group + index)
        distances[:, mine] = 0.3 * torch.randn(2, int(mine.sum()), generator=g)
    batch.old_logprobs = now + distances[0]
    batch.rollout_logprobs = batch.old_logprobs + distances[1]


def gradients(models: Path, case: dict, device: str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients of one update's loss for a case, whole, and the weights' names."""
    from lightrl.config.schema import AlgorithmConfig, CorrectionConfig, ModelConfig
    from lightrl.distributed.fsdp import set_gradient_sync
    from lightrl.distributed.mesh import init_world
    from lightrl.observe.metrics import Tally
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.objective import Objective, normalize_weights
    from lightrl.training.policy import Policy, to_device
    from lightrl.training.update import microbatch_loss
    from lightrl.wrappers import clean_name

    world = init_world(device, case.get("shard_size"))
    model = ModelConfig(
        path=str(models / case.get("model", "llama")),
        compute_dtype=case.get("compute_dtype", "float32"),
        activation_checkpointing=case.get("activation_checkpointing", False),
        reshard_after_forward=case.get("reshard_after_forward", True),
        kernels=case.get("kernels", "off"),
    )
    policy = Policy.load(model, world)
    samples = make_samples(case.get("only"), case.get("mask_all_but"), case.get("zero", ()))
    for s in samples if case.get("top") else ():
        g = torch.Generator().manual_seed(100 * s.group_index + s.index)
        s.rollout_top_ids = torch.randint(3, 97, (len(s.response), case["top"]), generator=g).tolist()
        s.rollout_top_logprobs = torch.rand(len(s.response), case["top"], generator=g).mul(0.05).log().tolist()
    (minibatch,) = build_minibatches(
        samples[world.rank :: world.size],
        world,
        minibatches=1,
        max_tokens=case.get("max_tokens", 1000),
        share_prompts=case.get("share_prompts", True),
        skip_zero_advantage=case.get("skip", False),
        aggregation=case["aggregation"],
        constant_length=16,
        cost=CostModel.from_config(policy.hf_config),
    )
    tally = Tally()
    correction = CorrectionConfig(**case.get("correction", {}))
    algorithm = AlgorithmConfig(entropy_coef=case.get("entropy_coef", 0.01), **case.get("loss", {}))
    objective = Objective.of(algorithm, correction)
    for batch in minibatch if case.get("stale") else ():
        age(batch, policy)
    if correction.tis_batch_normalize:
        normalize_weights([minibatch], world, correction)
    for i, batch in enumerate(minibatch):
        set_gradient_sync(policy.module, i == len(minibatch) - 1)
        logprobs, entropy, *top = policy(batch, 0.9)
        microbatch_loss(logprobs, entropy, to_device(batch, world.device), objective, tally, *top).backward()
    whole = {clean_name(n): p.grad.full_tensor().clone().cpu() for n, p in policy.module.named_parameters()}
    metrics = Tally.merged(world.gather(tally.to_dict())).result()
    return whole, metrics


def check_whitening_and_skipping(models: Path) -> None:
    """A4: one mean and variance over both ranks, an empty one too. A step that one rank spoils, none takes (A3)."""
    from lightrl.config.schema import ModelConfig, OptimConfig
    from lightrl.distributed.mesh import init_world
    from lightrl.training.advantage import whiten_advantages
    from lightrl.training.optim import build_optimizer, build_schedule, optimizer_step
    from lightrl.training.packing import TrainSample, pack
    from lightrl.training.policy import Policy

    world = init_world("cpu")

    def batch(advantages, masks):
        units = [
            [TrainSample(group_index=0, index=i, prompt=[1], response=[2] * len(m), loss_mask=m,
                         rollout_logprobs=None, advantage=a)]
            for i, (a, m) in enumerate(zip(advantages, masks, strict=True))
        ]  # fmt: skip
        return pack(units, [[1.0]] * len(units))

    # rank 0 holds advantages 1 (two tokens) and 7 (masked out), rank 1 holds 4 (one token): mean 2, variance 2
    mine = batch([1.0, 7.0], [[1, 1], [0, 0]]) if world.rank == 0 else batch([4.0], [[1]])
    whiten_advantages([[mine]], world)
    expected = [-1 / 2**0.5] * 2 + [5 / 2**0.5] * 2 if world.rank == 0 else [2 / 2**0.5]
    assert mine.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    empty = pack([], []) if world.rank == 0 else batch([1.0, 3.0], [[1], [1]])
    whiten_advantages([[empty]], world)
    assert empty.advantages.tolist() == ([] if world.rank == 0 else pytest.approx([-1.0, 1.0]))

    policy = Policy.load(ModelConfig(path=str(models / "llama"), compute_dtype="float32"), world)
    config = OptimConfig(lr=1.0)
    optimizer = build_optimizer(policy.parameters(), config)
    before = [p.to_local().clone() for p in policy.parameters()]
    logprobs, _ = policy(batch([1.0], [[1, 1]]), 1.0)
    (logprobs * (float("nan") if world.rank == 1 else 1.0)).sum().backward()
    _, stepped = optimizer_step(optimizer, build_schedule(optimizer, config, 1), policy.parameters(), 1.0)
    assert not stepped
    assert all(torch.equal(p.to_local(), b) for p, b in zip(policy.parameters(), before, strict=True))


def run_cases(models: str, reference: str) -> None:
    """On each of two ranks: every case's gradients and loss equal the single process's."""
    from safetensors.torch import load_file

    check_whitening_and_skipping(Path(models))
    for name, case in CASES.items():
        found, metrics = gradients(Path(models), case)
        expected = load_file(f"{reference}/{name}.safetensors")
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-5, msg=f"{name}: {parameter}")
        wanted = json.loads(Path(reference, f"{name}.json").read_text())
        for metric, value in wanted.items():
            assert metrics[metric] == pytest.approx(value, abs=1e-5), f"{name}: {metric}"
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one(tmp_path, run_distributed):
    from safetensors.torch import save_file

    from lightrl.distributed.mesh import close_world

    make_models(tmp_path / "models")
    try:
        for name, case in CASES.items():
            single = {k: v for k, v in case.items() if k not in ("shard_size", "skip")}  # the plain way
            whole, metrics = gradients(tmp_path / "models", single)
            if case.get("skip"):
                metrics = {}  # they are measured on fewer samples
            assert any(g.abs().max() > 0 for g in whole.values()) == (name != "nothing_to_learn")
            save_file({k: v.contiguous() for k, v in whole.items()}, tmp_path / f"{name}.safetensors")
            (tmp_path / f"{name}.json").write_text(json.dumps(metrics))
    finally:
        close_world()
    run_distributed(run_cases, 2, tmp_path / "models", tmp_path)


def test_one_process_equals_the_stock_model(tmp_path):
    """The single process that two ranks are held to, itself against plain transformers and autograd."""
    from transformers import AutoModelForCausalLM

    from lightrl.distributed.mesh import close_world

    make_models(tmp_path)
    try:
        found, _ = gradients(tmp_path, {"aggregation": "sequence_mean"})
    finally:
        close_world()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", attn_implementation="eager", dtype=torch.float32)
    counted = [s for s in make_samples() if sum(s.loss_mask)]
    for s in counted:
        logits = model(torch.tensor([s.prompt + s.response]), use_cache=False).logits[0, len(s.prompt) - 1 : -1]
        log_p = (logits / 0.9).log_softmax(-1)
        mine = log_p.gather(-1, torch.tensor(s.response)[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        mask = torch.tensor(s.loss_mask, dtype=torch.float32)
        token_loss = -s.advantage * (mine - mine.detach()).exp() - 0.01 * entropy
        ((token_loss * mask).sum() / mask.sum() / len(counted)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


if __name__ == "__main__":
    run_cases(*sys.argv[1:])
