"""Weights through buffers into a model of another layout: plan, protocol of both sides, what is refused."""

from __future__ import annotations

import base64
import itertools
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrl.engine import sglang_receiver as receiver
from lightrl.engine.sglang_copies import Copy, joined
from lightrl.sync.buckets import BucketSender, Plan, Slot, plan_buckets
from lightrl.sync.mailbox import Mailbox, MailboxError
from lightrl.sync.shared import SharedBuffers, open_shared

HIDDEN, VOCAB, LAYERS = 4, 10, 3
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="buffers on a CPU need Linux")


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
    assert plan.buckets[1][1] == Slot("layers.0.k", (4, 4), "bfloat16", 256, 0, 16)
    assert plan.capacity == 3 * 256 + 32
    assert plan.num_bytes == 2 * (40 + 12 * 16 + 4)
    assert Plan.from_json(plan.to_json()) == plan
    assert len(plan_buckets(layout(weights()), limit=1 << 20).buckets) == 1
    # a layer beyond the limit is split
    small = plan_buckets(layout(weights()), limit=300)
    assert [len(bucket) for bucket in small.buckets] == [1, *[2] * 6, 1]
    with pytest.raises(ValueError, match="no tensors"):
        plan_buckets([], limit=1)


def test_a_tensor_beyond_the_limit_is_cut_between_rows() -> None:
    def parts(shape: tuple[int, ...], dtype: torch.dtype, limit: int) -> list[list[tuple[str, int, int, int]]]:
        plan = plan_buckets([("a", (4,), torch.int8), ("b", shape, dtype), ("c", (2,), torch.int8)], limit)
        assert plan.capacity <= limit
        assert Plan.from_json(plan.to_json()) == plan
        return [[(s.name, s.offset, s.start, s.count) for s in bucket] for bucket in plan.buckets]

    a, c = ("a", 0, 0, 4), ("c", 0, 0, 2)
    # 15 rows of 40 bytes in 600; what follows shares the last bucket where it fits
    assert parts((17, 10), torch.float32, 600) == [[a], [("b", 0, 0, 150)], [("b", 0, 150, 20), ("c", 256, 0, 2)]]
    # a row that exceeds the limit is cut as well
    assert parts((2, 200), torch.float32, 600) == [[a], *([("b", 0, i, min(150, 400 - i))] for i in (0, 150, 300)), [c]]
    # matrices of 6 rows of 4: three fit
    assert parts((5, 6, 4), torch.float64, 600) == [[a], [("b", 0, 0, 72)], [("b", 0, 72, 48)], [c]]
    # ... and where none fits, rows of them
    parted = [[("b", 0, 0, 72)], [("b", 0, 72, 72)], [("b", 0, 144, 16), ("c", 256, 0, 2)]]
    assert parts((2, 20, 4), torch.float64, 600) == [[a], *parted]
    assert parts((500,), torch.int16, 900) == [[a], [("b", 0, 0, 450)], [("b", 0, 450, 50), ("c", 256, 0, 2)]]
    with pytest.raises(ValueError, match=r"b: no element of torch.float64 fits into buckets of 7 bytes"):
        parts((2,), torch.float64, 7)


class Pair:
    """Both sides: a sender, and a model that receives in a thread."""

    def __init__(self, model: nn.Module, limit: int = 1024) -> None:
        self.model = model
        self.sender = BucketSender(plan_buckets(layout(weights()), limit), CPU)
        self.sender.mailbox.begin()
        receiver.open_buffers(model, pickle.loads(base64.b64decode(self.sender.introduction())))
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


# 2: every element alone; 6: three of a row's four; 24: three rows; 40: the embedding of 80 bytes in two
@pytest.mark.parametrize("limit", [2, 6, 24, 40, 300, 1024, 1 << 20])
@pytest.mark.parametrize("rank", [0, 1])
def test_values_arrive_where_the_models_own_loader_puts_them(rank: int, limit: int) -> None:
    model = FusedModel(rank)
    pair = Pair(model, limit)
    assert all(buffer.numel() <= limit for buffer in pair.sender.shared.buffers)
    for parameter in (model.embed[:5], *model.qkv, *model.o, model.norm):
        assert bool((parameter == 7).all())  # a rehearsal copies nothing
    for seed in range(3):
        model.embed.detach()[5:] = float("nan")  # its memory was released meanwhile
        pair.run(receiver.receive, weights(seed))
        check_loaded(model, weights(seed))
        assert bool((model.embed[5:] == 0).all())
        report = pair.run(receiver.verify, weights(seed))
        # 5 rows of the embedding, 3 layers of 6 rows and 4 x 2, the norm
        assert report == {"differing": {}, "compared": 5 * 4 + 3 * (6 * 4 + 4 * 2) + 4}


class Deriving(FusedModel):
    """Computes something from its weights, as models with MLA."""

    def post_load_weights(self) -> None:
        self.double = self.norm.detach() * 2


def test_what_is_derived_is_renewed_with_each_sync() -> None:
    model = Deriving()
    model.post_load_weights()
    double = model.double  # a CUDA graph would know its address
    pair = Pair(model)
    for seed in range(2):
        pair.run(receiver.receive, weights(seed))
        assert model.double is double
        assert torch.equal(double, dict(weights(seed))["norm.weight"].bfloat16() * 2)


def test_blocks_of_a_range_are_those_elements_and_few() -> None:
    """Against brute force, over parts of all kinds: slices by rows and columns, transposed, expanded."""
    whole = torch.arange(5 * 6 * 7).view(5, 6, 7)
    views = [whole, whole[1:4], whole[:, 2:5], whole[:, :, 3:5], whole[::2, 1::3, 1:], whole.transpose(0, 2)[1:6]]
    views += [whole[2, :, 4], whole[3, 2, 1], whole[1:4, 2:3].expand(3, 5, 7), whole[:0]]
    chosen = random.Random(0)
    ranges = [tuple(sorted((chosen.randint(0, 210), chosen.randint(0, 210)))) for _ in range(60)]
    for view, (start, end) in itertools.product(views, [*ranges, (0, 210), (42, 126), (7, 8), (9, 9)]):
        target = torch.full(view.shape, -1)
        copy = Copy(tuple(view.shape), view.stride(), view.storage_offset(), target)
        blocks = copy.within(start, end)
        memory = whole.view(-1)[start:end].clone()  # nothing else may be read
        for block in blocks:
            assert bool((block.target == -1).all())  # no element twice
            block.target.copy_(block.source(memory, start))
        assert torch.equal(target, torch.where((view >= start) & (view < end), view, -1))
        assert len(blocks) <= 5
        if start % 42 == end % 42 == 0:
            assert len(blocks) <= 1


def test_neighbours_at_equal_distances_are_copied_as_one() -> None:
    """Five experts of 6 x 4, of which a rank takes rows 2 to 4; then one further away, and tensors of other forms."""
    torch.manual_seed(0)
    sent, held = torch.randn(400), torch.full((300,), torch.nan)
    experts = [sent.as_strided((6, 4), (4, 1), 32 * i) for i in (0, 1, 2, 3, 4, 7)]
    stack = held[:90].view(6, 15)[:, :12]
    pairs = [(expert[2:5], row.view(3, 4)) for expert, row in zip(experts, stack, strict=True)]
    pairs += [(sent[300:307], held[100:107]), (sent[310:317], held[93:100])]  # backwards: left as they are
    square, following = held[200:204].view(2, 2), held[204:208].view(2, 2)
    pairs += [(sent[380:384].view(2, 2).T, square), (sent[384:388].view(2, 2), following)]
    expected = held.clone()
    for source, target in pairs:
        expected.as_strided(target.size(), target.stride(), target.storage_offset()).copy_(source)
    found = joined(pairs)
    assert [tuple(target.shape) for _, target in found] == [(5, 3, 4), (3, 4), (7,), (7,), (2, 2), (2, 2)]
    for source, target in found:
        target.copy_(source)
    assert torch.equal(held.nan_to_num(), expected.nan_to_num())
    assert joined([]) == []


def test_buffers_on_a_cpu_are_shared_without_a_name() -> None:
    shared = SharedBuffers(2, 100, CPU)
    payload = pickle.loads(base64.b64decode(shared.payload({"plan": "x"})))
    message, buffers = open_shared(payload)
    assert message == {"plan": "x"}
    shared.buffers[1][7] = 3
    assert [buffer.tolist() for buffer in buffers] == [[0] * 100, [0] * 7 + [3] + [0] * 92]
    assert torch.equal(open_shared(payload)[1][1], buffers[1])  # another engine, after the first has died
    shared.close()
    with pytest.raises(FileNotFoundError):
        open_shared(payload)
    assert buffers[1][7] == 3  # who has them keeps them


def test_verification_names_what_differs() -> None:
    model = FusedModel()
    pair = Pair(model)
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
def test_models_that_would_be_synchronised_wrongly_are_refused(model: type[FusedModel], message: str) -> None:
    with pytest.raises(MailboxError, match=message):
        Pair(model())


def test_other_tensors_than_planned_are_refused() -> None:
    for wrong, message in (
        (weights()[::-1], "expected embed.weight in the plan's order, got norm.weight"),
        (weights()[:-1], "nothing came for norm.weight"),
        ([*weights(), ("extra", torch.zeros(1))], "expected nothing more in the plan's order, got extra"),
        ([("embed.weight", torch.zeros(11, 4)), *weights()[1:]], r"embed.weight: shape \[11, 4\], planned \[10, 4\]"),
    ):
        pair = Pair(FusedModel())
        with pytest.raises(ValueError, match=message):
            pair.run(receiver.receive, wrong)


def test_a_failing_receiver_is_reported_to_the_sender(capfd: pytest.CaptureFixture[str]) -> None:
    pair = Pair(FusedModel())
    pair.model.__dict__["_lightrl_receiver"].copies[2] = ([torch.zeros(2)], [torch.zeros(3)])
    with pytest.raises(MailboxError, match="RuntimeError: The size of tensor"):
        pair.run(receiver.receive, weights())
    assert "Traceback" in capfd.readouterr().err  # for the engine's log


def test_waiting_ends() -> None:
    box = Mailbox()
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


MAKER = """
import sys, time
from lightrl.sync.mailbox import Mailbox
box = Mailbox()
box.begin()
print(box.path, flush=True)
box.wait("drained", 3, timeout=60)
print("seen", flush=True)
time.sleep(600)
"""


def test_nothing_of_a_killed_trainer_stays(tmp_path: Path) -> None:
    """Another process opens its mailbox; no file of it is in the folder for temporary ones."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        try:
            path = Path(trainer.stdout.readline().strip())
            ours = Mailbox(path)
            ours.set("drained", 3)
            assert trainer.stdout.readline() == "seen\n"
        finally:
            trainer.kill()
    assert not list(tmp_path.iterdir())
    assert not path.exists()
    ours.close()
