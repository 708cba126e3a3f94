"""Checkpoints that count only once they are committed: sharded, reshardable, written in the background.

`checkpoints/step_000010.tmp` is filled by all ranks, then marked, flushed and renamed to `step_000010` in one move.
What is in the folder: docs/checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightrl.config.schema import CheckpointConfig
from lightrl.distributed.waiting import waiting
from lightrl.errors import UserError
from lightrl.files import fsync
from lightrl.models.load import persistent_tensors
from lightrl.models.names import adapter_tensors
from lightrl.training import random_state
from lightrl.training.checkpoint_storage import (
    TENSORS_FILE,
    Piece,
    PiecePlanner,
    SafetensorsReader,
    SafetensorsWriter,
    describe,
    own_piece,
    read_tensors,
    write_json,
)
from lightrl.training.optimizer_state import allocate, describe_groups, optimizer_tensors, restore_groups
from lightrl.wrappers import is_adapter

logger = logging.getLogger(__name__)

Others = Mapping[str, tuple[nn.Module, Optimizer]]

MARKER = "COMMITTED.json"
STATE_FILE = "state.json"
FORMAT = 1
_STEP = re.compile(r"step_(\d{6,})$")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Raised on all ranks, at the latest by the next `save` or `wait`."""


class Checkpointer:
    """Saves to and loads from `dir` (`RUN/checkpoints`). All ranks make one and call its methods together.

    `group` is a process group with a CPU backend; default: a gloo group of its own, so that writing in the background
    never mixes with the training's collectives, and that waits `timeout` for the other ranks (None: as torch does).
    """

    def __init__(
        self,
        dir: Path,
        config: CheckpointConfig,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.dir, self.config = dir, config
        self.group = group
        if group is None and dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.rank = dist.get_rank(self.group) if dist.is_initialized() else 0
        self.world = dist.get_world_size(self.group) if dist.is_initialized() else 1
        self._thread: threading.Thread | None = None
        self._failure: tuple[int, BaseException] | None = None
        self._pinned: dict[str, Tensor] = {}
        self._warned = False

    # ----- saving

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: dict[str, Any],
        others: Others | None = None,
        metrics: Mapping[str, float] | None = None,
        generators: random_state.Generators | None = None,
    ) -> None:
        """Save step `step`; with `async_save`, return once everything is copied and write in the background.

        `others` are further models with their optimizers, by name.
        `extra` is JSON of the caller's (schedule, data cursor …); rank 0's is kept. `generators` are further torch
        generators of this rank. Waits for the save before, and raises `CheckpointError` if that one failed.
        """
        self.wait()
        tensors = _named_tensors(model, optimizer)
        for part, (other, its_optimizer) in (others or {}).items():
            tensors.update({f"{part}.{name}": t for name, t in _named_tensors(other, its_optimizer).items()})
        states = random_state.capture(generators)
        tensors.update({f"rng.{self.rank}.{name}": state for name, state in states.items()})
        pieces: dict[str, Piece] = {}
        for name, tensor in tensors.items():
            # RNG states belong to one rank alone.
            alone = name.startswith("rng.")
            piece = own_piece(name, tensor, 0 if alone else self.rank, 1 if alone else self.world)
            if piece is not None:
                pieces[name] = piece
        state = {
            "step": step,
            "world_size": self.world,
            "extra": extra,
            "metrics": {name: float(value) for name, value in (metrics or {}).items()},
            "optimizer": None if optimizer is None else describe_groups(model, optimizer),
            "others": {part: describe_groups(*pair) for part, pair in (others or {}).items()},
        }
        text = json.dumps(state)  # now: the caller may go on changing `extra`; and wrong types fail here, not later
        if not self.config.async_save:
            self._write(step, pieces, text)
            self.wait()
            return
        pieces = self._stage(pieces)
        self._thread = threading.Thread(target=self._write, args=(step, pieces, text), name=f"checkpoint-{step}")
        self._thread.start()

    def wait(self) -> None:
        """Block until the save under way is committed; raises `CheckpointError` on all ranks if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            step, error = self._failure
            self._failure = None
            raise CheckpointError(f"checkpoint of step {step} was not written: {_root_cause(error)}") from error

    def _stage(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """Copies on the CPU that training cannot change; pinned buffers are kept from one save to the next."""
        staged = {}
        for name, piece in pieces.items():
            source = piece.tensor
            if source.is_cuda:
                buffer = self._pinned.get(name)
                if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                    buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                    self._pinned[name] = buffer
                buffer.copy_(source, non_blocking=True)
            else:
                buffer = source.detach().clone()
            staged[name] = Piece(buffer, piece.offsets, piece.whole)
        if self._pinned:
            torch.cuda.synchronize()
        return staged

    def _write(self, step: int, pieces: dict[str, Piece], state: str) -> None:
        """Write, commit, drop old ones. Failures are kept for `wait`: this may run in the background."""
        temporary = self.dir / f"{step_name(step)}.tmp"
        try:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            writer = SafetensorsWriter(temporary, self.rank, lambda files: self._commit(step, temporary, state, files))
            with warnings.catch_warnings():  # a world of one without a process group is fine
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(dict(pieces), storage_writer=writer, planner=PiecePlanner(), process_group=self.group)
            if self.rank == 0:
                self._prune(step)
        except BaseException as error:  # in a thread: kept, not lost
            self._failure = (step, error)
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def _commit(self, step: int, temporary: Path, state: str, files: dict[str, dict[str, int]]) -> None:
        """On rank 0, once all ranks have written: marker, flush, rename."""
        path = temporary / STATE_FILE
        path.write_text(state, encoding="utf-8")
        fsync(path)
        files = {**files, STATE_FILE: describe(path)}
        write_json(temporary / MARKER, {"format": FORMAT, "step": step, "files": files})
        fsync(temporary)
        final = self.dir / step_name(step)
        if final.exists():  # a damaged one that a resume went back behind
            old = self.dir / f"{step_name(step)}.old.tmp"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(final)
        fsync(self.dir)

    def _prune(self, newest: int) -> None:
        """Keep the last and the best of those up to the one just written; a resume left later ones behind."""
        steps = [s for s in committed_steps(self.dir) if s <= newest]
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_best:
            scores = {s: v for s in steps if (v := self._score(s)) is not None}
            if newest not in scores and not self._warned:
                self._warned = True
                logger.warning(
                    "checkpoint.best_metric: step %d has no metric %r, so it cannot be kept as one of the best",
                    newest,
                    self.config.best_metric,
                )
            keep.update(sorted(scores, key=lambda s: (scores[s], s))[-self.config.keep_best :])
        for step in set(steps) - keep:
            doomed = self.dir / step_name(step)
            hidden = doomed.with_name(f"{doomed.name}.old.tmp")  # so that a kill here leaves no half checkpoint
            try:
                shutil.rmtree(hidden, ignore_errors=True)
                doomed.rename(hidden)
                shutil.rmtree(hidden)
            except OSError as error:  # not worth ending a run for
                logger.warning("could not remove the old checkpoint %s: %s", doomed, error)

    def _score(self, step: int) -> float | None:
        try:
            state = json.loads((self.dir / step_name(step) / STATE_FILE).read_text(encoding="utf-8"))
            value = state["metrics"].get(self.config.best_metric)
        except (OSError, ValueError, KeyError, AttributeError):
            return None  # damaged: not one of the best
        return None if value is None or math.isnan(value) else float(value)

    # ----- loading

    def latest(self) -> Path | None:
        """Newest usable checkpoint, None if there is none yet; then stale temporary folders are removed.

        Waits for the save under way. A damaged one is skipped with a warning. `UserError` if all are damaged.
        """
        self.wait()
        found = latest(self.dir, verify=self.config.verify, group=self.group)
        if self.rank == 0 and self.dir.is_dir():
            for stale in self.dir.glob("step_*.tmp"):
                shutil.rmtree(stale, ignore_errors=True)
        return found

    def load(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        others: Others | None = None,
        rng: bool = True,
        generators: random_state.Generators | None = None,
    ) -> dict[str, Any]:
        """Restore model, optimizer and random generators in place, at any world size; returns `extra`.

        `folder` may be that of another run. `others` as they were saved: UserError where one is missing, or, unless
        only weights are asked for (no `optimizer`), one would be lost.

        Ranks that the saved run did not have get generators seeded from its rank 0 and their number.
        """
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if optimizer is not None and (fault := others_fault(folder, state, list(others or {}))) is not None:
            raise UserError(fault)
        stored = read_tensors(folder)
        targets = {f"model.{name}": t.detach() for name, t in _model_tensors(model).items()}
        _check_model(folder, targets, stored)
        if optimizer is not None:
            slots, plain = allocate(model, optimizer, stored, state["optimizer"], folder)
            targets.update(slots)
        parts = {name: _Part(name, pair, stored, state, folder) for name, pair in (others or {}).items()}
        for part in parts.values():
            targets.update(part.targets)
        if rng:
            saved = [n for n in stored if n.startswith(f"rng.{self.rank}.")] or [
                n for n in stored if n == "rng.0.torch"
            ]
            targets.update(
                {n: torch.empty(stored[n]["shape"], dtype=getattr(torch, stored[n]["dtype"])) for n in saved}
            )
        wanted = {n: t for n, t in targets.items() if t.numel()}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.load(wanted, storage_reader=SafetensorsReader(folder), planner=planner, process_group=self.group)
        if optimizer is not None:
            restore_groups(model, optimizer, slots, plain, state["optimizer"])
        for part in parts.values():
            part.restore()
        if rng:
            self._restore_rng({n.split(".", 2)[2]: targets[n] for n in saved}, generators)
        extra: dict[str, Any] = state["extra"]
        return extra

    def _restore_rng(self, states: dict[str, Tensor], generators: random_state.Generators | None) -> None:
        if "python" in states:
            random_state.restore(states, generators)
        elif "torch" in states:  # rank 0's, for a rank that is new
            random_state.reseed(states["torch"], self.rank, generators)


# ----- contents


class _Part:
    """A further model of a checkpoint, as it is loaded: `targets` are to be filled, then `restore` is called."""

    def __init__(
        self, name: str, pair: tuple[nn.Module, Optimizer], stored: Mapping[str, Any], state: Any, folder: Path
    ) -> None:
        self._model, self._optimizer = pair
        mine = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")}
        self._saved = state["others"][name]
        model = {f"model.{key}": tensor.detach() for key, tensor in _model_tensors(self._model).items()}
        _check_model(folder, model, mine)
        self._slots, self._plain = allocate(self._model, self._optimizer, mine, self._saved, folder)
        self.targets = {f"{name}.{key}": tensor for key, tensor in {**model, **self._slots}.items()}

    def restore(self) -> None:
        restore_groups(self._model, self._optimizer, self._slots, self._plain, self._saved)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, sharded: adapters, or each parameter and persistent buffer once, under its first name."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root's own group stays whole after a forward
    seen: set[int] = set()
    tensors = {}
    for name, tensor in (adapter_tensors(model) or persistent_tensors(model)).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def _named_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    tensors = {f"model.{name}": t.detach() for name, t in _model_tensors(model).items()}
    if optimizer is not None:
        tensors.update(optimizer_tensors(model, optimizer))
    return tensors


def _check_model(folder: Path, targets: Mapping[str, Tensor], stored: Mapping[str, Any]) -> None:
    """`UserError` naming the first tensor in which the checkpoint and the model differ."""
    has, wants = (any(map(is_adapter, names)) for names in (stored, targets))
    if has != wants:
        holds, instead = ("adapters", "those of its run") if has else ("a whole model", "0")
        raise UserError(f"{folder} holds {holds}: set lora.rank to {instead}, or take another run.dir")
    for name, tensor in targets.items():
        if tensor.numel() == 0:
            continue
        if name not in stored:
            raise _other_model(folder, f"it has no {name.removeprefix('model.')}")
        shape = tuple(stored[name]["shape"])
        if shape != tuple(tensor.shape):
            differs = f"{name.removeprefix('model.')} has shape {shape} there, {tuple(tensor.shape)} in this run"
            raise _other_model(folder, differs)
    for name in stored:
        if name.startswith("model.") and name not in targets:
            raise _other_model(folder, f"this run's has no {name.removeprefix('model.')}")


def _other_model(folder: Path, differs: str) -> UserError:
    remedy = "use the model.path it was trained with, or another run.dir"
    return UserError(f"{folder} is of another model: {differs}; {remedy}")


def others_fault(folder: Path, state: Mapping[str, Any], wanted: Sequence[str]) -> str | None:
    """What to say where a run that has the models `wanted` beside its own would begin one of them anew, or lose one."""
    saved = state.get("others", {})
    instead = "export it, name the export as model.path, and take another run.dir"
    for name in wanted:
        if name not in saved:
            return f"{folder} holds no {name}: it cannot be gone on from with one; {instead}"
    for name in saved:
        if name not in wanted:
            back = "algorithm.advantage = 'gae'" if name == "critic" else "the settings of its run"
            return f"{folder} holds a {name}, which this run would lose: go on with {back}; to go on without, {instead}"
    return None


# ----- which checkpoint


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step_{step:06d}"


def committed_steps(dir: Path) -> list[int]:
    """Steps in `dir` whose folder has its completion marker, oldest first; files are not verified."""
    return [s for s in _all_steps(dir) if (dir / step_name(s) / MARKER).is_file()]


def _all_steps(dir: Path) -> list[int]:
    if not dir.is_dir():
        return []
    return sorted(int(m[1]) for entry in dir.iterdir() if (m := _STEP.match(entry.name)) and entry.is_dir())


def latest(dir: Path, *, verify: bool = True, group: dist.ProcessGroup | None = None) -> Path | None:
    """Newest checkpoint in `dir` that is committed and whole, None if there is none yet.

    File sizes are always checked, checksums with `verify`; the ranks of `group` share the files. Damaged ones are
    skipped with a warning that names them and the one taken. `UserError` if all are damaged.
    """
    gather = _gatherer(group)
    steps = gather(_all_steps(dir))[0]
    damaged: list[str] = []
    for step in reversed(steps):
        folder = dir / step_name(step)
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        faults = [f for f in gather(find_fault(folder, verify=verify, rank=rank, world=world)) if f]
        if not faults:
            if damaged and rank == 0:
                logger.warning("skipped damaged checkpoint: %s; using %s", "; ".join(damaged), folder)
            return folder
        damaged.append(f"{folder}: {faults[0]}")
    if damaged:
        raise UserError(f"no usable checkpoint in {dir} ({'; '.join(damaged)}); start anew with another run.dir")
    return None


def _gatherer(group: dist.ProcessGroup | None) -> Callable[[Any], list[Any]]:
    def gather(value: Any) -> list[Any]:
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        with waiting(group):
            dist.all_gather_object(values, value, group=group)
        return values

    return gather


def find_fault(folder: Path, *, verify: bool = True, rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with a checkpoint folder, None if nothing; this rank reads every `world`-th file only."""
    marker = folder / MARKER
    if not marker.is_file():
        return f"no {MARKER}, so it was never completed"
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        files = {str(n): (int(f["bytes"]), int(f["crc32"])) for n, f in content["files"].items()}
        version, step = content["format"], int(content["step"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return f"{MARKER} is damaged"
    if version != FORMAT:
        return f"format {version}, this version reads {FORMAT}"
    if step_name(step) != folder.name or not {TENSORS_FILE, STATE_FILE} <= files.keys():
        return f"{MARKER} does not belong to this folder"
    for number, (name, (size, checksum)) in enumerate(sorted(files.items())):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if verify and number % world == rank and describe(path)["crc32"] != checksum:
            return f"{name} has a wrong checksum"
    return None


def _root_cause(error: BaseException) -> str:
    """One line for what made a save fail on some rank."""
    failures = getattr(error, "failures", None)  # torch's CheckpointException: rank -> (exception, traceback)
    if failures:
        rank, failure = next(iter(failures.items()))
        cause = failure[0] if isinstance(failure, tuple) else failure
        return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
