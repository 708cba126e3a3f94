"""An engine that is lost on one rank leaves no rank waiting; with a stand-in for SGLang, an engine a rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import sglang_stand_in


def lose_one_engine_in_a_sync(folder: str) -> None:
    import torch
    import torch.distributed as dist

    from lightrl.config.schema import EngineConfig, SyncConfig
    from lightrl.distributed.mesh import close_world, init_world
    from lightrl.engine import sglang
    from lightrl.engine.base import EngineLostError
    from lightrl.sync.buckets import BucketSender

    world = init_world("cpu")
    sglang.check_platform = lambda *_: None
    BucketSender.introduction = sglang_stand_in.introduction
    model = sglang.Model(
        path=Path(folder), layout=[(name, (300,), torch.float32) for name in "abc"], eos_token_ids=[0], decode=str,
        dtype=torch.float32, context_length=99, vocab_size=99,
    )  # fmt: skip
    config = EngineConfig(kind="sglang", hang_timeout=sglang_stand_in.HANG)
    engine = sglang.SGLangEngine(model, config, SyncConfig(), device=world.device, log_dir=Path(folder))
    walks: list[str] = []
    dying = False

    class Groups:
        """Making one is a collective, as with the policy's: a rank that left would keep the other waiting."""

        def __iter__(self):
            for number, name in enumerate("abc"):
                tensor = torch.ones(300)
                dist.all_reduce(tensor)
                if dying and number == 1:
                    os.kill(engine._host.pid, signal.SIGKILL)
                walks.append(name)
                yield [(name, tensor)]

    try:
        engine.load_groups(Groups(), 1)
        dying = world.rank == 0
        lost = False
        try:
            engine.load_groups(Groups(), 2)
        except EngineLostError:
            lost = True
        assert lost == dying == engine.lost
        dying = False
        if engine.lost:
            engine.restart()
        engine.load_groups(Groups(), 2)
        engine.load_groups(Groups(), 3)
        assert engine.policy_version == 3
        # first sync: sent and compared; 2: sent; again 2: compared on both, as one is new; 3: sent
        assert walks == list("abc") * (2 + 1 + 2 + 1)
    finally:
        engine.close()
        close_world()


def lose_a_shared_engine(folder: str) -> None:
    """It dies after it has told the second rank, but not the first, that it is done."""
    import torch
    import torch.distributed as dist

    from lightrl.config.schema import EngineConfig, SyncConfig
    from lightrl.distributed.mesh import close_world, consecutive_group, init_world
    from lightrl.engine import sglang
    from lightrl.engine.base import EngineLostError
    from lightrl.sync.buckets import BucketSender

    world = init_world("cpu")
    sglang.check_platform = lambda *_: None
    BucketSender.introduction = sglang_stand_in.introduction
    model = sglang.Model(
        path=Path(folder), layout=[(name, (300,), torch.float32) for name in "abc"], eos_token_ids=[0], decode=str,
        dtype=torch.float32, context_length=99, vocab_size=99,
    )  # fmt: skip
    config = EngineConfig(kind="sglang", hang_timeout=sglang_stand_in.HANG, tensor_parallel=2)
    group = consecutive_group(world, 2, "engine.tensor_parallel")
    os.environ["STAND_IN_DIES_IN"] = "open_buffers"
    engine = sglang.SGLangEngine(
        model, config, SyncConfig(), device=world.device, log_dir=Path(folder), group=group, member=world.rank
    )

    class Groups:
        def __iter__(self):
            for name in "abc":
                tensor = torch.ones(300)
                dist.all_reduce(tensor)
                yield [(name, tensor)]

    try:
        for dies_next_in in ("receive", ""):
            with pytest.raises(EngineLostError, match="exit code"):
                engine.load_groups(Groups(), 1)
            os.environ["STAND_IN_DIES_IN"] = dies_next_in
            engine.restart()
        engine.load_groups(Groups(), 2)
        assert engine.policy_version == 2
    finally:
        engine.close()
        close_world()


def test_a_shared_engine_is_lost_on_all_its_ranks(tmp_path, run_distributed):
    path = os.pathsep.join([str(sglang_stand_in.install(tmp_path)), os.environ["PYTHONPATH"]])
    run_distributed(lose_a_shared_engine, 2, tmp_path, env={"PYTHONPATH": path}, timeout=120)


def test_an_engine_lost_on_one_rank(tmp_path, run_distributed):
    path = os.pathsep.join([str(sglang_stand_in.install(tmp_path)), os.environ["PYTHONPATH"]])
    run_distributed(lose_one_engine_in_a_sync, 2, tmp_path, env={"PYTHONPATH": path})
