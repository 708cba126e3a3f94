"""GRPO written out from public parts: what `Trainer.step` does. A test holds the weights equal to the last bit.

    OMP_WAIT_POLICY=passive torchrun --nproc-per-node 2 examples/manual_loop.py configs/quickstart.toml 5

Left out: evaluation, checkpoints, logs, a reference, a teacher, whitening, estimators of tokens,
`correction.tis_batch_normalize` and `score_centering_top_k`, stop strings, `rollout.truncated` other than keep.
"""

from __future__ import annotations

import sys

from lightrl import load_config
from lightrl.data import PromptSource, load_prompts
from lightrl.distributed.mesh import close_world, init_world
from lightrl.engine.base import SamplingParams
from lightrl.models import load
from lightrl.models.context import context_length
from lightrl.observe.metrics import Tally
from lightrl.rewards import Scorer
from lightrl.rollout.collect import collect, run_async
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training import setup
from lightrl.training.advantage import Advantages, set_advantages
from lightrl.training.balance import CostModel
from lightrl.training.batch import build_minibatches
from lightrl.training.engines import build_engine
from lightrl.training.objective import Objective
from lightrl.training.optim import build_optimizer, build_schedule
from lightrl.training.packing import TrainSample
from lightrl.training.policy import Policy
from lightrl.training.update import update


def main(config_path: str, steps: int | None = None) -> Policy:
    """Train for `steps` (default: `run.steps`) and return the policy."""
    config = load_config(config_path)
    algorithm, rollout, temperature = config.algorithm, config.rollout, config.rollout.temperature
    objective = Objective.of(algorithm, config.correction)
    parallel = config.parallel
    world = init_world(
        config.run.device,
        parallel.shard_size,
        expert_parallel=parallel.expert_parallel,
        context_parallel=parallel.context_parallel,
    )
    hf_config, tokenizer = load.load_config_and_tokenizer(config.model.path)
    context, limit = context_length(hf_config) or setup.UNKNOWN_CONTEXT, rollout.max_response_tokens
    prompts = load_prompts(config.data, tokenizer, context_length=context, max_response_tokens=limit)
    source = PromptSource(prompts, seed=config.run.seed, shuffle=config.data.shuffle)
    scorer = Scorer(config.reward)
    advantages = Advantages.load(algorithm, limit)
    sampling = SamplingParams(max_new_tokens=limit, temperature=temperature, top_p=rollout.top_p, top_k=rollout.top_k)
    policy = Policy.load(config.model, world)  # FSDP2 shards, float32 masters
    optimizer = build_optimizer(policy.parameters(), config.optim)
    schedule = build_schedule(optimizer, config.optim, config.run.steps * algorithm.minibatches_per_step)
    engine = build_engine(config.engine, policy, tokenizer, context)

    for step in range(config.run.steps if steps is None else steps):
        numbered = enumerate(source.next(rollout.prompts_per_step), start=step * rollout.prompts_per_step)
        mine = list(numbered)[world.rank :: world.size]
        sync_weights(policy, engine, version=step)  # the engine borrows the policy's whole weights …
        groups = run_async(
            collect(engine, mine, sampling=sampling, group_size=rollout.group_size, scorer=scorer, seed=config.run.seed,
                    decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
        )  # fmt: skip
        release_engine(policy, engine)  # … and gives them back
        set_advantages(groups, advantages)  # GRPO: (reward - mean) / std of its group
        batch = build_minibatches(
            [TrainSample.from_sample(s) for g in groups for s in g.scored], world,
            minibatches=algorithm.minibatches_per_step, max_tokens=config.parallel.max_tokens_per_microbatch,
            share_prompts=config.parallel.share_prompts and policy.module.packed, aggregation=algorithm.aggregation,
            skip_zero_advantage=objective.may_skip_zero_advantage,
            constant_length=algorithm.constant_length or limit, cost=CostModel.from_config(hf_config.get_text_config()),
        )  # fmt: skip
        old = objective.needs_old_logprobs(len(batch))  # one update is on-policy
        for microbatch in (m for minibatch in batch for m in minibatch if old):
            microbatch.old_logprobs = policy.logprobs(microbatch, temperature)
        for minibatch in batch:
            update(policy, optimizer, schedule, minibatch, objective, temperature=temperature,
                   max_grad_norm=config.optim.max_grad_norm, tally=Tally())  # fmt: skip
        rewards = [r for part in world.gather([s.reward for g in groups for s in g.scored]) for r in part]
        if world.is_main:
            print(f"step {step + 1}  reward {sum(rewards) / len(rewards):.3f}")
    scorer.close()
    return policy


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not all(map(str.isdecimal, sys.argv[2:])):
        sys.exit("usage: python examples/manual_loop.py CONFIG [STEPS]")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
    close_world()
