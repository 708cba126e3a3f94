"""Stored tensors as parts of those in memory: what is a view, what is not, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import make_family
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Interleave, WeightConverter, revert_weight_conversion

from lightrl.models.names import Box, Layout, StoredTensors, boxes, kept_names


class Groups:
    """A model's own tensors, in groups of the given names."""

    def __init__(self, model: PreTrainedModel, names: list[list[str]]) -> None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.groups = [[(name, tensors[name].detach()) for name in group] for group in names]

    def layout(self) -> list[Layout]:
        return [[(name, tuple(t.shape), t.dtype) for name, t in group] for group in self.groups]

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        return iter(self.groups)


def load(folder: Any, family: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(make_family(folder, family))


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_stored_tensors_are_views(tmp_path: Any, family: str) -> None:
    """What is written into a model is in the tensors that were cut out before."""
    model = load(tmp_path, family)
    groups = Groups(model, [kept_names(model)])
    memory = {tensor.untyped_storage().data_ptr() for _, tensor in groups.groups[0]}
    [cut] = StoredTensors(model, groups)
    assert {tensor.untyped_storage().data_ptr() for _, tensor in cut} == memory
    assert sum(tensor.numel() for _, tensor in cut) == sum(tensor.numel() for _, tensor in groups.groups[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    stored = revert_weight_conversion(model, dict(groups.groups[0]))
    assert stored.keys() == dict(cut).keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in cut)


def test_what_is_no_part_of_a_tensor_is_converted_anew(tmp_path: Any) -> None:
    """hrm_text stores q, k and v in one."""
    model = load(tmp_path, "hrm_text")
    stream = StoredTensors(model, Groups(model, [kept_names(model)]))
    before = dict(next(iter(stream)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    after = dict(next(iter(stream)))
    made = [n for n in after if after[n].data_ptr() != before[n].data_ptr()]
    assert any("qkv" in name for name in made)
    assert all(torch.equal(after[name], 2 * before[name]) for name in made)


def test_a_copy_that_is_needed_stays_one(tmp_path: Any) -> None:
    """Interleaved rows are no strided part, though each step of making them could be seen as one."""
    model = load(tmp_path, "llama")
    rule = WeightConverter("mlp.mixed.weight", "mlp.down_proj.weight", [Interleave(dim=0)])
    model._weight_conversions = [rule]
    [stored] = StoredTensors(model, Groups(model, [kept_names(model)]))
    weight = model.model.layers[1].mlp.down_proj.weight
    half = len(weight) // 2
    mixed = dict(stored)["model.layers.1.mlp.mixed.weight"]
    assert torch.equal(mixed[0::2], weight[:half])
    assert torch.equal(mixed[1::2], weight[half:])
    assert boxes(model) is None


def test_parts_in_different_groups_are_refused(tmp_path: Any) -> None:
    model = load(tmp_path, "hrm_text")
    names = kept_names(model)
    first = next(n for n in names if "q_proj" in n)
    with pytest.raises(ValueError, match="HrmTextForCausalLM: some stored tensors are made of several layers"):
        StoredTensors(model, Groups(model, [[first], [n for n in names if n != first]]))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_boxes_by_parts(axis: int) -> None:
    """Rows 2 and 3 of the second matrix, transposed, from parts of the stored tensor for each shard."""
    whole = torch.arange(60.0).view(3, 4, 5)
    stored = whole[1, 2:4].T
    box = Box("fused", start=(1, 2, 0), extent=(1, 2, 5), axes=(2, 1))
    assert box.shape == (5, 2)
    filled = torch.zeros(3, 4, 5)
    offset = 0
    for shard in filled.split(2, dim=axis):
        if (shared := box.within(shard, [offset if a == axis else 0 for a in range(3)])) is not None:
            begins, sizes, elements = shared
            elements.copy_(stored[tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))])
        offset += 2
    expected = torch.zeros(3, 4, 5)
    expected[1, 2:4] = whole[1, 2:4]
    assert torch.equal(filled, expected)


def test_boxes_of_a_model(tmp_path: Any) -> None:
    found = boxes(load(tmp_path, "qwen3_moe"))
    assert found is not None
    layer = "model.layers.1.mlp.experts"
    assert found[f"{layer}.3.up_proj.weight"] == Box(f"{layer}.gate_up_proj", (3, 24, 0), (1, 24, 32), (1, 2))
    assert found[f"{layer}.2.down_proj.weight"] == Box(f"{layer}.down_proj", (2, 0, 0), (1, 32, 24), (1, 2))
    assert boxes(load(tmp_path, "hrm_text")) is None
