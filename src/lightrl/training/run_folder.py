"""What every kind of run does with its folder: take it, say what it is, log to it, export from it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from lightrl.config.rundir import holds_run, newest_state, used_dir_fault
from lightrl.config.schema import Config
from lightrl.data import PromptSource
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.models import load, lora
from lightrl.models.export import export_hf
from lightrl.models.export_adapter import export_adapter
from lightrl.observe.console import Console
from lightrl.observe.environment import environment, write_environment
from lightrl.observe.trackers import Trackers, make_trackers
from lightrl.training.checkpoint import others_fault
from lightrl.training.policy import Policy
from lightrl.training.run_config import write_config
from lightrl.training.value_model import ValueModel

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def claim(run_dir: Path, world: World, warn: Callable[[str], None]) -> Iterator[None]:
    """Keep `run_dir` for this run: two would mix their files. A collective.

    UserError on every rank if another run has it. The system drops the lock with its process, however that ends.
    Where the file system has no locks, `warn` is told and the run goes on.
    """
    from filelock import FileLock, Timeout

    # Newer releases would make do with a marker file, which a run killed on another node leaves behind for good.
    options: dict[str, Any] = {"fallback_to_soft": False}
    known = signature(FileLock.__init__).parameters
    lock, problem = FileLock(run_dir / ".lock", **{k: v for k, v in options.items() if k in known}), None
    if world.is_main:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            problem = f"run.dir: another run is training in {run_dir}; wait for its end, or name another folder"
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                problem = f"run.dir: cannot write in {run_dir} ({error.strerror}); name another folder"
            else:
                warn(f"run.dir: {run_dir} cannot be locked ({error}): see that no other run trains in it")
    try:
        if problem := world.gather(problem)[0]:
            raise UserError(problem)
        yield
    finally:
        lock.release()


def check_resume(run_dir: Path, source: PromptSource, world: World, others: Sequence[str] = ()) -> None:
    """Look ahead to the checkpoint that the run will go on from, before a model is loaded for it. A collective.

    UserError on every rank if it was made with other prompts, in another order, or with other models than `others`
    beside the trained one.
    """
    problem = None
    if world.is_main and (newest := newest_state(run_dir)) is not None:
        try:
            problem = others_fault(*newest, others)
            ahead = PromptSource(source.prompts, seed=source.seed, shuffle=source.shuffle)
            ahead.restore(newest[1]["extra"]["source"])
        except UserError as error:
            problem = str(error)
        except (AttributeError, KeyError, TypeError, ValueError):
            problem = None  # damaged, which loading it will find
    if problem := world.gather(problem)[0]:
        raise UserError(problem)


def refuse_used(run_dir: Path, world: World) -> None:
    """UserError on every rank if the folder already holds a run, which this one would write over. A collective."""
    if world.gather(holds_run(run_dir))[0]:
        raise UserError(f"run.dir: {used_dir_fault(run_dir)}")


def describe_run(run_dir: Path, config: Config, step: int, world: World, console: Console) -> None:
    """Write the settings in force after `step`, and the environment. For the first rank."""
    if not world.is_main:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    if changed := write_config(run_dir, config, step):
        console.notice(changed)
    write_environment(run_dir)


def open_trackers(run_dir: Path, config: Config, step: int, world: World) -> Trackers:
    """Where metrics go; a run that goes on after `step` drops what was logged behind it. Nowhere on other ranks."""
    if not world.is_main:
        return Trackers([])
    return make_trackers(config.log, run_dir, step or None, asdict(config) | {"environment": environment()})


def export_step(model: Policy | ValueModel, config: Config, step: int, world: World) -> None:
    """`hf/step_N`, and `hf/step_N_adapter` where adapters are trained (`checkpoint.hf_every`). A collective."""
    folder = Path(config.run.dir).expanduser() / "hf" / f"step_{step:06d}"
    export_model(model, folder, world, replace=True)
    if model.adapters is not None:
        base, beside = config.model, folder.with_name(f"{folder.name}_adapter")
        export_adapter(
            model.module, beside, base=base.path, revision=base.revision, is_main=world.is_main, replace=True
        )


def export_model(model: Policy | ValueModel, folder: Path, world: World, *, replace: bool = False) -> None:
    """The present weights in Hugging Face format, in the precision of the checkpoint they came from. A collective.

    A folder that is not empty is a UserError; `replace` swaps it for the new one, whatever it holds.
    """
    export_hf(
        model.module,
        folder,
        source=model.source,
        dtype=load.stored_dtype(model.hf_config) or torch.float32,
        is_main=world.is_main,
        replace=replace,
    )


def adapter_scaling(policy: Policy | ValueModel) -> float | None:
    """What a checkpoint says of adapters beside their values: what they are scaled by."""
    return None if policy.adapters is None else next(iter(lora.scalings(policy.model).values()))


def check_base(
    extra: Mapping[str, Any], policy: Policy | ValueModel, config: Config, folder: Path, console: Console
) -> None:
    """A checkpoint's `extra` against the run: UserError for adapters scaled otherwise, a warning for another model."""
    if policy.adapters is not None and extra.get("adapter_scaling") != adapter_scaling(policy):
        raise UserError(f"{folder}: its adapters were scaled otherwise: set lora.alpha and use_rslora as in its run")
    if extra["model"] == config.model.path:
        return
    text = f"model.path: {config.model.path} was {extra['model']} when this checkpoint was written: "
    if policy.adapters is None:
        text += "weights are the checkpoint's, reference and exported files those of the new path"
    else:
        text += "the adapters are the checkpoint's, the weights under them those of the new path"
    console.warning(text)
