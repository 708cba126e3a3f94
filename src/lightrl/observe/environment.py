"""What a run ran on: versions, devices, commit. Never fails: what cannot be learned is left out or null."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightrl.observe.jsonl import write_whole

ENVIRONMENT_FILE = "environment.json"
_PACKAGES = ("torch", "transformers", "datasets", "triton", "sglang", "flash-attn-4", "flash-linear-attention")


def environment(cwd: Path | None = None) -> dict[str, Any]:
    """Versions, hardware, world size, and the git commit of `cwd` (default: the working folder), JSON-safe.

    >>> environment()["versions"]["torch"] == torch.__version__
    True
    """
    gpus = _gpus()
    cpu, cores = _cpu_name(), _cpu_cores()
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return {
        "hardware": _hardware(gpus, cpu, cores),
        "gpus": gpus,
        "cpu": cpu,
        "cpu_cores": cores,
        "memory_gib": _memory_gib(),
        "world_size": world_size,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "versions": {"lightrl": _version("lightrl-torch"), **_versions()},
        "commit": git_commit(cwd),
    }


def write_environment(run_dir: Path) -> None:
    """Save `environment()` in the run folder, for the report."""
    data = json.dumps(environment(), indent=2, ensure_ascii=False) + "\n"
    write_whole(Path(run_dir) / ENVIRONMENT_FILE, data.encode())


def read_environment(run_dir: Path) -> dict[str, Any]:
    """What `write_environment` saved; empty when there is none."""
    try:
        saved = json.loads((Path(run_dir) / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def git_commit(cwd: Path | None = None) -> str | None:
    """Commit of the work tree around `cwd`, with `+changes` when tracked files differ; None outside of git."""
    commit = _git("rev-parse", "HEAD", cwd=cwd)
    if not commit:
        return None
    return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no", cwd=cwd) else "")


def _git(*args: str, cwd: Path | None) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=cwd, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in _PACKAGES}
    found["torch"] = str(torch.__version__)  # with the build: 2.13.0+cpu
    return {name: version for name, version in found.items() if version is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _hardware(gpus: list[str], cpu: str | None, cores: int | None) -> str:
    if gpus:
        return ", ".join(f"{gpus.count(name)}x {name}" for name in dict.fromkeys(gpus))
    return f"{cores or '?'}-core {cpu or 'CPU'}"


def _gpus() -> list[str]:
    try:
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception:  # a driver that does not fit: the run is on the CPU
        return []


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or None


def _cpu_cores() -> int | None:
    try:
        return len(os.sched_getaffinity(0))  # what this process may use, not what the host has
    except (AttributeError, OSError):
        return os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
