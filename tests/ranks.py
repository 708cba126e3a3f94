"""Ranks of a job as forks of one process that has torch and transformers imported: starting them takes no time.

Under torchrun each rank imports everything again, five seconds of a core, and torchrun itself two more. What depends on
torchrun (how a run ends, its rendezvous) is tested under torchrun.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import psutil

PRELOADED = [
    "lightrl.training.trainer",
    "lightrl.training.sft",
    "lightrl.engine.transformers",
    "lightrl.engine.sglang",
    "lightrl.engine.sglang_server",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "tiny_run",
    "tiny_sft",
    "ranks",
]


def preloaded() -> ForkServerContext:
    """Its processes have everything imported. All tests of a session share the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankFailedError(Exception):
    """The message holds what the ranks printed."""


def run_ranks(
    function: Callable[..., None], nproc: int, args: Sequence[str], log: Path, timeout: float, env: dict[str, str]
) -> str:
    """What `nproc` processes print that call `function(*args)`, as under torchrun: a rank that fails ends the others.

    None is left on return.
    """
    with started_ranks(function, nproc, args, log, env) as processes:
        failure = _first_failure(processes, timeout)
    output = log.read_text(errors="replace")
    if failure:
        raise RankFailedError(f"{failure}: {function.__qualname__} on {nproc} ranks\n{output}")
    return output


@contextlib.contextmanager
def started_ranks(
    function: Callable[..., None], nproc: int, args: Sequence[str], log: Path, env: dict[str, str]
) -> Iterator[list[ForkServerProcess]]:
    """`nproc` processes that call `function(*args)` with the environment that torchrun gives its workers; what they
    print goes into `log`. They end with the block."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ours, which outlives every rank
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    file = str(sys.modules[function.__module__].__file__)
    log.touch()
    context, processes = preloaded(), list[ForkServerProcess]()
    try:
        for rank in map(str, range(nproc)):
            variables = {**os.environ, **place, **env, "RANK": rank, "LOCAL_RANK": rank}
            given = (file, function.__qualname__, tuple(args), variables, str(log))
            processes.append(context.Process(target=_be_rank, args=given, name=f"rank {rank}"))
            processes[-1].start()
        yield processes
    finally:
        _end(processes)


def _first_failure(processes: list[ForkServerProcess], timeout: float) -> str | None:
    deadline, running = time.monotonic() + timeout, {p.sentinel: p for p in processes}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return f"not over after {timeout} s"
        for process in [running.pop(sentinel) for sentinel in ended]:
            process.join()
            if process.exitcode:
                return f"exit code {process.exitcode} of {process.name}"
    return None


def _end(processes: list[ForkServerProcess]) -> None:
    """TERM, as torchrun does, then KILL, of what still runs and what that has started."""
    left = [p for p in processes if p.is_alive()]
    for process in left:
        process.terminate()
    for process in left:
        process.join(10)
        if process.is_alive():
            kill_tree(process.pid)
            process.join()


def kill_tree(pid: int) -> None:
    """SIGKILL a process and its descendants: torchrun's workers lead sessions of their own, a group would miss them."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family[1:], timeout=10)


def _be_rank(file: str, function: str, args: tuple[str, ...], variables: dict[str, str], log: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(variables)
    call(file, function, args)


def call(file: str, function: str, args: Sequence[str]) -> None:
    """`function(*args)` of a test module, which is imported by its file."""
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location("called", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["called"] = module
    spec.loader.exec_module(module)
    getattr(module, function)(*args)
