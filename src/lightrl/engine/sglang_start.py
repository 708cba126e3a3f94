"""What must hold before SGLang starts on the trainer's own GPUs, what it is told, and its start."""

from __future__ import annotations

import hashlib
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

_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
_PORT_TAKEN = ("address already in use", "eaddrinuse")


def start_host(
    model: Model,
    config: EngineConfig,
    *,
    device: torch.device,
    number: int,
    seed: int,
    memory_fraction: float,
    log_dir: Path,
) -> HostProcess:
    """The process of an engine that is ready to serve. `number` is its own in the whole job.

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
