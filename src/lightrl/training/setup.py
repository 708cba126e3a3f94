"""Building the parts of a run from their sections of the config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightrl.config.schema import AlgorithmConfig, Config, EngineConfig
from lightrl.distributed.mesh import World
from lightrl.engine.base import Engine
from lightrl.errors import UserError
from lightrl.models import load
from lightrl.training.policy import Policy

UNKNOWN_CONTEXT = 1 << 20  # tokens, for a model whose config states no limit


def check(config: Config) -> None:
    """Rules between sections and required keys, for configs that were not loaded from a file too."""
    problems = config.validate() + config.required()
    if problems:
        raise UserError("; ".join(f"{key}: {text}" for key, text in problems))


def load_reference(config: Config, world: World) -> Policy | None:
    """The frozen reference, when the KL has a weight."""
    if config.algorithm.kl_coef == 0:
        return None
    model = config.model
    if model.reference_path is not None:
        model = replace(model, path=model.reference_path, revision=None)
    return Policy.load(model, world, frozen=True)


def build_engine(
    config: EngineConfig, policy: Policy, tokenizer: Any, context_length: int, trust_remote_code: bool = False
) -> Engine:
    """What `engine.kind` names. A new engine is added here."""
    from lightrl.engine.transformers import TransformersEngine

    return TransformersEngine(
        policy.hf_config,
        eos_token_ids=load.eos_token_ids(str(policy.source), policy.hf_config, tokenizer),
        decode=tokenizer.decode,
        device=policy.device,
        dtype=policy.compute_dtype,
        max_batch=config.max_batch,
        max_prefill_tokens=config.max_prefill_tokens,
        context_length=context_length,
        trust_remote_code=trust_remote_code,
    )


def may_skip_zero_advantage(config: AlgorithmConfig) -> bool:
    """Is a sample without advantage one without gradient?"""
    return config.skip_zero_advantage and not (config.kl_coef or config.entropy_coef or config.whiten)


def pad_token_id(tokenizer: Any) -> int:
    """Any valid id: rows that hold it carry no loss."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def summary(config: Config, world: World, policy: Policy, prompts: Any) -> dict[str, object]:
    """What a person wants to see when a run starts."""
    parameters = sum(p.numel() for p in policy.module.parameters())
    rollout = config.rollout
    return {
        "model": f"{config.model.path} ({parameters / 1e6:,.0f}M parameters, {policy.hf_config.model_type})",
        "compute": f"{policy.device.type}, {str(policy.compute_dtype).removeprefix('torch.')}, "
        f"{world.size} rank{'s' * (world.size > 1)} "
        f"(shard {world.mesh.size(1)} x replicate {world.mesh.size(0)})",
        "data": f"{len(prompts)} prompts from {config.data.path}",
        "step": f"{rollout.prompts_per_step} prompts x {rollout.group_size} samples, "
        f"{config.algorithm.minibatches_per_step} update{'s' * (config.algorithm.minibatches_per_step > 1)}",
        "folder": config.run.dir,
    }
