"""Every estimator, whitening and KL in the reward on two gloo ranks: advantages and gradients of one process."""

from __future__ import annotations

import sys
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


def outcome(model: Path, case: dict) -> dict[str, torch.Tensor]:
    """Advantages of every loss token by sample, and the gradients of two updates' losses, added up."""
    from lightrl.config.schema import AlgorithmConfig, ModelConfig
    from lightrl.distributed.fsdp import set_gradient_sync
    from lightrl.distributed.mesh import init_world
    from lightrl.observe.metrics import Tally
    from lightrl.training.advantage import Advantages, finish_advantages, set_advantages
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.objective import Objective
    from lightrl.training.packing import TrainSample
    from lightrl.training.policy import Policy
    from lightrl.training.update import microbatch_loss
    from lightrl.wrappers import clean_name

    world = init_world("cpu")
    policy = Policy.load(ModelConfig(path=str(model), compute_dtype="float32"), world)
    config = AlgorithmConfig(**{k: v for k, v in case.items() if k != "only"})
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
    finish_advantages(groups, batch, advantages, world)
    found = {}
    for minibatch in batch:
        for i, microbatch in enumerate(minibatch):
            set_gradient_sync(policy.module, i == len(minibatch) - 1)
            logprobs, entropy = policy(microbatch, 1.0)
            microbatch_loss(logprobs, entropy, microbatch, objective, Tally()).backward()
            for number, key in enumerate(microbatch.sample_keys):
                rows = (microbatch.sample_ids == number) & (microbatch.loss_mask > 0)
                found["advantages.{}.{}".format(*key)] = microbatch.advantages[rows]
    found = {name: tensor for part in world.gather(found) for name, tensor in part.items()}
    return found | {clean_name(n): p.grad.full_tensor().clone() for n, p in policy.module.named_parameters()}


def run_cases(model: str, reference: str) -> None:
    """On each of two ranks: every case's advantages and gradients equal the single process's."""
    from safetensors.torch import load_file

    for name, case in CASES.items():
        found = outcome(Path(model), case)
        expected = load_file(f"{reference}/{name}.safetensors")
        assert found.keys() == expected.keys(), name
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=1e-5, msg=f"{name}: {key}")
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one(tmp_path, run_distributed):
    from safetensors.torch import save_file

    from lightrl.distributed.mesh import close_world

    make_model(tmp_path / "model")
    try:
        for name, case in CASES.items():
            whole = outcome(tmp_path / "model", case)
            assert sum(t.abs().sum() for n, t in whole.items() if n.startswith("advantages")) > 0, name
            assert max(float(t.abs().max()) for n, t in whole.items() if t.numel() and "layers" in n) > 0, name
            save_file({k: v.contiguous() for k, v in whole.items()}, tmp_path / f"{name}.safetensors")
    finally:
        close_world()
    run_distributed(run_cases, 2, tmp_path / "model", tmp_path)


if __name__ == "__main__":
    run_cases(*sys.argv[1:])
