"""Offload and onload on GPUs: training equal to the last bit, memory given back, room that is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from lightrl.distributed.fsdp import shard
from lightrl.distributed.mesh import World, close_world, init_world
from lightrl.distributed.offload import Offloader
from lightrl.errors import UserError

MIB = 1 << 20
# Sizes that do not divide by two ranks: FSDP2 pads; some storages above 1 MiB, most below.
CONFIG = {
    "vocab_size": 2051, "hidden_size": 384, "intermediate_size": 1023, "num_hidden_layers": 3, "head_dim": 64,
    "num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def world() -> Iterator[World]:
    yield init_world("cuda")
    close_world()


def make_model(world: World, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG), dtype=torch.float32, attn_implementation="eager")
    model.to(world.device)
    shard(model, model, world.mesh, compute_dtype=dtype)
    return model


def train(world: World, dtype: torch.dtype, fused: bool, moves: bool) -> tuple[list[float], str]:
    """Four steps; returns losses and a hash of this rank's parameters and moments."""
    model = make_model(world, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
    offloader = Offloader(model, optimizer)
    losses = []

    def cycle() -> None:
        if moves:
            size = offloader.state_bytes()
            before = torch.cuda.memory_allocated()
            assert offloader.offload() == size > 0
            assert torch.cuda.memory_allocated() <= before - size
            poison = torch.full((64 * MIB,), 255, dtype=torch.uint8, device=world.device)  # what was freed is reused
            del poison
            offloader.onload()

    for step in range(4):
        cycle()
        ids = torch.randint(0, 2051, (2, 32), generator=torch.Generator().manual_seed(world.rank + 10 * step))
        loss = model(input_ids=ids.to(world.device), labels=ids.to(world.device)).loss
        loss.backward()
        cycle()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    cycle()
    offloader.close()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]):
            digest.update(tensor.detach().to_local().cpu().numpy().tobytes())
    return losses, digest.hexdigest()


def check_training(world: World) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for dtype, fused in ((torch.bfloat16, True), (torch.float32, False)):
        plain, moved = (train(world, dtype, fused, moves) for moves in (False, True))
        assert plain == moved, (world.rank, dtype)
        assert len(set(plain[0])) == 4
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_training_is_the_same_to_the_last_bit(world: World) -> None:
    check_training(world)


@pytest.mark.gpu2
def test_two_ranks_with_padded_shards(run_distributed: Callable[..., str]) -> None:
    run_distributed(on_every_rank, 2)


def on_every_rank() -> None:
    check_training(init_world("cuda"))
    close_world()


@pytest.mark.gpu
def test_the_driver_gets_the_memory_back(world: World) -> None:
    """Another process (an engine) sees it as free; `needed` says whether that is of use."""
    model = nn.Linear(1 << 13, 1 << 14, bias=False, device=world.device)  # 512 MiB
    offloader = Offloader(model)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    assert not offloader.needed(free - 64 * MIB)
    assert offloader.needed(free + 256 * MIB)
    assert offloader.offload() == 512 * MIB
    assert torch.cuda.mem_get_info()[0] >= free + 500 * MIB
    assert offloader.host_bytes == 512 * MIB
    assert not offloader.needed(free + 256 * MIB)
    offloader.close()
    assert offloader.host_bytes == 0
    assert model.weight.abs().max() > 0


@pytest.mark.gpu
def test_no_room_to_come_back_is_said_and_can_be_tried_again(world: World) -> None:
    model = nn.Sequential(*(nn.Linear(1 << 12, 1 << 13, device=world.device) for _ in range(6)))  # 128 MiB each
    expected = [p.detach().cpu() for p in model.parameters()]
    offloader = Offloader(model)
    moved = offloader.offload()
    total = torch.cuda.get_device_properties(world.device).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 300 * MIB) / total)
        with pytest.raises(UserError, match=r"cuda:\d: 0\.\d+ GiB of training state do not fit back") as error:
            offloader.onload()
        assert "\n" not in str(error.value)
        assert offloader.is_offloaded
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    rest = offloader.onload()
    assert 0 < rest < moved
    assert all(torch.equal(p.detach().cpu(), e) for p, e in zip(model.parameters(), expected, strict=True))
