"""A mixture's experts on a card: the fused form against float32, its bits, its memory, and a model around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lightrl.kernels.moe import ExpertWeights, grouped_experts, swiglu
from lightrl.models import experts

pytestmark = pytest.mark.gpu
NAMES = ("gate_up", "down", "grad_act", "grad_down", "grad_rows", "grad_gate_up")
TILES = [(128, 256, 64, 3, 8), (128, 256, 64, 4, 8), (128, 128, 64, 4, 8), (128, 128, 64, 3, 4)]
TILES += [(128, 256, 64, 3, 8, True), (128, 256, 64, 3, 8, True, 1)]


def plan_of(tiles: tuple[int, ...] | None) -> Any:
    from lightrl.kernels.moe_fused import Plan
    from lightrl.kernels.moe_products import Tiles

    return Plan() if tiles is None else Plan(**dict.fromkeys(NAMES, Tiles(*tiles)))


def example(
    tokens: int, top_k: int, hidden: int, width: int, num_experts: int = 5, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """hidden, indices, weights, gate_up, down. Of five experts the first and the last are idle where k allows."""
    g = torch.Generator("cuda").manual_seed(tokens + top_k)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=g, device="cuda") * shape[-1] ** -0.5
        return values.to(dtype).requires_grad_()

    used = torch.arange(1, 4) if num_experts == 5 and top_k <= 3 else torch.arange(num_experts)
    indices = used.cuda()[torch.rand(tokens, len(used), generator=g, device="cuda").argsort(-1)[:, :top_k]]
    if top_k > num_experts:  # some experts twice in a row
        indices = torch.randint(0, num_experts, (tokens, top_k), generator=g, device="cuda")
    weights = torch.rand(tokens, top_k, generator=g, device="cuda").requires_grad_()
    return [
        leaf(tokens, hidden), indices, weights,
        leaf(num_experts, 2 * width, hidden), leaf(num_experts, hidden, width),
    ]  # fmt: skip


def plain(hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The plain path: an activation that is not the one with kernels of its own."""
    activate = lambda x: swiglu(x)  # noqa: E731
    return grouped_experts(hidden, indices, weights, ExpertWeights(gate_up=gate_up, down=down), activate)


def dispatched(hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return grouped_experts(hidden, indices, weights, ExpertWeights(gate_up=gate_up, down=down), swiglu)


def results(call: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of hidden, weights, gate_up and down."""
    out = call(*inputs)
    push = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda").to(out)
    return [out.detach(), *torch.autograd.grad(out, [t for t in inputs if t.requires_grad], push)]


def upcast(inputs: list[Tensor]) -> list[Tensor]:
    return [t.detach().float().requires_grad_() if t.is_floating_point() else t for t in inputs]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


SIZES = [
    (1, 1, 200, 136, 5),
    (1, 8, 200, 136, 5),
    (63, 2, 200, 136, 5),
    (257, 2, 328, 264, 5),
    (257, 8, 200, 136, 5),
    (2000, 8, 512, 384, 128),
    (4096, 8, 2048, 768, 128),
]


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "width", "num_experts", "tiles"),
    [(*size, tiles) for size in SIZES for tiles in (None, TILES[-3], TILES[-1])]  # compiling takes its time
    + [(*SIZES[-1], tiles) for tiles in TILES if tiles not in (TILES[-3], TILES[-1])],
)
def test_fused_equals_float32(
    tokens: int, top_k: int, hidden: int, width: int, num_experts: int, tiles: tuple[int, ...] | None
) -> None:
    """bfloat16 within its rounding: no worse than the plain path, but for a little."""
    from lightrl.kernels.moe_fused import fused_experts

    inputs = example(tokens, top_k, hidden, width, num_experts)
    expected = results(plain, upcast(inputs))
    found = results(lambda *leaves: fused_experts(*leaves, plan_of(tiles)), inputs)
    ours, theirs = errors(found, expected), errors(results(plain, inputs), expected)
    print(f"{tokens} tokens, errors {ours}, of the plain path {theirs}")
    # of one weight's gradient the rounding of a single number would be compared
    counted = [e.numel() > 1 for e in expected]
    assert all(a < 1e-2 and (not many or a < 1.2 * b + 1e-3) for a, b, many in zip(ours, theirs, counted, strict=True))
    if num_experts == 5 and top_k <= 3:
        assert not found[3][0].any()
        assert not found[4][4].any()


@pytest.mark.parametrize(("tokens", "top_k"), [(63, 2), (257, 8)])
def test_float32_through_our_products(tokens: int, top_k: int) -> None:
    from lightrl.kernels.moe_fused import fused_experts

    inputs = example(tokens, top_k, 200, 136, dtype=torch.float32)
    plan = plan_of((64, 64, 32, 2, 4))
    found = results(lambda *leaves: fused_experts(*leaves, plan), inputs)
    expected = results(plain, [t.detach().double().requires_grad_(t.requires_grad) if i != 1 else t
                               for i, t in enumerate(inputs)])  # fmt: skip
    assert max(errors(found, [t.float() for t in expected])) < 1e-5


@pytest.mark.parametrize("tiles", [None, *TILES])
def test_bits_repeat(tiles: tuple[int, ...] | None) -> None:
    from lightrl.kernels.moe_fused import fused_experts

    inputs = example(2000, 8, 512, 384, 128)
    first, again, third = (results(lambda *leaves: fused_experts(*leaves, plan_of(tiles)), inputs) for _ in range(3))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, third, strict=True))


def test_the_fused_form_is_taken_and_waits_for_nothing() -> None:
    inputs = example(257, 2, 200, 136)
    leaves = [t for t in inputs if t.requires_grad]
    results(dispatched, inputs)  # kernels are compiled
    push = torch.ones_like(inputs[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = dispatched(*inputs)
        torch.autograd.grad(out, leaves, push)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "_Outputs" in type(out.grad_fn).__name__
    others = [*inputs[:3], *(t.detach().half() for t in inputs[3:])]
    with pytest.raises(RuntimeError):  # types that do not go together are nobody's: the plain path says so
        dispatched(*others)


def test_what_is_not_covered_runs_plain() -> None:
    """Biases, transposed matrices, another type, rows of 20 bytes."""
    hidden, indices, weights, gate_up, down = example(63, 2, 200, 136)
    plain_out = plain(hidden, indices, weights, gate_up, down)
    turned = ExpertWeights(gate_up=gate_up.mT.contiguous(), down=down.mT.contiguous(), transposed=True)
    out = grouped_experts(hidden, indices, weights, turned, swiglu)
    assert errors([out], [plain_out.float()])[0] < 1e-2
    for inputs in (example(63, 2, 200, 136, dtype=torch.float32), example(63, 2, 10, 6)):
        assert torch.equal(dispatched(*inputs), plain(*inputs))


def test_memory_at_the_size_of_qwen3_30b_a3b() -> None:
    """32k tokens: gate and up are kept; the backward pass never holds more than three times [S, H]."""
    tokens, top_k, hidden, width = 32768, 8, 2048, 768
    inputs = example(tokens, top_k, hidden, width, 128)
    results(dispatched, example(256, top_k, hidden, width, 128))
    leaves = [t for t in inputs if t.requires_grad]
    push = torch.randn_like(inputs[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = dispatched(*inputs)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    gradients = torch.autograd.grad(out, leaves, push)
    peak = torch.cuda.max_memory_allocated() - before
    print(f"kept {kept / 2**30:.3f} GiB, at once {peak / 2**30:.3f} GiB")
    assert kept < 1.02 * tokens * top_k * 2 * width * 2
    assert peak < 3.3 * 2**30
    assert all(g.isfinite().all() for g in gradients)


# ----- the router


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 5, 1), (63, 128, 8), (257, 512, 10), (4096, 128, 8)])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_choice_and_weights(tokens: int, num_experts: int, top_k: int, renormalize: bool, dtype: torch.dtype) -> None:
    """Against float64; bfloat16 logits have ties, so the chosen scores are compared and not their numbers."""
    from lightrl.kernels.moe_choice import best_experts, softmax_weights

    g = torch.Generator("cuda").manual_seed(0)
    logits = (torch.randn(tokens, num_experts, generator=g, device="cuda") * 2).to(dtype).requires_grad_()
    push = torch.randn(tokens, top_k, generator=g, device="cuda")
    indices = best_experts(logits.detach(), top_k)
    exact = logits.detach().double().requires_grad_()
    scores = exact.softmax(-1)
    assert torch.equal(scores.gather(-1, indices), scores.topk(top_k).values)
    assert all(len(set(row)) == top_k for row in indices.tolist())
    expected = scores.gather(-1, indices)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    found = softmax_weights(logits, indices, renormalize=renormalize)
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(w, x, push.to(w))[0] for w, x in ((found, logits), (expected, exact)))
    assert ours.dtype == dtype
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-5
    assert (ours.double() - theirs).norm() <= bound * theirs.norm() + 1e-6


# ----- a model


def tiny_model(implementation: str | None, layers: int = 1) -> Any:
    """A Qwen3-MoE in bfloat16; None: our experts and router. Idle experts: 16 of them, 2 a token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=64, moe_intermediate_size=72, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=2,
        norm_topk_prob=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.05,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation or "grouped_mm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.2)
    model = model.to("cuda", torch.bfloat16)
    if implementation is None:
        experts.exchange(model, experts.softmax_router)
        for module in model.modules():
            module.fuse = True
    return model


def model_results(model: Any, ids: Tensor) -> dict[str, Tensor]:
    logits = model(ids, use_cache=False).logits.float()
    (logits.log_softmax(-1)[..., 3].sum() / 10).backward()
    found = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return found | {"logits": logits.detach()}


def test_a_model_equals_stock() -> None:
    ids = torch.randint(3, 256, (3, 257), generator=torch.Generator().manual_seed(0)).cuda()
    ours, stock = (model_results(tiny_model(name), ids) for name in (None, "grouped_mm"))
    far = {name: ((ours[name].float() - g.float()).norm() / g.float().norm()).item() for name, g in stock.items()}
    print(far)
    assert far.keys() == ours.keys()
    for name, error in far.items():  # stock rounds the weights of the chosen experts, and their gradients
        assert error < (0.1 if name.endswith("gate.weight") else 0.04), name


def test_activation_checkpointing_changes_no_bit() -> None:
    ids = torch.randint(3, 256, (3, 257), generator=torch.Generator().manual_seed(0)).cuda()
    plain_model, wrapped = tiny_model(None, layers=3), tiny_model(None, layers=3)
    for name, block in list(wrapped.model.layers.named_children()):
        contexts = experts.recompute_contexts(block)
        block = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=contexts)
        wrapped.model.layers.register_module(name, block)
    expected, found = model_results(plain_model, ids), model_results(wrapped, ids)
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different
