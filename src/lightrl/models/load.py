"""Hugging Face checkpoints in: config, tokenizer, and weights streamed into a (sharded) model.

Order: `load_config_and_tokenizer` -> `empty_model` (meta) -> shard -> `model.to_empty(device=…)` -> `load_weights`.
Each rank reads only its own slices of the safetensors files.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lightrl.errors import UserError
from lightrl.models.names import boxes, persistent_tensors
from lightrl.models.quantized import Form, Opener, Reader, without_quantization
from lightrl.models.shards import local_shard
from lightrl.wrappers import clean_name

logger = logging.getLogger(__name__)

_LM_HEAD = "lm_head."
INDEX_FILE = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "*.py", "LICENSE*", "NOTICE*"]
# Saved by old releases beside the weights; every model recomputes it.
_IGNORED_ON_DISK = re.compile(r"rotary_emb\.inv_freq$")


# ----- config, tokenizer, folder


def load_config_and_tokenizer(
    path: str, revision: str | None = None, tokenizer: str | None = None, trust_remote_code: bool = False
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer of a causal LM, from a folder or the hub. Every failure is a one-line `UserError`."""
    config = load_model_config(path, revision, trust_remote_code)
    source = tokenizer or path
    return config, load_tokenizer(
        source,
        revision if source == path else None,
        trust_remote_code,
        key="model.tokenizer" if tokenizer else "model.path",
    )


def load_tokenizer(
    path: str, revision: str | None = None, trust_remote_code: bool = False, *, key: str = "model.tokenizer"
) -> PreTrainedTokenizerBase:
    """From a folder or the hub; `key` is the config's, for messages."""
    _check_local(path, key)
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            os.path.expanduser(path), revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise load_error(key, path, "tokenizer", error) from error
    return loaded


def load_model_config(
    path: str, revision: str | None = None, trust_remote_code: bool = False, *, key: str = "model.path"
) -> PretrainedConfig:
    """Config of a causal LM, checked to be one that can be trained; `key` is the config's, for messages."""
    _check_local(path, key)
    try:
        config = AutoConfig.from_pretrained(
            os.path.expanduser(path), revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError … here
        raise load_error(key, path, "config", error) from error
    check_causal_lm(config, path, key)
    return config


def stored_dtype(config: PretrainedConfig) -> torch.dtype | None:
    """Type of the checkpoint's weights that its config names; that of a model that sees may do so in its text part."""
    named = config.dtype or config.get_text_config().dtype
    return getattr(torch, named) if isinstance(named, str) else named


def eos_token_ids(
    path: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, revision: str | None = None
) -> list[int]:
    """Ids that end a response: those of generation_config.json, of the config and of the tokenizer together, sorted."""
    try:
        generation = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError:  # a checkpoint without generation_config.json
        generation = None
    found: set[int] = set()
    for ids in (generation, getattr(config.get_text_config(), "eos_token_id", None), tokenizer.eos_token_id):
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else [ids])
    return sorted(found)


def pad_token_id(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What a sequence classifier takes for padding: the config's; where that names none, the tokenizer's, or its end of
    sequence, as exported configs then do."""
    text_config = config.get_text_config()
    candidates = (text_config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in candidates if token is not None and 0 <= token < text_config.vocab_size), None)


def empty_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32, **kwargs: Any) -> PreTrainedModel:
    """The model on the meta device, tied as its config says; `kwargs` go to `from_config` (`attn_implementation` …)."""
    config = copy.deepcopy(config)  # transformers writes `dtype` into it; the caller's keeps the checkpoint's
    without_quantization(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)


def resolve_checkpoint(
    path: str, revision: str | None = None, *, weights: bool = True, key: str = "model.path"
) -> Path:
    """Local folder of a checkpoint, downloaded from the hub when `path` is a hub name.

    Only safetensors, JSON, tokenizer and text files are fetched, never pickles. `weights=False` leaves the weights out.
    `key` is the config's, for messages.
    """
    _check_local(path, key)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        patterns = _SMALL_FILES + (["*.safetensors"] if weights else [])
        try:
            folder = Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
        except Exception as error:
            raise load_error(key, path, "files", error) from error
    if weights and not any(folder.glob("*.safetensors")):
        raise _no_weights(folder, path, key)
    return folder


def _no_weights(folder: Path, path: str, key: str = "model.path") -> UserError:
    pickled = sorted(f.name for f in folder.glob("*") if f.suffix in PICKLED_SUFFIXES and "model" in f.name)
    found = f" ({pickled[0]} is a pickle, which can run code when opened)" if pickled else ""
    return UserError(
        f"{key}: {path} holds no *.safetensors file{found}; convert the checkpoint where you trust it: "
        "AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST)"
    )


def _check_local(path: str, key: str) -> None:
    """Refuse what can only be a local path and is not a folder, before the hub is asked for it."""
    if not path:
        raise UserError(f"{key} is empty: give a Hugging Face folder or hub name")
    local = Path(path).expanduser()
    if local.is_dir():
        return
    if local.is_file():
        raise UserError(f"{key}: {path} is a file; give the folder that holds config.json and *.safetensors")
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"{key}: no such folder: {path}")


def load_error(key: str, path: str, what: str, error: Exception) -> UserError:
    """One line for whatever transformers or the hub raised."""
    text = " ".join(str(error).split())
    chain = text + repr(error.__cause__) + repr(error.__context__) + type(error).__name__
    if "trust_remote_code" in text:
        return UserError(
            f"{key}: {path} needs Python code that ships with it; if you trust it, set model.trust_remote_code = true"
        )
    if (folder := Path(path).expanduser()).is_dir():
        if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
            text = (
                "there is an adapter alone; export the whole, `lightrl export` without --adapter, or merge it by peft"
            )
        return UserError(f"{key}: cannot read the {what} in {path}: {text[:300]}")
    if "GatedRepo" in chain or "gated repo" in text:
        return UserError(f"{key}: {path} is gated: accept its licence on the hub, then log in with `hf auth login`")
    if "RevisionNotFound" in chain:
        return UserError(f"{key.partition('.')[0]}.revision: {path} has no such branch, tag or commit on the hub")
    if "RepositoryNotFound" in chain or "HFValidationError" in chain or "not a valid model identifier" in text:
        return UserError(f"{key}: no local folder and no model on the hub is called {path!r}")
    if any(word in chain for word in ("couldn't connect", "LocalEntryNotFound", "OfflineMode", "ConnectError")):
        return UserError(
            f"{key}: {path!r} is neither a local folder nor in the hub cache, and the hub cannot be reached; "
            "check the name and the network, or give a folder"
        )
    return UserError(f"{key}: cannot load the {what} of {path}: {text[:300]}")


def check_causal_lm(config: PretrainedConfig, path: str, key: str = "model.path") -> None:
    """UserError for a model of another kind at `path`, which `key` names."""
    Form.of({"quantization_config": getattr(config, "quantization_config", None)}, path)
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    names = config.architectures or []
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    wrong_head = names and not any(re.search(r"CausalLM|LMHead|ConditionalGeneration", n) for n in names)
    if not known or wrong_head or config.is_encoder_decoder:
        kind = ", ".join(names) or config.model_type
        raise UserError(f"{key}: {path} is not a causal language model ({kind})")


# ----- weights


@torch.no_grad()
def load_weights(
    model: PreTrainedModel, folder: Path, *, trust_remote_code: bool = False, new_head: str | None = None
) -> None:
    """Fill a materialised model (after `to_empty`) from the safetensors files in `folder`.

    Each rank reads its own slices, dequantises them where they are FP8 or MXFP4, and casts them to the parameter's
    dtype. Missing, unexpected or mis-shaped names are
    a `UserError`. So it is where tensors in memory are put together from several stored ones (a layer's experts); only
    families whose stored tensors are no parts of those in memory are loaded whole by transformers first, on every rank.
    `new_head`: a tensor that stays as it is where the checkpoint has none; its language-model head is then left out.
    """
    if any(model.get_parameter(a) is not model.get_parameter(b) for a, b in model.all_tied_weights_keys.items()):
        model.tie_weights()  # `to_empty` gives an unsharded model a tensor for each name
    rebuild_buffers(model)
    targets = persistent_tensors(model)
    stored, form = checkpoint_files(folder), Form.of_folder(folder)
    files = stored if form is None else form.tensors(stored)

    def open_file(name: str) -> Any:
        handle = _open(folder / name)
        return handle if form is None else Reader(form, handle, stored, lambda other: _open(folder / other))

    if new_head is not None and new_head not in files:
        del targets[new_head]
        files = {name: file for name, file in files.items() if not name.startswith(_LM_HEAD)}
    if (used := _conversions(model, files, targets)) is not None:
        # as `from_pretrained` does: what is written then has the checkpoint's names
        model._weight_conversions = used  # type: ignore[assignment]
        if not _load_boxes(model, targets, files, folder, open_file):
            if form is not None:
                raise UserError(
                    f"{folder}: {type(model).__name__} cannot be read from a quantized checkpoint: convert it"
                )
            if new_head is not None:
                raise UserError(
                    f"{folder} stores its weights in a way that models with a value head cannot be loaded from"
                )
            logger.warning(
                "%s stores its weights in another way than the model has them in memory: "
                "each rank loads the whole model into host memory first",
                folder,
            )
            _load_converted(model, targets, folder, trust_remote_code)
        _check_ties(model, targets, files, folder, open_file)
        return
    sources = _match_names(model, targets, files, folder)
    by_file: dict[str, list[tuple[str, Tensor]]] = {}
    for target_name, disk_name in sources:
        by_file.setdefault(files[disk_name], []).append((disk_name, targets[target_name]))
    for file_name, wanted in by_file.items():
        with open_file(file_name) as handle:
            for disk_name, tensor in wanted:
                _fill(handle, disk_name, tensor, folder)
    _check_ties(model, targets, files, folder, open_file)


@torch.no_grad()
def rebuild_buffers(model: PreTrainedModel) -> None:
    """Compute non-persistent buffers (rotary frequencies) again, which `to_empty` leaves as garbage.

    Uses the model's own `_init_weights`, as `from_pretrained` does, so they equal a stock model's bit for bit.
    """
    for name, module in model.named_modules():
        buffers = [b for k in module._non_persistent_buffers_set if (b := module._buffers.get(k)) is not None]
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)  # so that one nobody computes is seen below
        if buffers:
            model._init_weights(module)
        if any(b.is_floating_point() and b.isnan().any() for b in buffers):
            raise UserError(f"{type(model).__name__} cannot recompute the buffers of {clean_name(name)}")


def checkpoint_files(folder: Path) -> dict[str, str]:
    """Which file of a Hugging Face folder holds each tensor, from the index or the files' headers."""
    index = folder / INDEX_FILE
    if not index.is_file():
        names = {}
        for file in sorted(folder.glob("*.safetensors")):
            with _open(file) as handle:
                names.update(dict.fromkeys(handle.keys(), file.name))
        if not names:
            raise _no_weights(folder, str(folder))
        return names
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        absent = sorted({f for f in weight_map.values() if Path(f).name != f or not (folder / f).is_file()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not a safetensors index ({error})") from error
    if absent:
        raise UserError(f"{index} names files that are not there: {_few(absent)}; download the checkpoint again")
    return weight_map


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error}); download it again") from error


def read_slice(handle: Any, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The part of a stored tensor that starts at `offsets`; only those bytes are read."""
    if not sizes:
        return handle.get_tensor(name)
    return handle.get_slice(name)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def _check_shape(handle: Any, disk_name: str, needed: tuple[int, ...], folder: Path) -> None:
    try:
        stored = tuple(handle.get_slice(disk_name).get_shape())
    except SafetensorError as error:
        raise UserError(f"{folder}: {disk_name} is in the index but not in its file; download it again") from error
    if stored != needed:
        raise UserError(f"{folder}: {disk_name} has shape {stored}, the model (config.json) needs {needed}")


def _fill(handle: Any, disk_name: str, tensor: Tensor, folder: Path) -> None:
    _check_shape(handle, disk_name, tuple(tensor.shape), folder)
    local, offsets = local_shard(tensor)
    if local.numel():
        local.copy_(read_slice(handle, disk_name, offsets, local.shape))


def _match_names(
    model: PreTrainedModel, targets: dict[str, Tensor], files: dict[str, str], folder: Path
) -> Iterator[tuple[str, str]]:
    """Pairs (name in memory, name on disk), one for each distinct tensor; raises if the two sides do not agree."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        names_of.setdefault(id(tensor), []).append(name)
    pairs = []
    missing = []
    for names in names_of.values():
        on_disk = [n for n in names if n in files]
        if on_disk:
            pairs.append((names[0], on_disk[0]))
        else:
            missing.append(names[0])
    unexpected = _unexpected(model, [n for n in files if n not in targets])
    if missing or unexpected:
        raise _names_error(folder, missing, unexpected)
    return iter(pairs)


def _unexpected(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of `names`, unknown to the model, that its class does not pass over."""
    ignored = [_IGNORED_ON_DISK, *(re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or [])]
    return [name for name in names if not any(pattern.search(name) for pattern in ignored)]


def _names_error(folder: Path, missing: Sequence[str], unexpected: Sequence[str]) -> UserError:
    parts = [f"lacks {_few(missing)}"] if missing else []
    parts += [f"has unknown {_few(unexpected)}"] if unexpected else []
    return UserError(f"{folder}: the weights do not fit config.json: the checkpoint {' and '.join(parts)}")


def _few(names: Sequence[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(sorted(names)[:count]) + more


def _check_ties(
    model: PreTrainedModel, targets: dict[str, Tensor], files: dict[str, str], folder: Path, open_file: Opener
) -> None:
    """A checkpoint with different values under two names that the config ties would lose one of them: refuse it."""
    first: dict[int, str] = {}
    for name, tensor in targets.items():
        if name not in files:
            continue
        other = first.setdefault(id(tensor), name)
        local, offsets = local_shard(tensor)
        if other == name or not local.numel():
            continue
        with open_file(files[name]) as handle:
            same = torch.equal(local.cpu(), read_slice(handle, name, offsets, local.shape).to(local.dtype))
        if not same:
            raise UserError(f"{folder}: config.json ties {name} to {other}, but they differ in the checkpoint")


# ----- families whose names on disk differ from those in memory


def _conversions(model: PreTrainedModel, disk_names: Iterable[str], targets: dict[str, Tensor]) -> list[Any] | None:
    """Which of transformers' rules change names or shapes of this checkpoint when it is loaded; None: it is as is."""
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    known: dict[str, Any] = dict(targets)
    changed = False
    for name in disk_names:
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        changed = changed or renamed != name or converter is not None
    return [m for m in mapping if m.was_used()] if changed else None


def _load_boxes(
    model: PreTrainedModel, targets: dict[str, Tensor], files: dict[str, str], folder: Path, open_file: Opener
) -> bool:
    """Fill tensors from the stored ones that are parts of them; False, with nothing done, if not all are there."""
    parts = boxes(model)
    if parts is None:
        return False
    parts = {name: part for name, part in parts.items() if part.source in targets}
    if not parts.keys() <= files.keys():
        return False
    if _unexpected(model, files.keys() - parts.keys() - model.all_tied_weights_keys.keys()):
        return False
    by_file: dict[str, list[str]] = {}
    for name in parts:
        by_file.setdefault(files[name], []).append(name)
    for file_name, names in by_file.items():
        with open_file(file_name) as handle:
            for name in names:
                _check_shape(handle, name, parts[name].shape, folder)
                local, offsets = local_shard(targets[parts[name].source])
                if (shared := parts[name].within(local, offsets)) is not None:
                    begins, sizes, elements = shared
                    elements.copy_(read_slice(handle, name, begins, sizes))
    return True


def _load_converted(model: PreTrainedModel, targets: dict[str, Tensor], folder: Path, trust_remote_code: bool) -> None:
    """Let transformers load and convert the checkpoint on the CPU, then copy this rank's parts."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    stock, info = loaded
    mismatched = [str(m) for m in info.get("mismatched_keys", ())]
    if mismatched:
        raise UserError(f"{folder}: shapes do not fit config.json: {_few(mismatched)}")
    unexpected = [n for n in info["unexpected_keys"] if not _IGNORED_ON_DISK.search(n)]
    if info["missing_keys"] or unexpected:
        raise _names_error(folder, list(info["missing_keys"]), unexpected)
    tensors = persistent_tensors(stock)
    if tensors.keys() != targets.keys():
        raise _names_error(folder, list(targets.keys() - tensors.keys()), list(tensors.keys() - targets.keys()))
    for name, tensor in targets.items():
        local, offsets = local_shard(tensor)
        if local.numel():
            part = tensors[name][tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))]
            local.copy_(part)
