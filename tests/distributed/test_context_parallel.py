"""Rows of a microbatch shared by gloo ranks against one process that has them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from distributed.test_expert_parallel import (
    RUN,
    assert_close,
    assert_same_runs,
    make_run_folder,
    two_updates,
    with_parallel,
)
from families import make_family
from safetensors.torch import load_file, save_file

CASES: dict[str, dict[str, Any]] = {
    "llama": {"max_tokens": 24},  # microbatches of a row or none, and of rows that the ranks do not divide
    "qwen3_moe": {"activation_checkpointing": True},
    "one_sample": {"model": "gpt_oss", "only": 1, "activation_checkpointing": True},  # sinks, windows
    "deepseek_v3": {"max_tokens": 30},  # values of another width
    "qwen3_next": {"activation_checkpointing": True, "max_tokens": 24},
    "qwen3_5_text": {},
    "mimo_v2_flash": {},
}
TWO: dict[str, dict[str, Any]] = {name: {"context_parallel": 2} for name in CASES}
TWO["qwen3_moe"]["expert_parallel"] = 2
FOUR: dict[str, dict[str, Any]] = {
    "llama": {"context_parallel": 4},  # two key and value heads
    "qwen3_moe": {"context_parallel": 2, "expert_parallel": 4},
    "one_sample": {"context_parallel": 4, "expert_parallel": 2, "shard_size": 2},
    "qwen3_next": {"context_parallel": 2, "shard_size": 2},
}


def case_of(name: str) -> dict[str, Any]:
    return {"model": name, **CASES[name]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each case on one process."""
    from lightrl.distributed.mesh import close_world

    folder = tmp_path_factory.mktemp("models")
    try:
        for name in CASES:
            family = case_of(name)["model"]
            make_family(folder / family, family)
            save_file(two_updates(folder, case_of(name)), folder / f"{name}.safetensors")
    finally:
        close_world()
    return folder


def compare(root: str, ranks: str) -> None:
    from lightrl.distributed.mesh import close_world

    for name, changes in (TWO if ranks == "2" else FOUR).items():
        found = two_updates(Path(root), {**case_of(name), **changes})
        assert_close(found, load_file(Path(root) / f"{name}.safetensors"), name)
    close_world()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one(models: Path, run_distributed, ranks: int) -> None:
    run_distributed(compare, ranks, models, str(ranks), timeout=300)


def test_a_run_of_two_equals_one(tmp_path: Path, run_distributed) -> None:
    """With what sums over a sample that is spread: the KL in the reward; and whitening over all loss tokens."""
    algorithm = {"kl_coef": 0.1, "kl_in": "reward", "whiten": "batch", "minibatches_per_step": 2}
    sections = {**RUN, "algorithm": algorithm}
    for name in ("alone", "spread"):
        make_run_folder(tmp_path / name)
    run_distributed(tiny_run.train, 1, tmp_path / "alone", json.dumps(sections))
    run_distributed(tiny_run.train, 2, tmp_path / "spread", json.dumps(with_parallel(sections, context_parallel=2)))
    assert_same_runs(tmp_path / "spread", tmp_path / "alone")


def test_rows_are_shared_evenly() -> None:
    """Two answers `x y` and `z` to `a b`, prompt shared: rows a b x, and one more to make two for each rank."""
    from lightrl.training.packing import TrainSample, pack, share_rows

    a, b, x, y, z = 11, 12, 13, 14, 15
    samples = [
        TrainSample(group_index=0, index=i, prompt=[a, b], response=r, loss_mask=[1] * len(r),
                    rollout_logprobs=None, advantage=float(i))
        for i, r in enumerate([[x, y], [z]])
    ]  # fmt: skip
    first, second = (share_rows(pack([samples], [[0.2, 0.3]]), rank, 2) for rank in (0, 1))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([a, b], [x, 0])
    assert (first.position_ids.tolist(), second.position_ids.tolist()) == ([0, 1], [2, 0])
    for part in (first, second):
        assert part.cu_seqlens_q.tolist() == [0, 2, 3, 4]
        assert part.cu_seqlens_k.tolist() == [0, 2, 5, 6]
        assert part.kv_index is not None
        assert part.kv_index.tolist() == [0, 1, 0, 1, 2, 3]
        assert part.cu_seqlens_q.dtype == torch.int32
    assert (first.logit_rows.tolist(), first.targets.tolist(), first.sample_ids.tolist()) == ([1, 1], [x, z], [0, 1])
    assert (second.logit_rows.tolist(), second.targets.tolist(), second.sample_ids.tolist()) == ([0], [y], [0])
    assert first.loss_weights.tolist() == pytest.approx([0.2, 0.3])
    assert second.loss_weights.tolist() == pytest.approx([0.2])


@pytest.mark.parametrize(
    ("family", "ranks", "reason"),
    [
        ("llama", 3, "it has 4 heads"),
        ("qwen3_next", 4, "it has linear_num_key_heads = 2"),
        ("gemma2", 2, "gemma2 is not packed"),
    ],
)
def test_what_cannot_be_shared_is_refused(family: str, ranks: int, reason: str) -> None:
    from families import FAMILIES
    from transformers import AutoConfig

    from lightrl.config.schema import ParallelConfig
    from lightrl.errors import UserError
    from lightrl.training.setup import check_parallel

    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, **FAMILIES.get(family, {})}
    parallel, config = ParallelConfig(context_parallel=ranks), AutoConfig.for_model(family, **settings)
    with pytest.raises(UserError, match=f"^parallel.context_parallel: {ranks} ranks cannot .* of a model: {reason}$"):
        check_parallel(parallel, config, "a model")


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    from lightrl.errors import UserError
    from lightrl.training.trainer import Trainer

    config = tiny_run.make_run(tmp_path, parallel={"context_parallel": 2})
    with pytest.raises(UserError, match=r"^parallel.context_parallel: 2 does not divide the 1 ranks of this run$"):
        Trainer(config)
