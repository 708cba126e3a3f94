"""Tiny random checkpoints of many model families, each with what makes its stored names special."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN_MOE = {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 24}
_DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4} | {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SIGMOID = {**_MOE, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_MLA |= {"num_key_value_heads": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": _QWEN_MOE,
    "qwen3_next": {**_QWEN_MOE, **_DELTA},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_QWEN_MOE, **_DELTA},
    "glm4_moe": {**_SIGMOID, "n_shared_experts": 1},
    "glm4_moe_lite": {**_SIGMOID, **_MLA, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v3": {**_SIGMOID, **_MLA},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mimo_v2_flash": {**_SIGMOID, "layer_types": ["full_attention", "sliding_attention"]},
    "hrm_text": {"num_key_value_heads": 4},  # stored tensors are concatenated of those in memory
}


def make_family(folder: Path, family: str, **changes: Any) -> Path:
    """A random checkpoint, float32, written by `save_pretrained`; no tensor is all ones or zeros."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn(tensor.shape) * 0.1)
    model.save_pretrained(folder)
    return folder
