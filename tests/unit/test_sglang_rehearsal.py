"""What a rehearsal makes of loaders that do more than copy: concatenate, zero, cast, derive, skip; what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from lightrl.engine.sglang_derived import Derived
from lightrl.engine.sglang_rehearsal import Rehearsed, rehearse
from lightrl.sync.buckets import plan_buckets

Loader = Callable[["Model", str, Tensor], None]


class Model(nn.Module):
    """Two parameters, and a loader that is a test's own."""

    def __init__(self, load: Loader, shape: tuple[int, ...] = (6, 4), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full(shape, 7.0, dtype=dtype))
        self.b = nn.Parameter(torch.full((2, 4), 7.0, dtype=dtype))
        self._load = load
        self.waiting: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self._load(self, name, weight)


def tensors(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]


AB = {"a": (6, 4), "b": (2, 4)}


def rehearsed(model: nn.Module, of: list[tuple[str, Tensor]], limit: int = 40) -> Rehearsed:
    layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in of]
    return rehearse(model, plan_buckets(layout, limit), Derived(model))


def sync(model: nn.Module, of: list[tuple[str, Tensor]], limit: int = 40) -> int:
    """As the receiver: fills and copies. Returns how many elements are copied."""
    found = rehearsed(model, of, limit)
    values = dict(of)
    count = 0
    with torch.no_grad():
        for fill in found.fills:
            fill.run()
        for slot, copies in (pair for bucket in found.copies for pair in bucket):
            for copy in copies:
                copy.target.copy_(copy.source(slot.part(values[slot.name]).contiguous(), slot.start))
                count += copy.target.numel()
    return count


def check(load: Loader, of: list[tuple[str, Tensor]], dtype: torch.dtype = torch.float32) -> Model:
    """The same values as the model's own loader gives, every element copied at most once."""
    expected, got = Model(load, dtype=dtype), Model(load, dtype=dtype)
    with torch.no_grad():
        expected.load_weights((name, tensor.clone()) for name, tensor in of)
    for limit in (4, 40, 1 << 20):
        assert sync(got, of, limit) <= 32
        assert all(torch.equal(e, g) for e, g in zip(expected.parameters(), got.parameters(), strict=True))
    return got


def plain(model: Model, name: str, weight: Tensor) -> None:
    getattr(model, name).data.copy_(weight)


# ---- tensors that are put together


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_concatenated_tensors(rank: int) -> None:
    """As MLA's q_a_proj and kv_a_proj_with_mqa, cut over ranks across the seam; nested, with a constant at the end."""

    def load(model: Model, name: str, weight: Tensor) -> None:
        model.waiting[name] = weight
        if len(model.waiting) == 3:
            parts = [model.waiting.pop(key) for key in "qkv"]
            fused = torch.cat([torch.cat(parts[:2]), parts[2][1:], torch.full((2, 4), 3.0)], dim=0)  # 5 + 3 + 3 + 2
            model.a.data.copy_(fused.narrow(0, rank * 6, 6))
            model.b.data.copy_(fused[-3:-1] if rank else fused[-2:])

    check(load, tensors(q=(5, 4), k=(3, 4), v=(4, 4)))


@pytest.mark.parametrize("dim", [1, -1])
def test_other_concatenations_are_refused(dim: int) -> None:
    def load(model: Model, name: str, weight: Tensor) -> None:
        model.waiting[name] = weight
        if len(model.waiting) == 2:
            model.a.data.copy_(torch.cat(list(model.waiting.values()), dim))

    with pytest.raises(ValueError, match=r"q goes through aten.cat.*only whole rows below each other"):
        rehearsed(Model(load), tensors(q=(6, 1), k=(6, 3)))


# ---- in-place changes


@pytest.mark.parametrize("zero", [lambda t: t.zero_(), lambda t: t.fill_(0), lambda t: t.transpose(0, 1).zero_()])
def test_a_tensor_that_is_zeroed_first_is_zero_here(zero: Callable[[Tensor], Tensor]) -> None:
    """As gpt-oss does with the experts' bias on all tensor-parallel ranks but the first."""

    def load(model: Model, name: str, weight: Tensor) -> None:
        kept = weight.clone()
        if name == "a":
            zero(weight)
        getattr(model, name).data.copy_(weight)
        if name == "a":
            model.b.data.copy_(kept[:2])  # its copy from before is not

    model = check(load, tensors(a=(6, 4)))
    assert bool((model.a == 0).all())
    assert bool((model.b != 0).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.mul_(2), r"a is changed in place by aten.mul_"),
        (lambda t: t.fill_(1), r"a is changed in place by aten.fill_"),
        (lambda t: t.copy_(torch.zeros(6, 4)), r"a is changed in place by aten.copy_"),
        (lambda t: t[1:3].zero_(), r"a is changed in place by aten.zero_.default \(of a part of it\)"),
        (lambda t: t.t_(), r"a is changed in place by aten.t_"),
        (lambda t: torch.add(t, 1, out=torch.empty(6, 4, device="meta")), r"a is changed in place by aten.add.out"),
        (lambda t: t.view(torch.int32), r"a goes through aten.view.dtype"),
        (lambda t: t.t().contiguous().view(-1), r"a goes through aten.view.*not compatible"),
    ],
)
def test_other_changes_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    def load(model: Model, name: str, weight: Tensor) -> None:
        plain(model, name, weight)
        if name == "a":
            change(weight)

    with pytest.raises(ValueError, match=message):
        rehearsed(Model(load), tensors(**AB))


# ---- what is written more than once, or not at all


def test_what_is_written_over_is_left_out() -> None:
    def load(model: Model, name: str, weight: Tensor) -> None:
        model.a.data.copy_(weight)  # the last one stays
        model.b.data.copy_(weight[:2])
        model.b.data.fill_(3)

    copies = rehearsed(Model(load), tensors(x=(6, 4), y=(6, 4)), 1 << 20).copies
    assert [(slot.name, len(found)) for bucket in copies for slot, found in bucket] == [("x", 0), ("y", 1)]
    check(load, tensors(x=(6, 4), y=(6, 4)))


def test_padding_is_filled_before_the_copies() -> None:
    def load(model: Model, name: str, weight: Tensor) -> None:
        target = getattr(model, name).data
        target.zero_()
        target[:, 1:].copy_(weight)

    check(load, tensors(a=(6, 3), b=(2, 3)))


def test_overlapping_copies_and_holes_are_refused() -> None:
    def overlapping(model: Model, name: str, weight: Tensor) -> None:
        model.a.data[:4].copy_(weight)
        model.a.data[2:].copy_(weight)

    with pytest.raises(ValueError, match="x is in part written over"):
        rehearsed(Model(overlapping), tensors(x=(4, 4)))

    def hole(model: Model, name: str, weight: Tensor) -> None:
        plain(model, "b", weight[:2])
        model.a.data[:4, :3].fill_(0)  # 12, 8 and 8 elements: more than there are, and not all
        model.a.data[:2].copy_(weight[:2])
        model.a.data[2:4].copy_(weight[2:4])

    with pytest.raises(ValueError, match=r"no values, or not all, for the engine's a$"):
        rehearsed(Model(hole), tensors(x=(6, 4)))


# ---- dtypes and numbers


def test_casts() -> None:
    def load(model: Model, name: str, weight: Tensor) -> None:
        plain(model, name, weight.to(torch.float32).t().contiguous().t())

    check(load, tensors(torch.bfloat16, **AB))
    check(load, tensors(torch.bfloat16, **AB), torch.bfloat16)

    def rounding(model: Model, name: str, weight: Tensor) -> None:
        plain(model, name, weight.to(torch.bfloat16))

    check(rounding, tensors(**AB), torch.bfloat16)
    with pytest.raises(ValueError, match=r"a is rounded to torch.bfloat16 and kept as torch.float32"):
        rehearsed(Model(rounding), tensors(**AB))


def test_numbers() -> None:
    """SGLang's default loader fills one-element parameters with `.item()`."""

    def load(model: Model, name: str, weight: Tensor) -> None:
        model.a.data[int(name)].fill_(weight.item())
        model.b.data.copy_(weight)

    of = tensors(torch.bfloat16, **{str(i): (1,) for i in range(6)})
    model = check(load, of)
    assert [row[0].item() for row in model.a] == [weight.item() for _, weight in of]

    def computing(model: Model, name: str, weight: Tensor) -> None:
        model.a.data.fill_(weight.item() * 2)

    with pytest.raises(ValueError, match=r"^1: read as a number"):
        rehearsed(Model(computing), tensors(**{"1": (1,)}))


# ---- experts of other ranks


class Experts(nn.Module):
    """As much of FusedMoE as says which experts are where."""

    def __init__(self, layer: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.layer_id, self.moe_ep_rank, self.moe_ep_size = layer, rank, ranks
        self.num_local_experts, self.num_fused_shared_experts = 4 // ranks + 1, 1
        self.w = nn.Parameter(torch.zeros(self.num_local_experts, 3))


class Mixture(nn.Module):
    def __init__(self, rank: int, ranks: int, lost: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.moe_ep_size = ranks  # a block around the experts has it, too
        self.layers = nn.ModuleList(Experts(layer, rank, ranks) for layer in range(2))
        self._lost = lost

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            _, _, layer, _, kind, *rest = name.split(".")
            experts = self.layers[int(layer)]
            local = int(rest[0]) - experts.moe_ep_rank * (experts.num_local_experts - 1) if kind == "experts" else -1
            if name not in self._lost and (kind != "experts" or 0 <= local < experts.num_local_experts - 1):
                experts.w.data[local].copy_(weight)


def mixture() -> list[tuple[str, Tensor]]:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.w" for layer in range(2) for expert in range(4)]
    return tensors(**dict.fromkeys(names + [f"model.layers.{i}.mlp.shared_experts.w" for i in range(2)], (3,)))


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_experts_of_other_ranks_may_be_skipped(rank: int, ranks: int) -> None:
    expected, got = Mixture(rank, ranks), Mixture(rank, ranks)
    with torch.no_grad():
        expected.load_weights(mixture())
    assert sync(got, mixture()) == 2 * 3 * (4 // ranks + 1)
    assert all(torch.equal(e, g) for e, g in zip(expected.parameters(), got.parameters(), strict=True))


@pytest.mark.parametrize(
    ("rank", "ranks", "lost"),
    [
        (1, 2, "model.layers.1.mlp.experts.2.w"),  # is this rank's
        (0, 2, "model.layers.0.mlp.shared_experts.w"),
        (0, 1, "model.layers.0.mlp.experts.3.w"),
        (1, 2, "model.layers.0.mlp.experts.4.w"),  # nobody's
        (1, 2, "model.layers.7.mlp.experts.0.w"),
    ],
)
def test_nothing_else_may_be_skipped(rank: int, ranks: int, lost: str) -> None:
    model = Mixture(rank, ranks, (lost,))
    of = mixture()
    if lost not in dict(of):
        of += tensors(**{lost: (3,)})
        model.layers.extend(nn.Module() for _ in range(6))
        for layer in model.layers[2:]:
            layer.moe_ep_rank, layer.num_local_experts = 1, 3
    with pytest.raises(ValueError, match=f"Mixture takes nothing from {lost}:"):
        rehearsed(model, of)


# ---- what a model makes of its weights


class Deriving(Model):
    """MLA's: `kept` is put into its memory, `replaced` is new each time."""

    kept: Tensor | None = None
    replaced: Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.post_load_weights()

    def post_load_weights(self, is_nextn: bool = False) -> None:
        new = self.a.detach().t().contiguous().t()
        self.kept = new if self.kept is None else self.kept.copy_(new)
        self.replaced = self.b.detach() * 2


def test_derived_tensors_stay_where_they_are() -> None:
    model = nn.ModuleDict({"language_model": Deriving(plain)})  # inside a model that has no such function itself
    inner = model["language_model"]
    model.load_weights = inner.load_weights
    inner.post_load_weights()
    kept, replaced = inner.kept, inner.replaced
    derived = Derived(model)
    layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors(**AB)]
    rehearse(model, plan_buckets(layout, 1000), derived)
    with torch.no_grad():
        inner.a.fill_(3)
        inner.b.fill_(5)
        assert derived.renew()
    assert inner.kept is kept
    assert inner.replaced is replaced
    assert bool((kept == 3).all())
    assert bool((replaced == 10).all())
    assert not Derived(Model(plain)).renew()


class Forgetful(Deriving):
    """Derives only while it loads."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        Model.load_weights(self, weights)
        self.kept = self.a.detach().t().contiguous()

    post_load_weights = None  # type: ignore[assignment]


class Buffered(Model):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.table.copy_(self.a[0] * 2)


class Moving(Model):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.b.data = self.b.data.t().contiguous()


def test_what_cannot_be_derived_again_is_refused() -> None:
    with pytest.raises(ValueError, match="Forgetful computes kept from its weights when it loads them"):
        rehearsed(Forgetful(plain), tensors(**AB))
    forgetful = Forgetful(plain)
    forgetful.kept = torch.zeros(4, 6)
    with pytest.raises(ValueError, match="Forgetful computes kept from its weights when it loads them"):
        rehearsed(forgetful, tensors(**AB))
    buffered = Buffered(plain)
    buffered.register_buffer("table", torch.zeros(4))
    with pytest.raises(ValueError, match="Buffered computes values from its weights"):
        rehearsed(buffered, tensors(**AB))
    with pytest.raises(ValueError, match="SGLang lays b out anew"):
        rehearsed(Moving(plain), tensors(**AB))


def test_a_model_with_eyes_is_refused_with_what_to_do() -> None:
    model = Model(plain)
    model.visual = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"visual.weight, visual.bias: SGLang has built Model, .*text model alone"):
        rehearsed(model, tensors(**AB))
