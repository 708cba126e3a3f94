"""Every estimator, whitening and KL in the reward on two gloo ranks: advantages and gradients of one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from tiny_run import make_model

TOKENS = {"advantage": "reinforce_plus_plus"}
IN_REWARD = {"kl_coef": 0.3, "kl_in": "reward"}
CASES = {
    "grpo": {},
    "grpo_whitened": {"whiten": "batch", **IN_REWARD},
    "grpo_within_groups": {"whiten": "group"},
    "rloo": {"advantage": "rloo", **IN_REWARD, "kl_estimator": "k1"},
    "reinforce_plus_plus": {**TOKENS, "gamma": 0.9, **IN_REWARD, "kl_estimator": "k2"},
    "reinforce_plus_plus_plain": {**TOKENS, "whiten": "none"},
    "reinforce_plus_plus_within_groups": {**TOKENS, "whiten": "group", **IN_REWARD},
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline", "overlong_buffer": 8},
    "gae": {"advantage": "gae", "gae_lambda": 0.9, **IN_REWARD},
    "gae_one_answer": {"advantage": "gae", "only": 1},
    "one_answer": {**TOKENS, "only": 1},
}


def make_groups(only: int | None = None):
    """Groups of 1 to 4 answers of 1 to 13 tokens with holes, one failed."""
    from lightrl.types import Prompt, Sample, SampleGroup, Status

    g = torch.Generator().manual_seed(4)
    groups = []
    for group in range(6):
        tokens = torch.randint(3, 28, (int(torch.randint(1, 9, (1,), generator=g)),), generator=g).tolist()
        prompt = Prompt(index=group, tokens=tokens, text="")
        samples = []
        for index in range(group % 4 + 1):
            n = int(torch.randint(1, 14, (1,), generator=g))
            mask = torch.randint(0, 2, (n,), generator=g).tolist()
            reward = float(torch.randn(1, generator=g))
            failed = (group, index) == (3, 1)
            sample = Sample(
                prompt=prompt, group_index=group, index=index, response_length=n, loss_mask=mask,
                tokens=tokens + torch.randint(3, 28, (n,), generator=g).tolist(), reward=None if failed else reward,
                status=Status.FAILED if failed else Status.COMPLETED,
            )  # fmt: skip
            samples.append(sample)
        groups.append(SampleGroup(prompt=prompt, group_index=group, samples=samples))
    return groups if only is None else groups[3 : 3 + only]


def make_critic(folder: Path) -> Path:
    """A sequence classifier with the tiny model's vocabulary; its head is not 0, as a new one would be."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def outcome(model: Path, case: dict) -> dict[str, torch.Tensor]:
    """Advantages of every loss token by sample; gradients of two updates' losses, added up, the critic's too."""
    from lightrl.config.load import load_config
    from lightrl.config.schema import AlgorithmConfig, ModelConfig
    from lightrl.distributed.fsdp import set_gradient_sync
    from lightrl.distributed.mesh import init_world
    from lightrl.observe.metrics import Tally
    from lightrl.training.advantage import Advantages, finish_advantages, set_advantages
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.critic import Critic, explained_variance, value_microbatch_loss
    from lightrl.training.objective import Objective
    from lightrl.training.packing import TrainSample
    from lightrl.training.policy import Policy
    from lightrl.training.update import microbatch_loss
    from lightrl.wrappers import clean_name

    world = init_world("cpu")
    policy = Policy.load(ModelConfig(path=str(model), compute_dtype="float32"), world)
    config = AlgorithmConfig(**{k: v for k, v in case.items() if k != "only"})
    section = {"path": str(model.parent / "critic"), "value_clip": 0.01}
    critic = None
    if config.estimator.critic:
        exact = {"path": str(model), "compute_dtype": "float32"}
        run = load_config(model=exact, algorithm={"advantage": "gae"}, critic=section)
        critic = Critic.build(replace(run, algorithm=config), world)
    advantages, objective = Advantages.load(config, 16), Objective.of(config)
    groups = make_groups(case.get("only"))[world.rank :: world.size]
    set_advantages(groups, advantages)
    batch = build_minibatches(
        [TrainSample.from_sample(s) for g in groups for s in g.scored],
        world,
        minibatches=2,
        max_tokens=40,
        share_prompts=True,
        skip_zero_advantage=objective.may_skip_zero_advantage,
        aggregation="token_mean",
        constant_length=16,
        cost=CostModel.from_config(policy.hf_config),
    )
    for microbatch in (m for minibatch in batch for m in minibatch):
        microbatch.old_logprobs = policy.logprobs(microbatch, 1.0)
        if config.kl_coef:
            microbatch.ref_logprobs = microbatch.old_logprobs + 0.5 * microbatch.targets.float().sin()
    if critic is not None:
        critic.add_values(batch)
    finish_advantages(groups, batch, advantages, world)
    found, tally = {}, Tally()
    for minibatch in batch:
        for i, microbatch in enumerate(minibatch):
            set_gradient_sync(policy.module, i == len(minibatch) - 1)
            logprobs, entropy = policy(microbatch, 1.0)
            microbatch_loss(logprobs, entropy, microbatch, objective, Tally()).backward()
            if critic is not None:
                set_gradient_sync(critic.module, i == len(minibatch) - 1)
                values = critic(microbatch) + 0.02 * microbatch.targets.float().sin()  # moved since, and clipped
                value_microbatch_loss(values, microbatch, critic.config, tally).backward()
            for number, key in enumerate(microbatch.sample_keys):
                rows = (microbatch.sample_ids == number) & (microbatch.loss_mask > 0)
                found["advantages.{}.{}".format(*key)] = microbatch.advantages[rows]
    found = {name: tensor for part in world.gather(found) for name, tensor in part.items()}
    if critic is not None:
        metrics = Tally.merged(world.gather(tally.to_dict())).result()
        assert 0 < metrics["critic/clip_fraction"] < 1 or case.get("only")
        found |= {name: torch.tensor([value]) for name, value in metrics.items()}
        found["explained"] = torch.tensor([explained_variance(batch, world) or 0.0])
        found |= {f"critic {clean_name(n)}": p.grad.full_tensor().clone() for n, p in critic.module.named_parameters()}
    return found | {clean_name(n): p.grad.full_tensor().clone() for n, p in policy.module.named_parameters()}


def critic_run(models: Path, folder: Path):
    """A policy and a critic whose optimizers hold state, and a checkpointer of `folder`."""
    from lightrl.config.load import load_config
    from lightrl.config.schema import CheckpointConfig
    from lightrl.distributed.mesh import init_world
    from lightrl.training.checkpoint import Checkpointer
    from lightrl.training.critic import Critic
    from lightrl.training.optim import build_optimizer
    from lightrl.training.policy import Policy

    config = load_config(
        model={"path": str(models / "model"), "compute_dtype": "float32"},
        algorithm={"advantage": "gae"},
        critic={"path": str(models / "critic")},
    )
    world = init_world("cpu")
    policy, critic = Policy.load(config.model, world), Critic.build(config, world)
    optimizer = build_optimizer(policy.parameters(), config.optim)
    return policy, optimizer, critic, Checkpointer(folder, CheckpointConfig(async_save=False)), world


def moved(policy, optimizer, critic) -> dict[str, torch.Tensor]:
    """Weights and second moments, whole."""
    from lightrl.distributed.fsdp import reshard_all

    found = {}
    for part, module, its in (("policy", policy.module, optimizer), ("critic", critic.module, critic.optimizer)):
        reshard_all(module)
        for name, parameter in module.named_parameters():
            found[f"{part}.{name}"] = parameter.full_tensor().detach()
            found[f"{part}.{name}.exp_avg_sq"] = its.state[parameter]["exp_avg_sq"].full_tensor()
    return found


def save_critic(models: Path, folder: Path) -> None:
    """One step of both models, a checkpoint of them, and beside it what it should hold."""
    from safetensors.torch import save_file

    from lightrl.training.packing import TrainSample, pack

    policy, optimizer, critic, checkpointer, world = critic_run(models, folder)
    sample = TrainSample(
        group_index=0, index=0, prompt=[3 + world.rank], response=[5, 6], loss_mask=[1, 1], rollout_logprobs=None,
        advantage=1.0,
    )  # fmt: skip
    batch = pack([[sample]], [[1.0]])
    policy(batch, 1.0)[0].sum().backward()
    critic(batch).sum().backward()
    optimizer.step()
    critic.optimizer.step()
    others = {"critic": (critic.module, critic.optimizer)}
    checkpointer.save(1, model=policy.module, optimizer=optimizer, extra={}, others=others)
    whole = moved(policy, optimizer, critic)
    if world.is_main:
        save_file({k: v.contiguous() for k, v in whole.items()}, folder / "expected.safetensors")


def run_cases(model: str, reference: str) -> None:
    """On each of two ranks: every case's advantages and gradients equal the single process's."""
    from safetensors.torch import load_file

    for name, case in CASES.items():
        found = outcome(Path(model), case)
        expected = load_file(f"{reference}/{name}.safetensors")
        assert found.keys() == expected.keys(), name
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=1e-5, msg=f"{name}: {key}")
    save_critic(Path(reference), Path(reference, "checkpoints"))
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one(tmp_path, run_distributed):
    from safetensors.torch import load_file, save_file

    from lightrl.distributed.mesh import close_world

    make_model(tmp_path / "model")
    make_critic(tmp_path / "critic")
    try:
        for name, case in CASES.items():
            whole = outcome(tmp_path / "model", case)
            assert sum(t.abs().sum() for n, t in whole.items() if n.startswith("advantages")) > 0, name
            assert max(float(t.abs().max()) for n, t in whole.items() if t.numel() and "layers" in n) > 0, name
            save_file({k: v.contiguous() for k, v in whole.items()}, tmp_path / f"{name}.safetensors")
    finally:
        close_world()
    run_distributed(run_cases, 2, tmp_path / "model", tmp_path)
    try:  # what two ranks saved, one of which holds no part of the value head's single row, one loads
        policy, optimizer, critic, checkpointer, _ = critic_run(tmp_path, tmp_path / "checkpoints")
        others = {"critic": (critic.module, critic.optimizer)}
        checkpointer.load(checkpointer.latest(), policy.module, optimizer, others=others)
        expected, found = load_file(tmp_path / "checkpoints" / "expected.safetensors"), moved(policy, optimizer, critic)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    finally:
        close_world()


if __name__ == "__main__":
    run_cases(*sys.argv[1:])
