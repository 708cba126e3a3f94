"""Which checkpoint or model a command looks at, and where what it makes of it belongs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from lightrl.errors import UserError

if TYPE_CHECKING:
    from lightrl.config import Config


def is_model(folder: Path) -> bool:
    """A Hugging Face folder: the model itself, not a state of a run."""
    return (folder / "config.json").is_file()


def overrides_of(checkpoint: Path | None, command: str) -> list[str]:
    """What `--checkpoint` sets by itself: a Hugging Face folder is the model. UserError for what is no folder."""
    if checkpoint is None:
        return []
    must_be_folder(checkpoint, f"{command}: --checkpoint")
    return [f"--model.path={checkpoint.absolute()}", "--run.resume=false"] if is_model(checkpoint) else []


def state_to_evaluate(config: Config, checkpoint: Path | None, command: str = "eval") -> Path | None:
    """Checkpoint folder that the command loads; None for the model at `model.path` as it is."""
    from lightrl.training.checkpoint import find_fault, latest

    if checkpoint is None:
        return latest(Path(config.run.dir).expanduser() / "checkpoints") if config.run.resume else None
    if is_model(checkpoint):
        return None
    if (checkpoint / "checkpoints").is_dir():
        if (newest := latest(checkpoint / "checkpoints")) is None:
            raise UserError(f"{command}: --checkpoint: {checkpoint} has no checkpoint yet; name another")
        return newest
    if fault := find_fault(checkpoint.resolve()):
        raise UserError(f"{command}: --checkpoint: {checkpoint} is neither a model nor a whole checkpoint: {fault}")
    return checkpoint.resolve()


def is_of_the_run(config: Config, checkpoint: Path | None, state: Path | None) -> bool:
    """Whether what is evaluated is a step of the run in `run.dir`: only its samples may stand beside the run's."""
    from lightrl.config.rundir import holds_run

    run_dir = Path(config.run.dir).expanduser()
    if state is not None:
        return state.resolve().parent == (run_dir / "checkpoints").resolve()
    return checkpoint is None and not holds_run(run_dir)  # step 0 of a run to come, not of one that has its own


def name_of(what: str) -> str:
    """Folder name for a model or checkpoint: the last two words of its path, such as `other-run-step_000050`."""
    words = [part for part in Path(what).parts if part != "checkpoints"]
    return re.sub(r"[^\w.-]+", "-", "-".join(words[-2:])).strip("-.")


def must_be_folder(path: Path, command: str) -> None:
    if not path.is_dir():
        raise UserError(f"{command}: {path}: {'not a folder' if path.exists() else 'no such folder'}")
