"""Process groups and the device mesh. The only place that reads torchrun's environment."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightrl.distributed.waiting import waiting
from lightrl.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's place among all ranks."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    """Axes `replicate` x `shard`."""
    cpu_group: Any
    """gloo group of all ranks, for records and waiting; None in a world of one."""
    expert_mesh: DeviceMesh | None = None
    """Axes `replicate` x `efsdp` x `ep` over the same ranks; None where experts are not spread over `ep`."""
    context_parallel: int = 1
    """Consecutive ranks that share the rows of a microbatch."""
    context_group: Any = None
    """Process group of those that this one is among; None where rows are not shared."""
    timeout: timedelta = timedelta(seconds=1800)
    """How long a collective waits for the other ranks (`parallel.timeout`)."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, record: Any) -> list[Any]:
        """The record of every rank, on every rank."""
        if self.size == 1:
            return [record]
        records: list[Any] = [None] * self.size
        with waiting(self.cpu_group):
            dist.all_gather_object(records, record, group=self.cpu_group)
        return records

    def barrier(self) -> None:
        if self.size > 1:
            with waiting(self.cpu_group):
                dist.barrier(group=self.cpu_group)

    def exchange(self, outgoing: list[list[Any]]) -> list[Any]:
        """Send `outgoing[r]` to rank r; returns what came in, by sender. Only what changes rank travels."""
        if self.size == 1:
            return outgoing[0]
        blobs = [_encode(records) for records in outgoing]
        blobs[self.rank] = torch.empty(0, dtype=torch.uint8)
        sizes = self.gather([blob.numel() for blob in blobs])
        incoming = [torch.empty(sizes[sender][self.rank], dtype=torch.uint8) for sender in range(self.size)]
        received = torch.empty(sum(t.numel() for t in incoming), dtype=torch.uint8)
        with waiting(self.cpu_group):
            dist.all_to_all_single(
                received,
                torch.cat(blobs),
                [t.numel() for t in incoming],
                [blob.numel() for blob in blobs],
                group=self.cpu_group,
            )
        parts = received.split([t.numel() for t in incoming])
        return [
            record
            for sender, part in enumerate(parts)
            for record in (outgoing[self.rank] if sender == self.rank else _decode(part))
        ]


def deal(world: World, items: Sequence[T], ranks_per_engine: int = 1) -> list[T]:
    """This rank's share of what is to be generated: only the first of `ranks_per_engine` consecutive ranks has one."""
    if world.rank % ranks_per_engine:
        return []
    return list(items[world.rank // ranks_per_engine :: world.size // ranks_per_engine])


def consecutive_group(world: World, size: int, key: str) -> Any:
    """gloo group of the `size` consecutive ranks that this one is among, None for size 1. A collective.

    UserError, naming the config's `key`, where the ranks do not divide.
    """
    if world.size % size:
        raise UserError(f"{key}: {size} does not divide the {world.size} ranks of this run")
    if size == 1:
        return None
    starts = range(0, world.size, size)
    groups = [dist.new_group(list(range(s, s + size)), backend="gloo", timeout=world.timeout) for s in starts]
    return groups[world.rank // size]


def _encode(records: list[Any]) -> torch.Tensor:
    """Records of our own between ranks of our own job: pickled as torch's object collectives do."""
    import pickle

    return torch.frombuffer(bytearray(pickle.dumps(records)), dtype=torch.uint8)


def _decode(blob: torch.Tensor) -> list[Any]:
    import pickle

    records: list[Any] = pickle.loads(blob.numpy().tobytes())
    return records


def pick_device(name: str, local_rank: int) -> torch.device:
    """`auto`, `cpu` or `cuda` -> this rank's device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device: 'cuda' asked for, but torch sees no GPU: set run.device = 'cpu' or 'auto'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} visible): "
            "lower torchrun's --nproc-per-node; without torchrun, set LOCAL_RANK"
        )
    return torch.device("cuda", local_rank)


def match_nccl_of_servers() -> None:
    """Let NCCL share memory between processes as it does in SGLang's servers: by CUDA IPC, not by cuMem handles.

    SGLang turns NCCL_CUMEM_ENABLE off unless it is set. Two processes that differ in it fail at their first operation,
    with "invalid argument". NCCL reads it once, so this comes before anything else of NCCL.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def init_world(
    device: str = "auto",
    shard_size: int | None = None,
    timeout: float = 1800.0,
    expert_parallel: int = 1,
    context_parallel: int = 1,
    broadcasts_to_servers: bool = False,
    rollout_ranks: int = 0,
) -> World:
    """Join the torchrun job, or be a world of one without it. A process group that exists is taken as it is.

    With `rollout_ranks` the job falls into two: its last ranks, which generate, and those before them. This is then the
    world of this rank's own part, and torch's default group is of that part alone; the two know each other by
    `job_store`.

    `expert_parallel` consecutive ranks share a layer's experts, `context_parallel` the rows of a microbatch.
    `broadcasts_to_servers`: NCCL is set up as in SGLang's servers, which will join a group of this process.

    Whoever starts ranks by other means than torchrun need not set LOCAL_RANK: the ranks find theirs out together.
    """
    rank, size, local_rank = _place()
    part = find_part(rollout_ranks) if rollout_ranks else None
    if part is not None:
        rank, size = part.rank, part.size
    shard = size if shard_size is None else shard_size
    if size % shard:
        raise UserError(f"parallel.shard_size: {shard} does not divide the {size} ranks of this run")
    if shard % expert_parallel:
        ranks = f"the {size} ranks of this run" if shard_size is None else f"parallel.shard_size = {shard}"
        raise UserError(f"parallel.expert_parallel: {expert_parallel} does not divide {ranks}")
    if size % context_parallel:
        raise UserError(f"parallel.context_parallel: {context_parallel} does not divide the {size} ranks of this run")
    here = pick_device(device, local_rank or 0)  # before anything else, as it may be refused
    if local_rank is not None:
        use_device(here)
    limit = timedelta(seconds=timeout)
    if broadcasts_to_servers:
        match_nccl_of_servers()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
        if part is not None:
            store = dist.PrefixStore(f"lightrl/{part.name}", job_store(timeout))
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        elif "RANK" in os.environ:
            dist.init_process_group(backend, timeout=limit)
        else:  # a store in memory instead of a server; gloo itself listens, on this machine's own address
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    group = dist.new_group(backend="gloo", timeout=limit) if size > 1 else None
    if local_rank is None:
        local_rank = _find_local_rank(rank, size, group) if part is None else _find_in_job(part, timeout)
        here = pick_device(device, local_rank)
        use_device(here)
    mesh = init_device_mesh(here.type, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
    expert_mesh = context_group = None
    if expert_parallel > 1:
        axes = {"replicate": size // shard, "efsdp": shard // expert_parallel, "ep": expert_parallel}
        expert_mesh = _mesh(here, axes, limit)
    if context_parallel > 1:
        context_group = _mesh(here, {"dp": size // context_parallel, "cp": context_parallel}, limit)["cp"].get_group()
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        device=here,
        mesh=mesh,
        cpu_group=group,
        expert_mesh=expert_mesh,
        context_parallel=context_parallel,
        context_group=context_group,
        timeout=limit,
    )


def _mesh(device: torch.device, axes: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """Axes (name -> ranks) over all ranks, whose groups wait `timeout`; torch gives them its own default."""
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for axis in axes:
        dist.distributed_c10d._set_pg_timeout(timeout, mesh[axis].get_group())
    return mesh


def use_device(device: torch.device) -> None:
    """Make it this thread's own GPU: each thread starts with the first. Nothing for the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _place() -> tuple[int, int, int | None]:
    """Rank, number of ranks, rank on this machine (None: not said). Schedulers set WORLD_SIZE too: without RANK it is
    not torchrun's."""
    local_rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), local_rank
    if "RANK" not in os.environ:
        return 0, 1, 0
    return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1")), local_rank


@dataclass(frozen=True, kw_only=True)
class Part:
    """This rank's part of a job in which some ranks train and the last ones generate."""

    trains: bool
    rank: int
    """Within the part."""
    size: int
    job_rank: int
    job_size: int

    @property
    def name(self) -> str:
        return "train" if self.trains else "rollout"


def find_part(rollout_ranks: int) -> Part:
    """Where this rank belongs. UserError where the job cannot be split so, the same on all ranks."""
    key = f"parallel.rollout_ranks: {rollout_ranks}"
    if "RANK" not in os.environ:
        raise UserError(
            f"{key}, but this is a single process: start it with torchrun --nproc-per-node {rollout_ranks + 1} or "
            "more, or set it to 0"
        )
    job_rank, job_size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    num_training = job_size - rollout_ranks
    if num_training < 1:
        ranks = f"{job_size} rank{'s' * (job_size > 1)}"
        raise UserError(
            f"{key} of the {ranks} of this job are to generate, and none is left to train: lower it, or raise "
            "torchrun's --nproc-per-node"
        )
    trains = job_rank < num_training
    size = num_training if trains else rollout_ranks
    if dist.is_initialized() and dist.get_world_size() != size:
        raise UserError(
            f"{key}: a process group of {dist.get_world_size()} ranks exists already, and training has {num_training}: "
            "let LightRL make it"
        )
    rank = job_rank if trains else job_rank - num_training
    return Part(trains=trains, rank=rank, size=size, job_rank=job_rank, job_size=job_size)


def job_store(timeout: float) -> Any:
    """The store of the whole job, torchrun's own: all ranks see it, whichever part they are in."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    return store


def _find_in_job(part: Part, timeout: float) -> int:
    """This rank's number among those of the whole job that see the same GPUs. All of them call it."""
    store, key = job_store(timeout), "lightrl/place/{}"
    store.set(key.format(part.job_rank), json.dumps(_where()))
    return number_among_equals([store.get(key.format(rank)) for rank in range(part.job_size)], part.job_rank)


def _where() -> tuple[str, str | None]:
    """What ranks that share GPUs have in common; a launcher may give each rank its own."""
    return socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")


def _find_local_rank(rank: int, size: int, group: Any) -> int:
    """This rank's number among those that see the same GPUs. A collective."""
    if size == 1:
        return 0
    places: list[Any] = [None] * size
    dist.all_gather_object(places, _where(), group=group)
    return number_among_equals(places, rank)


def number_among_equals(places: Sequence[Any], rank: int) -> int:
    """How many ranks before this one are at the same place.

    >>> [number_among_equals(["a", "b", "a"], rank) for rank in range(3)]
    [0, 0, 1]
    """
    return list(places[:rank]).count(places[rank])


def set_deterministic(enabled: bool) -> None:
    """Ask torch for deterministic kernels, or no longer. cuBLAS wants to be told before its first product."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)


def close_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
