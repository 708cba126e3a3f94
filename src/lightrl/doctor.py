"""`lightrl doctor`: what is installed, what a missing package costs, and which hardware is seen. Never fails."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    state: State
    found: str
    meaning: str = ""


# Smallest and largest minor release that the tests run with.
SUPPORTED = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 17), (5, 24))}
_REQUIRED = ("torch", "transformers", "safetensors", "datasets", "pydantic", "typer", "rich", "math-verify")
# Distribution, module, and what one does without it.
_OPTIONAL = (
    ("triton", "triton", "fused kernels and torch.compile are off on a GPU; nothing is lost on a CPU"),
    ("sglang", "sglang", "engine.kind cannot be 'sglang', the fast one on GPUs: pip install 'lightrl-torch[gpu]'"),
    ("flash-attn-4", "flash_attn", "on Hopper GPUs packed sequences under 2,048 tokens attend at half the speed"),
    ("flash-linear-attention", "fla", "hybrid models (gated delta) train in plain torch, slower"),
    ("peft", "peft", "lora.rank must stay 0: pip install 'lightrl-torch[lora]'"),
    ("gguf", "gguf", "`lightrl fetch smollm2-135m` cannot unpack the model: pip install 'lightrl-torch[quickstart]'"),
    ("reasoning-gym", "reasoning_gym", "a test that compares the arithmetic task with it is skipped"),
    ("wandb", "wandb", "log.trackers cannot name 'wandb': pip install wandb"),
    ("tensorboard", "tensorboard", "log.trackers cannot name 'tensorboard', a default: pip install tensorboard"),
)


def report() -> None:
    """Print the findings as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="lightrl doctor", show_lines=False, expand=False)
    for column in ("", "what", "found", "meaning"):
        table.add_column(column, overflow="fold")
    marks = {"ok": ("ok", "green"), "note": ("-", "yellow"), "problem": ("!!", "bold red")}
    for finding in findings():
        mark, style = marks[finding.state]
        table.add_row(Text(mark, style=style), finding.what, Text(finding.found), Text(finding.meaning))
    Console().print(table)


def findings() -> list[Finding]:
    """All of them; a check that itself breaks becomes a finding."""
    checks: list[Callable[[], list[Finding]]] = [_versions, _devices, _precision, _engine, _threads, _optional]
    found: list[Finding] = []
    for check in checks:
        try:
            found += check()
        except Exception as error:  # a broken install is what doctor is asked about
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            found.append(Finding(check.__name__.strip("_"), "problem", "check failed", reason[:200]))
    return found


def version_finding(package: str, version: str | None) -> Finding:
    """Whether a required package is there, and of a release that the tests cover.

    >>> version_finding("torch", "2.9.1").state
    'problem'
    """
    if version is None:
        return Finding(package, "problem", "missing", f"required: pip install {package}")
    if package not in SUPPORTED:
        return Finding(package, "ok", version)
    lowest, highest = SUPPORTED[package]
    span = f"{lowest[0]}.{lowest[1]} to {highest[0]}.{highest[1]}"
    match = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if minor < lowest:
        return Finding(package, "problem", version, f"too old: supported are {span}")
    if minor > highest:
        return Finding(package, "note", version, f"newer than what is tested ({span})")
    return Finding(package, "ok", version, f"supported: {span}")


def sglang_finding(version: str) -> Finding:
    """What is known of the version of SGLang that is installed.

    >>> sglang_finding("0.5.16").state
    'problem'
    """
    from lightrl.engine.sglang_versions import version_note, version_problem

    if problem := version_problem(version):
        return Finding("sglang", "problem", version, problem)
    return Finding("sglang", "ok", version, version_note(version))


def _versions() -> list[Finding]:
    python = platform.python_version()
    old = tuple(map(int, platform.python_version_tuple()[:2])) < (3, 11)
    found = [Finding("python", "problem" if old else "ok", python, "3.11 or newer" if old else "")]
    found += [version_finding(package, _installed(package)) for package in _REQUIRED]
    return found


def _devices() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        return [Finding("GPU", "note", "none", f"runs compute on the CPU ({built})")]
    found = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, _ = torch.cuda.mem_get_info(index)
        memory = f"{card.total_memory / 2**30:.0f} GiB, {free / 2**30:.0f} GiB free"
        found.append(Finding(f"GPU {index}", "ok", f"{card.name}, {memory}"))
    count = len(found)
    found.append(Finding("GPUs", "ok", str(count), f"torchrun --nproc-per-node {count} -m lightrl train …"))
    return found


def _precision() -> list[Finding]:
    import torch

    from lightrl.training.policy import native_bfloat16

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if native_bfloat16(device):
        return [Finding("bfloat16", "ok", f"native on this {_kind(device.type)}", "compute_dtype = 'auto' is bfloat16")]
    meaning = "compute_dtype = 'auto' is float32: emulated bfloat16 would be slower"
    return [Finding("bfloat16", "note", f"not native on this {_kind(device.type)}", meaning)]


def _kind(device: str) -> str:
    return "GPU" if device == "cuda" else "CPU"


def _engine() -> list[Finding]:
    meaning = "the default: shares the policy's weights with the trainer, no second copy of the model in memory"
    return [Finding("engine.kind", "ok", "transformers (embedded)", meaning)]


def _threads() -> list[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [Finding("CPU threads", "ok", f"{torch.get_num_threads()} of {cores} cores", "a process; OMP_NUM_THREADS")]
    policy = os.environ.get("OMP_WAIT_POLICY", "").lower()
    if policy == "passive":
        found.append(Finding("OMP_WAIT_POLICY", "ok", "passive"))
    else:
        meaning = "train and eval set it to passive, for Python scripts you may: up to 3 times faster on shared cores"
        meaning = "you chose so; passive is up to 3 times faster on shared cores" if policy else meaning
        found.append(Finding("OMP_WAIT_POLICY", "note", "active" if policy == "active" else "not set", meaning))
    return found


def _optional() -> list[Finding]:
    found = []
    for package, module, cost in _OPTIONAL:
        version = _installed(package)
        there = version is not None and importlib.util.find_spec(module) is not None
        found.append(Finding(package, "ok", str(version)) if there else Finding(package, "note", "not installed", cost))
        if there and package == "sglang":
            found[-1] = sglang_finding(str(version))
    return found


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
