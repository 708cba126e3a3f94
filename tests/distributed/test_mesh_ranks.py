"""Ranks that nobody told their place on the machine, and ranks that others wait for in vain."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest


def join_without_local_rank(folder: str) -> None:
    """As under a launcher of another kind: three ranks, the second on another machine."""
    import torch.distributed as dist

    from lightrl.distributed.mesh import close_world, init_world

    del os.environ["LOCAL_RANK"]
    rank = int(os.environ["RANK"])
    socket.gethostname = lambda: "one" if rank != 1 else "two"
    if rank != 2:  # a group made by hand, or made here from RANK and WORLD_SIZE
        dist.init_process_group("gloo")
    world = init_world("cpu")
    (Path(folder) / f"{rank}.json").write_text(json.dumps([world.rank, world.local_rank]))
    close_world()


def test_local_ranks_are_found_out(tmp_path, run_distributed):
    run_distributed(join_without_local_rank, 3, tmp_path)
    places = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert places == [[0, 0], [1, 0], [2, 1]]


def wait_for_a_rank(folder: str, what: str) -> None:
    """Rank 1 does not come to where the others wait: it is busy elsewhere, or gone."""
    from lightrl.distributed.mesh import init_world
    from lightrl.distributed.waiting import MissingRankError

    world = init_world("cpu", timeout=2.0)
    world.gather(world.rank)
    if world.rank == 1:
        while what == "busy" and not all(Path(folder, f"{rank}.txt").exists() for rank in (0, 2)):
            time.sleep(0.05)
        os._exit(0)
    time.sleep(0.5 * world.rank)  # not both at once: the second one's connections are closed before its time is over
    if what == "gone":
        time.sleep(1)
    try:
        world.gather(world.rank)
    except MissingRankError as error:
        Path(folder, f"{world.rank}.txt").write_text(str(error))
    os._exit(0)  # the group cannot be left any more


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "busy",
            r"^parallel\.timeout: rank 1 did not come to where the others wait, for \d s here: .*raise parallel\.tim",
        ),
        ("gone", r"^rank 1 left the job while the others waited: its own error says why$"),
    ],
)
def test_who_waits_says_which_rank_did_not_come(tmp_path, run_distributed, what, said):
    run_distributed(wait_for_a_rank, 3, tmp_path, what)
    for rank in (0, 2):
        assert re.search(said, (tmp_path / f"{rank}.txt").read_text())
