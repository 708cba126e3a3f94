"""The trainer: one step of reinforcement learning, and the run around it.

    prompts -> groups of scored samples -> advantages -> packed minibatches -> updates

Every rank runs this same code. `Trainer.step` is the algorithm; `Trainer.train` adds evaluation, checkpoints and logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from lightrl.config.engines import unused_by_engine
from lightrl.config.schema import Config
from lightrl.data import PromptSource, load_prompts
from lightrl.distributed.mesh import deal, set_deterministic
from lightrl.distributed.offload import TrainingState
from lightrl.engine.base import Engine
from lightrl.errors import UserError, end
from lightrl.models import load
from lightrl.models.context import context_length
from lightrl.observe.console import Console
from lightrl.observe.dumps import SampleWriter
from lightrl.observe.metrics import Tally, agent_metrics, rollout_metrics, step_metrics
from lightrl.observe.timing import StageTimer
from lightrl.rewards import Scorer, check_labels
from lightrl.rollout.agent import sampler_of
from lightrl.rollout.collect import Sampler, apply_truncation
from lightrl.rollout.selection import Selection
from lightrl.training import engines, replay, run_folder, setup
from lightrl.training.advantage import Advantages, finish_advantages, overlong_metrics, set_advantages
from lightrl.training.balance import CostModel
from lightrl.training.batch import build_minibatches
from lightrl.training.critic import Critic, explained_variance
from lightrl.training.dumped import DumpedRollouts, without_engine
from lightrl.training.evaluate import evaluate, load_eval_sets
from lightrl.training.hooks import Hooks, LoadedHooks, load_hooks
from lightrl.training.loop import Loop, State
from lightrl.training.objective import Objective, normalize_weights
from lightrl.training.optim import advance, build_optimizer, build_schedule
from lightrl.training.packing import TrainSample
from lightrl.training.probe import Probe
from lightrl.training.rollout_ranks import meet_rollout_ranks, remote_engine
from lightrl.training.rollouts import Rollouts, check_staleness, mask_older
from lightrl.training.teacher import Teacher, check_teacher
from lightrl.training.update import mismatch_metrics, update
from lightrl.types import Microbatch, Prompt, SampleGroup


class Trainer:
    """A run. `reward` replaces `reward.type`: a function of one `Sample` (of a list with `reward.batched`).

    Works under torchrun and, as a world of one, in plain Python or a notebook. Everything that can be wrong with
    config, data and rewards is found before the model loads. So is, with `claim`, a `run_dir` that another run has or
    that cannot be resumed: it is then this trainer's up to `close`, and not during `train` alone. With `only_sample`
    it does without a teacher.
    """

    def __init__(
        self,
        config: Config,
        *,
        reward: Callable[..., Any] | None = None,
        hooks: Hooks | None = None,
        claim: bool = False,
        only_sample: bool = False,
    ) -> None:
        config = without_engine(config)
        setup.check(config)
        self.config = config
        self._has_teacher = config.teacher.enabled and not only_sample
        self.world = setup.join_world(config)
        self.console = Console(config.log, enabled=self.world.is_main)
        self.loop = Loop(config, self.world, self.console, claim=claim, ended_by="run.steps")
        self.run_dir = self.loop.run_dir
        self.steps_done = 0
        self.policy_version = 0
        self.groups_done = 0
        self._torn = False  # an update was interrupted: weights and gradients are between two steps
        with self.loop.opening() as self._held:
            self.rollout_ranks = meet_rollout_ranks(config, self.world)
            for rank in self.rollout_ranks:
                self._held.callback(end, rank.close)
            self._load_data(reward, load_hooks(config, hooks))
            self.loop.check_resume(self.source, ["critic"] if config.algorithm.estimator.critic else [])
            self._load_model()

    def _load_data(self, reward: Callable[..., Any] | None, hooks: LoadedHooks) -> None:
        config = self.config
        model = config.model
        hf_config, self.tokenizer = load.load_config_and_tokenizer(
            model.path, model.revision, model.tokenizer, model.trust_remote_code
        )
        setup.check_parallel(config.parallel, hf_config, f"model.path = {model.path}")
        setup.check_replay(config.correction, hf_config, f"model.path = {model.path}")
        self.context_length = context_length(hf_config) or setup.UNKNOWN_CONTEXT
        self.agent = setup.load_agent(
            config,
            hf_config,
            self.tokenizer,
            self.context_length,
            graded=reward is not None or bool(config.reward.type),
            rank=self.world.rank,
        )
        if self.agent is not None:
            self._held.callback(end, self.agent.close)
        self.prompts = load_prompts(
            config.data,
            self.tokenizer,
            context_length=self.context_length,
            max_response_tokens=config.rollout.max_response_tokens,
            row_map=hooks.row_map,
            tools=[] if self.agent is None else self.agent.definitions,
        )
        self.dumped = DumpedRollouts.open(config, int(hf_config.get_text_config().vocab_size))
        setup.check_vocabulary(self.prompts, self.tokenizer, hf_config)
        setup.check_stop_ids(config, hf_config)
        setup.check_reference(config, hf_config, self.tokenizer, self.prompts)
        if self._has_teacher:
            check_teacher(config, hf_config, self.tokenizer, self.prompts)
        self.source = PromptSource(self.prompts, seed=config.run.seed, shuffle=config.data.shuffle)
        rewards = setup.reward_section(config)
        self.scorer = Scorer(rewards, custom=reward)
        self._held.callback(end, self.scorer.close)
        self.filter, self.generate = hooks.filter, hooks.generate
        self.probe = Probe(config, self.run_dir, self.world, self.scorer, hooks.on_step)
        self._held.callback(end, self.probe.close)
        self.advantages = Advantages.load(config.algorithm, config.rollout.max_response_tokens)
        self.objective = Objective.of(config.algorithm, config.correction, config.teacher)
        if reward is None and not (self.agent is not None and self.agent.gives_reward):
            check_labels(self.prompts, rewards)
        self.eval_sets = load_eval_sets(
            config, self.tokenizer, self.context_length, reward, self.scorer, hooks.row_map, self.agent
        )
        for eval_set in self.eval_sets:
            self._held.callback(end, eval_set.scorer.close)
        self.sampling = setup.training_samples(config)

    def _load_model(self) -> None:
        config = self.config
        torch.manual_seed(config.run.seed)
        set_deterministic(config.run.deterministic)
        self.policy = setup.load_policy(config, self.world)
        replay.check_policy(config.correction, self.policy)
        self.reference = setup.load_reference(config, self.world, self.policy)
        self.critic = Critic.build(config, self.world)
        size = int(self.policy.hf_config.get_text_config().vocab_size)
        self.teacher = Teacher.build(config, self.world, size) if self._has_teacher else None
        self.optimizer = build_optimizer(self.policy.parameters(), config.optim)
        self.schedule = self._schedule(steps_done=0)
        state = setup.training_state(
            config.parallel, self.policy, self.reference, self.optimizer, self.critic, self.teacher
        )
        self._held.callback(end, state.close)
        engine = self._build_engine(state)
        self.rollouts = Rollouts.build(config, engine, self.world, self.policy, state)
        self._held.callback(end, lambda: self.engine.close())
        self._held.callback(end, self.rollouts.close)
        self.cost = CostModel.from_config(self.policy.hf_config.get_text_config())
        self.writer = SampleWriter(self.run_dir, self.world.rank, self.world.size) if config.log.save_samples else None
        for text in setup.warnings(config, self.policy, self.tokenizer, len(self.prompts)):
            self.console.warning(text)

    def _build_engine(self, state: TrainingState) -> Engine:
        config, routing = self.config, self.sampling.return_routing
        if self.rollout_ranks:
            ranks, context = self.rollout_ranks, self.context_length
            return remote_engine(config, self.policy, self.world, ranks, context, return_routing=routing)
        return engines.build_engine(
            config.engine,
            self.policy,
            self.tokenizer,
            self.context_length,
            config.model.trust_remote_code,
            sync=config.sync,
            world=self.world,
            run_dir=self.run_dir,
            seed=engines.engine_seed(config.run),
            state=state,
            return_routing=routing,
            idle=self.dumped is not None,
        )

    @property
    def engine(self) -> Engine:
        """What samples."""
        return self.rollouts.engine

    # ---- one step ----

    def step(self, prompts: Sequence[Prompt], source: PromptSource | None = None) -> dict[str, float]:
        """One step on these prompts (all ranks get the same): collect, then update. Returns the step's metrics.

        `source`: where they came from, if `rollout.filter` may draw more of them and give back what it does not need.
        """
        if self._torn:
            raise UserError(
                "a step was interrupted in its updates: make a new Trainer, which resumes from a checkpoint"
            )
        tally, timer = Tally(), self.probe.begin(self.steps_done + 1)
        if self.rollouts.carries:
            with timer("generate"):
                self.rollouts.settle()
        with timer("sync"):
            self.rollouts.sync(self.policy_version)
        selection = self.selection(prompts, source)
        with timer("generate"):
            groups = self.collect(prompts, selection)
        if source is not None:
            source.give_back(selection.num_unused)
        if self.dumped is None:
            check_staleness(groups, self.policy_version, self.config.rollout.staleness, tally)
        self.probe.collected(self.steps_done + 1, groups, selection)
        with timer("sync"):
            self.rollouts.release()
        with timer("train"):
            set_advantages(groups, self.advantages)
            if self.teacher is not None:
                self.teacher.score(groups)
            batch = self.pack(groups)
            self.add_logprobs(batch, tally)
            if self.critic is not None:
                self.critic.add_values(batch)
            finish_advantages(groups, batch, self.advantages, self.world)
            if self.critic is not None and (explained := explained_variance(batch, self.world)) is not None:
                tally.add("critic/explained_variance", explained, kind="max")  # known to all ranks
            normalize_weights(batch, self.world, self.config.correction)
            self._torn = True
            for minibatch in batch:
                self._update(minibatch, tally)
        self._advance(selection, source)
        self._torn = False
        self._report(groups, selection, tally)
        metrics = self._metrics(tally, timer.metrics(), num_updates=len(batch))
        return self.probe.finish(self.steps_done, groups, metrics)

    def _update(self, minibatch: Sequence[Microbatch], tally: Tally) -> None:
        """One optimizer update, with its metrics; one of the critic beside it, or alone."""
        if self.critic is not None:
            self.critic.update(minibatch, tally)
            if self.critic.policy_waits(self.steps_done):
                return
        result = update(
            self.policy,
            self.optimizer,
            self.schedule,
            minibatch,
            self.objective,
            temperature=self.sampling.temperature,
            max_grad_norm=self.config.optim.max_grad_norm,
            tally=tally,
            teacher=None if self.teacher is None else self.teacher.head(),
        )
        tally.add("optim/grad_norm", result.grad_norm)
        tally.add("optim/lr", result.lr, kind="max")
        tally.add("optim/skipped_updates", float(not result.stepped) / self.world.size, kind="sum")

    def _advance(self, selection: Selection, source: PromptSource | None) -> None:
        """The step is made, whatever becomes of its report."""
        self.policy_version += 1
        self.steps_done += 1
        self.groups_done += selection.num_drawn - selection.num_unused
        updates = self.steps_done * self.config.algorithm.minibatches_per_step
        advance(self.schedule, updates)
        if self.critic is not None:
            self.critic.settle(updates)
        if self.teacher is not None:
            self.teacher.reclaim()
        if source is not None:
            source.settle()

    def _report(self, groups: Sequence[SampleGroup], selection: Selection, tally: Tally) -> None:
        """Metrics, files and console lines about the step's samples."""
        compares = self.config.algorithm.estimator.compares
        tally.merge([rollout_metrics(groups, self.sampling.max_new_tokens, compares=compares)])
        tally.merge([overlong_metrics(groups, self.advantages), agent_metrics(groups)])
        if self.filter is not None:
            for name, value in selection.metrics().items():
                tally.add(name, value, kind="max")  # known to all ranks
        samples = [s for g in groups for s in g.samples]
        if self.writer is not None:
            self.writer.write(self.steps_done, samples)
        self.console.samples(self.steps_done, [g.samples[0] for g in groups if g.samples])

    def selection(self, prompts: Sequence[Prompt], source: PromptSource | None = None) -> Selection:
        """Which groups will be trained on: all, or with `rollout.filter` those that pass, of these and of `source`."""
        rollout = self.config.rollout
        return Selection(
            prompts,
            start=self.groups_done,
            wanted=len(prompts) if self.filter is None else rollout.prompts_per_step,
            more=None if source is None else partial(source.next, rollout.prompts_per_draw),
            peek=None if source is None else source.peek,
            max_draws=rollout.max_draws,
        )

    def collect(self, prompts: Sequence[Prompt], selection: Selection | None = None) -> list[SampleGroup]:
        """This rank's share of the groups, sampled, scored and selected. The weights are in the engine."""
        rollout, selection = self.config.rollout, selection or self.selection(prompts)
        if self.dumped is not None:
            return self.dumped.groups(self.steps_done + 1, selection, self.world)
        mine = deal(self.world, prompts, self.rollouts.ranks_per_engine)
        total = len(mine) * rollout.group_size if self.filter is None else None
        steps_left = self.config.run.steps - self.steps_done - 1
        with self.console.progress("generating", total=total) as bar:
            groups = self.rollouts.collection(
                self._sampler,
                steps_left=max(steps_left, 0),
                selection=selection,
                judge=self.filter,
                prepare=lambda group: apply_truncation([group], rollout.truncated),
                on_group=lambda group: bar.advance(rollout.group_size),
                on_restart=self.console.restarted,
            ).run(partial(self.rollouts.renew, self.policy_version))
        self.scorer.check_failures(self.world.gather(self.scorer.take_stats()))
        if (text := selection.shortage()) is not None:
            self.console.warning(f"step {self.steps_done + 1}: {text}")
        if rollout.partial == "mask":
            mask_older(groups, self.policy_version)
        return groups

    def _sampler(self, engine: Engine) -> Sampler:
        return sampler_of(
            self.agent,
            together=self.config.engine.kind == "transformers" and self.rollouts.repeats,
            engine=engine,
            sampling=self.sampling,
            group_size=self.config.rollout.group_size,
            scorer=self.scorer,
            decode=self.decode,
            seed=self.config.run.seed,
            generate=self.generate,
            watch=self.probe.watch_any if self.rollouts.carries else self.probe.watch,
            context_length=self.context_length,
            vocab_size=int(self.policy.hf_config.get_text_config().vocab_size),
        )

    def pack(self, groups: Sequence[SampleGroup]) -> list[list[Microbatch]]:
        """This rank's microbatches of every update of the step."""
        config, algorithm = self.config, self.config.algorithm
        samples = [TrainSample.from_sample(s) for g in groups for s in g.scored]
        if self.sampling.return_routing:
            replay.check_samples(samples, self.policy.routing_shape)
        models = [m.module for m in (self.policy, self.reference, self.critic) if m is not None]
        models += [] if self.teacher is None else self.teacher.modules
        return build_minibatches(
            samples,
            self.world,
            minibatches=algorithm.minibatches_per_step,
            max_tokens=config.parallel.max_tokens_per_microbatch,
            share_prompts=config.parallel.share_prompts and all(m.packed for m in models),
            skip_zero_advantage=self.objective.may_skip_zero_advantage,
            aggregation=algorithm.aggregation,
            constant_length=algorithm.constant_length or config.rollout.max_response_tokens,
            cost=self.cost,
        )

    def add_logprobs(self, batch: Sequence[Sequence[Microbatch]], tally: Tally) -> None:
        """Old and reference log-probs, and a teacher's, where the algorithm needs them.

        A single update is made on the very weights that sampled, so its old log-probs are the present ones and no pass
        is spent on them.
        """
        temperature, correction = self.sampling.temperature, self.config.correction
        kl_in_reward = self.reference is not None and self.config.algorithm.kl_in == "reward"
        old = kl_in_reward or self.objective.needs_old_logprobs(len(batch))
        for microbatch in (m for minibatch in batch for m in minibatch):
            if old:
                microbatch.old_logprobs = replay.old_logprobs(self.policy, microbatch, temperature, correction, tally)
                mismatch_metrics(microbatch, microbatch.old_logprobs, tally)
            if self.reference is not None:
                microbatch.ref_logprobs = self.reference.logprobs(microbatch, temperature)
        if self.reference is not None:
            self.reference.reclaim()
        if self.teacher is not None:
            self.teacher.add_targets(batch, self.config.correction.score_centering_top_k)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _metrics(self, tally: Tally, times: dict[str, float], num_updates: int) -> dict[str, float]:
        metrics = step_metrics(Tally.merged(self.world.gather(tally.to_dict())), times, num_updates)
        return metrics | self.rollouts.take_metrics() | times | setup.peak_memory(self.world)

    # ---- the run ----

    def train(self) -> dict[str, float]:
        """Train to `run.steps`, from the newest checkpoint if there is one. Returns the last step's metrics.

        UserError if another run is training in `run.dir`.
        """
        return self.loop.train(self)

    @property
    def total_steps(self) -> int:
        return self.config.run.steps

    def next_step(self) -> dict[str, float]:
        """`step` on the next prompts of `source`."""
        with self.source.dealt(self.config.rollout.prompts_per_draw) as prompts:
            return self.step(prompts, self.source)

    def evaluate(self) -> dict[str, float]:
        """Metrics of all `[[eval.sets]]` for the present weights."""
        timer = StageTimer()
        with timer("evaluate"):
            self.rollouts.sync(self.policy_version)
            metrics = evaluate(
                self.rollouts,
                self.eval_sets,
                world=self.world,
                decode=self.decode,
                seed=self.config.run.seed,
                step=self.steps_done,
                version=self.policy_version,
                console=self.console,
                writer=self.writer,
                generate=self.generate,
                agent=self.agent,
                together=self.config.engine.kind == "transformers",
            )
            self.rollouts.release()
        self.console.evaluation(self.steps_done, metrics)
        return metrics | {"time/evaluate": timer.seconds("evaluate")}

    def export(self, folder: str | Path, *, replace: bool = False) -> None:
        """The present weights in Hugging Face format, in the precision of the checkpoint they came from.

        A folder that is not empty is a UserError; `replace` swaps it for the new one, whatever it holds.
        """
        self.rollouts.release()
        run_folder.export_model(self.policy, Path(folder), self.world, replace=replace)

    def load_checkpoint(self, folder: Path, *, weights_only: bool = False) -> None:
        """Take weights, optimizer, schedule, data position and random state from one checkpoint folder.

        `weights_only`, to evaluate: training data may be another than the checkpoint's.
        """
        self.rollouts.release()
        self.rollouts.forget()
        extra = self.loop.load(folder, self, weights_only=weights_only)
        self.steps_done, self.policy_version = extra["step"], extra["policy_version"]
        self.groups_done = extra["groups"]
        run_folder.check_base(extra, self.policy, self.config, folder, self.console)
        if not weights_only:
            self.schedule = self._schedule(self.steps_done)
            if self.critic is not None:
                self.critic.resumed(self.steps_done * self.config.algorithm.minibatches_per_step)

    def training_state(self) -> State:
        """What a checkpoint holds: the policy, and the critic beside it."""
        others = {} if self.critic is None else {"critic": (self.critic.module, self.critic.optimizer)}
        extra = {
            "policy_version": self.policy_version,
            "groups": self.groups_done,
            "adapter_scaling": run_folder.adapter_scaling(self.policy),
        }
        return State(model=self.policy.module, optimizer=self.optimizer, others=others, extra=extra)

    def export_step(self) -> None:
        """Policy and critic to `hf/step_N` and beside it; what was there is replaced."""
        self.rollouts.release()
        run_folder.export_step(self.policy, self.config, self.steps_done, self.world)
        if self.critic is not None:
            self.critic.export(self.run_dir / "hf" / f"step_{self.steps_done:06d}_critic", replace=True)

    def close(self) -> None:
        """Free engine, reward workers and, if it was claimed, the folder."""
        self.loop.close()

    def introduce(self) -> None:
        """Say what the run is; files of samples behind where it goes on are dropped."""
        if self.world.is_main and self.writer is not None:
            self.writer.drop_after(self.steps_done)
        self.probe.resumed(self.steps_done)
        self.world.barrier()
        for prompts in (self.prompts, *(s.prompts for s in self.eval_sets)):
            if prompts.notice:
                self.console.notice(prompts.notice)
        if self.dumped is None and (unused := unused_by_engine(self.config)):
            self.console.notice(f"not used by engine.kind = {self.config.engine.kind!r}: {', '.join(unused)}")
        self.console.settings("LightRL", setup.summary(self.config, self.world, self.policy, self.prompts))

    def _schedule(self, steps_done: int) -> LambdaLR:
        """At the place of a run that had the present settings from the start."""
        updates = self.config.algorithm.minibatches_per_step
        return build_schedule(self.optimizer, self.config.optim, self.config.run.steps * updates, steps_done * updates)
