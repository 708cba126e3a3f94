"""Weights a group at a time: all that are lent, and what `save_pretrained` writes; on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_run
from families import FAMILIES, make_family


def compare(folder: str, sections: str) -> None:
    """The stream against what is lent: names, order, shapes and bits; then once more."""
    import torch

    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(Path(folder), **json.loads(sections)))
    policy = trainer.policy
    whole = {name: tensor.clone() for name, tensor in policy.lend()}
    policy.reclaim()
    stream = policy.stream()
    sharded = [type(p).__name__ for p in policy.module.parameters()]
    for _ in range(2):
        found = {}
        for group in stream:
            for name, tensor in group:
                assert name not in found
                found[name] = tensor.to(policy.compute_dtype, copy=True)
        assert found.keys() == whole.keys()
        assert [(n, tuple(t.shape), t.dtype) for n, t in found.items()] == stream.layout()
        for name, tensor in whole.items():
            assert torch.equal(found[name], tensor), name
        assert [type(p).__name__ for p in policy.module.parameters()] == sharded  # nothing is left whole
    assert len(list(stream)) >= 3  # two layers and the rest
    trainer.close()
    close_world()


@pytest.mark.parametrize(("ranks", "tied"), [(1, True), (2, False)])
def test_stream_equals_lent(tmp_path: Path, run_distributed, ranks: int, tied: bool) -> None:
    tiny_run.make_model(tmp_path / "model", family="qwen3", head_dim=8, tie_word_embeddings=tied)
    tiny_run.make_data(tmp_path / "data.jsonl")
    model = {"compute_dtype": "bfloat16", "activation_checkpointing": ranks == 2}
    run_distributed(compare, ranks, tmp_path, json.dumps({"model": model}))


def compare_stored(folder: str) -> None:
    """Every family's stream against a stock bfloat16 save: names, shapes and bits; twice."""
    import logging

    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from lightrl.config.schema import ModelConfig
    from lightrl.distributed.mesh import close_world, init_world
    from lightrl.training.policy import Policy

    world = init_world("cpu")
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightrl.models.load").addHandler(handler)
    for family in FAMILIES:
        source, again = Path(folder) / family, Path(folder) / f"{family}_again"
        if world.is_main:
            make_family(source, family)
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(again)
        world.barrier()
        stored = load_file(again / "model.safetensors")
        stream = Policy.load(ModelConfig(path=str(source), compute_dtype="bfloat16"), world).stream()
        layout = {name: (shape, dtype) for name, shape, dtype in stream.layout()}
        assert layout.keys() == stored.keys(), (family, layout.keys() ^ stored.keys())
        for _ in range(2):
            order = []
            for group in stream:
                for name, tensor in group:
                    order.append(name)
                    shape, dtype = layout[name]
                    assert tuple(tensor.shape) == shape == tuple(stored[name].shape), (family, name)
                    # the stream has what the trainer computes with; stock stores a router's weight as float32, and
                    # rounds decays, which stay float32 here
                    coarser = min(dtype, stored[name].dtype, key=lambda kind: kind.itemsize)
                    assert torch.equal(tensor.to(coarser), stored[name].to(coarser)), (family, name)
            assert order == list(layout)
    assert len(warned) == 1  # each rank read its own parts of all but one
    assert "hrm_text stores its weights in another way" in warned[0]
    close_world()


@pytest.mark.parametrize("ranks", [1, 2])
def test_stream_equals_saved(tmp_path: Path, run_distributed, ranks: int) -> None:
    run_distributed(compare_stored, ranks, tmp_path, timeout=300)
