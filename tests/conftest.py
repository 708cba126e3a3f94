"""Fixtures of all tiers.

Tests marked `interpreter` call Triton kernels on CPU tensors. Where there is no GPU, the whole pytest process (and what
it starts) runs with TRITON_INTERPRET=1, so tests import kernels like any other module. The interpreter multiplies
float32 and float16 exactly but bfloat16 wrongly (`tl.dot`): that belongs into `tests/gpu`. Each operation of each
program of a grid takes tens of microseconds or more: keep grids small.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ranks

if TYPE_CHECKING:
    from transformers import LlamaConfig, Qwen3Config

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # numbers that do not depend on the machine's cores
    "OMP_WAIT_POLICY": "passive",  # waiting threads sleep: up to three times faster where cores are shared
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def pytest_configure() -> None:
    """Set the environment before any test module imports torch or transformers; subprocesses inherit it."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not _num_gpus():  # Triton reads it when a kernel is defined, its own library's included: before any import of it
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    marked = [item for item in items if item.get_closest_marker("interpreter")]
    if marked and (reason := _interpreter_missing()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
    for mark, needed in (("gpu", 1), ("gpu2", 2)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and (found := _num_gpus()) < needed:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {found}"))
    marked = [item for item in items if item.get_closest_marker("model")]
    if marked and (reason := _smollm2_missing()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _interpreter_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "no triton: install the dev extra on Linux"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels are compiled here, not interpreted: a GPU was found (set TRITON_INTERPRET=1 to interpret them)"
    return None


def _smollm2_missing() -> str | None:
    from lightrl.models.fetch import is_complete

    if is_complete(SMOLLM2):
        return None
    return f"no {SMOLLM2.relative_to(ROOT)}: run `lightrl fetch smollm2-135m` in {ROOT.name}/"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the fetched SmolLM2-135M-Instruct (float32, 538 MB); the test is skipped without it."""
    if reason := _smollm2_missing():
        pytest.skip(reason)
    return SMOLLM2


@pytest.fixture
def tiny_llama() -> Callable[..., LlamaConfig]:
    """`tiny_llama(**changes)`: config of a Llama of 2 layers, grouped heads, vocabulary 128."""

    def make(**changes: Any) -> LlamaConfig:
        from transformers import LlamaConfig

        return LlamaConfig(**{**_TINY, **changes})

    return make


@pytest.fixture
def tiny_qwen3() -> Callable[..., Qwen3Config]:
    """`tiny_qwen3(**changes)`: as `tiny_llama`, with q and k norms, a head size of its own and a tied head."""

    def make(**changes: Any) -> Qwen3Config:
        from transformers import Qwen3Config

        return Qwen3Config(**{**_TINY, "head_dim": 16, "tie_word_embeddings": True, **changes})

    return make


_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def trainer_for(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`trainer_for(reward=…, **sections)`: a trainer on the miniature run (`tiny_run.py`); closed after the test."""
    import tiny_run

    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    made: list[Trainer] = []

    def build(reward: Any = None, **sections: Any) -> Trainer:
        made.append(Trainer(tiny_run.make_run(tmp_path, **sections), reward=reward))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


@pytest.fixture
def run_distributed(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`run_distributed(target, nproc=2, *args, timeout=180, env=None, torchrun=False) -> output` on this machine.

    `target`: a module-level function, which gets `args` as strings on every rank; or a script or a `-m` module name,
    which run under torchrun. So does a function with `torchrun=True`; else its ranks are forks (`ranks.py`), which
    start in no time. A run that fails, or is not over after `timeout` seconds, fails the test and shows its output; its
    processes are gone when the call returns.
    """
    started: list[subprocess.Popen[str]] = []
    numbers = itertools.count()

    def run(
        target: Path | str | Callable[..., None],
        nproc: int = 2,
        *args: str | Path,
        timeout: float = 180,
        env: dict[str, str] | None = None,
        torchrun: bool = False,
    ) -> str:
        if callable(target) and not torchrun and not _num_gpus():
            log = tmp_path / f"ranks_{next(numbers)}.log"
            try:
                return ranks.run_ranks(target, nproc, list(map(str, args)), log, timeout, env or {})
            except ranks.RankFailedError as error:
                pytest.fail(str(error), pytrace=False)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        if callable(target):
            command.append(str(_script_calling(target, tmp_path)))
        elif str(target).endswith(".py"):
            command.append(str(target))
        else:
            command += ["-m", str(target)]
        process = subprocess.Popen(
            command + [str(arg) for arg in args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        started.append(process)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            ranks.kill_tree(process.pid)
            output, _ = process.communicate()
            pytest.fail(f"not over after {timeout} s: {' '.join(command)}\n{output}", pytrace=False)
        if process.returncode:
            pytest.fail(f"exit code {process.returncode}: {' '.join(command)}\n{output}", pytrace=False)
        return output

    yield run
    for process in started:
        if process.poll() is None:  # the test itself was interrupted
            ranks.kill_tree(process.pid)


def _script_calling(function: Callable[..., None], folder: Path) -> Path:
    script = folder / f"call_{function.__name__}.py"
    call = (str(sys.modules[function.__module__].__file__), function.__qualname__)
    script.write_text(f"import ranks, sys\nif __name__ == '__main__':\n    ranks.call(*{call!r}, sys.argv[1:])\n")
    return script
