"""Experts against a plain loop, routers against stock, the same choice in a recompute, gradients of sinks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_packed_models import SPECIAL, TEMPERATURE, build, our_results, samples
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from lightrl.kernels.attention import attend
from lightrl.kernels.moe import ExpertWeights, grouped_experts, grouped_experts_reference
from lightrl.models import experts, registry
from lightrl.models.attention import Segments, _with_sinks
from lightrl.training.packing import pack
from lightrl.training.policy import PolicyModule

MIXTURES = sorted(name for name in registry.FAMILIES if "num_experts_per_tok" in SPECIAL.get(name, {}))


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def clamped(x: Tensor) -> Tensor:
    """gpt-oss's: gate and up interleaved."""
    gate, up = x[..., ::2].clamp(max=1.0), x[..., 1::2].clamp(-1.0, 1.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@pytest.mark.parametrize(("transposed", "bias", "activate"), [(False, False, swiglu), (True, True, clamped)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_grouped_experts_equal_the_loop(transposed: bool, bias: bool, activate, tokens: int) -> None:
    """Values and gradients; experts 0 and 4 get no token, with one token only k experts get any."""
    g = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) / 2).requires_grad_()

    shapes = [(6, 12, 10), (6, 10, 6)]
    gate_up, down = (leaf(e, i, o) if transposed else leaf(e, o, i) for e, o, i in shapes)
    biases = (leaf(6, 12), leaf(6, 10)) if bias else (None, None)
    weights = ExpertWeights(
        gate_up=gate_up, down=down, transposed=transposed, gate_up_bias=biases[0], down_bias=biases[1]
    )
    hidden, shares = leaf(tokens, 10), leaf(tokens, 2)
    used = torch.tensor([1, 2, 3, 5])
    indices = torch.stack([used[torch.randperm(4, generator=g)[:2]] for _ in range(tokens)])
    leaves = [t for t in (hidden, shares, gate_up, down, *biases) if t is not None]
    cotangent = torch.randn(tokens, 10, generator=g)
    results = []
    for function in (grouped_experts, grouped_experts_reference):
        out = function(hidden, indices, shares, weights, activate)
        results.append([out, *torch.autograd.grad((out * cotangent).sum(), leaves)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    assert not results[0][3][0].any()
    assert results[0][3][1:4].any() or tokens == 1


def test_a_rank_without_tokens_gives_every_weight_a_gradient() -> None:
    weights = [torch.randn(4, 8, 6), torch.randn(4, 6, 4), torch.randn(4, 8), torch.randn(4, 6)]
    gate_up, down, up_bias, down_bias = (w.requires_grad_() for w in weights)
    parameters = ExpertWeights(gate_up=gate_up, down=down, gate_up_bias=up_bias, down_bias=down_bias)
    hidden, indices = torch.zeros(0, 6, requires_grad=True), torch.zeros(0, 2, dtype=torch.int64)
    out = grouped_experts(hidden, indices, torch.zeros(0, 2), parameters, swiglu)
    assert out.shape == (0, 6)
    out.sum().backward()
    assert all(w.grad is not None and not w.grad.any() for w in weights)


def test_the_sum_over_experts_is_not_rounded_on_the_way() -> None:
    """Eight bfloat16 experts that cancel: adding them up in bfloat16 would lose what is left."""
    experts_of = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    down = torch.tensor([256.0, 1, 1, 1, 1, 1, 1, -256.0]).view(8, 1, 1).bfloat16()
    ones = ExpertWeights(gate_up=torch.ones(8, 1, 1).bfloat16(), down=down)
    out = grouped_experts(torch.ones(1, 1).bfloat16(), experts_of, torch.ones(1, 8), ones, lambda x: x)
    assert out.item() == 6.0


# ----- routers


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_router_weights_stay_float32(family: str) -> None:
    """In bfloat16 stock rounds the chosen experts' weights; ours are the softmax of the same logits in float32."""
    stock, model = (m.bfloat16() for m in build(family))
    registry.prepare_packed(model)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    routers = [m.model.layers[1].mlp for m in (stock, model)]
    theirs, ours = (getattr(m, "gate", None) or m.router for m in routers)
    logits, rounded, indices = theirs(hidden)
    same_logits, weights, same_indices = ours(hidden)
    assert torch.equal(logits, same_logits)
    assert torch.equal(indices, same_indices)
    assert weights.dtype == torch.float32
    expected = logits.float().gather(-1, indices).softmax(-1)  # renormalised softmax is the softmax over the chosen
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    assert (rounded.float() - expected).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo_v2_flash"])
def test_sigmoid_router_equals_stock(family: str) -> None:
    """Two groups of four experts, one of them allowed, with a bias that changes the choice."""
    stock, model = build(family)
    registry.prepare_packed(model)
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    theirs, ours = (m.model.layers[1].mlp.gate for m in (stock, model))
    for found, expected in zip(ours(hidden), theirs(hidden), strict=True):
        torch.testing.assert_close(found, expected)
    assert theirs.e_score_correction_bias.abs().max() > 0.1


def test_other_models_of_the_class_stay_stock() -> None:
    stock, model = build("qwen3_moe")
    registry.prepare_packed(model)
    assert "forward" not in vars(stock.model.layers[0].mlp.gate)
    assert stock.config._experts_implementation == "eager"
    assert stock.config._attn_implementation == "eager"


def test_code_that_comes_with_a_checkpoint_is_not_taken_for_the_familys() -> None:
    _, model = build("deepseek_v3")
    remote = type("DeepseekV3ForCausalLM", (type(model),), {"__module__": "transformers_modules.model.modeling"})
    model.__class__ = remote
    assert not registry.is_own_code(model)
    registry.patch_layers(model)
    assert model.config._experts_implementation != experts.NAME


# ----- activation checkpointing


def checkpointed(model: torch.nn.Module, contexts=experts.recompute_contexts) -> PolicyModule:
    for name, block in list(model.model.layers.named_children()):
        context_fn = contexts(block)
        options = {} if context_fn is None else {"context_fn": context_fn}
        wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
        model.model.layers.register_module(name, wrapped)
    return PolicyModule(model, packed=True)


@pytest.mark.parametrize("family", MIXTURES)
def test_checkpointing_changes_nothing(family: str) -> None:
    units = samples()
    coefficients = torch.randn(2, sum(len(s.response) for u in units for s in u))
    results = []
    for wrap in (lambda m: PolicyModule(m, packed=True), checkpointed):
        _, model = build(family)
        registry.prepare_packed(model)
        results.append(our_results(wrap(model), units, coefficients))
    assert torch.equal(results[0][0], results[1][0])
    for plain, again in zip(results[0][2].values(), results[1][2].values(), strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("family", MIXTURES)
def test_recompute_takes_the_same_experts(family: str) -> None:
    """A router that has changed since, as if every tie had flipped, does not change the recompute's choice."""

    def choices(contexts) -> tuple[list[Tensor], list[Tensor]]:
        _, model = build(family)
        registry.prepare_packed(model)
        seen: list[Tensor] = []
        for module in model.modules():
            if hasattr(module, "gate_up_proj") and module.gate_up_proj is not None and hasattr(module, "num_experts"):
                module.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
        module = checkpointed(model, contexts)
        units = samples()
        batch = pack(units, [[1.0] * len(u) for u in units])
        logprobs, _ = module(batch, Segments.from_microbatch(batch, torch.device("cpu")), TEMPERATURE)
        forward = seen.copy()
        seen.clear()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "gate.weight" in name or "router.weight" in name:
                    parameter.neg_()
        logprobs.sum().backward()
        return forward, seen[::-1]  # the last block is computed again first

    forward, again = choices(experts.recompute_contexts)
    assert len(forward) == len(again) > 0
    assert all(torch.equal(a, b) for a, b in zip(forward, again, strict=True))
    forward, again = choices(lambda block: None)  # without it they do change
    assert not any(torch.equal(a, b) for a, b in zip(forward, again, strict=True))


def test_two_forwards_before_their_backwards_keep_their_own_choices() -> None:
    _, model = build("qwen3_moe")
    registry.prepare_packed(model)
    module = checkpointed(model)
    totals = []
    for units in (samples()[:1], samples()[1:]):
        batch = pack(units, [[1.0] * len(u) for u in units])
        totals.append(module(batch, Segments.from_microbatch(batch, torch.device("cpu")), 1.0)[0].sum())
    totals[0].backward()
    totals[1].backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters()}
    module.zero_grad()
    for units in (samples()[:1], samples()[1:]):
        batch = pack(units, [[1.0] * len(u) for u in units])
        module(batch, Segments.from_microbatch(batch, torch.device("cpu")), 1.0)[0].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, atol=1e-5, rtol=1e-5, msg=name)


# ----- sinks through a kernel that knows none


class CpuFlash:
    """torch's flash attention for CPUs in the place of that for CUDA: the same two halves, one causal segment."""

    def __init__(self, mask: Tensor | None, scale: float) -> None:
        self.mask, self.scale = mask, scale

    def forward(self, *rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(self._heads_first, rows), 0.0, self.mask is None, attn_mask=self.mask, scale=self.scale
        )
        return out[0].transpose(0, 1), (lse[0],)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(self._heads_first, (grad, q, k, v, out)), saved[0][None].contiguous(), 0.0, self.mask is None,
            attn_mask=self.mask, scale=self.scale,
        )  # fmt: skip
        return tuple(g[0].transpose(0, 1) for g in grads)

    @staticmethod
    def _heads_first(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None].contiguous()


@pytest.mark.parametrize("window", [None, 7])
def test_sinks_through_a_flash_kernel(window: int | None) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(33, 4, 16, generator=g).requires_grad_() for _ in range(3))
    sinks = torch.tensor([-1.0, 0.0, 1.0, 4.0], requires_grad=True)
    cotangent = torch.randn(33, 4, 16, generator=g)
    allowed = torch.ones(33, 33, dtype=torch.bool).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    mask = None if window is None else torch.zeros(33, 33).masked_fill(~allowed, float("-inf"))
    ours = attend(q, k, v, CpuFlash(mask, 0.3), sinks)
    plain = _with_sinks(*(x.transpose(0, 1)[None] for x in (q, k, v)), allowed, 0.3, sinks)[0].transpose(0, 1)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
    found, expected = (torch.autograd.grad((o * cotangent).sum(), (q, k, v, sinks)) for o in (ours, plain))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
