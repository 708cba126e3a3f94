"""`lightrl export`: a run's checkpoint to a Hugging Face folder, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_family
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lightrl.config.schema import CheckpointConfig
from lightrl.errors import UserError
from lightrl.models import export, load
from lightrl.training import export_cli
from lightrl.training.checkpoint import Checkpointer


class Policy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.fixture
def run(tmp_path: Path, tiny_llama: Callable[..., Any]) -> tuple[Path, LlamaForCausalLM]:
    """A run folder with steps 1 and 2, and the model as at step 2. It started from a bfloat16 checkpoint."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama(tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "start")
    (tmp_path / "start" / "tokenizer_config.json").write_text("{}")
    model.float()
    keeper = Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig(async_save=False))
    for step in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        optimizer = torch.optim.AdamW(model.parameters())
        keeper.save(step, model=Policy(model), optimizer=optimizer, extra={}, metrics={})
    (tmp_path / "run" / "config.toml").write_text(f'[model]\npath = "{tmp_path / "start"}"\n')
    return tmp_path / "run", model


def test_newest_checkpoint_in_the_starting_type(
    tmp_path: Path, run: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_cli, "MAX_SHARD_BYTES", 10_000)
    folder, model = run
    assert export_cli.export_run(folder, tmp_path / "out").name == "step_000002"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    export.export_hf(
        model,
        tmp_path / "same",
        source=tmp_path / "start",
        dtype=torch.bfloat16,
        is_main=True,
        max_shard_bytes=10_000,
    )
    for file in (tmp_path / "same").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, theirs), (_, ours) in zip(back.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(theirs, ours.bfloat16()), name


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_starting_type_of_a_model_that_sees_too(tmp_path: Path, place: str) -> None:
    """Published configs name it in one of two places; `Trainer.export` asks the same function."""
    make_family(tmp_path / "start", "qwen3_5_text")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    settings: dict[str, Any] = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    settings["text_config"] = {k: v for k, v in model.config.to_dict().items() if k != "dtype"}
    (settings if place == "top" else settings["text_config"])["dtype"] = "bfloat16"
    (tmp_path / "start" / "config.json").write_text(json.dumps(settings))
    assert load.stored_dtype(load.load_model_config(str(tmp_path / "start"))) == torch.bfloat16
    keeper = Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig(async_save=False))
    keeper.save(1, model=Policy(model), optimizer=None, extra={}, metrics={})
    (tmp_path / "run" / "config.toml").write_text(f'[model]\npath = "{tmp_path / "start"}"\n')
    export_cli.export_run(tmp_path / "run", tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == model.state_dict().keys()
    assert {tensor.dtype for tensor in back.values()} == {torch.bfloat16}


def test_one_checkpoint_in_another_type(tmp_path: Path, run: tuple[Path, LlamaForCausalLM]) -> None:
    folder, model = run
    export_cli.export_run(folder / "checkpoints" / "step_000002", tmp_path / "out", "float32")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())


def test_what_cannot_be_exported(
    tmp_path: Path, run: tuple[Path, LlamaForCausalLM], tiny_llama: Callable[..., Any]
) -> None:
    folder, _ = run
    out = tmp_path / "out"
    newest = folder / "checkpoints" / "step_000002"
    with pytest.raises(UserError, match="'int8' is not one of auto, bfloat16"):
        export_cli.export_run(folder, out, "int8")
    with pytest.raises(UserError, match="no such folder"):
        export_cli.export_run(tmp_path / "absent", out)
    with pytest.raises(UserError, match="neither a run folder"):
        export_cli.export_run(tmp_path / "start", out)
    (newest / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"step_000002 is damaged: state.json has 2 bytes"):
        export_cli.export_run(newest, out)
    assert export_cli.export_run(folder, out).name == "step_000001"
    LlamaForCausalLM(tiny_llama(num_hidden_layers=3)).save_pretrained(tmp_path / "start")
    with pytest.raises(UserError, match=r"another model .* it has no lm_head\.weight|has no model\.layers\.2"):
        export_cli.export_run(folder, tmp_path / "new")
    (folder / "config.toml").unlink()
    with pytest.raises(UserError, match=r"config\.toml is missing"):
        export_cli.export_run(folder, out)
