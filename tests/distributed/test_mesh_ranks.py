"""Ranks that nobody told their place on the machine."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path


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
