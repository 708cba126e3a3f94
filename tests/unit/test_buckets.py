"""Weights through buffers into a model of another layout: plan, protocol of both sides, what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrl.engine import sglang_receiver as receiver
from lightrl.sync.buckets import BucketSender, Plan, Slot, plan_buckets
from lightrl.sync.mailbox import Mailbox, MailboxError

HIDDEN, VOCAB, LAYERS = 4, 10, 3
CPU = torch.device("cpu")


class FusedModel(nn.Module):
    """As SGLang lays a model out on one of two tensor-parallel ranks: q, k, v fused by rows, o cut by columns, half of
    the vocabulary, padded; loading is a copy each."""

    def __init__(self, rank: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank = rank
        self.embed = nn.Parameter(torch.full((VOCAB // 2 + 3, HIDDEN), 7.0, dtype=dtype))
        self.qkv = nn.ParameterList(torch.full((6, HIDDEN), 7.0, dtype=dtype) for _ in range(LAYERS))
        self.o = nn.ParameterList(torch.full((HIDDEN, 2), 7.0, dtype=dtype) for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.full((HIDDEN,), 7.0, dtype=dtype))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "embed.weight":
                part = weight.narrow(0, self.rank * VOCAB // 2, VOCAB // 2)
                self.embed[: VOCAB // 2].data.copy_(part)
                self.embed[VOCAB // 2 :].data.fill_(0)
            elif name == "norm.weight":
                self.norm.data.copy_(weight)
            elif name.startswith("layers."):
                _, layer, kind = name.split(".")
                if kind in "qkv":
                    half = weight.view(2, 2, HIDDEN)[self.rank]
                    self.qkv[int(layer)].data.narrow(0, "qkv".index(kind) * 2, 2).copy_(half)
                elif kind == "o":
                    self.o[int(layer)].data.copy_(weight.narrow(1, self.rank * 2, 2))


def weights(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (VOCAB, HIDDEN)}
    shapes |= {f"layers.{i}.{kind}": (4, HIDDEN) for i in range(LAYERS) for kind in "qkvo"}
    shapes |= {"norm.weight": (HIDDEN,)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def layout(of: list[tuple[str, Tensor]]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(t.shape), torch.bfloat16) for name, t in of]


def groups(of: list[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    return [of[:1], *(of[i : i + 4] for i in range(1, 13, 4)), of[13:]]


def check_loaded(model: FusedModel, of: list[tuple[str, Tensor]]) -> None:
    """Hand-cut values of every parameter."""
    expected = {name: tensor.bfloat16() for name, tensor in of}
    r = model.rank
    assert torch.equal(model.embed[:5], expected["embed.weight"][5 * r : 5 * r + 5])
    assert torch.equal(model.embed[5:], torch.zeros(3, HIDDEN, dtype=torch.bfloat16))
    for i in range(LAYERS):
        rows = [expected[f"layers.{i}.{kind}"][2 * r : 2 * r + 2] for kind in "qkv"]
        assert torch.equal(model.qkv[i], torch.cat(rows))
        assert torch.equal(model.o[i], expected[f"layers.{i}.o"][:, 2 * r : 2 * r + 2])
    assert torch.equal(model.norm, expected["norm.weight"])


def test_plan_keeps_order_layers_and_alignment() -> None:
    plan = plan_buckets(layout(weights()), limit=1024)
    names = [[slot.name for slot in bucket] for bucket in plan.buckets]
    assert names == [["embed.weight"], *([f"layers.{i}.{k}" for k in "qkvo"] for i in range(3)), ["norm.weight"]]
    assert plan.buckets[1][1] == Slot("layers.0.k", (4, 4), "bfloat16", 256, 32)
    assert plan.capacity == 3 * 256 + 32
    assert plan.num_bytes == 2 * (40 + 12 * 16 + 4)
    assert Plan.from_json(plan.to_json()) == plan
    assert len(plan_buckets(layout(weights()), limit=1 << 20).buckets) == 1
    # a layer beyond the limit is split; a tensor beyond it is alone
    small = plan_buckets(layout(weights()), limit=300)
    assert [len(bucket) for bucket in small.buckets] == [1, *[2] * 6, 1]
    alone = plan_buckets([("a", (4,), torch.int8), ("b", (500,), torch.float32), ("c", (2,), torch.int8)], limit=300)
    assert [[s.name for s in bucket] for bucket in alone.buckets] == [["a"], ["b"], ["c"]]
    assert alone.capacity == 2000
    with pytest.raises(ValueError, match="no tensors"):
        plan_buckets([], limit=1)


class Pair:
    """Both sides: a sender, and a model that receives in a thread."""

    def __init__(self, folder: Path, model: nn.Module, limit: int = 1024) -> None:
        self.model = model
        self.sender = BucketSender(plan_buckets(layout(weights()), limit), CPU, folder / f"mailbox{model.rank}")
        message = json.dumps({"mailbox": str(self.sender.mailbox.path), "plan": self.sender.plan.to_json()})
        self.sender.mailbox.begin()
        receiver.open_buffers(model, [(message, b) for b in self.sender.buffers])
        self.sender.mailbox.wait("drained", len(self.sender.plan.buckets) + 1, timeout=1)

    def run(self, loader: Callable[..., None], of: list[tuple[str, Tensor]]) -> dict[str, Any]:
        self.sender.mailbox.begin()
        thread = threading.Thread(target=loader, args=(self.model, []))
        thread.start()
        try:
            return self.sender.send(groups(of))
        finally:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("limit", [300, 1024, 1 << 20])
@pytest.mark.parametrize("rank", [0, 1])
def test_values_arrive_where_the_models_own_loader_puts_them(tmp_path: Path, rank: int, limit: int) -> None:
    model = FusedModel(rank)
    pair = Pair(tmp_path, model, limit)
    for parameter in (model.embed[:5], *model.qkv, *model.o, model.norm):
        assert bool((parameter == 7).all())  # a rehearsal copies nothing
    for seed in range(3):
        pair.run(receiver.receive, weights(seed))
        check_loaded(model, weights(seed))
        report = pair.run(receiver.verify, weights(seed))
        # 5 rows of the embedding, 3 layers of 6 rows and 4 x 2, the norm
        assert report == {"differing": {}, "compared": 5 * 4 + 3 * (6 * 4 + 4 * 2) + 4}


def test_verification_names_what_differs(tmp_path: Path) -> None:
    model = FusedModel()
    pair = Pair(tmp_path, model)
    pair.run(receiver.receive, weights())
    with torch.no_grad():
        model.qkv[1][3, 2] += 1  # the second row of k
        model.o[2][0, 0] = float("nan")
    assert pair.run(receiver.verify, weights())["differing"] == {"layers.1.k": 1, "layers.2.o": 1}
    negative_zero = [(name, tensor * 0 if name == "norm.weight" else tensor) for name, tensor in weights()]
    pair.run(receiver.receive, negative_zero)
    with torch.no_grad():
        model.norm[1] = -0.0  # equal, but not the same bits
    assert pair.run(receiver.verify, negative_zero)["differing"] == {"norm.weight": 1}


class Skipping(FusedModel):
    """W4: a name goes into nothing, without a word."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((n, w) for n, w in weights if n != "layers.1.v")


class Scaling(FusedModel):
    """Does more than copy."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((n, w * 2 if n == "norm.weight" else w) for n, w in weights)


class Larger(FusedModel):
    """Has a parameter that the policy lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("model", "message"),
    [(Skipping, "takes nothing from layers.1.v"), (Scaling, "norm.weight goes through aten.mul"), (Larger, "vision")],
)
def test_models_that_would_be_synchronised_wrongly_are_refused(
    tmp_path: Path, model: type[FusedModel], message: str
) -> None:
    with pytest.raises(MailboxError, match=message):
        Pair(tmp_path, model())


def test_other_tensors_than_planned_are_refused(tmp_path: Path) -> None:
    for wrong, message in (
        (weights()[::-1], "expected embed.weight in the plan's order, got norm.weight"),
        (weights()[:-1], "nothing came for norm.weight"),
        ([*weights(), ("extra", torch.zeros(1))], "expected nothing more in the plan's order, got extra"),
    ):
        pair = Pair(tmp_path, FusedModel())
        with pytest.raises(ValueError, match=message):
            pair.run(receiver.receive, wrong)


def test_a_failing_receiver_is_reported_to_the_sender(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pair = Pair(tmp_path, FusedModel())
    pair.model.__dict__["_lightrl_receiver"].parts[2] = [("layers.1.q", torch.zeros(3), torch.zeros(2))]
    with pytest.raises(MailboxError, match="RuntimeError: The size of tensor"):
        pair.run(receiver.receive, weights())
    assert "Traceback" in capfd.readouterr().err  # for the engine's log


def test_waiting_ends(tmp_path: Path) -> None:
    box = Mailbox(tmp_path / "box", create=True)
    with pytest.raises(MailboxError, match="nothing from the other side"):
        box.wait("filled", 1, timeout=0.05)

    def dead() -> None:
        raise RuntimeError("the engine has died")

    with pytest.raises(RuntimeError, match="has died"):
        box.wait("filled", 1, timeout=10, check=dead)
    other = Mailbox(box.path)
    other.report({"compared": 3})
    other.set("drained", 1)
    assert box.wait("drained", 1, timeout=1) == {"compared": 3}
    box.begin()
    assert (other.get("drained"), other.get("state")) == (0, 0)
    other.fail("x" * 100_000)  # more than fits
    with pytest.raises(MailboxError, match=r"^x{60000}"):
        box.wait("filled", 1, timeout=1)
