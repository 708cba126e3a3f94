"""The section `[parallel]`, and the rules of `parallel.rollout_ranks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass

from lightrl.config.kinds import STRICT, Count, Faults, PositiveFloat, PositiveInt, Seconds

if TYPE_CHECKING:
    from lightrl.config.schema import Config


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """How the model and the batch are spread."""

    shard_size: PositiveInt | None = None
    """Ranks a copy of the model is sharded over; the rest replicate (HSDP). Default: all ranks."""
    expert_parallel: PositiveInt = 1
    """Consecutive ranks that share the experts of a mixture: each computes its own, and tokens travel to them, instead
    of all experts being gathered on every rank. Divides `shard_size` and the number of experts."""
    context_parallel: PositiveInt = 1
    """Consecutive ranks that share each microbatch's rows, for samples too long for one: attention runs over all rows,
    on a part of the heads. Divides the ranks and the heads."""
    rollout_ranks: Count = 0
    """So many ranks, the last of the job, hold engines and do not train; the others train and hold none
    (docs/rollouts.md#placement). 0: every rank trains, and generates with an engine of its own."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Packed tokens in one forward, a rank. A longer single sample gets a microbatch of its own."""
    share_prompts: bool = True
    """Compute a prompt once for all its samples in a microbatch, where the attention allows it."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Parameters and optimizer state leave the GPU for page-locked host memory while an engine in another process
    generates on it: `auto` only where the engine's memory is not free otherwise."""
    offload_host_gib: PositiveFloat | None = None
    """Host memory a rank may take for it; default: as much as its state."""
    timeout: Seconds = 1800.0
    """Seconds a collective may wait before the run is ended with an error."""


def of_placement(config: Config) -> Faults:
    """(key, what is wrong and what to do), as far as it can be said without the number of ranks."""
    ranks, engine, key = config.parallel.rollout_ranks, config.engine, "parallel.rollout_ranks"
    if not ranks:
        return []
    problems = []
    if engine.kind == "sglang_server":
        text = "engine.kind = 'sglang_server' generates on servers elsewhere: set it to 0, or engine.kind = 'sglang'"
        problems.append((key, f"{ranks}, but {text}"))
    elif ranks % engine.tensor_parallel:
        text = f"engine.tensor_parallel = {engine.tensor_parallel} does not divide it: each engine takes as many ranks"
        problems.append((key, f"{ranks}, but {text}"))
    if config.debug.rollouts is not None:
        problems.append((key, f"{ranks}, but debug.rollouts trains without engines: set it to 0"))
    return problems


def without_rollout_ranks(config: Config, command: str) -> Faults:
    """The same for a command that generates nothing."""
    if not config.parallel.rollout_ranks:
        return []
    return [("parallel.rollout_ranks", f"lightrl {command} generates nothing: set it to 0, so that all ranks train")]
