"""`lightrl export`: a run's checkpoint into a Hugging Face folder, tensor by tensor, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lightrl.config.load import load_config
from lightrl.config.schema import Config
from lightrl.errors import UserError
from lightrl.models import lora
from lightrl.models.export import MAX_SHARD_BYTES, export_dtype, export_hf, write_hf_folder
from lightrl.models.export_adapter import export_adapter
from lightrl.models.load import (
    empty_model,
    load_model_config,
    load_weights,
    persistent_tensors,
    resolve_checkpoint,
    stored_dtype,
)
from lightrl.models.value_head import VALUE_HEAD, empty_value_model, load_value_config
from lightrl.training.checkpoint import MARKER, find_fault, latest
from lightrl.training.checkpoint_storage import read_tensors, read_whole
from lightrl.training.critic import critic_model
from lightrl.training.value_model import value_config_and_tokenizer

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# The trainer saves its policy module, which holds the Hugging Face model as `model`.
_PREFIXES = ("model.model.", "model.")


def export_run(source: Path, out: Path, dtype: str = "auto", *, critic: bool = False, adapter: bool = False) -> Path:
    """Export a run folder's newest checkpoint, or one checkpoint folder, to `out`; returns the checkpoint taken.

    The policy, with its adapters merged, or the `adapter` alone; or as sequence classifiers of one label the `critic`,
    and what `lightrl rm` trained.

    `dtype`: bfloat16, float16, float32, or auto for the type of the checkpoint that the run started from. The whole
    model is never in memory, only a file of it at a time; but to merge adapters, the one that they belong to is.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise UserError(f"--dtype: {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    folder, run_dir = _find(source)
    config_file = run_dir / "config.toml"
    if not config_file.is_file():
        raise UserError(f"{config_file} is missing: it names the model that {folder} was trained from")
    run = load_config(config_file)
    tensors = read_tensors(folder)
    if critic and not any(name.startswith("critic.") for name in tensors):
        raise UserError(f"{folder} holds no critic: its run had algorithm.advantage = {run.algorithm.advantage!r}")
    if adapter and (critic or not run.lora.rank):
        what = "--critic: choose one of the two" if critic else "a run with lora.rank > 0, which this one is not"
        raise UserError(f"--adapter: {'not with' if critic else 'only for'} {what}")
    settings = critic_model(run) if critic else run.model
    if run.lora.rank and not critic:
        _export_adapted(run, folder, tensors, out, dtype, adapter)
        return folder
    original = resolve_checkpoint(settings.path, settings.revision, weights=False)
    config: PretrainedConfig
    rewards = not critic and any(prefix + VALUE_HEAD in tensors for prefix in _PREFIXES)  # a run of `lightrl rm`
    if critic or rewards:
        if rewards:
            config, _ = value_config_and_tokenizer(settings, "model.path")
        else:
            config = load_value_config(original, settings.trust_remote_code)
        model = empty_value_model(config, trust_remote_code=settings.trust_remote_code)
    else:
        config = load_model_config(str(original), trust_remote_code=settings.trust_remote_code)
        model = empty_model(config, trust_remote_code=settings.trust_remote_code)
    stored = _stored_names(model, tensors, folder, "critic." if critic else "")
    target = stored_dtype(config) if dtype == "auto" else _DTYPES[dtype]

    def fetch(name: str) -> Tensor:
        whole = read_whole(folder, stored[name], tensors)
        return whole.to(export_dtype(model, name, whole.dtype, target))

    write_hf_folder(
        model,
        fetch,
        out,
        original,
        target,
        is_main=True,
        max_shard_bytes=MAX_SHARD_BYTES,
        replace=False,
        device=torch.device("cpu"),
    )
    return folder


def _export_adapted(run: Config, folder: Path, tensors: Mapping[str, Any], out: Path, dtype: str, alone: bool) -> None:
    """The adapters of a checkpoint, `alone` or merged into the model that they belong to."""
    if fault := lora.missing():
        raise UserError(f"lora.rank: {fault}")
    original = resolve_checkpoint(run.model.path, run.model.revision, weights=not alone)
    config = load_model_config(str(original), trust_remote_code=run.model.trust_remote_code)
    kept = stored_dtype(config) or torch.float32
    model: Any = empty_model(config, dtype=kept, trust_remote_code=run.model.trust_remote_code)
    lora.inject(model, run.lora)
    if not alone:
        model.to_empty(device="cpu")
        load_weights(model, original, trust_remote_code=run.model.trust_remote_code)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        stored = next((p + name for p in _PREFIXES if p + name in tensors), None)
        if stored is None or tuple(tensors[stored]["shape"]) != shape:
            raise UserError(f"{folder} is of other adapters than the run's config.toml names: {name} is not the same")
        return read_whole(folder, stored, tensors)

    lora.fill(model, read)
    if alone:
        export_adapter(model, out, base=run.model.path, revision=run.model.revision, is_main=True)
    else:
        export_hf(model, out, source=original, dtype=kept if dtype == "auto" else _DTYPES[dtype], is_main=True)


def _find(source: Path) -> tuple[Path, Path]:
    """The checkpoint to export, and the run folder it lies in."""
    if not source.is_dir():
        raise UserError(f"no such folder: {source}")
    if (source / MARKER).is_file():
        if fault := find_fault(source.resolve()):
            raise UserError(f"{source} is damaged: {fault}")
        return source, source.resolve().parent.parent
    if source.name.startswith("step_"):
        raise UserError(f"{source} has no {MARKER}: it was never completed; give the run folder to take the newest")
    folder = latest(source / "checkpoints")
    if folder is None:
        raise UserError(f"{source} is neither a run folder with checkpoints nor a checkpoint")
    return folder, source


def _stored_names(
    model: PreTrainedModel, tensors: Mapping[str, object], folder: Path, part: str = ""
) -> dict[str, str]:
    """Name in the model -> name in the checkpoint, behind that of its `part`, where tied tensors are stored once."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in persistent_tensors(model).items():
        names_of.setdefault(id(tensor), []).append(name)
    found: dict[str, str] = {}
    for names in names_of.values():
        stored = next((part + p + n for p in _PREFIXES for n in names if part + p + n in tensors), None)
        if stored is None:
            raise UserError(f"{folder} is of another model than the run's config.toml names: it has no {names[0]}")
        found.update(dict.fromkeys(names, stored))
    return found
