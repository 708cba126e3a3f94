"""Rules of `rollout.schedule`, `rollout.max_staleness` and `rollout.partial`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.config.kinds import Faults

if TYPE_CHECKING:
    from lightrl.config.schema import Config


def of_rollouts(config: Config) -> Faults:
    """(key, what is wrong and what to do)."""
    rollout, problems = config.rollout, []
    how = f"rollout.schedule = {rollout.schedule!r}"
    if rollout.max_staleness is not None and rollout.schedule != "async" and rollout.partial == "drop":
        text = "only used by rollout.schedule = 'async', or with rollout.partial = 'mask' or 'correct': drop it"
        problems.append(("rollout.max_staleness", text))
    elif rollout.max_staleness is not None and rollout.schedule == "one_step_off":
        problems.append(("rollout.max_staleness", f"it is 1 with {how}: drop it"))
    if rollout.schedule != "sync" and config.engine.kind == "sglang" and not config.parallel.rollout_ranks:
        text = (
            f"{how} generates while it trains, and engine.kind = 'sglang' gives its GPUs back to training: set "
            "parallel.rollout_ranks, so that some ranks generate alone, or engine.kind = 'sglang_server', with servers "
            "on other GPUs, or rollout.schedule = 'sync'"
        )
        problems.append(("rollout.schedule", text))
    problems += _of_partial(config)
    old = rollout.staleness > 0 and rollout.partial != "mask"
    if old and not config.correction.reads_rollout_logprobs:
        key = "rollout.schedule" if rollout.schedule != "sync" else "rollout.partial"
        text = (
            f"{key} = {getattr(rollout, key.split('.')[1])!r} trains on tokens of older weights, and nothing in "
            "[correction] goes by their log-probs: set correction.use_tis = true (the old policy is the trainer's) or "
            "correction.use_rollout_logprobs = true (it is the engine's)"
        )
        problems.append((key, text))
    return problems


def _of_partial(config: Config) -> Faults:
    rollout, how = config.rollout, f"rollout.partial = {config.rollout.partial!r}"
    if rollout.partial == "drop":
        return []
    problems = []
    if rollout.schedule != "sync":
        text = f"rollout.schedule = {rollout.schedule!r} goes on with what is under way by itself: drop {how}"
        problems.append(("rollout.partial", text))
    elif rollout.filter == "none":
        problems.append(("rollout.partial", f"{how}: without a rollout.filter nothing is aborted: set one, or drop it"))
    if config.agent.enabled:  # an episode could be held only with the state of its tools, or of a program outside
        text = f"{how}: episodes of agent.environment or agent.tools are not held, as their environments go on: "
        problems.append(("rollout.partial", f"{text}set 'drop', or rollout.schedule = 'async'"))
    return problems
