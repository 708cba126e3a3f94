"""An optimizer's state as named tensors and JSON, by parameter name, so that it fits any world size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.errors import UserError
from lightrl.training.checkpoint_storage import stored_dtype
from lightrl.wrappers import clean_name

_TENSOR = "__tensor__"


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`optim.<entry>.<parameter>` -> tensor, for every tensor in the state (moments, step counts)."""
    names = _names(model)
    return {
        f"optim.{key}.{names[id(parameter)]}": value.detach()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def describe_groups(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """JSON of the parameter groups (settings and parameter names) and of state that is no tensor."""
    names = _names(model)
    groups = [
        {
            "params": [names[id(p)] for p in group["params"]],
            "settings": {k: _to_json(v) for k, v in group.items() if k not in ("params", "param_names")},
        }
        for group in optimizer.param_groups
    ]
    scalars = {
        names[id(parameter)]: plain
        for parameter, state in optimizer.state.items()
        if (plain := {k: v for k, v in state.items() if not isinstance(v, Tensor)})
    }
    return {"groups": groups, "scalars": scalars}


def allocate(
    model: nn.Module, optimizer: Optimizer, stored: Mapping[str, Any], saved: Mapping[str, Any] | None, folder: Path
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors to load the state into, sharded as their parameters are, and the state that is no tensor.

    `UserError` if the checkpoint's parameter groups are not the optimizer's.
    """
    if saved is None:
        raise UserError(f"{folder} holds no optimizer state: it cannot be resumed from")
    names = _names(model)
    mine = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in saved["groups"]]
    if mine != theirs:
        raise UserError(
            f"{folder}: its optimizer has {[len(g) for g in theirs]} parameters in its groups, this run "
            f"{[len(g) for g in mine]}, or in another order: resume with the settings it was saved with"
        )
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    slots: dict[str, Tensor] = {}
    for key, entry in stored.items():
        if not key.startswith("optim."):
            continue
        parameter = parameters[key.split(".", 2)[2]]
        shape, dtype = tuple(entry["shape"]), stored_dtype(entry)
        if shape == tuple(parameter.shape) and shape:
            slots[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            slots[key] = torch.empty(shape, dtype=dtype)
    return slots, saved["scalars"]


def restore_groups(
    model: nn.Module,
    optimizer: Optimizer,
    slots: Mapping[str, Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
    saved: Mapping[str, Any],
) -> None:
    """Give the optimizer its loaded state and its groups' settings."""
    names = _names(model)
    number: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            number[names[id(parameter)]] = len(number)
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in slots.items():
        _, entry, name = key.split(".", 2)
        state.setdefault(number[name], {})[entry] = tensor
    for name, plain in scalars.items():
        state.setdefault(number[name], {}).update(plain)
    packed = optimizer.state_dict()["param_groups"]
    for group, there in zip(packed, saved["groups"], strict=True):
        group.update({k: _from_json(v, group.get(k)) for k, v in there["settings"].items()})
    optimizer.load_state_dict({"state": state, "param_groups": packed})


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}


def _to_json(value: Any) -> Any:
    return {_TENSOR: value.item()} if isinstance(value, Tensor) else value


def _from_json(value: Any, now: Any) -> Any:
    """JSON has no tuples (betas) and no tensors (a learning rate under CUDA graphs)."""
    if isinstance(value, dict) and _TENSOR in value:
        return torch.full_like(now, value[_TENSOR]) if isinstance(now, Tensor) else value[_TENSOR]
    return tuple(value) if isinstance(value, list) and isinstance(now, tuple) else value
