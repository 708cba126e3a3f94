"""The engine of a run, from its sections of the config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lightrl.config.rundir import newest_state
from lightrl.config.schema import EngineConfig, LoraConfig, RunConfig, SyncConfig
from lightrl.distributed.mesh import World, consecutive_group
from lightrl.distributed.offload import TrainingState
from lightrl.engine.base import Engine
from lightrl.errors import end
from lightrl.models import load
from lightrl.models.routing import RoutingShape
from lightrl.training.dumped import NoEngine

if TYPE_CHECKING:
    from lightrl.engine import sglang_requests

_BESIDE = 0.06  # of the GPU, which an engine takes beside `engine.memory_fraction`: context, CUDA graphs, activations


class HasLayout(Protocol):
    def layout(self) -> Sequence[tuple[str, Sequence[int], torch.dtype]]:
        """Name, shape and dtype of each tensor, in the order in which they come."""
        ...


class Served(Protocol):
    """What an engine must know of the policy (`training.policy.Policy`)."""

    @property
    def hf_config(self) -> Any: ...
    @property
    def source(self) -> Path: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def adapters(self) -> LoraConfig | None: ...
    @property
    def routing_shape(self) -> RoutingShape | None: ...
    def stream(self) -> HasLayout: ...


def build_engine(
    config: EngineConfig,
    policy: Served,
    tokenizer: Any,
    context_length: int,
    trust_remote_code: bool = False,
    *,
    sync: SyncConfig | None = None,
    world: World | None = None,
    run_dir: Path = Path("."),
    seed: int = 0,
    state: TrainingState | None = None,
    return_routing: bool = False,
    idle: bool = False,
) -> Engine:
    """What `engine.kind` names. A new engine is added here. Every rank calls it; SGLang needs the `world`, and to know
    at its start whether it will be asked to `return_routing`.

    With `idle` none is made: nothing will be generated.

    The training `state` leaves the GPU while an engine starts on it, where it would not find its share of the memory;
    afterwards the engine's memory is released.
    """
    if idle:
        return NoEngine()
    if config.kind != "transformers":
        assert world is not None, "SGLang's engine needs to know its ranks"
        if config.kind == "sglang_server":
            state = None  # it is not on these GPUs
        if state is not None:
            make_room(config, policy, state)
        model = _sglang_model(policy, tokenizer, context_length, trust_remote_code, return_routing)
        engine = _build_sglang(config, sync or SyncConfig(), policy, model, world, run_dir, seed)
        if state is not None:
            try:
                engine.offload()
                state.come_back()
            except BaseException:
                end(engine.close)
                raise
        return engine
    from lightrl.engine.transformers import TransformersEngine

    return TransformersEngine(
        policy.hf_config,
        eos_token_ids=load.eos_token_ids(str(policy.source), policy.hf_config, tokenizer),
        decode=tokenizer.decode,
        device=policy.device,
        dtype=policy.compute_dtype,
        max_batch=config.max_batch,
        max_prefill_tokens=config.max_prefill_tokens,
        context_length=context_length,
        trust_remote_code=trust_remote_code,
        adapters=policy.adapters if policy.adapters is not None and policy.adapters.lent else None,
    )


def engine_seed(run: RunConfig) -> int:
    """Of the random streams of engines: a run that goes on does not draw again what it drew at its start."""
    newest = newest_state(run.dir) if run.resume else None
    return run.seed + 2**64 * (0 if newest is None else int(newest[1].get("step", 0)))


def make_room(config: EngineConfig, policy: Served, state: TrainingState) -> None:
    """An engine is about to start on this rank's GPU: let the training state leave it, if both do not fit."""
    total = 0 if policy.device.type == "cpu" else torch.cuda.get_device_properties(policy.device).total_memory
    state.make_room(int((config.memory_fraction + _BESIDE) * total))


def _sglang_model(
    policy: Served, tokenizer: Any, context_length: int, trust_remote_code: bool, return_routing: bool
) -> sglang_requests.Model:
    from lightrl.engine.sglang_requests import Model

    text_config = policy.hf_config.get_text_config()
    return Model(
        path=policy.source,
        layout=policy.stream().layout(),
        eos_token_ids=load.eos_token_ids(str(policy.source), policy.hf_config, tokenizer),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        dtype=policy.compute_dtype,
        context_length=min(context_length, int(text_config.max_position_embeddings)),
        vocab_size=int(text_config.vocab_size),
        trust_remote_code=trust_remote_code,
        routing=policy.routing_shape if return_routing else None,
    )


def _build_sglang(
    config: EngineConfig,
    sync: SyncConfig,
    policy: Served,
    model: sglang_requests.Model,
    world: World,
    run_dir: Path,
    seed: int,
) -> Engine:
    from lightrl.engine.sglang import SGLangEngine
    from lightrl.engine.sglang_server import SGLangServers

    if config.kind == "sglang_server":
        folder = run_dir / "sync" if sync.folder is None else Path(sync.folder)
        return SGLangServers(model, config, sync, device=policy.device, ranks=world, folder=folder)
    return SGLangEngine(
        model,
        config,
        sync,
        device=policy.device,
        seed=seed,
        log_dir=run_dir / "engine",
        group=consecutive_group(world, config.tensor_parallel, "engine.tensor_parallel"),
        member=world.rank % config.tensor_parallel,
    )
