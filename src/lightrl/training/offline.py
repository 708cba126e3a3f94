"""Training on given rows: a step is a batch of them and one update. What SFT, DPO and reward models have in common.

Data order, packing, sharding, optimizer, checkpoints, export and logs are those of the RL trainer; what is sampled
there is given here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lightrl.config.preferences import of_command
from lightrl.config.schema import Config, DataConfig
from lightrl.data import PromptSource
from lightrl.data.source import RowSet
from lightrl.distributed.fsdp import set_gradient_sync
from lightrl.distributed.mesh import deal, init_world, set_deterministic
from lightrl.errors import UserError, end
from lightrl.models import load
from lightrl.models.context import context_length, longrope_notice
from lightrl.models.registry import stock_notice
from lightrl.observe.console import Columns, Console
from lightrl.observe.metrics import Tally
from lightrl.observe.timing import StageTimer
from lightrl.training import run_folder, setup
from lightrl.training.balance import CostModel
from lightrl.training.batch import build_minibatches
from lightrl.training.evaluate import set_data
from lightrl.training.hooks import OnStep, load_on_step
from lightrl.training.loop import Loop, State
from lightrl.training.optim import build_optimizer, build_schedule, optimizer_step
from lightrl.training.packing import TrainSample
from lightrl.training.policy import AdaptersOff, Policy
from lightrl.training.probe import StepProbe
from lightrl.training.value_model import ValueModel
from lightrl.types import Microbatch

_OF_RL = (
    "reward", "rollout", "agent", "endpoint", "sandbox", "engine", "sync", "algorithm", "correction", "teacher",
    "critic", "critic_optim", "dump", "debug",
)  # fmt: skip
_KEYS_OF_RL = ("lora.sync", "parallel.offload", "parallel.offload_host_gib", "log.timeline_steps")
_COMMANDS = ("sft", "dpo", "rm")
_EVAL_BATCH = 256  # rows of a set that are planned and packed together

Row = TypeVar("Row")
Mean = tuple[Tensor, int]
"""Sum of a microbatch's values, and how many they are."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a microbatch adds to an update, and to the metrics of all microbatches on all ranks together."""

    loss: Tensor
    """Its share of the update's loss, scalar."""
    means: Mapping[str, Mean] = field(default_factory=dict)
    """Metrics of training: totals divided by how many."""
    eval_means: Mapping[str, Mean] = field(default_factory=dict)
    """… of evaluation, named without their set."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Totals of both."""


class OfflineTrainer(ABC, Generic[Row]):
    """A run on given rows. Under torchrun and, as a world of one, in plain Python or a notebook.

    Everything that can be wrong with config and data is found before the model loads; with `claim`, so is a `run_dir`
    that another run has or that cannot be resumed. `on_step` is called in place of `run.on_step`.

    A kind of training says what its rows are (`read`), its model (`load_model`), which of it each row feeds
    (`samples`), and the loss (`terms`).
    """

    command: ClassVar[str]
    """`lightrl COMMAND`, and the section of the config, which has `batch_size` and `epochs`."""
    columns: ClassVar[Columns]
    rows_called: ClassVar[str] = "pairs"
    one_unit_a_row: ClassVar[bool] = False
    """The samples of a row are computed in one microbatch, as the loss compares them."""

    def __init__(self, config: Config, *, on_step: OnStep | None = None, claim: bool = False) -> None:
        setup.check(config)
        if problems := of_command(config, self.command):
            raise UserError("; ".join(f"{key}: {text}" for key, text in problems))
        self.config, self.section = config, getattr(config, self.command)
        parallel = config.parallel
        self.world = init_world(config.run.device, parallel.shard_size, parallel.timeout, parallel.expert_parallel)
        self.console = Console(config.log, enabled=self.world.is_main, columns=self.columns)
        epochs = self.section.epochs is not None
        ended_by = f"{self.command}.epochs" if epochs else "run.steps"
        self.loop = Loop(config, self.world, self.console, claim=claim, ended_by=ended_by)
        self.run_dir = self.loop.run_dir
        self.steps_done = 0
        self._torn = False  # an update was interrupted: weights and gradients are between two steps
        with self.loop.opening() as held:
            self.probe = StepProbe(config.log, self.run_dir, self.world, load_on_step(config.run.on_step, on_step))
            held.callback(end, self.probe.close)
            self._load_data()
            self.check_models()
            self.loop.check_resume(self.source)
            torch.manual_seed(config.run.seed)
            set_deterministic(config.run.deterministic)
            self.model = self.load_model()
            self.optimizer = build_optimizer(self.model.parameters(), config.optim)
            self.schedule = self._schedule()
            self.cost = CostModel.from_config(self.model.hf_config.get_text_config())

    def _load_data(self) -> None:
        config, model = self.config, self.config.model
        self.hf_config, self.tokenizer = self.load_config_and_tokenizer()
        setup.check_parallel(config.parallel, self.hf_config, f"model.path = {model.path}")
        folder = load.resolve_checkpoint(model.path, model.revision, weights=False)
        self.end_ids = load.eos_token_ids(str(folder), self.hf_config, self.tokenizer)
        self.context_length = context_length(self.hf_config) or setup.UNKNOWN_CONTEXT
        self.rows: RowSet[Row] = self._checked(config.data)
        self.eval_sets = {spec.name: self._checked(set_data(config.data, spec)) for spec in config.eval.sets}
        self.source = PromptSource(self.rows, seed=config.run.seed, shuffle=config.data.shuffle)
        longest = config.optim.warmup_steps + config.optim.decay_steps
        if longest > self.total_steps:
            text = f"warmup_steps + decay_steps = {longest} exceed the run's {self.total_steps} updates"
            raise UserError(f"optim.warmup_steps: {text}; lower them, or raise {self.command}.epochs")

    def _checked(self, data: DataConfig) -> RowSet[Row]:
        rows: Any = self.read(data)
        setup.check_vocabulary(rows, self.tokenizer, self.hf_config)
        return rows

    # ---- what a kind of training is

    def load_config_and_tokenizer(self) -> tuple[Any, Any]:
        """Of what is trained. UserError for models that cannot be."""
        model = self.config.model
        return load.load_config_and_tokenizer(model.path, model.revision, model.tokenizer, model.trust_remote_code)

    @abstractmethod
    def read(self, data: DataConfig) -> RowSet[Row]:
        """The rows of `data`, with `notices` on them. Needs the tokenizer, no model."""

    @abstractmethod
    def load_model(self) -> Policy | ValueModel:
        """What is trained."""

    @abstractmethod
    def samples(self, number: int, row: Row) -> list[TrainSample]:
        """What a row, the `number`-th of its batch, feeds to the model: samples of the group `number`."""

    @abstractmethod
    def terms(self, batch: Microbatch, rows: Sequence[Row]) -> Terms:
        """Loss and metrics of a microbatch of a batch of `rows`; every rank calls it as often."""

    def check_models(self) -> None:
        """UserError for other models that do not fit, before one is loaded."""

    def complete(self, batch: Sequence[Microbatch], rows: Sequence[Row]) -> None:
        """Add what the loss needs of other models."""

    @abstractmethod
    def describe(self) -> Mapping[str, object]:
        """Lines on data and steps for a person."""

    # ---- one step

    def step(self, rows: Sequence[Row]) -> dict[str, float]:
        """One update on these rows (all ranks get the same). Returns the step's metrics."""
        if self._torn:
            raise UserError(f"a step was interrupted in its update: make a new {type(self).__name__}, which resumes")
        tally, timer = Tally(), self.probe.begin(self.steps_done + 1)
        with timer("pack"):
            batch = self.pack(rows)
        with timer("train"):
            self.complete(batch, rows)
            self._torn = True
            self._update(batch, rows, tally)
        self.steps_done += 1
        self.source.settle()
        self._torn = False
        tally.add(f"{self.command}/epoch", self.source.epoch, kind="max")
        metrics = Tally.merged(self.world.gather(tally.to_dict())).result() | timer.metrics()
        if metrics.get("time/total"):
            metrics["perf/tokens_per_second"] = metrics[f"{self.command}/tokens"] / metrics["time/total"]
        return self.probe.finish(self.steps_done, (), metrics | setup.peak_memory(self.world))

    def pack(self, rows: Sequence[Row]) -> list[Microbatch]:
        """This rank's microbatches of one update on these rows: as many on every rank."""
        return self.pack_for([self.model], rows, self.cost)

    def pack_for(
        self, models: Sequence[Policy | ValueModel | AdaptersOff], rows: Sequence[Row], cost: CostModel
    ) -> list[Microbatch]:
        """`pack`, for models that all have to take what is packed."""
        parallel = self.config.parallel
        mine = deal(self.world, list(enumerate(rows)))
        (minibatch,) = build_minibatches(
            [sample for number, row in mine for sample in self.samples(number, row)],
            self.world,
            minibatches=1,
            max_tokens=parallel.max_tokens_per_microbatch,
            share_prompts=parallel.share_prompts and self.one_unit_a_row and all(m.module.packed for m in models),
            whole_groups=self.one_unit_a_row,
            skip_zero_advantage=False,
            aggregation="token_mean",
            constant_length=1,
            cost=cost,
        )
        return [trained_rows(microbatch) for microbatch in minibatch]

    def _update(self, batch: Sequence[Microbatch], rows: Sequence[Row], tally: Tally) -> None:
        """Add up gradients over microbatches and step once. Ranks reduce only in the last backward.

        Each microbatch has its share of the whole update's loss, so the sums over microbatches and ranks are the mean
        over all that counts, whatever the split.
        """
        lr = float(self.optimizer.param_groups[0]["lr"])
        found = []
        for i, microbatch in enumerate(batch):
            set_gradient_sync(self.model.module, i == len(batch) - 1)
            terms = self.terms(microbatch, rows)
            terms.loss.backward()
            found.append(replace(terms, loss=terms.loss.detach()))
        norm, stepped = optimizer_step(
            self.optimizer, self.schedule, self.model.parameters(), self.config.optim.max_grad_norm
        )
        for terms in found:  # reads numbers off the device, which would otherwise wait for the host in between
            tally.add("loss/total", float(terms.loss), kind="sum")
            _count(tally, terms.means, terms.counts, f"{self.command}/")
        tally.add(f"{self.command}/tokens", sum(m.num_tokens for m in batch if m.sample_keys), kind="sum")
        tally.add("optim/grad_norm", norm)
        tally.add("optim/lr", lr, kind="max")
        tally.add("optim/skipped_updates", float(not stepped), kind="max")

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """`eval/NAME/…` of all `[[eval.sets]]`: means over a whole set. A collective."""
        timer, metrics = StageTimer(), dict[str, float]()
        with timer("evaluate"):
            for name, rows in self.eval_sets.items():
                tally, prefix = Tally(), f"eval/{name}/"
                for part in parts(rows):
                    batch = self.pack(part)
                    self.complete(batch, part)
                    for terms in (self.terms(microbatch, part) for microbatch in batch):
                        means = {prefix + metric: mean for metric, mean in terms.eval_means.items()}
                        _count(tally, means, terms.counts, prefix)
                metrics |= Tally.merged(self.world.gather(tally.to_dict())).result()
            self.model.reclaim()
        self.console.evaluation(self.steps_done, metrics)
        return metrics | {"time/evaluate": timer.seconds("evaluate")}

    # ---- the run

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: `run.steps`, or what `epochs` still asks for beyond those done."""
        if self.section.epochs is None:
            return self.config.run.steps
        return self.steps_done + math.ceil(self._rows_left() / self.section.batch_size)

    def _rows_left(self) -> int:
        epochs = self.section.epochs or math.inf
        return max(0, max(1, round(epochs * len(self.rows))) - self.source.num_dealt)

    def train(self) -> dict[str, float]:
        """Train to the last step, from the newest checkpoint if there is one. Returns the last step's metrics.

        UserError if another run is training in `run.dir`.
        """
        return self.loop.train(self)

    def next_step(self) -> dict[str, float]:
        """`step` on the next rows; the last one of `epochs` takes what is left."""
        with self.source.dealt(self._next_size()) as rows:
            return self.step(rows)

    def _next_size(self) -> int:
        """Rows of the next step: the last one of `epochs` takes what is left."""
        size: int = self.section.batch_size
        return size if self.section.epochs is None else min(size, self._rows_left())

    def introduce(self) -> None:
        """Say what the run is."""
        self.world.barrier()
        sets: list[Any] = [self.rows, *self.eval_sets.values()]
        for text in dict.fromkeys(text for rows in sets for text in rows.notices):
            self.console.notice(text)
        if unused := unused_settings(self.config, self.command):
            self.console.notice(f"not used by lightrl {self.command}: {', '.join(unused)}")
        if self.section.epochs is not None and self.config.run.steps != type(self.config.run)().steps:
            which = f"{self.command}.epochs = {self.section.epochs:g}"
            self.console.notice(f"run.steps = {self.config.run.steps} is not used: {which} says how long the run is")
        size = self._next_size()
        if size > len(self.rows):
            self.console.warning(
                f"{self.command}.batch_size = {size} in this run, but there are {len(self.rows)} {self.rows_called}: "
                "an update trains them more than once; lower it"
            )
        if not self.model.module.packed:
            self.console.warning(stock_notice(self.model.hf_config))
        if (text := longrope_notice(self.model.hf_config)) is not None:
            self.console.warning(text)
        epochs = self.section.epochs or self.total_steps * self.section.batch_size / len(self.rows)
        facts = setup.model_facts(self.config, self.world, self.model) | dict(self.describe())
        steps = f"{facts['step']}; {self.total_steps} steps, {epochs:.3g} epochs"
        self.console.settings("LightRL", facts | {"step": steps, "folder": self.config.run.dir})

    def export(self, folder: str | Path, *, replace: bool = False) -> None:
        """The present weights in Hugging Face format, in the precision of the checkpoint they came from.

        A folder that is not empty is a UserError; `replace` swaps it for the new one, whatever it holds.
        """
        run_folder.export_model(self.model, Path(folder), self.world, replace=replace)

    def export_step(self) -> None:
        """The same to `hf/step_N`."""
        run_folder.export_step(self.model, self.config, self.steps_done, self.world)

    def load_checkpoint(self, folder: Path) -> None:
        """Take weights, optimizer, schedule, data position and random state from one checkpoint folder."""
        extra = self.loop.load(folder, self)
        run_folder.check_base(extra, self.model, self.config, folder, self.console)
        self.steps_done = extra["step"]
        self.schedule = self._schedule()

    def training_state(self) -> State:
        """What a checkpoint holds."""
        extra = {"adapter_scaling": run_folder.adapter_scaling(self.model)}
        return State(model=self.model.module, optimizer=self.optimizer, extra=extra)

    def close(self) -> None:
        """Write a profile that is under way, and free the folder if it was claimed."""
        self.loop.close()

    def _schedule(self) -> LambdaLR:
        """At the place of a run that had the present settings from the start."""
        return build_schedule(self.optimizer, self.config.optim, self.total_steps, self.steps_done)


def parts(rows: RowSet[Row]) -> list[list[Row]]:
    """All rows, a list for each time that a set is packed."""
    every = [rows[i] for i in range(len(rows))]
    return [every[start : start + _EVAL_BATCH] for start in range(0, len(every), _EVAL_BATCH)]


def _count(tally: Tally, means: Mapping[str, Mean], counts: Mapping[str, int], prefix: str) -> None:
    for name, (total, count) in means.items():
        tally.add(name, float(total) / max(count, 1), weight=count)
    for name, count in counts.items():
        tally.add(prefix + name, count, kind="sum")


def unused_settings(config: Config, command: str) -> list[str]:
    """Sections and keys that are set, and that `lightrl COMMAND` makes nothing of: one file may serve several."""
    default = Config()
    others = (*_OF_RL, *(name for name in _COMMANDS if name != command))
    keys = [key.split(".") for key in _KEYS_OF_RL]
    return [f"[{name}]" for name in others if getattr(config, name) != getattr(default, name)] + [
        f"{section}.{key}"
        for section, key in keys
        if getattr(getattr(config, section), key) != getattr(getattr(default, section), key)
    ]


def trained_rows(batch: Microbatch) -> Microbatch:
    """Without the targets that carry no loss: nothing is computed for them."""
    kept = batch.loss_mask > 0
    names = ("logit_rows", "targets", "sample_ids", "loss_mask", "loss_weights", "advantages")
    return replace(batch, **{name: getattr(batch, name)[kept] for name in names})
