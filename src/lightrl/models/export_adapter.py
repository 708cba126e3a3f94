"""Low-rank adapters out: a folder in peft's format, which `PeftModel.from_pretrained` loads over the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from lightrl.models.export import inner_model, write_folder
from lightrl.models.lora import ADAPTER
from lightrl.models.names import adapter_tensors
from lightrl.models.shards import whole_tensor

WEIGHTS_FILE = "adapter_model.safetensors"


def export_adapter(
    model: nn.Module, out_dir: Path, *, base: str, revision: str | None = None, is_main: bool, replace: bool = False
) -> None:
    """Write the adapters of `model` to `out_dir`, float32. All ranks call it; the main one writes.

    `base` and `revision` name the model they belong to. As for `export_hf`, the folder appears whole or not at all, and
    a target that is not empty is a `UserError` unless `replace`.
    """
    inner: Any = inner_model(model)
    tensors = adapter_tensors(inner)
    device = next(iter(tensors.values())).device
    whole = {name: whole_tensor(t.detach()) for name, t in tensors.items()}
    config = copy.copy(inner.peft_config[ADAPTER])
    config.base_model_name_or_path, config.revision, config.inference_mode = base, revision, True
    config.target_modules = sorted(config.target_modules)

    def fill(folder: Path) -> None:
        stored = {_stored_name(name): t.cpu().contiguous() for name, t in whole.items()}
        save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config.save_pretrained(str(folder))

    write_folder(fill, out_dir, is_main=is_main, replace=replace, device=device)


def _stored_name(name: str) -> str:
    """peft's: within the wrapper that it puts around a model, without the adapter's own name."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"
