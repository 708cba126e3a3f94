"""Packed forwards against the stock model, one sample at a time: log-probs, entropies and gradients, per family.

Prompts of 1, 63 and 257 tokens; responses of 1, 5 and 40; with and without sharing a prompt's rows (cases L2, A6).
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.models import attention, registry
from lightrl.models.attention import Segments
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import PolicyModule

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": False},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "initializer_range": 0.15}
_SIGMOID = _MOE | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_SIGMOID |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
_MLA = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_MLA |= {"qk_nope_head_dim": 12, "v_head_dim": 16}  # values are narrower than queries and keys
SPECIAL |= {
    "qwen3_moe": _MOE | {"head_dim": 16, "num_experts": 8, "norm_topk_prob": True, "tie_word_embeddings": False},
    "glm4_moe": _SIGMOID | {"head_dim": 16, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": _SIGMOID | _MLA | {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v3": _SIGMOID | _MLA | {"rope_interleave": True},
    "mimo_v2_flash": _SIGMOID
    | {"head_dim": 24, "v_head_dim": 16, "sliding_window": 20, "num_key_value_heads": 1}
    | {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.15}
    | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
}
_DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "head_dim": 16}
_SHARED = _MOE | {"num_experts": 8, "shared_expert_intermediate_size": 24}
SPECIAL |= {
    "qwen3_next": _SHARED | _DELTA,
    "qwen3_5_text": _DELTA | {"tie_word_embeddings": True},
    "qwen3_5_moe_text": _SHARED | _DELTA,
}
TEMPERATURE = 0.7


def tiny_config(family: str):
    return AutoConfig.for_model(family, **(COMMON | SPECIAL.get(family, {})))


def samples() -> list[list[TrainSample]]:
    g = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 97, (n,), generator=g).tolist()

    units = []
    for group, (prompt_length, lengths) in enumerate([(63, (5, 1, 40)), (1, (40, 3)), (257, (5,)), (2, (1,))]):
        prompt = ids(prompt_length)
        units.append(
            [
                TrainSample(
                    group_index=group,
                    index=i,
                    prompt=prompt,
                    response=ids(n),
                    loss_mask=[int(j % 3 != 1) for j in range(n)],
                    rollout_logprobs=None,
                    advantage=0.0,
                )
                for i, n in enumerate(lengths)
            ]
        )
    return units


def stock_results(model, units, coefficients):
    """log-prob and entropy of every response token, and the gradients of a weighted sum of both."""
    model.zero_grad()
    logprobs, entropies = [], []
    for sample in (s for unit in units for s in unit):
        logits = model(torch.tensor([sample.prompt + sample.response]), use_cache=False).logits[0]
        log_p = (logits[len(sample.prompt) - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
        logprobs.append(log_p.gather(-1, torch.tensor(sample.response)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return _finish(model, torch.cat(logprobs), torch.cat(entropies), coefficients)


def our_results(module, units, coefficients):
    module.zero_grad()
    batch = pack(units, [[1.0] * len(u) for u in units])
    segments = Segments.from_microbatch(batch, torch.device("cpu")) if module.packed else None
    logprobs, entropies = module(batch, segments, TEMPERATURE)
    return _finish(module.model, logprobs, entropies, coefficients)


def _finish(model, logprobs, entropies, coefficients):
    (logprobs * coefficients[0] + entropies * coefficients[1]).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    return logprobs.detach(), entropies.detach(), gradients


def compare(ours, stock):
    torch.testing.assert_close(ours[0], stock[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], stock[1], atol=1e-5, rtol=1e-5)
    assert ours[2].keys() == stock[2].keys()
    for name, gradient in stock[2].items():
        atol = 2e-5 + 1e-6 * float(gradient.abs().max())  # sums whose parts are that large are rounded
        torch.testing.assert_close(ours[2][name], gradient, atol=atol, rtol=1e-4, msg=name)


def build(family: str):
    torch.manual_seed(1)
    stock = AutoModelForCausalLM.from_config(
        tiny_config(family), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, tensor in stock.state_dict().items():
            if "bias" in name or "sinks" in name:  # not their trivial start values
                tensor.add_(torch.randn_like(tensor) * 0.3)
            if name.endswith("A_log"):  # states that last, so that a leak would show
                tensor.copy_(torch.linspace(-5, -2, len(tensor)))
    ours = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


@pytest.mark.parametrize("fuse", [False, True])  # on a CPU the kernels' plain-torch references
@pytest.mark.parametrize("family", sorted(registry.FAMILIES))
def test_packed_equals_stock(family, fuse):
    stock, model = build(family)
    assert registry.packs_exactly(model.config)
    registry.prepare_packed(model, fuse=fuse)
    module = PolicyModule(model, packed=True)
    units = samples()
    num_targets = sum(len(s.response) for u in units for s in u)
    coefficients = torch.randn(2, num_targets, generator=torch.Generator().manual_seed(2))
    expected = stock_results(stock, units, coefficients)
    compare(our_results(module, units, coefficients), expected)  # prompts shared
    compare(our_results(module, [[s] for u in units for s in u], coefficients), expected)  # each sample alone


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_padded_fallback_equals_stock(family):
    """Any other causal LM: logit caps and all, one padded row a sample."""
    stock, model = build(family)
    assert registry.packs_exactly(model.config) == (family == "llama")
    model.set_attn_implementation("eager")
    module = PolicyModule(model, packed=False)
    units = [[s] for u in samples() for s in u]
    num_targets = sum(len(s.response) for u in units for s in u)
    coefficients = torch.randn(2, num_targets, generator=torch.Generator().manual_seed(2))
    compare(our_results(module, units, coefficients), stock_results(stock, units, coefficients))


def test_attention_outside_the_policy_is_refused():
    _, model = build("llama")
    model.set_attn_implementation(attention.register())
    with pytest.raises(RuntimeError, match="PolicyModule"):
        model(torch.tensor([[1, 2, 3]]), use_cache=False)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe_lite", "gpt_oss"])
def test_empty_microbatch_reaches_every_parameter(family):
    """A rank without work still gives every parameter a (zero) gradient, or others would hang in the reduction."""
    _, model = build(family)
    registry.prepare_packed(model)
    module = PolicyModule(model, packed=True)
    batch = pack([], [])
    logprobs, entropies = module(batch, Segments.from_microbatch(batch, torch.device("cpu")), 1.0)
    assert logprobs.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
