"""Routing replay of a step: which forwards of the policy write routing down, and which choose it again.

`trainer` (R2): the pass before the updates writes down what it chose, and each update chooses the same. `rollout` (R3):
the engine wrote it down; that pass, if there is one, and each update choose the same. Reference and critic are other
models, and route by themselves. Every record is used once in each forward that it is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrl.config.schema import CorrectionConfig
from lightrl.errors import UserError
from lightrl.models.routing import Recorder, Replay, RoutingShape
from lightrl.observe.metrics import Tally
from lightrl.training.packing import TrainSample
from lightrl.training.policy import Policy
from lightrl.types import NOT_RECORDED, Microbatch, RoutingRecord

KEY = "correction.routing_replay"


def check_policy(config: CorrectionConfig, policy: Policy) -> None:
    """UserError for routing that cannot be replayed: the model runs by code of its own."""
    if config.routing_replay != "none" and policy.routing_shape is None:
        kind = type(policy.model).__name__
        raise UserError(f"{KEY}: {kind} runs by its own code, whose routers are not known: set it to 'none'")


def check_samples(samples: Sequence[TrainSample], shape: RoutingShape | None) -> None:
    """RuntimeError for an answer whose routing an engine did not give, or gave of another model."""
    assert shape is not None
    for sample in samples:
        if not sample.response:
            continue
        where, record = f"{KEY}: sample {sample.group_index}/{sample.index}", sample.rollout_routing
        if record is None:
            raise RuntimeError(f"{where}: the engine did not say which experts it chose")
        expected = (len(sample.prompt) + len(sample.response) - 1, len(shape.layers), shape.top_k)
        if tuple(record.shape) != expected or record.dtype != shape.dtype:
            raise RuntimeError(
                f"{where}: the engine's choices are {list(record.shape)} of {record.dtype}, the trainer makes "
                f"{list(expected)} of {shape.dtype}"
            )
        known = record != NOT_RECORDED[record.dtype]
        if bool((known & (record >= shape.num_experts)).any()):
            raise RuntimeError(f"{where}: the engine chose an expert beyond the policy's {shape.num_experts}")


def old_logprobs(
    policy: Policy, batch: Microbatch, temperature: float, config: CorrectionConfig, tally: Tally
) -> Tensor:
    """Log-probs [N] of the policy before the step's updates, on the host."""
    if config.routing_replay == "trainer":
        assert policy.routing_shape is not None
        recorder = Recorder(policy.routing_shape)
        found = policy.logprobs(batch, temperature, recorder)
        batch.routing = RoutingRecord(experts=recorder.experts.cpu())
        return found
    if batch.routing is not None:
        batch.routing.due += 1  # beside the update's
    replay = replay_of(batch, config, policy.device)
    found = policy.logprobs(batch, temperature, replay)
    if replay is not None:
        mismatch_metrics(replay, tally)
    return found


def replay_of(batch: Microbatch, config: CorrectionConfig, device: torch.device) -> Replay | None:
    """What a forward of the policy is to choose. RuntimeError where there should be a record and is none."""
    if batch.routing is not None:
        return Replay(batch.routing.take().to(device, non_blocking=True))
    by_engine = config.routing_replay == "rollout" and bool(batch.sample_keys)
    by_trainer = config.routing_replay == "trainer" and batch.old_logprobs is not None
    if by_engine or by_trainer:
        raise RuntimeError(f"{KEY} = {config.routing_replay!r}: a microbatch has no record of its routing")
    return None


def check_used(batch: Microbatch) -> None:
    """RuntimeError for a record that was made for more forwards than there were."""
    if batch.routing is not None and batch.routing.due:
        raise RuntimeError(f"{KEY}: a routing record was not used in {batch.routing.due} forwards that it is for")


def update_metrics(replay: Replay, batch: Microbatch, config: CorrectionConfig, tally: Tally) -> None:
    """Of a forward of an update, once it is over."""
    if config.routing_replay == "rollout":
        if batch.old_logprobs is None:  # else the pass before has told
            mismatch_metrics(replay, tally)
        return
    counts = replay.counts()
    tally.add("routing/changed_share", counts.choices_other / max(counts.choices, 1), weight=counts.choices)


def mismatch_metrics(replay: Replay, tally: Tally) -> None:
    """How often the engine chose other experts than the trainer would."""
    counts = replay.counts()
    tally.add("mismatch/routing_diff", counts.rows_other / max(counts.rows, 1), weight=counts.rows)
    tally.add("mismatch/routing_diff_choices", counts.choices_other / max(counts.choices, 1), weight=counts.choices)
    tally.add("routing/missing_share", 1 - counts.choices / max(counts.total, 1), weight=counts.total)
