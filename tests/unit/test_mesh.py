"""Where a process learns its place among the ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightrl.distributed.mesh import close_world, init_world


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
