"""Offload and onload on the CPU (`on_cpu`): every byte comes back, views stay valid, host memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightrl.distributed.fsdp import shard, unshard_all
from lightrl.distributed.mesh import close_world, init_world
from lightrl.distributed.offload import HostMemory, Offloader, _plan
from lightrl.errors import UserError

LR = 1e-2


@pytest.fixture
def world() -> Iterator[object]:
    yield init_world("cpu")
    close_world()


def make_model(config, world, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shard(model, model, world.mesh, compute_dtype=dtype)
    return model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, between=lambda: None) -> float:
    ids = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    between()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().clone().flatten().view(torch.uint8).numpy().tobytes()  # numpy() fixes a storage's size


def test_training_is_the_same_to_the_last_bit(world, tiny_qwen3) -> None:
    """Away and back before and after every step and between backward and step; tied head, AdamW from its first step."""
    losses, weights = [], []
    for moves in (False, True):
        model = make_model(tiny_qwen3(), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=True)
        offloader = Offloader(model, optimizer, on_cpu=True)

        def cycle(active: bool = moves, offloader: Offloader = offloader) -> None:
            if active:
                assert offloader.offload() > 0
                assert offloader.state_bytes() == 0
                offloader.onload()

        trace = []
        for step in range(4):
            cycle()
            trace.append(train_step(model, optimizer, step, cycle))
        cycle()
        losses.append(trace)
        weights.append([bits(p.full_tensor()) for p in model.parameters()])
    assert losses[0] == losses[1]
    assert losses[0][-1] != losses[0][0]
    assert weights[0] == weights[1]


def test_whole_parameters_left_behind_are_freed_and_fsdp_keeps_its_views(world, tiny_llama) -> None:
    model = make_model(tiny_llama(), world, torch.bfloat16)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        unshard_all(model)
        whole = list(model.parameters())
        offloader = Offloader(model, on_cpu=True)
        moved = offloader.offload()
        assert all(p.untyped_storage().nbytes() == 0 for p in whole)
        assert all(p.to_local().untyped_storage().nbytes() == 0 for p in model.parameters())
        assert moved == sum(4 * p.numel() for p in model.parameters())
        offloader.onload()
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_state_that_grows_and_calls_that_repeat() -> None:
    """Host memory grows with the state and is reused; a second call and a call with nothing away do nothing."""
    model = nn.Linear(1000, 300)
    numbers = 1000 * 300 + 300
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    offloader = Offloader(model, optimizer, on_cpu=True)
    assert (offloader.onload(), offloader.is_offloaded, offloader.host_bytes) == (0, False, 0)
    assert offloader.state_bytes() == 4 * numbers
    assert offloader.offload() == 4 * numbers
    assert offloader.is_offloaded
    assert (offloader.offload(), offloader.state_bytes()) == (0, 0)
    first = offloader.host_bytes
    assert 4 * numbers <= first < 4 * numbers + 3 * 4096
    assert offloader.onload() == 4 * numbers
    assert (offloader.onload(), offloader.is_offloaded) == (0, False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    assert offloader.offload() == 8 * numbers
    offloader.onload()
    optimizer.step()  # two moments, and a step count of 4 bytes a parameter
    optimizer.zero_grad(set_to_none=True)
    assert offloader.offload() == 12 * numbers + 8
    last = offloader.host_bytes
    assert first < last < 12 * numbers + 5 * 4096
    offloader.onload()
    for _ in range(3):
        offloader.offload()
        offloader.onload()
    assert offloader.host_bytes == last
    offloader.offload()
    offloader.close()
    assert (offloader.is_offloaded, offloader.host_bytes) == (False, 0)
    assert float(optimizer.state[model.bias]["exp_avg"][0]) == pytest.approx(0.05)


def test_new_state_while_the_rest_is_away() -> None:
    model = nn.Linear(4, 3)
    before = bits(model.weight)
    offloader = Offloader(model, on_cpu=True)
    offloader.offload()
    model.bias.grad = torch.tensor([1.0, 2.0, 3.0])
    assert offloader.offload() == 12
    assert model.bias.grad.untyped_storage().nbytes() == 0
    offloader.onload()
    assert bits(model.weight) == before
    assert model.bias.grad.tolist() == [1.0, 2.0, 3.0]


class Odd(nn.Module):
    """Sizes, types and sharing that a plain copy gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.tied = nn.Parameter(torch.randn(700, 1000, generator=g))
        self.head = self.tied
        padded = torch.randn(11, 5, generator=g)  # FSDP2 pads shards: the storage is longer than the tensor
        self.padded, self.padding = nn.Parameter(padded[:7]), padded[7:]
        self.bf16 = nn.Parameter(torch.randn(3, generator=g).bfloat16())
        self.octets = nn.Parameter(torch.tensor([1, 2, 255], dtype=torch.uint8), requires_grad=False)
        self.large = nn.Parameter(torch.randint(0, 9, (600_000,), generator=g), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.tensor(3.5), requires_grad=False)


@pytest.mark.parametrize("chunk_bytes", [1 << 30, 1 << 20, 4096])
def test_every_byte_over_chunk_borders(chunk_bytes: int) -> None:
    model = Odd()
    tensors = [*model.parameters(), model.padding]
    before = [bits(t) for t in tensors]
    offloader = Offloader(model, on_cpu=True, chunk_bytes=chunk_bytes)
    expected = 4 * 700_000 + 4 * 11 * 5 + 2 * 3 + 3 + 8 * 600_000 + 4  # the tied parameter once, padding too
    assert offloader.offload() == expected
    assert model.padding.untyped_storage().nbytes() == 0
    offloader.onload()
    assert [bits(t) for t in tensors] == before
    assert model.head is model.tied


def test_nested_optimizer_state_and_memory_of_others() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    deep = torch.tensor([5.0, 6.0])
    lent = torch.frombuffer(bytearray(8), dtype=torch.float32)  # not torch's memory: cannot be freed
    optimizer.state[model.weight] = {"a": [{"b": (deep, 1)}], "count": 2, "lent": lent, "none": None}
    offloader = Offloader(model, optimizer, on_cpu=True)
    assert offloader.offload() == 16 + 8
    assert lent.tolist() == [0.0, 0.0]
    offloader.onload()
    assert deep.tolist() == [5.0, 6.0]


def test_host_limit_names_the_key_and_moves_nothing() -> None:
    model = nn.Linear(1024, 1024)
    before = bits(model.bias)
    offloader = Offloader(model, on_cpu=True, max_host_bytes=4 << 20, host_key="parallel.host")
    with pytest.raises(UserError, match=r"^parallel\.host: .* 0\.00 GiB are allowed: raise it, or shard") as error:
        offloader.offload()
    assert "\n" not in str(error.value)
    assert (offloader.is_offloaded, offloader.host_bytes, bits(model.bias)) == (False, 0, before)
    roomy = Offloader(model, on_cpu=True, max_host_bytes=5 << 20)
    assert roomy.offload() == (1 << 22) + 4096
    assert roomy.host_bytes <= 5 << 20
    roomy.close()


def test_nothing_moves_on_the_cpu_unless_asked() -> None:
    model = nn.Linear(8, 8)
    offloader = Offloader(model)
    assert (offloader.offload(), offloader.onload(), offloader.host_bytes, offloader.state_bytes()) == (0, 0, 0, 0)
    assert not offloader.is_offloaded
    assert not offloader.needed(1 << 50)
    assert model.weight.untyped_storage().nbytes() == 256


def test_plan_by_hand() -> None:
    """Large storages first and aligned, small ones packed one after the other; batches end at their limits."""
    mib = 1 << 20
    storages = [torch.UntypedStorage(n) for n in (3, mib, 5, 300 * mib, 2 * mib + 1, 7)]
    batches, end = _plan(storages, 100)
    assert [(b.sizes, b.packed) for b in batches] == [
        ([mib], False),
        ([300 * mib], False),
        ([2 * mib + 1], False),
        ([3, 5, 7], True),
    ]
    assert batches[0].starts == [512]
    assert batches[1].starts == [512 + mib]
    assert batches[2].starts == [512 + 301 * mib]
    tail = 512 + 303 * mib + 512  # after one byte, the next multiple of 512
    assert batches[3].starts == [tail, tail + 3, tail + 8]
    assert end == tail + 15


def test_host_memory_pieces() -> None:
    host = HostMemory(pin=False, limit=None, key="k", chunk_bytes=8192)
    host.reserve(20_000)
    assert host.nbytes == 20_480
    assert [p.numel() for p in host.pieces(8000, 10_000)] == [192, 8192, 1616]
    for piece in host.pieces(0, 20_480):
        piece.fill_(7)
    next(iter(host.pieces(8192, 1))).fill_(9)
    assert [int(next(iter(host.pieces(at, 1)))) for at in (8191, 8192, 8193)] == [7, 9, 7]
    host.reserve(10)
    assert host.nbytes == 20_480
