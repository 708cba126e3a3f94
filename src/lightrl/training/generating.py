"""Samples and scores into a dump, without training: `lightrl generate`."""

from __future__ import annotations

import statistics
from pathlib import Path

from lightrl.config.sampling_only import for_generation
from lightrl.config.schema import Config
from lightrl.errors import UserError
from lightrl.observe.rollouts import RolloutWriter
from lightrl.training.probe import rollout_writer
from lightrl.training.rollout_ranks import serve_rollouts
from lightrl.training.trainer import Trainer
from lightrl.types import SampleGroup


def check_out(out: Path, what: str = "generate: --out") -> None:
    """UserError for a folder that has rollouts: two dumps would mix."""
    if out.exists() and (not out.is_dir() or any(out.glob("step_*.jsonl*"))):
        raise UserError(f"{what}: {out} holds something already; name a new folder, or remove it")


def generate(config: Config, out: Path, *, steps: int, checkpoint: Path | None) -> Path:
    """Collect `steps` steps of groups and write them to `out`, as `dump.rollouts` does. A collective.

    From the weights of `checkpoint`, or the model's own; prompts come from the beginning of their order.
    """
    check_out(out)
    config = for_generation(config)
    if serve_rollouts(config):
        return out
    trainer = Trainer(config, only_sample=True)
    try:
        if checkpoint is not None:
            trainer.load_checkpoint(checkpoint, weights_only=True)
        _generate(trainer, rollout_writer(out, config, trainer.world), steps)
    finally:
        trainer.close()
    return out


def _generate(trainer: Trainer, writer: RolloutWriter, steps: int) -> None:
    trainer.rollouts.renew(trainer.policy_version)
    first = trainer.steps_done + 1
    for step in range(first, first + steps):
        prompts = trainer.source.next(trainer.config.rollout.prompts_per_draw)
        selection = trainer.selection(prompts, trainer.source)
        groups = trainer.collect(prompts, selection)
        trainer.source.give_back(selection.num_unused)
        trainer.groups_done += selection.num_drawn - selection.num_unused
        trainer.steps_done = step
        writer.write(step, groups, selection.record())
        trainer.console.notice(_told(step, trainer.world.gather(_numbers(groups))))
    trainer.rollouts.release()


def _numbers(groups: list[SampleGroup]) -> tuple[int, list[float]]:
    samples = [s for g in groups for s in g.samples]
    return len(samples), [float(s.reward) for s in samples if s.reward is not None]


def _told(step: int, parts: list[tuple[int, list[float]]]) -> str:
    rewards = [reward for _, part in parts for reward in part]
    told = f"step {step}: {sum(count for count, _ in parts)} samples"
    if rewards:
        told += f", reward {statistics.fmean(rewards):.4g} ± {statistics.pstdev(rewards):.4g}"
    return told
