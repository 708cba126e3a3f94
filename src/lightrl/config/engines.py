"""The sections `[engine]` and `[sync]`."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Count, PositiveFloat, PositiveInt, Seconds

if TYPE_CHECKING:
    from lightrl.config.schema import Config


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineConfig:
    """What generates."""

    kind: Literal["transformers", "sglang", "sglang_server"] = "transformers"
    """`transformers`: the embedded engine, on CPU or GPU, sharing the policy's weights. `sglang`: SGLang on the same
    GPUs, or the CPU, in processes of its own. `sglang_server`: SGLang servers that you started elsewhere
    (docs/engines.md)."""
    max_batch: PositiveInt = 64
    """Sequences decoded together, an engine."""
    max_prefill_tokens: PositiveInt = 8192
    """Prompt tokens computed in one prefill."""
    tensor_parallel: PositiveInt = 1
    """SGLang: consecutive ranks that share an engine, split over their GPUs."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """SGLang: share of the GPU's memory for weights and KV cache while it generates; both are released for training."""
    hang_timeout: PositiveFloat = 15.0
    """SGLang: an engine that gives no sign of life for so many seconds is lost. Must exceed its longest batch."""
    quantization: Literal["none", "fp8"] = "none"
    """SGLang: `fp8` gives it the matrices of attention, MLPs and experts in blockwise FP8: half the memory, faster, and
    log-probs that differ more from the trainer's. Ada and Hopper GPUs (docs/engines.md#weights-in-fp8)."""
    max_restarts: Count = 3
    """SGLang: how often an engine that died or hung is started again in a run; then the run ends with its error."""
    args: dict[str, Any] = field(default_factory=dict)
    """SGLang: further arguments of its engine, passed as they are; unknown names are refused."""
    urls: list[str] = field(default_factory=list)
    """Servers: where they are, such as `["http://node7:30000"]`."""
    api_key_env: str | None = None
    """Servers: name of the environment variable that holds their API key."""
    request_timeout: Seconds = 1800.0
    """Servers: seconds one answer may take."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SyncConfig:
    """How new weights reach an engine in a process of its own (SGLang)."""

    transport: Literal["nccl", "disk"] = "nccl"
    """Servers: broadcast over NCCL (gloo, where the trainer is on CPUs), or safetensors in a shared folder."""
    folder: str | None = None
    """Servers: for `disk`, a folder of this run's own that every server sees under the same path; default: `sync` in
    `run.dir`."""
    address: str | None = None
    """Servers: for `nccl`, the first rank's address as the servers reach it; default: what the system says."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Servers: for `nccl`, the port it listens on; 0 takes a free one."""
    timeout: Seconds = 600.0
    """Servers: seconds that one bucket, or one reading from disk, may take."""

    bucket_mib: PositiveInt = 512
    """Size of the buffers that weights pass through, or of the files, MiB. Larger tensors come in
    parts; for servers it grows to the largest."""
    verify_every: Count = 0
    """Syncs between bit-by-bit comparisons of the engine's weights with the trainer's; 0: only after the first."""


_SGLANG, _SERVERS = ("sglang",), ("sglang_server",)
_USED_BY = {
    "engine.max_prefill_tokens": ("transformers", "sglang"),
    **dict.fromkeys(("engine.memory_fraction", "engine.hang_timeout", "engine.max_restarts"), _SGLANG),
    **dict.fromkeys(("engine.api_key_env", "engine.request_timeout"), _SERVERS),
    **dict.fromkeys(("sync.transport", "sync.folder", "sync.address", "sync.port", "sync.timeout"), _SERVERS),
    **dict.fromkeys(("sync.bucket_mib", "sync.verify_every"), ("sglang", "sglang_server")),
    **dict.fromkeys(("parallel.offload", "parallel.offload_host_gib"), _SGLANG),
}
_BY_RANKS = ("engine.hang_timeout", "sync.bucket_mib")
"""With `parallel.rollout_ranks` used whatever the kind: by how ranks reach each other."""


def unused_by_engine(config: Config) -> list[str]:
    """Keys that are set, and that `engine.kind` makes nothing of.

    They are told, not refused: each only tunes another kind of engine, and one file serves several kinds, with
    `--engine.kind` on the command line. Refused (`rules.of_engines`) is what would change what is computed, or where.
    """
    default, used = type(config)(), _BY_RANKS if config.parallel.rollout_ranks else ()
    return [
        name
        for name, kinds in _USED_BY.items()
        if not (config.engine.kind in kinds or name in used) and _value(config, name) != _value(default, name)
    ]


def _value(config: Config, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)
