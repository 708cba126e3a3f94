"""Hugging Face checkpoints out: a (sharded) model streamed into a folder that `from_pretrained` loads.

Names, bits and split equal `save_pretrained` of the same model. Memory: one shard file plus one tensor, except for
families whose names on disk differ from those in memory, which are gathered on the CPU of the main rank.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from lightrl.errors import UserError
from lightrl.files import fsync
from lightrl.models import lora
from lightrl.models.load import INDEX_FILE, PICKLED_SUFFIXES, persistent_tensors
from lightrl.models.names import adapter_tensors, kept_names
from lightrl.models.shards import whole_tensor
from lightrl.wrappers import is_adapter

MAX_SHARD_BYTES = 5 * 1000**3
_WEIGHT_SUFFIXES = (".safetensors", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", *PICKLED_SUFFIXES)
_COPIED_FOLDERS = ("additional_chat_templates",)

Fetch = Callable[[str], Tensor]


def export_hf(
    model: nn.Module,
    out_dir: Path,
    *,
    source: Path,
    dtype: torch.dtype | None,
    is_main: bool,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    replace: bool = False,
) -> None:
    """Write a model to `out_dir` in Hugging Face format, adapters merged. All ranks call it; the main one writes.

    `model` is the Hugging Face model or the FSDP root that holds it as `.model`.

    `source` is the checkpoint the model came from: tokenizer and other files without weights are copied from there.
    `dtype` casts floating tensors (None keeps them). The folder appears whole or not at all. A target that is not empty
    is a `UserError` unless `replace`, which swaps it once the new one is complete.
    """
    inner = inner_model(model)
    tensors, adapters, scaling = persistent_tensors(inner), adapter_tensors(inner), lora.scalings(inner)

    def gather(name: str) -> Tensor:
        tensor = tensors[name].detach()
        stored = export_dtype(inner, name, tensor.dtype, dtype)
        if name not in scaling:
            return whole_tensor(tensor.to(stored))
        a, b = (whole_tensor(adapters[part].detach()) for part in lora.adapter_names(name))
        return lora.merged(whole_tensor(tensor), a, b, scaling[name]).to(stored)

    device = next(iter(tensors.values())).device
    write_hf_folder(
        inner, gather, out_dir, source, dtype, is_main=is_main, max_shard_bytes=max_shard_bytes, replace=replace,
        device=device,
    )  # fmt: skip


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model, itself or in its FSDP root, with its parameters sharded."""
    inner = model if isinstance(model, PreTrainedModel) else model.model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"expected a transformers model, got {type(inner).__name__}")
    _reshard(model)
    return inner


def _reshard(model: nn.Module) -> None:
    """FSDP keeps the root's own group whole, in compute precision, after a forward: back to the float32 shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    kinds = {isinstance(p, DTensor) for p in model.parameters()}
    if len(kinds) == 2 and not isinstance(model, FSDPModule):
        raise RuntimeError("some parameters are not sharded: export the FSDP root, or reshard it first")


def export_dtype(model: PreTrainedModel, name: str, have: torch.dtype, want: torch.dtype | None) -> torch.dtype:
    """Type a tensor is stored in: `want`, but float32 for those the model class keeps so (a router's bias)."""
    if want is None or not have.is_floating_point:
        return have
    kept = model._keep_in_fp32_modules_strict or ()
    if any(re.search(rf"(^|\.){re.escape(k)}($|\.)", name) for k in kept):
        return torch.float32
    return want


def write_hf_folder(
    model: PreTrainedModel,
    fetch: Fetch,
    out_dir: Path,
    source: Path,
    dtype: torch.dtype | None,
    *,
    is_main: bool,
    max_shard_bytes: int,
    replace: bool,
    device: torch.device,
) -> None:
    """As `export_hf`, but tensors come from `fetch(name)`, which every rank calls for the same names in one order.

    `model` gives names, shapes and config; it may be on the meta device.
    """
    out_dir = out_dir.expanduser().absolute()  # `.` has no name of its own to put a temporary folder beside
    _agree(_target_error(out_dir, replace) if is_main else None, device)
    temporary = out_dir.with_name(f".{out_dir.name}.tmp")
    error: Exception | None = None
    if is_main:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        except OSError as caught:
            error = caught
    # A failure on the main rank must not leave the others waiting in a gather: it goes on gathering, then all raise.
    error = _write_weights(model, fetch, temporary, dtype, is_main, max_shard_bytes, error)
    if is_main and error is None:
        try:
            _write_config(model, temporary, source, dtype)
            _copy_files(source, temporary)
            _publish(temporary, out_dir)
        except Exception as caught:
            error = caught
    if is_main and error is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    _agree(error, device)


def write_folder(
    fill: Callable[[Path], None], out_dir: Path, *, is_main: bool, replace: bool, device: torch.device
) -> None:
    """What `fill(folder)` writes on the main rank, under the conditions of `export_hf`. All ranks call it."""
    out_dir = out_dir.expanduser().absolute()
    _agree(_target_error(out_dir, replace) if is_main else None, device)
    temporary = out_dir.with_name(f".{out_dir.name}.tmp")
    error: Exception | None = None
    if is_main:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            fill(temporary)
            _publish(temporary, out_dir)
        except Exception as caught:
            error = caught
            shutil.rmtree(temporary, ignore_errors=True)
    _agree(error, device)


def _write_weights(
    model: PreTrainedModel,
    fetch: Fetch,
    folder: Path,
    dtype: torch.dtype | None,
    is_main: bool,
    max_shard_bytes: int,
    error: Exception | None,
) -> Exception | None:
    stored, made_from = _plan(model, dtype)
    split = split_torch_state_dict_into_shards(
        stored, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
    )
    ready: dict[str, Tensor] = {}
    fetched: set[str] = set()
    for file_name, names in split.filename_to_tensors.items():
        for name in names:
            if name in fetched:
                continue
            # On every rank alike: a fetch is a collective.
            parts = {n: _to_cpu(fetch(n), is_main and error is None) for n in made_from[name]}
            fetched.update(n for n in stored if made_from[n] is made_from[name])
            if is_main and error is None:
                ready.update(revert_weight_conversion(model, parts) if made_from[name] != [name] else parts)
        if is_main and error is None:
            try:
                shard = {n: _compact(ready.pop(n)) for n in names}
                save_file(shard, folder / file_name, metadata={"format": "pt"})
            except Exception as caught:  # disk full, no permission
                error = caught
    if is_main and error is None and split.is_sharded:
        count = sum(p.numel() for name, p in model.named_parameters() if not is_adapter(name))
        index = {"metadata": {"total_parameters": count, **split.metadata}, "weight_map": split.tensor_to_filename}
        try:
            _write_text(folder / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True) + "\n")
        except OSError as caught:
            error = caught
    return error


def _to_cpu(tensor: Tensor, keep: bool) -> Tensor:
    return tensor.to("cpu") if keep else tensor.new_empty(0)


def _compact(tensor: Tensor) -> Tensor:
    """Contiguous, and not a view that keeps a larger tensor alive."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _plan(model: PreTrainedModel, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """What is stored (name -> meta tensor, in `save_pretrained`'s order), and from which tensors each is made.

    Families with other names on disk are converted by transformers' own code, a decoder layer at a time.
    """
    layout = _memory_layout(model, dtype)
    stored = revert_weight_conversion(model, dict(layout))
    if stored.keys() == layout.keys() and all(stored[n] is t for n, t in layout.items()):
        return layout, {n: [n] for n in layout}
    # Views of one fused tensor would each count with the size of the whole when files are split.
    stored = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in stored.items()}
    layers: dict[str, list[str]] = {}
    for name in layout:
        layer = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(layer[1] if layer else name, []).append(name)
    made_from: dict[str, list[str]] = {}
    for names in layers.values():
        made_from.update(dict.fromkeys(revert_weight_conversion(model, {n: layout[n] for n in names}), names))
    if made_from.keys() != stored.keys():  # a conversion that spans layers: all at once, on the main rank's CPU
        everything = list(layout)
        made_from = dict.fromkeys(stored, everything)
    return stored, made_from


def _memory_layout(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Name in memory -> meta tensor, of what `save_pretrained` writes."""
    tensors = persistent_tensors(model)
    layout: dict[str, Tensor] = {}
    for name in kept_names(model):
        stored = export_dtype(model, name, tensors[name].dtype, dtype)
        layout[name] = torch.empty(tensors[name].shape, dtype=stored, device="meta")
    # The order of a model that came from `from_pretrained`.
    return dict(sorted(layout.items(), key=lambda item: dot_natural_key(item[0])))


# ----- everything but the weights


def _write_config(model: PreTrainedModel, folder: Path, source: Path, dtype: torch.dtype | None) -> None:
    """The source's config.json with the new dtype; the model's own where the source is of another class.

    The source's is kept because transformers drops keys it does not know, which other engines read.
    """
    main = dtype or next(model.parameters()).dtype
    text = str(main).removeprefix("torch.")
    name = type(model).__name__.removeprefix("FSDP")
    original = source / "config.json"
    config: dict[str, Any] = json.loads(original.read_text(encoding="utf-8")) if original.is_file() else {}
    if name not in (config.get("architectures") or ()):
        model.config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["architectures"] = [name]
    config.pop("quantization_config", None)  # of a source that was dequantised
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = text
    if isinstance(config.get("text_config"), dict):
        config["text_config"][key] = text
    _write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _copy_files(source: Path, folder: Path) -> None:
    """Tokenizer, generation config, templates, README, LICENSE …: all top-level files but weights and pickles."""
    for file in sorted(source.iterdir()):
        if file.is_dir() and file.name in _COPIED_FOLDERS:
            shutil.copytree(file, folder / file.name)
        skip = file.name.startswith(".") or file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not skip and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)  # follows the hub cache's links


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _target_error(out_dir: Path, replace: bool) -> Exception | None:
    if out_dir.exists() and not out_dir.is_dir():
        return UserError(f"export: {out_dir} is a file; name a new folder")
    if not replace and out_dir.is_dir() and any(out_dir.iterdir()):
        return UserError(f"export: {out_dir} is not empty; name a new folder or remove it first")
    return None


def _publish(temporary: Path, out_dir: Path) -> None:
    """Flush to disk, then move into place."""
    for path in [*temporary.rglob("*"), temporary]:
        fsync(path)
    if out_dir.is_dir():
        old = out_dir.with_name(f".{out_dir.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        out_dir.rename(old)
        temporary.rename(out_dir)
        shutil.rmtree(old)
    else:
        temporary.rename(out_dir)
    fsync(out_dir.parent)


def _agree(error: Exception | None, device: torch.device) -> None:
    """Raise on every rank if any rank failed, so that none goes on alone."""
    failed = error is not None
    if dist.is_initialized() and dist.get_world_size() > 1:
        flag = torch.tensor([float(failed)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        failed = bool(flag.item())
    if error is not None:
        raise error
    if failed:
        raise UserError("export failed on the main rank; its message says why")
