"""Where metrics go besides the console: a JSON-lines file, TensorBoard, Weights & Biases. Only rank 0 makes them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightrl.errors import UserError
from lightrl.observe.jsonl import read_records, to_line, write_records

if TYPE_CHECKING:
    from lightrl.config.schema import LogConfig

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """Takes the metrics of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics; a step may be logged in several parts."""

    def close(self) -> None:
        """Write what is pending; idempotent."""


class JsonlTracker:
    """`metrics.jsonl`: one line a call, `{"step": 3, "time": <unix seconds>, "reward/mean": 0.53, …}`.

    Each line is on disk when `log` returns. `resume_step` keeps the lines up to that step, so that steps a resumed run
    repeats are not there twice; None starts an empty file. NaN and infinities are null.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        path = Path(run_dir) / METRICS_FILE
        kept = [] if resume_step is None or not path.exists() else list(read_records(path))
        write_records(path, [r for r in kept if _step_of(r) is not None and r["step"] <= resume_step])
        self._file = path.open("ab")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(to_line({"step": step, "time": round(time.time(), 3), **_numbers(metrics)}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Event files in `tensorboard/` of the run folder; what a resumed run repeats is purged."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of import

        purge_from = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge_from)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. Log-in and offline mode are wandb's own (`wandb login`, `WANDB_MODE=offline`).

    The run's id is kept in the run folder (`wandb_id`), so that a resumed run continues its curves; steps it repeats
    appear twice there, as W&B cannot take points back.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int | None = None,
        *,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"log.trackers: wandb cannot be imported ({error}): pip install wandb, "
                "or take 'wandb' out of log.trackers"
            ) from error
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / "wandb_id"
        if resume_step is None or not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project or "lightrl",
                name=name or run_dir.resolve().name,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(run_dir),
                config=dict(config or {}),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"log.trackers: W&B did not start ({reason}): run `wandb login`, set WANDB_MODE=offline, "
                "or take 'wandb' out of log.trackers"
            ) from error
        # An axis of our own: W&B drops points whose built-in step does not rise, as after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **_numbers(metrics)})

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Several trackers as one; also a context manager."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def __iter__(self) -> Iterator[Tracker]:
        return iter(self._trackers)

    def __len__(self) -> int:
        return len(self._trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Close all; the first error is raised after the others are closed."""
        errors = []
        while self._trackers:
            try:
                self._trackers.pop(0).close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def make_trackers(
    config: LogConfig, run_dir: Path, resume_step: int | None = None, config_dict: Mapping[str, Any] | None = None
) -> Trackers:
    """The trackers of `log.trackers`. `resume_step` is the last step that counts, None for a fresh run."""
    made: list[Tracker] = []
    try:
        for kind in dict.fromkeys(config.trackers):
            if kind == "jsonl":
                made.append(JsonlTracker(run_dir, resume_step))
            elif kind == "tensorboard":
                made.append(TensorBoardTracker(run_dir, resume_step))
            else:
                project, name = config.wandb_project, config.wandb_name
                made.append(WandbTracker(run_dir, resume_step, project=project, name=name, config=config_dict))
    except BaseException:
        Trackers(made).close()
        raise
    return Trackers(made)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics of a run by rising step: `[{"step": 1, "time": …, "reward/mean": …}, …]`.

    Parts of a step are joined. A torn last line is left out; null stays None.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise UserError(
            f"{path}: no such file: name the folder of a run (run.dir) that was trained with 'jsonl' in log.trackers"
        )
    steps: dict[int, dict[str, Any]] = {}
    for record in read_records(path):
        step = _step_of(record)
        if step is not None:
            steps.setdefault(step, {}).update(record)
    return [steps[step] for step in sorted(steps)]


def _step_of(record: Mapping[str, Any]) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """By names that can be written: a part of a reward may be called by half a character."""
    names = {name: name.encode("utf-8", "replace").decode() for name in metrics}
    return {names[n]: int(value) if isinstance(value, int) else float(value) for n, value in metrics.items()}
