"""A mixture of experts with pretrained weights: SmolLM2's MLPs, each copied into the experts of a GLM-4-MoE shape.

Random weights route at random and forgive much. Here all experts are the MLP of a real model, so that without noise any
routing gives the real model's logits; with noise they differ, and a wrong choice or a wrong weight shows.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

EXPERTS, CHOSEN = 4, 2


def make_real_moe(source: Path, folder: Path, *, noise: float, layers: int | None = None) -> Path:
    """Write a float32 checkpoint of the first `layers` blocks; `noise` is relative to each expert matrix's spread."""
    import torch
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = dense.config
    blocks = layers or old.num_hidden_layers
    config = Glm4MoeConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        moe_intermediate_size=old.intermediate_size,
        num_hidden_layers=blocks,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=old.hidden_size // old.num_attention_heads,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters={**old.rope_parameters, "partial_rotary_factor": 1.0},
        tie_word_embeddings=False,
        attention_bias=False,
        use_qk_norm=False,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        n_shared_experts=1,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        eos_token_id=old.eos_token_id,
        bos_token_id=old.bos_token_id,
        pad_token_id=old.pad_token_id,
    )
    torch.manual_seed(0)
    mixture = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        mixture.model.embed_tokens.weight.copy_(dense.model.embed_tokens.weight)
        mixture.lm_head.weight.copy_(dense.lm_head.weight)
        mixture.model.norm.weight.copy_(dense.model.norm.weight)
        for new, block in zip(mixture.model.layers, dense.model.layers, strict=False):
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(new, name).weight.copy_(getattr(block, name).weight)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(new.self_attn, name).weight.copy_(getattr(block.self_attn, name).weight)
            new.mlp.shared_experts.down_proj.weight.zero_()
            new.mlp.gate.weight.normal_(std=0.05)
            new.mlp.gate.e_score_correction_bias.normal_(std=0.02)
            gate_up = torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight])
            experts, down = new.mlp.experts, block.mlp.down_proj.weight
            for fused, weight in ((experts.gate_up_proj, gate_up), (experts.down_proj, down)):
                fused.copy_(weight.expand_as(fused))
                fused.add_(torch.randn_like(fused) * noise * weight.std())
    mixture.save_pretrained(folder)
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copyfile(file, folder / file.name)
    return folder


def train_with_sglang(
    model: Path,
    data: Path,
    folder: Path,
    device: str,
    *,
    sections: dict[str, dict[str, Any]] | None = None,
    **engine: Any,
) -> list[dict[str, float]]:
    """Metrics of two steps, an update between them, with the mixture in SGLang; `sections` have further keys."""
    from lightrl.config import load_config
    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "device": device, "steps": 2},
        "model": {"path": str(model), "compute_dtype": "float32" if device == "cpu" else "bfloat16"},
        "data": {"path": str(data), "label_key": "label", "apply_chat_template": True},
        "reward": {"type": "random"},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_response_tokens": 12},
        "engine": {"kind": "sglang", **engine},
        "optim": {"lr": 1e-4},
        "log": {"trackers": [], "print_samples": 0, "save_samples": False},
    }
    for name, section in (sections or {}).items():
        base[name] = base.get(name, {}) | section
    config = load_config(**base)
    trainer = Trainer(config)
    try:
        return [trainer.step(trainer.source.next(2)) for _ in range(2)]
    finally:
        trainer.close()
        close_world()
