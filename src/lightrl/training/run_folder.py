"""What every kind of run does with its folder: take it, say what it is, log to it, export from it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from lightrl.config.rundir import holds_run, used_dir_fault
from lightrl.config.schema import Config
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.models import load
from lightrl.models.export import export_hf
from lightrl.observe.console import Console
from lightrl.observe.environment import environment, write_environment
from lightrl.observe.trackers import Trackers, make_trackers
from lightrl.training.policy import Policy
from lightrl.training.run_config import write_config
from lightrl.training.value_model import ValueModel


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
