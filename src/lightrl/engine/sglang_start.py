"""What must hold before SGLang starts on the trainer's own GPUs, what it is told, and its start."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import torch

from lightrl.config.schema import EngineConfig
from lightrl.engine.base import EngineLostError
from lightrl.engine.sglang_arguments import check_installed
from lightrl.engine.sglang_memory import memory_hint
from lightrl.engine.sglang_process import HostProcess
from lightrl.engine.sglang_requests import Model
from lightrl.errors import UserError
from lightrl.models.fp8 import Fp8Plan

_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
_PORT_TAKEN = ("address already in use", "eaddrinuse")
_UNLOADED_SCALES = ("llama", "mistral", "gpt_oss")
"""Model types whose loaders in SGLang pass over the scales of FP8 blocks."""
_MOVED = "SGLang lays FP8 weights out anew"


def start_host(
    model: Model,
    config: EngineConfig,
    *,
    device: torch.device,
    number: int,
    seed: int,
    memory_fraction: float,
    log_dir: Path,
    override: dict[str, Any] | None = None,
) -> HostProcess:
    """The process of an engine that is ready to serve. `number` is its own in the whole job; `override` replaces keys
    of the model's config.json.

    Its port is free when it is chosen, but not kept: where another process takes it, SGLang starts once more.
    """
    on_cpu = device.type == "cpu"
    settings = {
        "model_path": str(model.path),
        "dtype": str(model.dtype).removeprefix("torch."),
        "trust_remote_code": model.trust_remote_code,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "tensor_parallel": config.tensor_parallel,
        "device": device.type,
        "gpu": 0 if on_cpu else device.index or 0,
        "capability": None if on_cpu else list(torch.cuda.get_device_capability(device)),
        "seed": seed,
        "memory_fraction": memory_fraction,
        "max_batch": config.max_batch,
        "max_prefill_tokens": config.max_prefill_tokens,
        "override": override or {},
        "routing": None if model.routing is None else "triton" if config.quantization == "none" else "any",
    }
    logs: list[str] = []

    def hint(log: str) -> str | None:
        logs.append(log)
        return memory_hint(log, config)

    for again in (True, False):
        host = HostProcess(
            {"settings": settings | {"port": free_port()}, "args": config.args},
            log=log_dir / f"sglang_{'cpu' if on_cpu else 'gpu'}{number}.log",
            environment=child_environment(os.environ) | (_CPU_ENVIRONMENT if on_cpu else {}),
            hint=hint,
            hang_timeout=config.hang_timeout,
        )
        try:
            host.wait_ready()
            return host
        except EngineLostError:
            host.stop()
            if not (again and any(sign in log.lower() for log in logs for sign in _PORT_TAKEN)):
                raise
        except BaseException:
            host.stop()
            raise
    raise AssertionError("unreachable")


def fp8_plan(model: Model, config: EngineConfig, device: torch.device) -> Fp8Plan | None:
    """What goes in FP8, None if nothing does. UserError where SGLang could not hold it as it is sent."""
    if config.quantization == "none":
        return None
    key = "engine.quantization"
    if model.dtype != torch.bfloat16:
        raise UserError(f"{key}: SGLang's FP8 computes with bfloat16: set model.compute_dtype = 'bfloat16'")
    if device.type == "cpu":
        raise UserError(f"{key}: {_MOVED} on a CPU, for instructions that few have: set it to 'none'")
    if (capability := torch.cuda.get_device_capability(device)) not in ((8, 9), (9, 0)):
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"{key}: {_MOVED} on a GPU of compute capability {capability[0]}.{capability[1]} ({name}), where a sync "
            "would be wrong: Ada and Hopper (8.9 and 9.0) work; set it to 'none'"
        )
    if (kind := _config_of(model).get("model_type")) in _UNLOADED_SCALES:
        raise UserError(f"{key}: SGLang loads no FP8 scales for models of type {kind}: set it to 'none'")
    try:
        return Fp8Plan.of(model.layout, config.tensor_parallel)
    except ValueError as error:
        raise UserError(f"{key}: {error}: set it to 'none'") from None


def config_override(model: Model, fp8: Fp8Plan | None) -> dict[str, Any]:
    """What of the checkpoint's config.json is not so in the engine: the policy's weights, unlike those of a quantised
    checkpoint, are sent in the compute dtype or as `fp8` says."""
    if fp8 is not None:
        return {"quantization_config": fp8.config()}
    return {"quantization_config": None} if _config_of(model).get("quantization_config") else {}


def _config_of(model: Model) -> dict[str, Any]:
    file = model.path / "config.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def stream_seed(seed: int, number: int, restarts: int) -> int:
    """SGLang's `random_seed`, 0 to 2^31 - 1: another stream for each engine of the job, and after each restart, where
    the same one would draw once more what was trained on already."""
    digest = hashlib.blake2b(f"{seed}/engine/{number}/{restarts}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def check_platform(environment: Any, device: torch.device) -> None:
    """UserError when SGLang is missing, of an unknown version, or cannot work with this process's settings."""
    check_installed()
    if device.type == "cpu":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
            raise UserError(
                f"{name}: expandable_segments:True makes memory that cannot be shared with the engine's process: "
                "unset it, or set engine.kind = 'transformers'"
            )


def check_routing(model: Model, device: torch.device) -> None:
    """UserError where SGLang cannot record what its routers choose: the record lies in page-locked memory."""
    if model.routing is not None and device.type == "cpu":
        raise UserError(
            "correction.routing_replay: SGLang records routing on GPUs only: choose engine.kind = 'transformers', "
            "or drop this"
        )


def child_environment(environment: Any) -> dict[str, str]:
    """Without torchrun's variables, as SGLang's own process group must not join the job's store; and without the one
    by which SGLang moves weights to other places once they are loaded."""
    ours = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC", "GROUP_", "ROLE_", "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in environment.items() if not k.startswith(ours) and k not in names}
    source = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH", "")]))
    return kept


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
