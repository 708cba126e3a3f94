"""The experts' Triton kernels, interpreted, against the plain loop: values and gradients at odd sizes."""

from __future__ import annotations

import pytest
import torch
from test_experts import checkpointed
from test_packed_models import build, compare, our_results, samples, stock_results
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightrl.kernels.moe import ExpertWeights, grouped_experts_reference, swiglu
from lightrl.models import experts, registry
from lightrl.training.policy import PolicyModule

pytest.importorskip("triton")
from lightrl.kernels import moe_choice, moe_fused, moe_products, moe_rows
from lightrl.kernels.moe_fused import Plan, fused_experts
from lightrl.kernels.moe_products import Tiles

pytestmark = pytest.mark.interpreter
TILES = Tiles(rows=32, cols=32, depth=16)
NAMES = ("gate_up", "down", "grad_act", "grad_down", "grad_rows", "grad_gate_up")
OURS = Plan(**dict.fromkeys(NAMES, TILES))
COPIED = Plan(**dict.fromkeys(NAMES, Tiles(rows=32, cols=32, depth=16, tma=True, persistent=1)))
TORCHS = Plan()


def example(tokens: int, top_k: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """hidden, indices, weights, gate_up, down of five experts; 0 and 4 are idle where k allows, k > 3 repeats some."""
    g = torch.Generator().manual_seed(tokens + top_k)

    def leaf(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) / 2).to(dtype).requires_grad_()

    weights = torch.rand(tokens, top_k, generator=g).requires_grad_()
    indices = torch.stack([torch.randperm(3, generator=g) for _ in range(tokens)]) + 1
    if top_k > 3:
        indices = torch.randint(0, 5, (tokens, top_k), generator=g)
    return [leaf(tokens, hidden), indices[:, :top_k], weights, leaf(5, 2 * width, hidden), leaf(5, hidden, width)]


def results(call, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of hidden, weights, gate_up and down."""
    out = call(*inputs)
    push = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [t for t in inputs if t.requires_grad], push)]


def reference(hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return grouped_experts_reference(hidden, indices, weights, ExpertWeights(gate_up=gate_up, down=down), swiglu)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 8), (63, 2), (257, 1), (257, 8)])
@pytest.mark.parametrize("num_experts", [5, 70])
def test_sort_is_that_of_torch(tokens: int, top_k: int, num_experts: int) -> None:
    """Experts without a pair first, in the middle and last; an expert twice in a row."""
    g = torch.Generator().manual_seed(0)
    indices = torch.tensor([1, 3])[torch.randint(0, 2, (tokens, top_k), generator=g)] + num_experts - 5
    order = moe_rows.sort_by_expert(indices, num_experts)
    expert, source = indices.flatten().sort(stable=True)
    assert torch.equal(order.source.long(), source)
    assert torch.equal(order.token.long(), source // top_k)
    assert torch.equal(source[order.place.flatten().long()], torch.arange(tokens * top_k))
    assert torch.equal(order.ends.long(), torch.searchsorted(expert, torch.arange(num_experts), right=True))


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "width", "plan"),
    [
        (1, 1, 20, 12, OURS),
        (63, 2, 20, 12, OURS),
        (33, 8, 40, 36, OURS),
        (257, 1, 20, 12, OURS),
        (1, 2, 20, 12, COPIED),
        (33, 3, 40, 36, COPIED),
        (1, 2, 20, 12, TORCHS),
        (63, 8, 20, 12, TORCHS),
        (257, 1, 24, 36, TORCHS),
    ],
)
def test_fused_equals_the_loop(tokens: int, top_k: int, hidden: int, width: int, plan: Plan) -> None:
    inputs = example(tokens, top_k, hidden, width)
    ours = results(lambda *leaves: fused_experts(*leaves, plan), inputs)
    for found, expected in zip(ours, results(reference, inputs), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    if top_k <= 3:
        assert not ours[3][0].any()
        assert not ours[4][4].any()


@pytest.mark.parametrize("name", NAMES)
def test_each_product_alone(name: str) -> None:
    """Every product of ours between torch's others; tiles wider and deeper than the matrices."""
    inputs = example(40, 2, 20, 12)
    plan = Plan(**{name: Tiles(rows=16, cols=64, depth=32)})
    ours = results(lambda *leaves: fused_experts(*leaves, plan), inputs)
    for found, expected in zip(ours, results(reference, inputs), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_an_idle_experts_gradient_is_zero_whatever_torch_leaves_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grouped product does not write there on every card (pytorch/pytorch#172439)."""
    stock = moe_products._torch_product()

    def careless(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = stock(a, b, offs=offs)
        if out.dim() == 3:
            out[offs == offs.roll(1)] = float("nan")
            out[0] = float("nan")
        return out

    inputs = example(63, 2, 20, 12)
    expected = results(lambda *leaves: fused_experts(*leaves, TORCHS), inputs)
    monkeypatch.setattr(moe_products, "_torch_product", lambda: careless)
    found = results(lambda *leaves: fused_experts(*leaves, TORCHS), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_float16_is_as_good_as_its_rounding() -> None:
    inputs = example(63, 2, 40, 36, torch.float16)
    exact = [t.detach().float().requires_grad_() if t.is_floating_point() else t for t in inputs]
    ours = results(lambda *leaves: fused_experts(*leaves, OURS), inputs)
    for found, expected in zip(ours, results(reference, exact), strict=True):
        assert (found.float() - expected).norm() < 2e-3 * expected.norm()
    assert ours[2].dtype == torch.float32


@pytest.mark.parametrize("plan", [OURS, TORCHS, COPIED])
def test_nothing_passes_between_tokens_or_experts(plan: Plan) -> None:
    """A token that is not a number spoils itself and its experts' gradients, nothing else: not even times zero."""
    hidden, indices, weights, gate_up, down = example(40, 2, 20, 12)
    indices[:, 0], indices[:, 1] = torch.arange(40) % 2, 2
    indices[7] = torch.tensor([3, 4])
    with torch.no_grad():
        hidden[7] = float("nan")
    out, of_hidden, _, of_gate_up, of_down = results(
        lambda *leaves: fused_experts(*leaves, plan), [hidden, indices, weights, gate_up, down]
    )
    others = torch.arange(40) != 7
    assert out[7].isnan().all()
    assert out[others].isfinite().all()
    assert of_hidden[others].isfinite().all()
    assert of_gate_up[:3].isfinite().all()
    assert of_down[:3].isfinite().all()


@pytest.mark.parametrize("plan", [OURS, TORCHS])
def test_a_graph_that_is_kept_gives_the_same_again(plan: Plan) -> None:
    """The backward pass writes into what was saved only where no other can follow."""
    inputs = example(20, 2, 20, 12)
    leaves = [t for t in inputs if t.requires_grad]
    total = fused_experts(*inputs, plan).square().sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    again = torch.autograd.grad(total, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("plan", [OURS, TORCHS])
def test_a_checkpointed_forward_gives_the_same_and_stops_half_way(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its repeat ends with gate and up: the sums of rows are the output's and the hidden gradient's, no third."""
    sums = []

    def counted(rows: Tensor, order: moe_rows.Order) -> Tensor:
        sums.append(rows.shape)
        return moe_rows.combine(rows, order)

    inputs = example(20, 2, 20, 12)
    plain = results(lambda *leaves: fused_experts(*leaves, plan), inputs)
    monkeypatch.setattr(moe_fused, "combine", counted)
    wrapped = results(lambda *leaves: checkpoint(fused_experts, *leaves, plan, use_reentrant=False), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, wrapped, strict=True))
    assert len(sums) == 2


def test_a_repeat_goes_on_to_what_is_saved_later() -> None:
    """A square after the experts needs their output in the repeat, too."""
    inputs = example(20, 2, 20, 12)
    plain = results(lambda *leaves: fused_experts(*leaves, OURS).square(), inputs)
    wrapped = results(
        lambda *leaves: checkpoint(lambda *x: fused_experts(*x, OURS).square(), *leaves, use_reentrant=False), inputs
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, wrapped, strict=True))


@pytest.mark.parametrize("plan", [OURS, TORCHS])
def test_only_gate_and_up_are_kept(plan: Plan) -> None:
    """Beside the inputs, and 12 bytes a pair, nothing stays for the backward pass."""
    inputs = example(63, 2, 20, 12)
    given = {t.data_ptr() for t in inputs}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in given:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fused_experts(*inputs, plan)
    assert sorted(t.numel() for t in kept if t.is_floating_point()) == [63 * 2 * 24]
    assert sum(t.nbytes for t in kept if not t.is_floating_point()) == 4 * (3 * 63 * 2 + 5)


def test_frozen_inputs_get_nothing_and_change_nothing() -> None:
    inputs = example(20, 2, 20, 12)
    whole = results(lambda *leaves: fused_experts(*leaves, OURS), inputs)
    for frozen in ((3,), (4,), (0, 2)):
        some = [t.detach().requires_grad_(t.requires_grad and i not in frozen) for i, t in enumerate(inputs)]
        found = results(lambda *leaves: fused_experts(*leaves, OURS), some)
        expected = [whole[0], *(g for i, g in zip((0, 2, 3, 4), whole[1:], strict=True) if i not in frozen)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_rank_without_tokens_gives_every_weight_a_gradient() -> None:
    inputs = [torch.zeros(0, 20, requires_grad=True), torch.zeros(0, 2, dtype=torch.int64)]
    inputs += [torch.zeros(0, 2, requires_grad=True), *example(1, 1, 20, 12)[3:]]
    out, of_hidden, of_weights, of_gate_up, of_down = results(fused_experts, inputs)
    assert (out.shape, of_hidden.shape, of_weights.shape) == ((0, 20), (0, 20), (0, 2))
    assert (of_gate_up.shape, of_down.shape) == ((5, 24, 20), (5, 20, 12))
    assert not of_gate_up.any()
    assert not of_down.any()


# ----- the router's choice


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 5, 1), (63, 5, 2), (257, 8, 8), (7, 130, 3)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_choice_and_weights_equal_plain_torch(tokens: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(tokens, num_experts, generator=g) * 3).requires_grad_()
    push = torch.randn(tokens, top_k, generator=g)
    scores = logits.softmax(-1)
    expected_indices = scores.topk(top_k).indices
    expected = scores.gather(-1, expected_indices)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    indices = moe_choice.best_experts(logits.detach(), top_k)
    assert torch.equal(indices, expected_indices)
    found = moe_choice.softmax_weights(logits, indices, renormalize=renormalize)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    gradients = [torch.autograd.grad(weights, logits, push)[0] for weights in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_choice_among_equals_is_the_first_and_never_outside() -> None:
    """Ties, experts ruled out, and a token that is not a number: distinct numbers of experts that there are."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 2, 2, 1, 1], [-inf, -inf, 0, -inf, -inf], [nan] * 5, [inf, 0, inf, 1, 0]])
    indices = moe_choice.best_experts(logits, 3).tolist()
    assert indices[0] == [1, 2, 0]
    assert indices[1] == [2, 0, 1]
    assert set(indices[2]) <= set(range(5))
    assert indices[3] == [0, 2, 3]


# ----- a model through all of them


def test_a_packed_model_equals_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, entropies and gradients of Qwen3-MoE, plain and checkpointed, with what a GPU would run."""

    plan = Plan(**dict.fromkeys(NAMES, Tiles(rows=32, cols=64, depth=32)))

    def fused(hidden: Tensor, indices: Tensor, weights: Tensor, of: ExpertWeights, activate: object) -> Tensor:
        assert activate is swiglu
        return fused_experts(hidden, indices, weights, of.gate_up, of.down, plan)

    monkeypatch.setattr(experts, "grouped_experts", fused)
    monkeypatch.setattr(experts, "has_kernels", lambda x: True)
    units = samples()[1:2]
    coefficients = torch.randn(2, sum(len(s.response) for u in units for s in u))
    stock, model = build("qwen3_moe")
    registry.prepare_packed(model)
    for module in model.modules():
        module.fuse = True
    plain = our_results(PolicyModule(model, packed=True), units, coefficients)
    compare(plain, stock_results(stock, units, coefficients))
    again = our_results(checkpointed(model), units, coefficients)
    assert all(torch.equal(a, b) for a, b in zip(plain[2].values(), again[2].values(), strict=True))
