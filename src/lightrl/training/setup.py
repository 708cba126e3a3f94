"""Building the parts of a run from their sections of the config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig

from lightrl.config.load import model_fault
from lightrl.config.rundir import run_dir_fault
from lightrl.config.schema import (
    Config,
    CorrectionConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
)
from lightrl.data.conversations import Conversation
from lightrl.distributed.mesh import World, find_part, init_world
from lightrl.distributed.offload import Offloader, TrainingState
from lightrl.engine.base import SamplingParams
from lightrl.errors import UserError
from lightrl.models import load, lora
from lightrl.models.context import context_length, longrope_notice
from lightrl.models.registry import num_experts, stock_notice, unshared_rows
from lightrl.models.value_head import load_value_config
from lightrl.rollout import agent
from lightrl.rollout.agent import Agent
from lightrl.training.critic import Critic, critic_model
from lightrl.training.policy import AdaptersOff, Policy
from lightrl.training.value_model import ValueModel
from lightrl.types import Prompt
from lightrl.wrappers import is_adapter

if TYPE_CHECKING:
    from lightrl.training.teacher import Teacher

UNKNOWN_CONTEXT = 1 << 20  # tokens, for a model whose config states no limit


def check(config: Config) -> None:
    """Rules between sections and required keys, for configs that were not loaded from a file too."""
    if not isinstance(config, Config):  # `Trainer("run.toml")`
        of = "**{…}" if isinstance(config, dict) else repr(str(config)) if isinstance(config, str | Path) else "…"
        raise UserError(f"Trainer takes a Config, not a {type(config).__name__}: Trainer(load_config({of}))")
    problems = config.validate() + config.required()
    if config.log.save_samples and (fault := run_dir_fault(config.run.dir)) is not None:
        problems.append(("run.dir", fault))
    for key in ("path", "tokenizer", "reference_path"):
        value = getattr(config.model, key)
        if value and (fault := model_fault(value)) is not None:
            problems.append((f"model.{key}", fault))
    paths = [("critic.path", config.critic.path), ("teacher.path", config.teacher.path)]
    for key, path in (*paths, ("dpo.reference_path", config.dpo.reference_path)):
        if path and (fault := model_fault(path)) is not None:
            problems.append((key, fault))
    if config.lora.rank and (fault := lora.missing()) is not None:
        problems.append(("lora.rank", fault))
    if "wandb" in config.log.trackers and find_spec("wandb") is None:
        problems.append(("log.trackers", "wandb is not installed: pip install wandb, or take 'wandb' out"))
    if problems:
        raise UserError("; ".join(f"{key}: {text}" for key, text in problems))
    check_engine(config.engine)


def check_engine(config: EngineConfig) -> None:
    """UserError for an engine that cannot be had here, as far as can be told without a model."""
    if config.kind == "sglang":
        from lightrl.engine import sglang_arguments

        sglang_arguments.check_installed()
        sglang_arguments.check(config.args)
    if config.kind == "sglang_server":
        from lightrl.engine.sglang_server import read_key

        read_key(config)


def join_world(config: Config) -> World:
    """The ranks of an RL run."""
    parallel = config.parallel
    if parallel.rollout_ranks and not (part := find_part(parallel.rollout_ranks)).trains:
        raise UserError(
            f"parallel.rollout_ranks: rank {part.job_rank} of {part.job_size} generates, and has no Trainer: call "
            "lightrl.serve_rollouts(config) before, which returns True on such ranks once the run is over"
        )
    return init_world(
        config.run.device,
        parallel.shard_size,
        parallel.timeout,
        parallel.expert_parallel,
        parallel.context_parallel,
        broadcasts_to_servers=config.engine.kind == "sglang_server" and config.sync.transport == "nccl",
        rollout_ranks=parallel.rollout_ranks,
    )


def training_samples(config: Config) -> SamplingParams:
    """How `[rollout]` has training data sampled."""
    return SamplingParams(
        max_new_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        stop=tuple(config.rollout.stop),
        stop_token_ids=tuple(config.rollout.stop_token_ids),
        top_logprobs=max(config.correction.score_centering_top_k, config.teacher.student_k),
        return_routing=config.correction.routing_replay == "rollout",
    )


def check_vocabulary(prompts: Iterable[Prompt | Conversation], tokenizer: Any, hf_config: Any) -> None:
    """UserError for a tokenizer of another model: ids that this one has no embedding for."""
    size = int(hf_config.get_text_config().vocab_size)
    for prompt in prompts:
        if max(prompt.tokens) >= size:
            raise UserError(
                f"{prompt.source}: token {max(prompt.tokens)} ({tokenizer.decode([max(prompt.tokens)])!r}) is none of "
                f"the model's {size}: the tokenizer is not the model's; correct model.tokenizer"
            )


def check_stop_ids(config: Config, hf_config: Any) -> None:
    """UserError for an id that the model cannot sample: nothing would ever stop there."""
    size = int(hf_config.get_text_config().vocab_size)
    if (largest := max(config.rollout.stop_token_ids, default=0)) >= size:
        raise UserError(f"rollout.stop_token_ids: {largest} is none of the model's {size} tokens: correct or remove it")


def check_parallel(config: ParallelConfig, hf_config: Any, model: str, *, needs_experts: bool = True) -> None:
    """UserError for a model that cannot be spread as `[parallel]` asks; `model` names it: `model.path = …`.

    Without `needs_experts` one that has none will do.
    """
    ranks, count = config.expert_parallel, num_experts(hf_config)
    if ranks > 1 and needs_experts and not count:
        kind = f"{model} ({hf_config.model_type})"
        raise UserError(f"parallel.expert_parallel: {kind} has no experts that LightRL packs: set it to 1")
    if count % ranks:
        raise UserError(f"parallel.expert_parallel: {ranks} does not divide the {count} experts of {model}")
    ranks = config.context_parallel
    if ranks > 1 and (reason := unshared_rows(hf_config, ranks)) is not None:
        raise UserError(f"parallel.context_parallel: {ranks} ranks cannot share rows of {model}: {reason}")


def check_replay(config: CorrectionConfig, hf_config: Any, model: str) -> None:
    """UserError for a model without a choice of experts that could be replayed; `model` names it."""
    if config.routing_replay != "none" and not num_experts(hf_config):
        kind = f"{model} ({hf_config.model_type})"
        raise UserError(f"correction.routing_replay: {kind} has no experts that LightRL packs: set it to 'none'")


def check_reference(config: Config, hf_config: Any, tokenizer: Any, prompts: Iterable[Prompt]) -> None:
    """UserError for a reference or a critic that cannot read the policy's samples: it knows fewer tokens, or less of
    them at once."""
    paths = [("model.reference_path", "reference", config.model.reference_path if config.algorithm.kl_coef else None)]
    paths.append(("critic.path", "critic", config.critic.path if config.algorithm.estimator.critic else None))
    needed = num_tokens(hf_config, tokenizer)
    longest = max((len(p.tokens) for p in prompts), default=0) + config.rollout.max_response_tokens
    for key, what, path in paths:
        if path is not None:
            check_reads(config, key, what, path, needed, longest, "rollout.max_response_tokens")
    if config.algorithm.estimator.critic:
        model = critic_model(config)
        folder = load.resolve_checkpoint(model.path, model.revision, weights=False, key="critic.path")
        load_value_config(folder, model.trust_remote_code)


def reward_section(config: Config) -> RewardConfig:
    """`[reward]`; nothing need be named where no reward is trained on."""
    if config.reward.type or config.algorithm.estimator.rewards:
        return config.reward
    return replace(config.reward, type="none")


def num_tokens(hf_config: Any, tokenizer: Any) -> int:
    """That a model knows: some pad their embeddings, others not."""
    return min(int(hf_config.get_text_config().vocab_size), len(tokenizer))


def check_reads(config: Config, key: str, what: str, path: str, needed: int, longest: int, limited_by: str) -> None:
    """UserError where the model at `path`, which `key` names, has fewer tokens than the `needed` ones of the policy, or
    a context of fewer than the `longest` sample's, which the key `limited_by` limits."""
    folder = load.resolve_checkpoint(path, weights=False, key=key)
    theirs = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    size = int(theirs.get_text_config().vocab_size)
    if size < needed:
        same = "an earlier checkpoint of the same model" if what == "reference" else "a model with its tokenizer"
        raise UserError(
            f"{key}: {path} has {size} tokens, the policy {needed}: a {what} has the policy's vocabulary; name {same}"
        )
    context = context_length(theirs)
    if context is not None and context < longest:
        raise UserError(
            f"{key}: {path} reads {context} tokens, and samples have up to {longest}: lower {limited_by}, or name a "
            f"{what} with a longer context"
        )
    check_parallel(config.parallel, theirs, f"{key} = {path}", needs_experts=False)


def load_policy(config: Config, world: World) -> Policy:
    """What is trained: all weights, or with `lora.rank` adapters."""
    return Policy.load(config.model, world, adapters=config.lora if config.lora.rank else None, seed=config.run.seed)


def load_reference(config: Config, world: World, policy: Policy) -> Policy | AdaptersOff | None:
    """The frozen reference, when the KL has a weight."""
    if config.algorithm.kl_coef == 0:
        return None
    return reference_of(policy, config.model, config.model.reference_path, world)


def reference_of(policy: Policy, model: ModelConfig, path: str | None, world: World) -> Policy | AdaptersOff:
    """What is at `path`, or the policy's start: the policy itself without its adapters, where it has any."""
    if path is None and policy.adapters is not None:
        return AdaptersOff(policy)
    return frozen_model(model, path, world)


def frozen_model(model: ModelConfig, path: str | None, world: World) -> Policy:
    """What is at `path`, or the policy's start, without gradients."""
    if path is not None:
        model = replace(model, path=path, revision=None)
    return Policy.load(model, world, frozen=True)


def training_state(
    config: ParallelConfig,
    policy: Policy,
    reference: Policy | AdaptersOff | None,
    optimizer: Any,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
) -> TrainingState:
    """What may leave the GPU while engines generate: policy and critic with their optimizers, reference and teacher."""
    modules = nn.ModuleList(part.module for part in (policy, reference, critic) if part is not None)
    modules.extend([] if teacher is None else teacher.modules)
    others = [] if critic is None else [critic.optimizer]
    limit = None if config.offload_host_gib is None else int(config.offload_host_gib * 2**30)
    return TrainingState(Offloader(modules, optimizer, *others, max_host_bytes=limit), config.offload)


def warnings(config: Config, policy: Policy, tokenizer: Any, num_prompts: int) -> list[str]:
    """What goes, and is worth a look."""
    found = [] if policy.module.packed else [stock_notice(policy.hf_config)]
    found += filter(None, [longrope_notice(policy.hf_config)])
    if (drawn := config.rollout.prompts_per_draw) > num_prompts:
        key = "oversample_prompts" if config.rollout.oversample_prompts else "prompts_per_step"
        found.append(
            f"rollout.{key} = {drawn}, but there are {num_prompts} prompts: they are drawn more than once in a step; "
            "lower it, or add prompts"
        )
    if config.rollout.group_size == 1 and config.algorithm.estimator.compares:
        found.append(
            "rollout.group_size = 1: an answer is compared with the others to its prompt, and alone has advantage 0: "
            "nothing is learned from rewards"
        )
    elif config.rollout.group_size == 1 and config.algorithm.whitening == "group":
        found.append(
            "rollout.group_size = 1 with algorithm.whiten = 'group': the advantages of an answer are shifted to mean 0 "
            "by themselves, so that its reward has no say: set 'batch'"
        )
    if config.algorithm.estimator.critic and config.critic.pretrain_steps >= config.run.steps:
        found.append(
            f"critic.pretrain_steps = {config.critic.pretrain_steps}: all {config.run.steps} steps of the run "
            "(run.steps) train the critic alone, the policy stays as it is"
        )
    if config.algorithm.loss == "gspo" and config.algorithm.aggregation != "sequence_mean":
        found.append(
            f"algorithm.loss = 'gspo' is a mean over samples, but algorithm.aggregation = "
            f"{config.algorithm.aggregation!r} gives long ones more weight: set 'sequence_mean'"
        )
    ends = load.eos_token_ids(str(policy.source), policy.hf_config, tokenizer)
    if not (ends or config.rollout.stop or config.rollout.stop_token_ids):
        found.append(
            "neither model nor tokenizer names an end-of-sequence token: every response runs into "
            "rollout.max_response_tokens; set rollout.stop or rollout.stop_token_ids"
        )
    return found


def load_agent(
    config: Config, hf_config: Any, tokenizer: Any, context_length: int, *, graded: bool, rank: int
) -> Agent | None:
    """Of `[agent]`, before the model loads; None where it is off."""
    model = config.model
    if not config.agent.enabled:
        return None
    end_ids = load.eos_token_ids(model.path, hf_config, tokenizer, model.revision)
    return agent.load_agent(
        config.agent,
        config.sandbox,
        tokenizer,
        end_ids=end_ids,
        context_length=context_length,
        template_kwargs=config.data.chat_template_kwargs,
        endpoint=config.endpoint,
        model=model.path,
        graded=graded,
        rank=rank,
    )


def model_facts(config: Config, world: World, policy: Policy | ValueModel) -> dict[str, object]:
    """What is trained, and on what."""
    trained = sum(p.numel() for p in policy.parameters())
    parameters = sum(p.numel() for name, p in policy.module.named_parameters() if not is_adapter(name))
    adapters = {}
    if policy.adapters is not None:
        layers = len(lora.layers(policy.model))
        adapters["adapters"] = f"rank {policy.adapters.rank} on {layers} layers, {trained / 1e6:,.1f}M parameters"
    return {
        "model": f"{config.model.path} ({parameters / 1e6:,.0f}M parameters, {policy.hf_config.model_type})",
        "compute": f"{policy.device.type}, {str(policy.compute_dtype).removeprefix('torch.')}, "
        f"{world.size} rank{'s' * (world.size > 1)} "
        f"(shard {world.mesh.size(1)} x replicate {world.mesh.size(0)}"
        + (f", experts over {world.expert_mesh['ep'].size()}" if world.expert_mesh is not None else "")
        + (f", rows over {world.context_parallel})" if world.context_parallel > 1 else ")")
        + (f"; {ranks} more generate{'s' * (ranks == 1)}" if (ranks := config.parallel.rollout_ranks) else ""),
        **adapters,
    }


def summary(config: Config, world: World, policy: Policy, prompts: Any) -> dict[str, object]:
    """What a person wants to see when a run starts."""
    rollout = config.rollout
    others = {"critic": config.critic.path or "from the policy's start"} if config.algorithm.estimator.critic else {}
    if config.teacher.enabled:
        others["teacher"] = f"{config.teacher.path or config.teacher.url} ({config.teacher.form})"
    return model_facts(config, world, policy) | {
        **others,
        **({"rollouts": f"of {config.debug.rollouts}: no engine, no evaluation"} if config.debug.rollouts else {}),
        "data": f"{len(prompts)} prompts from {config.data.path}",
        "step": f"{rollout.prompts_per_step} prompts x {rollout.group_size} samples, "
        f"{config.algorithm.minibatches_per_step} update{'s' * (config.algorithm.minibatches_per_step > 1)}",
        "folder": config.run.dir,
    }


def peak_memory(world: World) -> dict[str, float]:
    """`perf/peak_memory_gib` since the last call, on a GPU."""
    if world.device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return {"perf/peak_memory_gib": peak}
