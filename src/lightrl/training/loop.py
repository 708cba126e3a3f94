"""The run around the steps, the same for every kind of training: its folder, resuming, evaluation, logs, checkpoints.

A trainer holds a `Loop`, and is a `Trainable` to it: the loop says when, the trainer what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from lightrl.config.schema import Config
from lightrl.data import PromptSource
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.observe.console import Console
from lightrl.training import run_folder
from lightrl.training.checkpoint import Checkpointer, Others
from lightrl.training.optim import apply_settings
from lightrl.training.outside_eval import OutsideEvaluation


@dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint is made of, beside random states: tensors to write, or to fill."""

    model: nn.Module
    optimizer: Optimizer
    others: Others = field(default_factory=dict)
    """Further models with their optimizers, by name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON of the trainer's own."""


class Trainable(Protocol):
    """A trainer, as its loop sees it."""

    steps_done: int

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        ...

    @property
    def source(self) -> PromptSource[Any]:
        """Where the rows of its steps come from."""
        ...

    def next_step(self) -> dict[str, float]:
        """One step on the next rows; its metrics."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Metrics of all `[[eval.sets]]`."""
        ...

    def training_state(self) -> State:
        """What a checkpoint holds of it."""
        ...

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint, by `Loop.load`."""
        ...

    def export_step(self) -> None:
        """Its models in Hugging Face format, the main one to `hf/step_N`."""
        ...

    def export(self, folder: str | Path, *, replace: bool = False) -> None:
        """Its main model in Hugging Face format to a folder."""
        ...

    def introduce(self) -> None:
        """Say what the run is."""
        ...


class Fruitless:
    """Steps in a row that taught nothing, as loss and gradients were not finite: weights stay as they are, and so does
    what makes them so. One is noise; a run of them would only cost its time, and end as if all were well."""

    MOST = 10

    def __init__(self, step: int) -> None:
        self._last_good = self._began = step

    def check(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """UserError after `MOST` of them, and at the end of a run of several that had no others."""
        if not metrics.get("optim/skipped_updates") or math.isfinite(metrics.get("loss/total", 0.0)):
            self._last_good = step
        count = step - self._last_good
        if count >= self.MOST or (1 < count == step - self._began and step == total):
            raise UserError(
                f"step {step}: loss and gradients were not finite in {count} steps in a row, so nothing is learned: "
                "look at the weights of model.path, at a loss of your own, and at optim.lr"
            )


class Loop:
    """One run: `opening` while a trainer is built, `train`, `close`.

    With `claim` the folder is this run's own up to `close`, and not during `train` alone.
    """

    def __init__(self, config: Config, world: World, console: Console, *, claim: bool, ended_by: str) -> None:
        self.config, self.world, self.console = config, world, console
        self.run_dir = Path(config.run.dir).expanduser()
        self.outside = OutsideEvaluation(config, self.run_dir, world, console)
        self.held = ExitStack()
        """What the trainer has to end."""
        self._claimed = claim
        self._began = False  # the run in the folder is this trainer's own
        self._ended_by = ended_by  # the key that says how long the run is

    @contextmanager
    def opening(self) -> Iterator[ExitStack]:
        """`held`, for a block that makes the trainer's parts: what is made is ended if a later part cannot be."""
        try:
            if self._claimed:
                self.held.enter_context(run_folder.claim(self.run_dir, self.world, self.console.warning))
            yield self.held
        except BaseException:
            self.close()
            raise

    def check_resume(self, source: PromptSource[Any], others: Sequence[str] = ()) -> None:
        """With `claim`: UserError for a checkpoint that cannot be gone on from, before a model is loaded for it.

        `others` name the models that it is to hold beside the trained one.
        """
        if self._claimed and self.config.run.resume:
            run_folder.check_resume(self.run_dir, source, self.world, others)

    def train(self, trainer: Trainable) -> dict[str, float]:
        """Train to the last step, from the newest checkpoint if there is one. Returns the last step's metrics.

        UserError if another run is training in the folder.
        """
        if self._claimed:
            return self._train(trainer)
        with run_folder.claim(self.run_dir, self.world, self.console.warning):
            return self._train(trainer)

    def _train(self, trainer: Trainable) -> dict[str, float]:
        every, checkpoint = self.config.eval.every, self.config.checkpoint
        self._resume(trainer)
        metrics: dict[str, float] = {}
        fruitless = Fruitless(trainer.steps_done)
        with run_folder.open_trackers(self.run_dir, self.config, trainer.steps_done, self.world) as trackers:
            if trainer.steps_done == 0 and every and self.config.eval.at_start:
                trackers.log(0, trainer.evaluate())
            while trainer.steps_done < trainer.total_steps:
                metrics = trainer.next_step()
                step, total = trainer.steps_done, trainer.total_steps
                self.console.step(step, total, metrics)
                fruitless.check(step, total, metrics)
                if every and (step % every == 0 or step == total):
                    metrics |= trainer.evaluate()
                trackers.log(step, metrics)  # before the checkpoint: a resume drops lines of steps that it repeats
                if step == total or (checkpoint.every and step % checkpoint.every == 0):
                    self._save(trainer, metrics)
                if checkpoint.hf_every and step % checkpoint.hf_every == 0:
                    trainer.export_step()
                self.outside.log(trackers)
                if self.outside.is_due(step, last=step == total):
                    self.outside.submit(step, partial(trainer.export, replace=True))
            self._checkpointer.wait()
            self.outside.finish(trackers)
        return metrics

    def _resume(self, trainer: Trainable) -> None:
        """Go on from the newest checkpoint, if there is one, and say what the run is."""
        if not (self.config.run.resume or self._began):
            run_folder.refuse_used(self.run_dir, self.world)
        self._began = True
        found = self._checkpointer.latest()
        if found is not None and trainer.steps_done == 0:
            trainer.load_checkpoint(found)
            self.console.notice(f"resumed at step {trainer.steps_done} from {found}")
        if trainer.steps_done >= trainer.total_steps:
            by_steps = self._ended_by == "run.steps"
            more = f" and run.steps = {self.config.run.steps}; raise it" if by_steps else f"; raise {self._ended_by}"
            self.console.notice(f"nothing to train: step {trainer.steps_done} is done{more} to go on")
        run_folder.describe_run(self.run_dir, self.config, trainer.steps_done, self.world, self.console)
        trainer.introduce()

    def load(self, folder: Path, trainer: Trainable, *, weights_only: bool = False) -> dict[str, Any]:
        """Weights, optimizers, data position and random state from one checkpoint folder; returns its `extra`.

        `weights_only`, to evaluate: training data may be another than the checkpoint's.
        """
        state = trainer.training_state()
        if weights_only:
            extra = self._checkpointer.load(folder, state.model, None, rng=False)
        else:
            extra = self._checkpointer.load(folder, state.model, state.optimizer, others=state.others)
            apply_settings(state.optimizer, self.config.optim)
            trainer.source.restore(extra["source"])
        return extra

    def _save(self, trainer: Trainable, metrics: Mapping[str, float]) -> None:
        state, step = trainer.training_state(), trainer.steps_done
        common = {"step": step, "model": self.config.model.path, "source": trainer.source.state()}
        extra = {"policy_version": step, "groups": 0, **common, **state.extra}  # `lightrl eval` reads those of any kind
        self._checkpointer.save(
            step, model=state.model, optimizer=state.optimizer, others=state.others, extra=extra, metrics=metrics
        )

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        """One, as it has a process group of its own; it loads from any folder."""
        return Checkpointer(self.run_dir / "checkpoints", self.config.checkpoint, timeout=self.world.timeout)

    def close(self) -> None:
        """End what the trainer holds, the last first, and free the folder if it was claimed."""
        self.held.close()  # all of it, whatever fails on the way
        self._claimed = False
