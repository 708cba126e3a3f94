"""One GPU: a run of a real shape with SGLang; drift, growth, and training state that leaves. One trainer for all.

Qwen3-0.6B with random weights, and coins for rewards.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gpu.sglang_tools import (
    GIB,
    MIB,
    QWEN3,
    MemoryWatch,
    make_files,
    memory_in_use,
    num_values,
    put_back,
    same_bits,
    sections,
    set_learning_rate,
    shards,
    started,
    unwatch,
    watch,
)

from lightrl.distributed.mesh import set_deterministic
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training.trainer import Trainer
from lightrl.types import SampleGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp("real")
    make_files(folder, "qwen3", **QWEN3)
    config = sections(
        engine={"kind": "sglang", "memory_fraction": 0.3, "max_batch": 128},
        rollout={"prompts_per_step": 8, "group_size": 8, "max_response_tokens": 64},
        optim={"lr": 1e-6},
        algorithm={"skip_zero_advantage": False},
        reward={"type": "random"},
        sync={"verify_every": 1},
    )
    yield from started(folder, config)


def test_nothing_drifts_at_learning_rate_0(real: Trainer) -> None:
    """L4. Gradients are not 0; every sync is compared bit by bit."""
    set_learning_rate(real, 0.0)
    before, seen = shards(real), watch(real.engine)
    try:
        steps = [real.step(real.source.next(8)) for _ in range(20)]
    finally:
        unwatch(real.engine)
        set_learning_rate(real, real.config.optim.lr)
    assert all(step["optim/grad_norm"] > 0 and step["optim/skipped_updates"] == 0 for step in steps)
    assert same_bits(before, shards(real))
    assert [loader for loader, _ in seen.passes[0]] == ["receive", "verify"] * 20
    for number in range(20):
        assert seen.passes[0][2 * number + 1][1] == {"differing": {}, "compared": num_values(real)}
    found = [step["mismatch/logprob_abs_diff"] for step in steps]
    first, last = sum(found[:10]) / 10, sum(found[10:]) / 10
    print([round(x, 4) for x in found], f"halves {first:.5f} {last:.5f}")
    assert max(found) <= 0.011
    assert abs(last - first) <= 0.1 * first


def test_no_drift_in_20_updates(real: Trainer) -> None:
    before = shards(real)
    steps = [real.step(real.source.next(8)) for _ in range(21)]
    found = [step["mismatch/logprob_abs_diff"] for step in steps]
    print([round(x, 4) for x in found], "highest of a token", max(s["mismatch/logprob_abs_diff_max"] for s in steps))
    assert not same_bits(before, shards(real))
    assert max(found) <= 0.011


def test_no_growth_in_100_syncs(real: Trainer) -> None:
    """W1."""
    used = []
    for version in range(103):
        sync_weights(real.policy, real.engine, 1000 + version)
        release_engine(real.policy, real.engine)
        if version in (2, 102):
            used.append(memory_in_use())
    print(f"growth over 100 syncs: {(used[1] - used[0]) / MIB:+.1f} MiB")
    assert used[1] - used[0] < 16 * MIB


@dataclass
class Steps:
    """Three steps under one value of `parallel.offload`."""

    groups: list[list[SampleGroup]] = field(default_factory=list)
    """What was trained on, as it was sampled."""
    weights: list[torch.Tensor] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    own: list[int] = field(default_factory=list)
    """Bytes that torch's allocator in this process holds while the engine generates."""
    used: list[int] = field(default_factory=list)
    """… and those of them in use by tensors."""
    seconds: dict[str, float] = field(default_factory=dict)


def test_training_state_that_leaves(real: Trainer) -> None:
    """W2. `always` trains as `never` to the last bit; state, KV cache and weights are never on the GPU together."""
    weights, prompts = shards(real), [real.source.next(8) for _ in range(3)]
    with deterministic_kernels():
        stays = three_steps(real, "never", weights, prompts, None)
        state = real.state._offloader.state_bytes()
        leaves = three_steps(real, "always", weights, prompts, stays.groups)
    real.state._mode = real.config.parallel.offload
    host = real.state._offloader.host_bytes
    for name, steps in (("never", stays), ("always", leaves)):
        gib = {k: round(v / GIB, 2) for k, v in steps.peaks.items()}
        own, used = round(max(steps.own) / GIB, 2), round(max(steps.used) / GIB, 2)
        print(f"{name}: most of the GPU in use, GiB: {gib}; this process while generating {own}, {used} by tensors")
        print(f"{name}: seconds {steps.seconds}")
    print(f"state {state / GIB:.2f} GiB, page-locked host memory {host / GIB:.2f} GiB")
    assert not same_bits(weights, stays.weights)
    assert same_bits(stays.weights, leaves.weights)
    assert leaves.peaks["generate"] <= stays.peaks["generate"] - 0.9 * state
    assert max(leaves.peaks.values()) <= stays.peaks["generate"] - 0.9 * state
    buffers = 2 * real.engine._sender.plan.capacity
    assert max(leaves.own) <= buffers + 768 * MIB  # torch keeps what a small tensor lives in: 0.5 GiB were seen
    assert state <= host <= state + 64 * MIB


def three_steps(
    trainer: Trainer, mode: Any, weights: list[torch.Tensor], prompts: list[Any], groups: list[list[SampleGroup]] | None
) -> Steps:
    """From `weights`, with a new optimizer. The engine generates; trained on are `groups`, if given."""
    put_back(trainer, weights)
    torch.cuda.empty_cache()
    trainer.rollouts.state._mode = mode
    done, collect, pack = Steps(), trainer.collect, trainer.pack

    def collecting(*given: Any) -> list[SampleGroup]:
        watching.stage = "generate"
        done.own.append(torch.cuda.memory_reserved())
        done.used.append(torch.cuda.memory_allocated())
        assert trainer.rollouts.state.is_offloaded == (mode == "always")
        sampled = collect(*given)
        watching.stage = "sync"
        done.groups.append(copy.deepcopy(sampled if groups is None else groups[len(done.groups)]))
        return copy.deepcopy(done.groups[-1])

    def packing(*given: Any) -> Any:
        watching.stage = "train"
        return pack(*given)

    trainer.collect, trainer.pack = collecting, packing  # type: ignore[method-assign]
    try:
        with MemoryWatch("sync") as watching:
            for batch in prompts:
                watching.stage = "sync"
                metrics = trainer.step(batch)
    finally:
        del trainer.collect, trainer.pack
    done.weights, done.peaks = shards(trainer), dict(watching.peaks)
    done.seconds = {k: round(v, 2) for k, v in metrics.items() if k.startswith("time/")}
    return done


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """For good: asked only to warn, torch's flash attention stays as it is."""
    set_deterministic(True)
    try:
        yield
    finally:
        set_deterministic(False)
