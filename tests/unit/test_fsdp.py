"""What of a block's weights is whole, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from torch.distributed.tensor import DTensor

from lightrl.config.schema import ModelConfig
from lightrl.distributed import fsdp
from lightrl.distributed.mesh import close_world, init_world
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import Policy


@pytest.fixture
def world() -> Iterator[Any]:
    yield init_world("cpu")
    close_world()


def whole(policy: Policy) -> list[bool]:
    """By block."""
    blocks = fsdp.decoder_blocks(policy.model).children()
    return [not any(isinstance(p, DTensor) for p in block.parameters()) for block in blocks]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_weights_stay_whole_until_the_backward_pass(world: Any, tmp_path: Path, reshard: bool, recompute: bool) -> None:
    path = tiny_run.make_model(tmp_path / "model")
    settings: Any = {"activation_checkpointing": recompute, "reshard_after_forward": reshard}
    policy = Policy.load(ModelConfig(path=str(path), compute_dtype="float32", **settings), world)
    sample = TrainSample(
        group_index=0, index=0, prompt=[5, 6], response=[7, 8, 9], loss_mask=[1] * 3, rollout_logprobs=None,
        advantage=1.0,
    )  # fmt: skip
    batch = pack([[sample]], [[1.0]])
    for _ in range(2):
        assert not any(whole(policy))
        policy.logprobs(batch, 1.0)
        assert whole(policy) == [not reshard] * len(whole(policy))
        logprobs, _ = policy(batch, 1.0)
        assert whole(policy) == [not reshard] * len(whole(policy))
        logprobs.sum().backward()
    policy.logprobs(batch, 1.0)
    policy.reclaim()
    assert not any(whole(policy))
