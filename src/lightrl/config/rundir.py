"""What a run's folder tells without torch: whether it may be written and holds a run, and its newest checkpoint."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

_STEP = re.compile(r"step_\d+")  # not step_000010.tmp, a save that was killed
_MARKER, _STATE = "COMMITTED.json", "state.json"


def run_dir_fault(name: str) -> str | None:
    """Why a run cannot write into this folder (which need not exist yet), None if it can."""
    if not name.strip():
        return "empty; name a folder for the run"
    if "\0" in name:
        return "has a NUL character, which no file name can have; name a folder"
    folder = Path(name).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"{there} is not a folder; name another place"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"no permission to write in {there}; name another place"
    return None


def holds_run(name: str | os.PathLike[str]) -> bool:
    """Whether a run was begun in this folder: it has metrics or a whole checkpoint."""
    folder = Path(name).expanduser()
    return bool(_checkpoints(folder)) or (folder / "metrics.jsonl").exists()


def used_dir_fault(name: str | os.PathLike[str]) -> str:
    """What to say when `run.resume = false` meets a folder that holds a run."""
    return f"{name} already holds a run; name another folder, or continue with run.resume = true"


def newest_state(name: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]] | None:
    """Newest checkpoint of a run's folder that was completed, and its `state.json`; None without one.

    A look ahead: its other files are not read. What loads a checkpoint verifies it, and may go back to an older one.
    """
    for folder in sorted(_checkpoints(Path(name).expanduser()), key=lambda path: path.name, reverse=True):
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if (folder / _MARKER).is_file() and isinstance(state, dict):
            return folder, state
    return None


def order_fault(saved: dict[str, Any], *, seed: int, shuffle: bool) -> tuple[str, str] | None:
    """(key, what is wrong) where a checkpoint's prompts came in another order than these settings give, else None."""
    source = saved.get("extra", {}).get("source", {})
    for name, key, ours in (("seed", "run.seed", seed), ("shuffle", "data.shuffle", shuffle)):
        if name in source and source[name] != ours:
            was = json.dumps(source[name])
            return key, f"the checkpoint in run.dir was made with {was}: set it back, or start a new run.dir"
    return None


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoints/step_*") if _STEP.fullmatch(path.name)]
