"""The topology of a run on eight GPUs, on eight gloo ranks: experts over ranks beside FSDP2, engines of four ranks with
a part of the weights each, ranks that are killed, and the end of it on four.

Ranks are forks, as in `ranks.py`, but nobody ends those that wait for one that is gone: each has to end by itself. Each
has a file for what it says. In place of SGLang stands `sglang_receiving`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sglang_receiving
import tiny_run
import torch
from ranks import preloaded

DYING, TIMEOUT = 5, 120.0
HEADS = {"heads": 8, "kv_heads": 2}
SIGNS = (f"rank {DYING} left the job", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
BASE: dict[str, Any] = {
    "run": {"steps": 3, "device": "auto"},
    "rollout": {"prompts_per_step": 8, "group_size": 2, "max_response_tokens": 6},
    "sync": {"verify_every": 1},
    "checkpoint": {"every": 1, "hf_every": 1, "keep_last": 9},
    "engine": {"kind": "sglang", "tensor_parallel": 4, "args": {"ep_size": 4}, "hang_timeout": 60.0},
    "parallel": {"expert_parallel": 4, "timeout": TIMEOUT},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    tiny_run.make_model(
        folder / "model", family="qwen3_moe", num_attention_heads=8, head_dim=8, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, initializer_range=0.15,
    )  # fmt: skip
    tiny_run.make_data(folder / "data.jsonl")
    sglang_receiving.install(folder)
    return folder


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[..., list[tuple[int | None, str]]]]:
    """`start(name, size, target, *args)`: exit code and output of each rank; ranks that are not over have None."""
    context = preloaded()
    alive: list[Any] = []

    def run(name: str, size: int, target: Callable[..., None], *args: Any) -> list[tuple[int | None, str]]:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outputs = [folder / f"{name}_{rank}.txt" for rank in range(size)]
        ranks = [
            context.Process(
                target=as_rank, args=(rank, size, store.port, str(outputs[rank]), str(folder), target, args)
            )
            for rank in range(size)
        ]
        alive.extend(ranks)
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 2 * TIMEOUT
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        return [(process.exitcode, output.read_text()) for process, output in zip(ranks, outputs, strict=True)]

    yield run
    for process in alive:
        if process.exitcode is None:
            process.kill()
            process.join()


def as_rank(rank: int, size: int, port: int, output: str, folder: str, target: Callable[..., None], args: Any) -> None:
    """What torchrun does for a rank."""
    with open(output, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "CUDA_VISIBLE_DEVICES": "", "STAND_IN_KEEPS": folder,
    }  # fmt: skip
    site = str(Path(folder, "site"))
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ["PYTHONPATH"]])
    sys.path.insert(0, site)
    target(Path(folder), *args)


# ----- on each rank


@contextmanager
def opened(folder: Path, overrides: dict[str, Any]) -> Iterator[Any]:
    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(folder, **overrides))
    yield trainer
    trainer.close()
    close_world()


def check_topology(world: Any) -> None:
    """Experts over four consecutive ranks, of which there are two sets; two engines with a leader each."""
    import torch.distributed as dist

    from lightrl.distributed.mesh import deal

    here = world.rank
    ranks = [dist.get_process_group_ranks(world.expert_mesh[axis].get_group()) for axis in ("efsdp", "ep")]
    assert ranks == [[here % 4, here % 4 + 4], list(range(here - here % 4, here - here % 4 + 4))]
    assert deal(world, range(10), 4) == (list(range(here // 4, 10, 2)) if here % 4 == 0 else [])


def die(folder: Path) -> None:
    (folder / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank_in_a_sync(folder: Path, overrides: dict[str, Any]) -> None:
    """Two steps; a rank is gone in the middle of the third sync."""
    with opened(folder, overrides) as trainer:
        world, stream = trainer.world, trainer.policy.stream()
        check_topology(world)
        experts = {n: p for n, p in trainer.policy.module.named_parameters() if ".experts." in n}
        assert all(8 * p.to_local().numel() == p.numel() for p in experts.values())
        assert (trainer.engine._host is not None) == (world.rank % 4 == 0)

        class Dying:
            def layout(self) -> Any:
                return stream.layout()

            def __iter__(self) -> Iterator[Any]:
                for number, group in enumerate(stream):
                    if (trainer.steps_done, number, world.rank) == (2, 1, DYING):
                        die(folder)
                    yield group

        trainer.policy.stream = Dying
        trainer.train()


def lose_a_rank_in_training(folder: Path, overrides: dict[str, Any]) -> None:
    """What two steps have left goes on, with other groups; a rank is gone when its first gradients are computed."""
    with opened(folder, overrides) as trainer:

        def hook(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
            if trainer.world.rank == DYING and output[0].requires_grad:
                assert trainer.steps_done == 2
                output[0].register_hook(lambda gradient: die(folder))

        trainer.policy.module.register_forward_hook(hook)
        trainer.train()


def go_on(folder: Path, overrides: dict[str, Any]) -> None:
    with opened(folder, overrides) as trainer:
        trainer.train()


# ----- the test


def check_end(folder: Path, ranks: list[tuple[int | None, str]]) -> None:
    """All are over, each by itself and with the reason: that another is gone, not that time is up."""
    (folder / "killed").unlink()
    for rank, (code, text) in enumerate(ranks):
        assert code == (-signal.SIGKILL if rank == DYING else 1), f"rank {rank}, {code}: {text}"
        assert rank == DYING or any(sign in text for sign in SIGNS), f"rank {rank}: {text}"


def check_engines(folder: Path, step: int, engines: int, *, spread: bool) -> None:
    """What each engine held is what the trainer exported, to the last bit; wherever its ranks keep it."""
    exported = tiny_run.exported(folder, step)
    held = sglang_receiving.assembled(folder, step, **HEADS, spread=spread)
    assert len(held) == engines
    for whole in held:
        assert whole.keys() == exported.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor, exported[name]), name
    for file in folder.glob("*.safetensors"):
        file.unlink()


def test_ranks_are_killed_and_four_go_on(folder: Path, start: Callable[..., Any]) -> None:
    ranks = start("sync", 8, lose_a_rank_in_a_sync, BASE)
    check_end(folder, ranks)
    check_engines(folder, 1, 2, spread=True)

    other = BASE | {"engine": BASE["engine"] | {"tensor_parallel": 8, "args": {}}}
    other["parallel"] = BASE["parallel"] | {"shard_size": 4, "expert_parallel": 2}
    ranks = start("training", 8, lose_a_rank_in_training, other)
    check_end(folder, ranks)
    check_engines(folder, 2, 1, spread=False)
    assert sorted(path.name for path in (folder / "run" / "checkpoints").glob("step_*")) == [
        "step_000001",
        "step_000002",
    ]

    four = BASE | {"parallel": BASE["parallel"] | {"expert_parallel": 2}}
    ranks = start("four", 4, go_on, four)
    assert [code for code, _ in ranks] == [0] * 4, json.dumps(ranks, indent=1)
    check_engines(folder, 2, 1, spread=True)
    assert [step for (step, *_) in tiny_run.metrics_of(folder, "optim/grad_norm")] == [1, 2, 3]
