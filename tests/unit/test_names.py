"""Stored tensors as parts of those in memory: what is a view, what is not, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import make_family
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightrl.models.names import Layout, StoredTensors, kept_names


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


def test_parts_in_different_groups_are_refused(tmp_path: Any) -> None:
    model = load(tmp_path, "hrm_text")
    names = kept_names(model)
    first = next(n for n in names if "q_proj" in n)
    with pytest.raises(ValueError, match="HrmTextForCausalLM: some stored tensors are made of several layers"):
        StoredTensors(model, Groups(model, [[first], [n for n in names if n != first]]))
