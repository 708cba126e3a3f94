"""Whole models with gated delta layers, packed: nothing passes between samples (L5), and decays stay float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, make_family
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from lightrl.config.schema import ModelConfig
from lightrl.distributed.mesh import close_world, init_world
from lightrl.engine.transformers import TransformersEngine
from lightrl.kernels.gated_delta import Chains
from lightrl.models import gated_delta, registry
from lightrl.models.attention import Segments
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import Policy, PolicyModule
from lightrl.types import Microbatch

CPU = torch.device("cpu")
NAMES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
LENGTHS = (63, 257, 3, 1)


def build(family: str) -> torch.nn.Module:
    """Random weights, none of them trivial; states forget little, so that what leaks stays visible."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 512}
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family], "layer_types": kinds})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-5, -2, len(parameter)))
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def packed(model: torch.nn.Module, *, fuse: bool = False) -> PolicyModule:
    """The same weights in a model that takes segments."""
    ours: Any = AutoModelForCausalLM.from_config(model.config).eval()
    ours.load_state_dict(model.state_dict())
    registry.prepare_packed(ours)
    gated_delta.prepare_training(ours, CPU, torch.float32, fuse=fuse)
    return PolicyModule(ours, packed=True)


def microbatch() -> Microbatch:
    """Samples of `LENGTHS` rows (the last token of a response is not fed), none shared."""
    g = torch.Generator().manual_seed(0)
    units = []
    for group, length in enumerate(LENGTHS):
        ids = torch.randint(3, 97, (length + 1,), generator=g).tolist()
        sample = TrainSample(
            group_index=group, index=0, prompt=ids[:1], response=ids[1:], loss_mask=[1] * length,
            rollout_logprobs=None, advantage=0.0,
        )  # fmt: skip
        units.append([sample])
    return pack(units, [[1.0]] * len(units))


def results(module: PolicyModule, batch: Microbatch, segments: Segments | None) -> dict[str, torch.Tensor]:
    """Log-probs, entropies, and gradients of a weighted mean of both under the stock model's names."""
    module.zero_grad()
    logprobs, entropies = module(batch, segments, 1.0)
    push = torch.randn(2, len(logprobs), generator=torch.Generator().manual_seed(1)) / len(logprobs)
    (logprobs * push[0] + entropies * push[1]).sum().backward()
    found = {"logprobs": logprobs.detach(), "entropies": entropies.detach()}
    for name, parameter in module.model.named_parameters():
        assert parameter.grad is not None, name
        found[name.replace("_float32_module.", "")] = parameter.grad
    return found


@pytest.mark.parametrize("family", NAMES)
def test_packed_equals_a_padded_batch(family: str) -> None:
    """The oracle: transformers' own forward over right-padded rows with a mask."""
    stock, batch = build(family), microbatch()
    expected = results(PolicyModule(stock, packed=False), batch, None)
    found = results(packed(stock), batch, Segments.from_microbatch(batch, CPU))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_the_fused_norm_equals_stock(family: str) -> None:
    """On a CPU by its plain reference: what is exchanged, and with which weight and epsilon."""
    stock, batch = build(family), microbatch()
    segments = Segments.from_microbatch(batch, CPU)
    fused = packed(stock, fuse=True)
    assert all("forward" in vars(layer.norm) for layer in gated_delta.layers(fused.model))
    expected = results(packed(stock), batch, segments)
    for name, value in results(fused, batch, segments).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("leak", ["convolution", "state"])
@torch.no_grad()
def test_each_cut_is_needed(family: str, leak: str) -> None:
    """Without one of the two cuts log-probs of later samples are off by far more than rounding; so the test above sees
    each of them."""
    stock, batch = build(family), microbatch()
    module, segments = packed(stock), Segments.from_microbatch(batch, CPU)
    expected = module(batch, segments, 1.0)[0]
    cut, uncut = segments.chains, Chains.build([sum(LENGTHS)], [-1], CPU)
    if leak == "convolution":
        leaky = replace(cut, before=uncut.before, _history={})
    else:
        leaky = replace(uncut, before=cut.before, _history={})
    vars(segments)["chains"] = leaky  # where the cached property keeps it
    error = (module(batch, segments, 1.0)[0] - expected).abs()
    assert error[: LENGTHS[0]].max() < 1e-5  # nothing comes before the first sample
    assert error[LENGTHS[0] : LENGTHS[0] + 3].max() > 1e-2


def test_layers_outside_the_policy_are_refused() -> None:
    module = packed(build("qwen3_5_text"))
    with pytest.raises(RuntimeError, match="PolicyModule"):
        module.model(torch.tensor([[1, 2, 3]]), use_cache=False)


def test_decays_are_float32_under_bfloat16(tmp_path: Path) -> None:
    """In the policy's forward, in what is lent to an engine, and in what is streamed to one; and in a reference."""
    folder = make_family(tmp_path, "qwen3_5_text")
    world = init_world("cpu")
    try:
        config = ModelConfig(path=str(folder), compute_dtype="bfloat16")
        policy = Policy.load(config, world)
        masters = {n: t.clone() for n, t in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
        wanted = {n for n in masters if n.endswith(("A_log", "dt_bias"))}
        assert any(not torch.equal(masters[n].bfloat16().float(), masters[n]) for n in wanted)
        for name, tensor in policy.lend():
            assert tensor.dtype == (torch.float32 if name in wanted else torch.bfloat16)
            assert name not in wanted or torch.equal(tensor, masters[name])
        policy.reclaim()
        assert {name for name, _, dtype in policy.stream().layout() if dtype == torch.float32} == wanted
        for group in policy.stream():
            for name, tensor in group:
                assert name not in wanted or torch.equal(tensor, masters[name])
        (layer,) = gated_delta.layers(policy.model)
        _check_decay(policy, layer, masters)
        reference = Policy.load(config, world, frozen=True)
        (layer,) = gated_delta.layers(reference.model)
        _check_decay(reference, layer, masters)
    finally:
        close_world()


def _check_decay(policy: Policy, layer: Any, masters: dict[str, torch.Tensor]) -> None:
    seen = []
    layer._float32_module.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    logprobs, _ = policy(microbatch(), 1.0)
    ((a, out),) = seen
    prefix = "model.layers.0.linear_attn."
    rate = masters[prefix + "A_log"].exp()
    assert a.dtype == torch.bfloat16
    torch.testing.assert_close(out, -rate * F.softplus(a.float() + masters[prefix + "dt_bias"]), atol=0, rtol=1e-6)
    if logprobs.requires_grad:
        logprobs.sum().backward()
        gradient = layer._float32_module.A_log.grad.full_tensor()
        assert gradient.dtype == torch.float32
        assert gradient.abs().max() > 0


def test_a_model_that_sees_too_is_packed_by_its_text_part(tmp_path: Path) -> None:
    """Checkpoints of Qwen3.5 as they are published: text weights under another prefix, and a vision tower."""
    text = AutoModelForCausalLM.from_pretrained(make_family(tmp_path / "text", "qwen3_5_text"))
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config={**vision, "num_position_embeddings": 16})
    both = Qwen3_5ForConditionalGeneration(config)
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(tmp_path / "both")
    world = init_world("cpu")
    try:
        policies = [
            Policy.load(ModelConfig(path=str(tmp_path / name), compute_dtype="float32"), world)
            for name in ("text", "both")
        ]
        assert all(policy.module.packed for policy in policies)
        expected, found = (policy(microbatch(), 1.0)[0] for policy in policies)
        assert torch.equal(found, expected)
        engine = TransformersEngine(policies[1].hf_config)
        engine.load_weights(policies[1].lend(), 0, share=True)
        policies[1].reclaim()
    finally:
        close_world()
