"""Hugging Face folders in and out, against stock `from_pretrained` and `save_pretrained`, in a world of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import make_family
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrl.errors import UserError
from lightrl.models import export, load
from lightrl.models.context import context_length

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "rope_parameters": _YARN}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "glm4_moe": (  # has a persistent buffer that stays float32
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
}
_SHARD = "20KB"


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if ours:
        dist.destroy_process_group()


def _stock(family: str) -> PreTrainedModel:
    kind, changes = _FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SIZES, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for tensor in load.persistent_tensors(model).values():
            tensor.add_(torch.randn(tensor.shape) * 0.1)  # norms are ones and biases zeros otherwise
    return model


def _sharded(folder: Path) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (1,))
    model = load.empty_model(AutoConfig.from_pretrained(folder))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(7)  # what `to_empty` leaves is not zero in general
    return model


def _folder(path: Path, family: str = "llama") -> Path:
    """A checkpoint as found on the hub: several shards, tokenizer, licence, and a pickle."""
    _stock(family).save_pretrained(path, max_shard_size=_SHARD)
    (path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    (path / "LICENSE").write_text("licence")
    (path / "README.md").write_text("card")
    (path / "training_args.bin").write_bytes(b"pickle")
    (path / ".cache").mkdir()
    return path


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.usefixtures("world")
def test_round_trip(tmp_path: Path, family: str) -> None:
    source = _folder(tmp_path / "source", family)
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = _sharded(source)
    load.load_weights(model, source)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert torch.equal(ours.full_tensor(), theirs), name
    buffers = list(zip(model.named_buffers(), stock.named_buffers(), strict=True))
    assert any("inv_freq" in name for (name, _), _ in buffers)
    for (name, ours), (_, theirs) in buffers:
        assert torch.equal(ours, theirs), name

    ids = torch.arange(20)[None]
    for dtype in (torch.float32, torch.bfloat16):
        ours_dir, stock_dir = tmp_path / f"ours_{dtype}", tmp_path / f"stock_{dtype}"
        model(ids, use_cache=False)  # leaves FSDP's root group whole
        export.export_hf(model, ours_dir, source=source, dtype=dtype, is_main=True, max_shard_bytes=20_000)
        same = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        same.save_pretrained(stock_dir, max_shard_size=_SHARD)
        _compare_folders(ours_dir, stock_dir, bytes_equal="moe" not in family)
        back, info = AutoModelForCausalLM.from_pretrained(ours_dir, output_loading_info=True)
        assert not any(info.values())
        assert back.dtype is dtype
        assert torch.equal(back(ids).logits, same(ids).logits)


def _compare_folders(ours: Path, stock: Path, *, bytes_equal: bool) -> None:
    """Weights equal bit for bit; for dense families so do the split, the index and the config."""
    weights, expected = _all_tensors(ours), _all_tensors(stock)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype is tensor.dtype
        assert torch.equal(weights[name], tensor), name
    assert len(list(ours.glob("*.safetensors"))) > 1
    if bytes_equal:
        for file in stock.iterdir():
            if file.suffix != ".json":
                assert file.read_bytes() == (ours / file.name).read_bytes(), file.name
            else:
                assert json.loads(file.read_text()) == json.loads((ours / file.name).read_text()), file.name
    extra = {f.name for f in ours.iterdir()} - {f.name for f in stock.iterdir()}
    assert {n for n in extra if "safetensors" not in n} == {"tokenizer_config.json", "LICENSE", "README.md"}


def _all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


@pytest.mark.usefixtures("world")
def test_export_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _folder(tmp_path / "source")
    model = _sharded(source)
    load.load_weights(model, source)

    def run(out: Path, replace: bool = False) -> None:
        export.export_hf(model, out, source=source, dtype=None, is_main=True, replace=replace)

    run(tmp_path / "out")
    with pytest.raises(UserError, match="out is not empty"):
        run(tmp_path / "out")
    (tmp_path / "out" / "old").write_text("")
    run(tmp_path / "out", replace=True)
    assert not (tmp_path / "out" / "old").exists()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path / "out", replace=True)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path / "new")
    assert (tmp_path / "out" / "model.safetensors").is_file()  # the old one survives
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def _rewrite(folder: Path, change: Any) -> None:
    """Replace the shards by one file with changed tensors."""
    tensors = _all_tensors(folder)
    change(tensors)
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


_Q = "model.layers.1.self_attn.q_proj.weight"
_HEAD = {"lm_head.weight": torch.zeros(97, 32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(_Q), f"lacks {_Q}"),
        (lambda t: t.update(extra=torch.zeros(1)), "has unknown extra"),
        (lambda t: t.update({_Q: torch.zeros(32, 31)}), rf"{_Q} has shape \(32, 31\), .* needs \(32, 32\)"),
        (lambda t: t.update(_HEAD), "ties lm_head.weight to model.embed_tokens.weight, but they differ"),
    ],
)
@pytest.mark.usefixtures("world")
def test_weights_that_do_not_fit(tmp_path: Path, change: Any, message: str) -> None:
    source = _folder(tmp_path / "source")
    _rewrite(source, change)
    with pytest.raises(UserError, match=message) as caught:
        load.load_weights(_sharded(source), source)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("world")
def test_tied_name_and_old_buffers_are_accepted(tmp_path: Path) -> None:
    """Old files hold the head twice, or under the head's name only, and rotary frequencies."""
    source = _folder(tmp_path / "source")
    table = _all_tensors(source)["model.embed_tokens.weight"]

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    for change in (rename, lambda t: t.update({"model.embed_tokens.weight": table.clone()})):
        _rewrite(source, change)
        model = _sharded(source)
        load.load_weights(model, source)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight.full_tensor(), table)


def test_language_model_of_a_larger_one(tmp_path: Path) -> None:
    """Its names have a prefix, which an export keeps, and lie beside those of parts that are not trained."""
    source = make_family(tmp_path / "source", "qwen3_5_moe_text")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors.update({"mtp.fc.weight": torch.zeros(2), "model.visual.pos_embed.weight": torch.zeros(3)})

    _rewrite(source, rename)
    model = _materialised(source)
    load.load_weights(model, source)
    stock = AutoModelForCausalLM.from_pretrained(source)
    for name, tensor in load.persistent_tensors(stock).items():
        assert torch.equal(load.persistent_tensors(model)[name], tensor), name
    stock.save_pretrained(tmp_path / "stock")
    export.export_hf(model, tmp_path / "ours", source=source, dtype=None, is_main=True)
    ours = _all_tensors(tmp_path / "ours")
    assert ours.keys() == _all_tensors(tmp_path / "stock").keys()
    assert "model.language_model.layers.1.mlp.experts.3.up_proj.weight" in ours


def test_experts_beside_a_tied_head_that_is_stored_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read in parts like any other; a head with values of its own would be lost."""
    source = make_family(tmp_path / "source", "qwen3_moe", tie_word_embeddings=True)
    table = _all_tensors(source)["model.embed_tokens.weight"]
    _rewrite(source, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    model = _materialised(source)
    load.load_weights(model, source)
    assert torch.equal(model.get_output_embeddings().weight, table)
    assert not caplog.messages  # none that the whole model is loaded first
    _rewrite(source, lambda tensors: tensors.update({"lm_head.weight": table + 1}))
    with pytest.raises(UserError, match=r"config\.json ties .*, but they differ"):
        load.load_weights(_materialised(source), source)


def test_damaged_folders(tmp_path: Path) -> None:
    source = _folder(tmp_path / "source")
    lost = sorted(source.glob("*.safetensors"))[0]
    lost.write_bytes(lost.read_bytes()[:100])
    with pytest.raises(UserError, match=f"{lost.name}: not a readable safetensors file"):
        load.load_weights(_materialised(source), source)
    lost.unlink()
    with pytest.raises(UserError, match=f"names files that are not there: {lost.name}"):
        load.checkpoint_files(source)
    (source / load.INDEX_FILE).write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    with pytest.raises(UserError, match="names files that are not there"):
        load.checkpoint_files(source)
    for file in source.glob("*.safetensors"):
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle.*save_pretrained"):
        load.resolve_checkpoint(str(source))


def _materialised(folder: Path) -> PreTrainedModel:
    return load.empty_model(AutoConfig.from_pretrained(folder)).to_empty(device="cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a causal language model .BertForMaskedLM"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
            "quantized .fp8 without weight_block",
        ),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            "is quantized .gptq.; training reads",
        ),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}, "model.trust_remote_code = true"),
        ({"model_type": "no-such-type"}, "cannot read the config"),
        ("{", "cannot read the config"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path: Path, config: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        load.load_config_and_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"teacher\.path: cannot read the config in .*: there is an adapter alone"):
        load.load_model_config(str(tmp_path), key="teacher.path")


def test_paths_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path, message in (
        ("", "model.path is empty"),
        ("./no/such", "no such folder: ./no/such"),
        (str(tmp_path / "x"), "no such folder"),
        (__file__, "is a file; give the folder"),
        ("nobody/nothing-of-this-name", "neither a local folder nor in the hub cache"),
    ):
        with pytest.raises(UserError, match=message):
            load.load_config_and_tokenizer(path)
        with pytest.raises(UserError, match=message):
            load.resolve_checkpoint(path)
    source = _folder(tmp_path / "source")
    with pytest.raises(UserError, match=r"model.path: cannot read the tokenizer in .*source"):
        load.load_config_and_tokenizer(str(source))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load.load_model_config("~/source").model_type == "llama"
    assert load.resolve_checkpoint("~/source") == source


def test_empty_model_leaves_the_config_alone() -> None:
    """The caller reads the checkpoint's own type from it when it exports."""
    config = AutoConfig.for_model("llama", **_SIZES, dtype="bfloat16")
    model = load.empty_model(config)
    assert model.dtype is torch.float32
    assert model.device.type == "meta"
    assert config.dtype is torch.bfloat16


def test_lengths_and_end_ids(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **{**_SIZES, "eos_token_id": [2, 5]})
    assert context_length(config) == 512
    tokenizer = type("Tokenizer", (), {"eos_token_id": 9})()
    assert load.eos_token_ids(str(tmp_path), config, tokenizer) == [2, 5, 9]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 11}')
    assert load.eos_token_ids(str(tmp_path), config, tokenizer) == [2, 5, 9, 11]


def test_source_config_keeps_unknown_keys(tmp_path: Path) -> None:
    """transformers drops keys it does not know; other engines read them."""
    source = _folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype")
    (source / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32", "full_attention_interval": 4}))
    model = _materialised(source)
    load.load_weights(model, source)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # `to_empty` had cut the tie
    export.export_hf(model, tmp_path / "out", source=source, dtype=torch.bfloat16, is_main=True)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["full_attention_interval"] == 4
    assert written["torch_dtype"] == "bfloat16"
    shutil.rmtree(tmp_path / "out")
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["Other"]}))
    export.export_hf(model, tmp_path / "out", source=source, dtype=torch.bfloat16, is_main=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
