"""Tiny models with random weights, and embedded engines that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from lightrl.engine.transformers import TransformersEngine

VOCAB = 128
EOS = 2
CONTEXT = 400
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,  # spread-out logits: greedy ids do not hang on rounding
    "pad_token_id": EOS,  # M2: pad and EOS are one
    "eos_token_id": EOS,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=30, max_window_layers=1),
}
_SIGMOID = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 2}
_SIGMOID |= {"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
_MLA = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_MLA |= {"qk_nope_head_dim": 12, "v_head_dim": 16}
_MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "glm4_moe": _SIGMOID | {"head_dim": 16, "use_qk_norm": True},
    "glm4_moe_lite": _SIGMOID | _MLA | {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v3": _SIGMOID | _MLA,
    "mimo_v2_flash": _SIGMOID
    | {"head_dim": 24, "v_head_dim": 16, "sliding_window": 20, "num_key_value_heads": 1}
    | {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
}


def _mixture(family: str) -> Callable[[], PretrainedConfig]:
    return lambda: AutoConfig.for_model(family, **{**SMALL, **_MIXTURES[family]})


_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
RECURRENT: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_next": lambda: Qwen3NextConfig(**SMALL, **_DELTA, **_EXPERTS),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SMALL, **_DELTA),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**SMALL, **_DELTA, **_EXPERTS),
}
OTHERS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama3_rope": lambda: LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral_window": lambda: MistralConfig(**SMALL, head_dim=8, sliding_window=24),
    "gemma2_softcap": lambda: Gemma2Config(**SMALL, head_dim=8, sliding_window=20, query_pre_attn_scalar=8),
    "gpt_oss_sinks": lambda: GptOssConfig(
        **SMALL, head_dim=8, sliding_window=20, num_local_experts=4, num_experts_per_tok=2, rope_parameters=None
    ),
    **{family: _mixture(family) for family in _MIXTURES},
}


def stock(config: PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    # eager where the model has attention that sdpa lacks (softcap, sinks)
    kind = "eager" if config.model_type in ("gemma2", "gpt_oss", "mimo_v2_flash") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kind, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:  # not their trivial start values
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def make_engine(model: torch.nn.Module, *, share: bool = True, **options: Any) -> TransformersEngine:
    settings = {"eos_token_ids": [EOS], "context_length": CONTEXT, "max_batch": 5, "max_prefill_tokens": 100, **options}
    engine = TransformersEngine(model.config, **settings)
    engine.load_weights(model.state_dict().items(), 7, share=share)
    return engine
