"""Where a process learns its place among the ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightrl.distributed.mesh import World, close_world, consecutive_group, init_world, number_among_equals


@pytest.fixture(autouse=True)
def _leave(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    close_world()


def test_a_scheduler_that_sets_only_the_world_size_is_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    world = init_world("cpu")
    assert (world.rank, world.size, world.mesh.size()) == (0, 1, 1)


def test_a_process_group_that_exists_says_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    world = init_world("cpu")
    assert (world.rank, world.size) == (0, 1)


def test_ranks_are_numbered_among_those_that_see_the_same_gpus() -> None:
    two_machines = [("a", None)] * 3 + [("b", None)] * 2
    assert [number_among_equals(two_machines, r) for r in range(5)] == [0, 1, 2, 0, 1]
    round_robin = [("a", None), ("b", None)] * 2
    assert [number_among_equals(round_robin, r) for r in range(4)] == [0, 0, 1, 1]
    a_gpu_each = [("a", "0"), ("a", "1"), ("b", "0")]
    assert [number_among_equals(a_gpu_each, r) for r in range(3)] == [0, 0, 0]


def test_a_group_made_by_hand_believes_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert init_world("cpu").local_rank == 0
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert init_world("cpu").local_rank == 2


def test_nccl_is_set_up_as_in_sglangs_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang turns cuMem handles off unless it is told otherwise, and both sides of a broadcast must be alike."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")  # somebody's own choice, for both
    init_world("cpu", broadcasts_to_servers=True)
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    init_world("cpu")
    assert "NCCL_CUMEM_ENABLE" not in os.environ
    init_world("cpu", broadcasts_to_servers=True)
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # what was there before comes back afterwards


def test_ranks_of_one_engine_wait_as_long_as_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((ranks, options)))
    limit = timedelta(seconds=77)
    world = World(rank=0, size=4, local_rank=0, device=None, mesh=None, cpu_group=None, timeout=limit)
    consecutive_group(world, 2, "engine.tensor_parallel")
    assert made == [([s, s + 1], {"backend": "gloo", "timeout": limit}) for s in (0, 2)]
