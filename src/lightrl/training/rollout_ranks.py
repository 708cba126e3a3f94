"""A job in which some ranks generate and the others train: `parallel.rollout_ranks`.

The ranks that train are a world of their own, in which nothing is known of the others but the engine they hold. The
others run `serve_rollouts`. They find each other by torchrun's store.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from lightrl.config.schema import Config, LoraConfig
from lightrl.distributed.mesh import (
    Part,
    World,
    close_world,
    find_part,
    init_world,
    job_store,
    set_deterministic,
)
from lightrl.engine.base import Engine
from lightrl.errors import LostError, UserError
from lightrl.models import load
from lightrl.models.quantized import without_quantization
from lightrl.models.routing import RoutingShape
from lightrl.sync.broadcast import join_group
from lightrl.training import setup
from lightrl.training.engines import HasLayout, build_engine, engine_seed
from lightrl.training.policy import Policy

if TYPE_CHECKING:
    from lightrl.engine.remote.client import RolloutRank

_BEATS = 15  # signs of life in `engine.hang_timeout`
_KEY = "lightrl/rollout_rank/{}"


@dataclass(frozen=True, kw_only=True)
class _Layout:
    tensors: list[tuple[str, tuple[int, ...], torch.dtype]]

    def layout(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return self.tensors


@dataclass(frozen=True, kw_only=True)
class _ServedPolicy:
    """What a rank without the policy knows of it (`engines.Served`)."""

    hf_config: Any
    source: Path
    compute_dtype: torch.dtype
    device: torch.device
    adapters: LoraConfig | None
    routing_shape: RoutingShape | None
    tensors: list[tuple[str, tuple[int, ...], torch.dtype]]

    def stream(self) -> HasLayout:
        return _Layout(tensors=self.tensors)


# ---- on the ranks that train


def meet_rollout_ranks(config: Config, world: World) -> list[RolloutRank]:
    """Connections to all ranks that generate; none without `parallel.rollout_ranks`. Every training rank calls it."""
    count = config.parallel.rollout_ranks
    if not count:
        return []
    from lightrl.engine.remote.channel import connect
    from lightrl.engine.remote.client import RolloutRank

    store, timeout, ranks = job_store(config.parallel.timeout), config.parallel.timeout, []
    for number in range(count):
        place = _placed(store, number, world.size + number, timeout)
        if place["host"] != socket.gethostname():
            raise UserError(
                f"parallel.rollout_ranks: rank {world.size + number} is on {place['host']}, rank {world.rank} on "
                f"{socket.gethostname()}: training and rollout ranks share one machine; for engines on others set "
                "engine.kind = 'sglang_server' and parallel.rollout_ranks = 0"
            )
        try:
            channel = connect(place["path"])
        except OSError as error:  # machines, or containers, of one name
            raise UserError(
                f"parallel.rollout_ranks: rank {world.size + number} has no socket at {place['path']} ({error}): all "
                "ranks share one machine and its folder for temporary files"
            ) from None
        name = f"rank {world.size + number}, which generates (parallel.rollout_ranks),"
        ranks.append(RolloutRank(channel, name=name, hang_timeout=config.engine.hang_timeout, rank=world.rank))
    return ranks


def _placed(store: Any, number: int, job_rank: int, timeout: float) -> dict[str, Any]:
    try:
        store.wait([_KEY.format(number)], timedelta(seconds=timeout))
    except RuntimeError:
        text = f"parallel.timeout: rank {job_rank}, which is to generate, did not come for {timeout:.0f} s"
        raise LostError(f"{text}: every rank of the job runs the same command") from None
    return dict(json.loads(store.get(_KEY.format(number))))


def remote_engine(
    config: Config,
    policy: Policy,
    world: World,
    ranks: Sequence[RolloutRank],
    context_length: int,
    *,
    return_routing: bool,
) -> Engine:
    """The engine of the training ranks, once all of `ranks` hold theirs. A collective."""
    from lightrl.engine.remote.client import RemoteEngine, RemoteGroupEngine

    by_groups = config.engine.kind != "transformers"
    layout = list(policy.stream().layout()) if by_groups else []
    about = {
        "source": str(policy.source),
        "dtype": _name(policy.compute_dtype),
        "context_length": context_length,
        "layout": [(name, list(shape), _name(dtype)) for name, shape, dtype in layout],
        "routing": asdict(policy.routing_shape) if return_routing and policy.routing_shape is not None else None,
        "seed": engine_seed(config.run),
        "run_dir": str(Path(config.run.dir).expanduser().absolute()),
    }
    return (RemoteGroupEngine if by_groups else RemoteEngine)(
        ranks,
        about=about,
        join=partial(_join, config, policy.device, 0),
        world=world,
        device=policy.device,
        bucket_bytes=config.sync.bucket_mib << 20,
        tensor_parallel=config.engine.tensor_parallel,
        dtypes={name: dtype for name, _, dtype in layout},
    )


def num_lost(engine: Engine) -> int:
    """Engines of a `remote_engine` that are lost: several training ranks may miss the same."""
    from lightrl.engine.remote.client import RemoteEngine

    assert isinstance(engine, RemoteEngine)
    return engine.num_lost


# ---- on the ranks that generate


def serve_rollouts(config: Config) -> bool:
    """On a rank that generates, hold an engine until the run is over, and return True. On others return False.

    Call it on every rank before a Trainer is made, as `lightrl train` does. UserError and EngineLostError as of an
    engine; LostError when a training rank is gone.
    """
    if not config.parallel.rollout_ranks:
        return False
    part = find_part(config.parallel.rollout_ranks)
    if part.trains:
        return False
    setup.check(config)
    set_deterministic(config.run.deterministic)
    world = init_world(config.run.device, timeout=config.parallel.timeout, rollout_ranks=config.parallel.rollout_ranks)
    _serve(config, world, part)
    close_world()
    return True


def _serve(config: Config, world: World, part: Part) -> None:
    from lightrl.engine.remote.channel import Listener
    from lightrl.engine.remote.service import RolloutService, accept_all

    store, key = job_store(config.parallel.timeout), _KEY.format(world.rank)
    listener = Listener()
    try:
        store.set(key, json.dumps({"path": str(listener.path), "host": socket.gethostname()}))
        channels = accept_all(listener, part.job_size - world.size, config.parallel.timeout)
    finally:
        listener.close()
        store.delete_key(key)
    service = RolloutService(
        channels,
        start=partial(_start_engine, config, world),
        join=partial(_join, config, world.device, 1 + world.rank),
        device=world.device,
        beat=config.engine.hang_timeout / _BEATS,
    )
    asyncio.run(service.run())


def _start_engine(config: Config, world: World, about: dict[str, Any]) -> Engine:
    model = config.model
    hf_config = AutoConfig.from_pretrained(about["source"], trust_remote_code=model.trust_remote_code)
    policy = _ServedPolicy(
        hf_config=without_quantization(hf_config),
        source=Path(about["source"]),
        compute_dtype=getattr(torch, about["dtype"]),
        device=world.device,
        adapters=config.lora if config.lora.rank else None,
        routing_shape=None if about["routing"] is None else _routing(about["routing"]),
        tensors=[(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in about["layout"]],
    )
    return build_engine(
        config.engine,
        policy,
        load.load_config_and_tokenizer(model.path, model.revision, model.tokenizer, model.trust_remote_code)[1],
        about["context_length"],
        model.trust_remote_code,
        sync=config.sync,
        world=world,
        run_dir=Path(about["run_dir"]),
        seed=about["seed"],
        return_routing=about["routing"] is not None,
    )


def _routing(fields: dict[str, Any]) -> RoutingShape:
    return RoutingShape(**fields | {"layers": tuple(fields["layers"])})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(config: Config, device: torch.device, rank: int, name: str) -> Any:
    """The group in which weights travel: the first training rank and, behind it, all that generate."""
    timeout = config.parallel.timeout
    store = dist.PrefixStore(f"lightrl/weights/{name}", job_store(timeout))
    return join_group(store, rank, 1 + config.parallel.rollout_ranks, device, timedelta(seconds=timeout))
