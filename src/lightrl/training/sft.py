"""Supervised fine-tuning: one step is a batch of conversations and one update, on the mean over their trained tokens.

Data order, packing, sharding, optimizer, checkpoints, export and logs are those of the RL trainer; what is sampled
there is given here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from lightrl.config.schema import Config
from lightrl.config.sft import sft_problems
from lightrl.data import PromptSource
from lightrl.data.conversations import Conversation, ConversationSet, load_conversations
from lightrl.distributed.fsdp import set_gradient_sync
from lightrl.distributed.mesh import deal, init_world, set_deterministic
from lightrl.errors import UserError
from lightrl.models import load
from lightrl.models.registry import stock_notice
from lightrl.observe.console import SFT_COLUMNS, Console
from lightrl.observe.metrics import Tally
from lightrl.observe.timing import StageTimer
from lightrl.training import run_folder, setup
from lightrl.training.balance import CostModel
from lightrl.training.batch import build_minibatches
from lightrl.training.checkpoint import Checkpointer
from lightrl.training.evaluate import set_data
from lightrl.training.optim import apply_settings, build_optimizer, build_schedule, optimizer_step
from lightrl.training.packing import TrainSample
from lightrl.training.policy import to_device
from lightrl.types import Microbatch

_OF_RL = ("reward", "rollout", "engine", "sync", "algorithm", "correction", "critic", "critic_optim")
_EVAL_BATCH = 256  # conversations of a set that are planned and packed together


class SFTTrainer:
    """A run of `lightrl sft`. Under torchrun and, as a world of one, in plain Python or a notebook.

    Everything that can be wrong with config and data is found before the model loads; with `claim`, so is a `run_dir`
    that another run has or that cannot be resumed.
    """

    def __init__(self, config: Config, *, claim: bool = False) -> None:
        setup.check(config)
        if problems := sft_problems(config):
            raise UserError("; ".join(f"{key}: {text}" for key, text in problems))
        self.config = config
        self.world = init_world(config.run.device, config.parallel.shard_size, config.parallel.timeout)
        self.console = Console(config.log, enabled=self.world.is_main, columns=SFT_COLUMNS)
        self.run_dir = Path(config.run.dir).expanduser()
        self.steps_done = 0
        self._claimed, self._began, self._torn = claim, False, False
        with contextlib.ExitStack() as held:
            if claim:
                held.enter_context(setup.claim(self.run_dir, self.world, self.console.warning))
            self._load_data()
            if claim and config.run.resume:
                setup.check_resume(self.run_dir, self.source, self.world)
            self._load_model()
            self._held = held.pop_all()

    def _load_data(self) -> None:
        config, model = self.config, self.config.model
        hf_config, self.tokenizer = load.load_config_and_tokenizer(
            model.path, model.revision, model.tokenizer, model.trust_remote_code
        )
        folder = load.resolve_checkpoint(model.path, model.revision, weights=False)
        ends = load.eos_token_ids(str(folder), hf_config, self.tokenizer)
        context = load.context_length(hf_config) or setup.UNKNOWN_CONTEXT

        def read(data: Any) -> ConversationSet:
            found = load_conversations(data, config.sft, self.tokenizer, context_length=context, end_ids=ends)
            setup.check_vocabulary(found, self.tokenizer, hf_config)
            return found

        self.conversations = read(config.data)
        self.eval_sets = {spec.name: read(set_data(config.data, spec)) for spec in config.eval.sets}
        self.source = PromptSource(self.conversations, seed=config.run.seed, shuffle=config.data.shuffle)
        longest = config.optim.warmup_steps + config.optim.decay_steps
        if longest > self.total_steps:
            text = f"warmup_steps + decay_steps = {longest} exceed the run's {self.total_steps} updates"
            raise UserError(f"optim.warmup_steps: {text}; lower them, or raise sft.epochs")

    def _load_model(self) -> None:
        config = self.config
        torch.manual_seed(config.run.seed)
        set_deterministic(config.run.deterministic)
        self.policy = setup.load_policy(config, self.world)
        self.optimizer = build_optimizer(self.policy.parameters(), config.optim)
        self.schedule = self._schedule()
        self.cost = CostModel.from_config(self.policy.hf_config.get_text_config())

    # ---- one step ----

    def step(self, conversations: Sequence[Conversation]) -> dict[str, float]:
        """One update on these conversations (all ranks get the same). Returns the step's metrics."""
        if self._torn:
            raise UserError("a step was interrupted in its update: make a new SFTTrainer, which resumes")
        tally, timer = Tally(), StageTimer()
        with timer("pack"):
            batch = self.pack(conversations)
        with timer("train"):
            self._torn = True
            self._update(batch, tally)
        self.steps_done += 1
        self.source.settle()
        self._torn = False
        tally.add("sft/epoch", self.source.epoch, kind="max")
        tally.add("sft/conversations", len(conversations), kind="max")
        return self._metrics(tally, timer.metrics())

    def pack(self, conversations: Sequence[Conversation]) -> list[Microbatch]:
        """This rank's microbatches of one update on these conversations: as many on every rank."""
        numbered = list(enumerate(conversations))
        (minibatch,) = build_minibatches(
            [train_sample(number, c) for number, c in deal(self.world, numbered)],
            self.world,
            minibatches=1,
            max_tokens=self.config.parallel.max_tokens_per_microbatch,
            share_prompts=False,
            skip_zero_advantage=False,
            aggregation="token_mean",
            constant_length=1,
            cost=self.cost,
        )
        return [trained_rows(microbatch) for microbatch in minibatch]

    def _update(self, batch: Sequence[Microbatch], tally: Tally) -> None:
        """Add up gradients over microbatches and step once. Ranks reduce only in the last backward.

        Each token has its share of the whole update's loss (`loss_weights`), so the sums over microbatches and ranks
        are the mean over all trained tokens, whatever the split.
        """
        lr = float(self.optimizer.param_groups[0]["lr"])
        total = entropies = torch.zeros((), device=self.policy.device)
        for i, microbatch in enumerate(batch):
            set_gradient_sync(self.policy.module, i == len(batch) - 1)
            logprobs, entropy = self.policy(microbatch, temperature=1.0)
            loss = -(logprobs * to_device(microbatch, self.policy.device).loss_weights).sum()
            loss.backward()
            total, entropies = total + loss.detach(), entropies + entropy.detach().sum()
        trained = sum(m.targets.numel() for m in batch)
        norm, stepped = optimizer_step(
            self.optimizer, self.schedule, self.policy.parameters(), self.config.optim.max_grad_norm
        )
        tally.add("loss/total", float(total), kind="sum")
        tally.add("loss/entropy", float(entropies) / max(trained, 1), weight=trained)
        tally.add("sft/trained_tokens", trained, kind="sum")
        tally.add("sft/tokens", sum(m.num_tokens for m in batch if m.sample_keys), kind="sum")
        tally.add("optim/grad_norm", norm)
        tally.add("optim/lr", lr, kind="max")
        tally.add("optim/skipped_updates", float(not stepped), kind="max")

    def _metrics(self, tally: Tally, times: dict[str, float]) -> dict[str, float]:
        metrics = Tally.merged(self.world.gather(tally.to_dict())).result()
        if times.get("time/total"):
            metrics["perf/tokens_per_second"] = metrics["sft/tokens"] / times["time/total"]
        return metrics | times | setup.peak_memory(self.world)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """`eval/NAME/loss` of all `[[eval.sets]]`: the mean over all trained tokens of a set. A collective."""
        timer, metrics = StageTimer(), dict[str, float]()
        with timer("evaluate"):
            for name, conversations in self.eval_sets.items():
                tally = Tally()
                for start in range(0, len(conversations), _EVAL_BATCH):
                    for microbatch in self.pack(list(conversations)[start : start + _EVAL_BATCH]):
                        logprobs, _ = self.policy(microbatch, temperature=1.0)
                        trained = logprobs.numel()
                        tally.add(f"eval/{name}/loss", -float(logprobs.sum()) / max(trained, 1), weight=trained)
                        tally.add(f"eval/{name}/trained_tokens", trained, kind="sum")
                found = Tally.merged(self.world.gather(tally.to_dict())).result()
                metrics |= found | {f"eval/{name}/logprob": -found[f"eval/{name}/loss"]}
            self.policy.reclaim()
        self.console.evaluation(self.steps_done, metrics)
        return metrics | {"time/evaluate": timer.seconds("evaluate")}

    # ---- the run ----

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: `run.steps`, or what `sft.epochs` still asks for beyond those done."""
        if self.config.sft.epochs is None:
            return self.config.run.steps
        return self.steps_done + math.ceil(self._rows_left() / self.config.sft.batch_size)

    def _rows_left(self) -> int:
        epochs = self.config.sft.epochs or math.inf
        return max(0, max(1, round(epochs * len(self.conversations))) - self.source.num_dealt)

    def _next_size(self) -> int:
        """Conversations of the next step: the last one of `sft.epochs` takes what is left."""
        size = self.config.sft.batch_size
        return size if self.config.sft.epochs is None else min(size, self._rows_left())

    def train(self) -> dict[str, float]:
        """Train to the last step, from the newest checkpoint if there is one. Returns the last step's metrics.

        UserError if another run is training in `run.dir`.
        """
        if self._claimed:
            return self._train()
        with setup.claim(self.run_dir, self.world, self.console.warning):
            return self._train()

    def _train(self) -> dict[str, float]:
        config, checkpointer = self.config, self._checkpointer
        self._begin(checkpointer)
        metrics: dict[str, float] = {}
        with run_folder.open_trackers(self.run_dir, config, self.steps_done, self.world) as trackers:
            if self.steps_done == 0 and config.eval.every and config.eval.at_start:
                trackers.log(0, self.evaluate())
            while self.steps_done < self.total_steps:
                with self.source.dealt(self._next_size()) as conversations:
                    metrics = self.step(conversations)
                step, total = self.steps_done, self.total_steps
                self.console.step(step, total, metrics)
                if config.eval.every and (step % config.eval.every == 0 or step == total):
                    metrics |= self.evaluate()
                trackers.log(step, metrics)  # before the checkpoint: a resume drops lines of steps that it repeats
                if step == total or (config.checkpoint.every and step % config.checkpoint.every == 0):
                    self._save(checkpointer, metrics)
                if config.checkpoint.hf_every and step % config.checkpoint.hf_every == 0:
                    run_folder.export_step(self.policy, config, step, self.world)
            checkpointer.wait()
        return metrics

    def _begin(self, checkpointer: Checkpointer) -> None:
        """Resume, if there is something to resume, and say what the run is."""
        config = self.config
        if not (config.run.resume or self._began):
            run_folder.refuse_used(self.run_dir, self.world)
        self._began = True
        found = checkpointer.latest()
        if found is not None and self.steps_done == 0:
            self.load_checkpoint(found)
            self.console.notice(f"resumed at step {self.steps_done} from {found}")
        if self.steps_done >= self.total_steps:
            what = "run.steps" if config.sft.epochs is None else "sft.epochs"
            self.console.notice(f"nothing to train: step {self.steps_done} is done; raise {what} to go on")
        run_folder.describe_run(self.run_dir, config, self.steps_done, self.world, self.console)
        self.world.barrier()
        for text in dict.fromkeys(t for s in (self.conversations, *self.eval_sets.values()) for t in s.notices):
            self.console.notice(text)
        if unused := [name for name in _OF_RL if getattr(config, name) != getattr(Config(), name)]:
            self.console.notice(f"not used by lightrl sft: {', '.join(f'[{name}]' for name in unused)}")
        if (size := self._next_size()) > len(self.conversations):
            self.console.warning(
                f"sft.batch_size = {size} in this run, but there are {len(self.conversations)} conversations: an "
                "update trains them more than once; lower it"
            )
        if not self.policy.module.packed:
            self.console.warning(stock_notice(self.policy.hf_config))
        self.console.settings("LightRL", self._summary())

    def _summary(self) -> dict[str, object]:
        data = self.conversations
        trained, tokens = (sum(sum(c.loss_mask) for c in data), sum(len(c.tokens) for c in data))
        size = self.config.sft.batch_size
        epochs = self.config.sft.epochs or self.total_steps * size / len(data)
        return setup.model_facts(self.config, self.world, self.policy) | {
            "data": f"{len(data)} conversations from {self.config.data.path}, {trained:,} of {tokens:,} tokens trained",
            "step": f"{size} conversations; {self.total_steps} steps, {epochs:.3g} epochs",
            "folder": self.config.run.dir,
        }

    def export(self, folder: str | Path, *, replace: bool = False) -> None:
        """The present weights in Hugging Face format, in the precision of the checkpoint they came from.

        A folder that is not empty is a UserError; `replace` swaps it for the new one, whatever it holds.
        """
        run_folder.export_policy(self.policy, Path(folder), self.world, replace=replace)

    def load_checkpoint(self, folder: Path) -> None:
        """Take weights, optimizer, schedule, data position and random state from one checkpoint folder."""
        extra = self._checkpointer.load(folder, self.policy.module, self.optimizer)
        apply_settings(self.optimizer, self.config.optim)
        self.source.restore(extra["source"])
        self.steps_done = extra["step"]
        self.schedule = self._schedule()
        run_folder.check_base(extra, self.policy, self.config, folder, self.console)

    def close(self) -> None:
        """Free the folder, if it was claimed."""
        self._held.close()
        self._claimed = False

    def _schedule(self) -> LambdaLR:
        """At the place of a run that had the present settings from the start."""
        return build_schedule(self.optimizer, self.config.optim, self.total_steps, self.steps_done)

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        """One, as it has a process group of its own; it loads from any folder."""
        return Checkpointer(self.run_dir / "checkpoints", self.config.checkpoint, timeout=self.world.timeout)

    def _save(self, checkpointer: Checkpointer, metrics: dict[str, float]) -> None:
        checkpointer.save(
            self.steps_done,
            model=self.policy.module,
            optimizer=self.optimizer,
            extra={
                "step": self.steps_done,
                "policy_version": self.steps_done,  # what `lightrl eval` reads of the checkpoints of either kind
                "groups": 0,
                "model": self.config.model.path,
                "adapter_scaling": run_folder.adapter_scaling(self.policy),
                "source": self.source.state(),
            },
            metrics=metrics,
        )


def train_sample(number: int, conversation: Conversation) -> TrainSample:
    """A conversation for the packer: what comes before the first trained token is its prompt, and what comes after the
    last is left out, as nothing trained depends on it."""
    tokens, mask = conversation.tokens, conversation.loss_mask
    first = mask.index(1)
    end = len(mask) - mask[::-1].index(1)
    return TrainSample(
        group_index=number,
        index=0,
        prompt=tokens[:first],
        response=tokens[first:end],
        loss_mask=mask[first:end],
        rollout_logprobs=None,
        advantage=0.0,
    )


def trained_rows(batch: Microbatch) -> Microbatch:
    """Without the targets between trained turns: no log-prob is computed for what has no loss."""
    kept = batch.loss_mask > 0
    names = ("logit_rows", "targets", "sample_ids", "loss_mask", "loss_weights", "advantages")
    return replace(batch, **{name: getattr(batch, name)[kept] for name in names})
