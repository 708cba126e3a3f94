"""Checkpoints in blockwise FP8 and MXFP4, read as float ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from families import make_family
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lightrl.errors import UserError
from lightrl.kernels import fp8
from lightrl.models import load
from lightrl.models.names import persistent_tensors
from lightrl.models.quantized import Form, Reader

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def rewrite(folder: Path, stored: dict[str, Tensor], settings: dict[str, Any] | None) -> None:
    """Tensors into two files, values and scales apart."""
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    names = sorted(stored)
    files = {name: f"model-{int('scale' in name) + 1:05}-of-00002.safetensors" for name in names}
    for file_name in set(files.values()):
        save_file({n: stored[n].contiguous() for n in names if files[n] == file_name}, folder / file_name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": settings} if settings else {})))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(folder: Path) -> dict[str, Tensor]:
    config = load.load_model_config(str(folder))
    model = load.empty_model(config)
    model.to_empty(device="cpu")
    load.load_weights(model, folder)
    return persistent_tensors(model)


def in_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales, and the values they stand for, by a loop over blocks."""
    numbers, scales = fp8.quantize_reference(weight, *block)
    values = torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, cols = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            values[rows, cols] = numbers[rows, cols].float() * scales[i, j]
    return numbers, scales, values


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("block", [(128, 128), (16, 24)])
def test_fp8_is_read_as_the_values_it_stands_for(family: str, block: tuple[int, int], tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", family)
    plain = tensors_of(folder)
    stored, values = dict(plain), dict(plain)
    count = 0
    for name, tensor in plain.items():
        if "_proj.weight" in name and tensor.ndim == 2:
            stored[name], stored[f"{name}_scale_inv"], values[name] = in_fp8(tensor, block)
            count += 1
    assert count > 12
    rewrite(folder, values, None)
    expected = loaded(folder)
    rewrite(folder, stored, FP8 | {"weight_block_size": list(block)})
    found = loaded(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name
    if block == (16, 24):  # transformers' own, where it takes the shape
        name = next(
            n for n, t in plain.items() if f"{n}_scale_inv" in stored and t.shape[0] % 16 == t.shape[1] % 24 == 0
        )
        theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
        assert torch.equal(theirs, values[name])


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_any_part_of_an_fp8_tensor(scale: torch.dtype, tmp_path: Path) -> None:
    """A shard begins anywhere in a block."""
    torch.manual_seed(0)
    numbers = (torch.randn(150, 70) * 50).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-9, 2, (5, 3)).float()).to(scale)
    whole = numbers.float() * scales.float().repeat_interleave(32, 0)[:150].repeat_interleave(32, 1)[:, :70]
    save_file({"w": numbers, "w_scale_inv": scales}, tmp_path / "a.safetensors")

    def open_file(name: str) -> Any:
        return load._open(tmp_path / name)

    files = dict.fromkeys(("w", "w_scale_inv"), "a.safetensors")
    with Reader(Form((32, 32)), open_file("a.safetensors"), files, open_file) as reader:
        assert list(reader.get_slice("w").get_shape()) == [150, 70]
        for rows, cols in (((0, 150), (0, 70)), ((31, 33), (5, 70)), ((64, 65), (69, 70)), ((149, 150), (0, 1))):
            found = load.read_slice(reader, "w", (rows[0], cols[0]), (rows[1] - rows[0], cols[1] - cols[0]))
            assert torch.equal(found, whole[slice(*rows), slice(*cols)])
        assert torch.equal(reader.get_tensor("w"), whole)


def test_mxfp4_experts_equal_transformers(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "gpt_oss", hidden_size=64, intermediate_size=96)
    plain = tensors_of(folder)
    stored, values = dict(plain), dict(plain)
    torch.manual_seed(0)
    for name in [n for n in plain if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, rows = stored.pop(name).shape
        stored[f"{name}_blocks"] = torch.randint(256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(110, 140, (experts, rows, width // 32), dtype=torch.uint8)
        values[name] = convert_moe_packed_tensors(
            stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32
        ).contiguous()
        assert values[name].shape == plain[name].shape
    rewrite(folder, values, None)
    expected = loaded(folder)
    rewrite(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    found = loaded(folder)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    files = dict.fromkeys(stored, "")
    files |= {name: f"model-{int('scale' in name) + 1:05}-of-00002.safetensors" for name in stored}

    def open_file(name: str) -> Any:
        return load._open(folder / name)

    name = "model.layers.0.mlp.experts.down_proj"
    with Reader(Form(None), open_file(files[f"{name}_blocks"]), files, open_file) as reader:
        part = load.read_slice(reader, name, (1, 5, 3), (2, 60, 7))  # not whole groups of 32
        assert torch.equal(part, values[name][1:3, 5:65, 3:10])


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    plain = tensors_of(folder)
    for name in [n for n in plain if "o_proj" in n]:
        plain[name], plain[f"{name}_scale_inv"], _ = in_fp8(plain[name], (16, 16))
    edit(plain)
    rewrite(folder, plain, FP8 | {"weight_block_size": [16, 16]})


NAME = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda stored: stored.pop(f"{NAME}_scale_inv"), f"{NAME} is in FP8, and {NAME}_scale_inv is missing"),
        (
            lambda stored: stored.update({f"{NAME}_scale_inv": torch.ones(1, 2)}),
            r"_scale_inv has shape .1, 2., blocks of .16, 16. need .2, 2.",
        ),
    ],
)
def test_damaged_checkpoints(edit: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "qwen3")
    change(folder, edit)
    with pytest.raises(UserError, match=message):
        loaded(folder)


def test_a_run_from_fp8_trains_and_exports_a_float_checkpoint(tmp_path: Path) -> None:
    from lightrl.training.trainer import Trainer

    tiny_run.make_model(tmp_path / "model", family="qwen3", head_dim=8)
    tiny_run.make_data(tmp_path / "data.jsonl")
    change(tmp_path / "model", lambda _: None)
    trainer = Trainer(tiny_run.make_run(tmp_path, model={"compute_dtype": "float32"}))
    start = {name: tensor.clone() for name, tensor in trainer.policy.lend()}
    trainer.policy.reclaim()
    numbers = tensors_of(tmp_path / "model")
    values = fp8.dequantize(numbers[NAME], numbers[f"{NAME}_scale_inv"], rows=16, cols=16)
    assert torch.equal(start[NAME], values)
    metrics = trainer.step(trainer.source.next(2))
    assert metrics["mismatch/logprob_abs_diff"] < 1e-4  # the embedded engine has the same weights
    trainer.export(tmp_path / "out")
    trainer.close()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert model.state_dict()[NAME].isfinite().all()
    assert AutoConfig.from_pretrained(tmp_path / "model").quantization_config is not None
