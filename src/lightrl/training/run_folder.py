"""What every kind of run does with its folder: take it, say what it is, log to it, export from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightrl.config.rundir import holds_run, used_dir_fault
from lightrl.config.schema import Config
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.models import load, lora
from lightrl.models.export import export_hf
from lightrl.models.export_adapter import export_adapter
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
