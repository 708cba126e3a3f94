"""Quantised checkpoints as input: parts of tensors, dequantised as they are read.

Two forms: blockwise FP8 (DeepSeek-V3, Kimi-K2, Qwen3-FP8 and others: `NAME` in e4m3 beside `NAME_scale_inv`), and MXFP4
(gpt-oss: experts as `NAME_blocks`, two e2m1 numbers a byte, the first in its low half, beside `NAME_scales`, a power of
two for each 32: OCP Microscaling Formats, v1.0). Each value is number times scale in float32, exact but for that
product's rounding; what is stored in bfloat16 stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightrl.errors import UserError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = 32  # numbers that share a scale in MXFP4
Opener = Callable[[str], Any]
"""An open safetensors file by its name."""


class Part(Protocol):
    """A stored tensor, of which parts can be read: as safetensors' slices."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Form:
    """How a checkpoint is quantised."""

    block: tuple[int, int] | None
    """Of FP8; None for MXFP4."""

    @classmethod
    def of(cls, config: Mapping[str, Any], path: str) -> Form | None:
        """From a `config.json`; None for float checkpoints. UserError for a form that is not known."""
        settings = config.get("quantization_config")
        if not settings:
            return None
        settings = settings if isinstance(settings, Mapping) else settings.to_dict()
        method = settings.get("quant_method")
        if method == "mxfp4":
            return cls(None)
        block = settings.get("weight_block_size")
        if method == "fp8" and isinstance(block, list | tuple) and len(block) == 2:
            return cls((int(block[0]), int(block[1])))
        what = f"{method} without weight_block_size" if method == "fp8" else str(method)
        raise UserError(
            f"model.path: {path} is quantized ({what}); training reads float checkpoints, blockwise FP8 and MXFP4"
        )

    @classmethod
    def of_folder(cls, folder: Path) -> Form | None:
        """Of a checkpoint's folder."""
        file = folder / "config.json"
        return cls.of(json.loads(file.read_text(encoding="utf-8")), str(folder)) if file.is_file() else None

    def scales_of(self, name: str) -> str:
        """The stored tensor with the scales of tensor `name`."""
        return f"{name}_scales" if self.block is None else f"{name}_scale_inv"

    def numbers_of(self, name: str) -> str:
        """The one with its numbers."""
        return f"{name}_blocks" if self.block is None else name

    def tensors(self, files: Mapping[str, str]) -> dict[str, str]:
        """Each tensor's name, and the file of its values, of stored ones and their files: scales are no tensors."""
        end = self.scales_of("")
        names = [n.removesuffix(end) for n in files if n.endswith(end)]
        quantised = {self.numbers_of(n): n for n in names if self.numbers_of(n) in files}
        scales = {self.scales_of(n) for n in quantised.values()}
        return {quantised.get(n, n): file for n, file in files.items() if n not in scales}


class Reader:
    """Stands for an open safetensors file: gives float values of what is quantised in it, all else as it is."""

    def __init__(self, form: Form, handle: Any, files: Mapping[str, str], open_file: Opener) -> None:
        """`files` are all stored tensors of the checkpoint, `open_file` opens one of its files."""
        self._form, self._handle, self._files, self._open_file = form, handle, files, open_file

    def __enter__(self) -> Reader:
        self._handle.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.__exit__(*error)

    def get_slice(self, name: str) -> Part:
        form = self._form
        scales, numbers = form.scales_of(name), form.numbers_of(name)
        if scales not in self._files or numbers not in self._files:
            part: Part = self._handle.get_slice(name)
            if self._handle.get_slice(name).get_dtype().startswith("F8_"):
                raise UserError(f"{name} is in FP8, and {scales} is missing: download the checkpoint again")
            return part
        stored: Part = self._handle.get_slice(numbers)
        if form.block is None:
            return _Mxfp4Part(stored, self._read(scales))
        return _Fp8Part(name, stored, self._read(scales), form.block)

    def get_tensor(self, name: str) -> Tensor:
        part = self.get_slice(name)
        if not (shape := part.get_shape()):
            whole: Tensor = self._handle.get_tensor(name)
            return whole
        return part[tuple(slice(0, size) for size in shape)]

    def _read(self, name: str) -> Tensor:
        """Scales may be in another file than their numbers; they are small."""
        with self._open_file(self._files[name]) as handle:
            scales: Tensor = handle.get_tensor(name)
        return scales


class _Fp8Part:
    def __init__(self, name: str, numbers: Part, scales: Tensor, block: tuple[int, int]) -> None:
        *leading, rows, cols = numbers.get_shape()
        needed = [*leading, -(-rows // block[0]), -(-cols // block[1])]
        if list(scales.shape) != needed:
            raise UserError(f"{name}_scale_inv has shape {list(scales.shape)}, blocks of {list(block)} need {needed}")
        self._numbers, self._scales, self._block = numbers, scales.float(), block

    def get_shape(self) -> list[int]:
        return self._numbers.get_shape()

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        numbers = self._numbers[place].float()
        *leading, rows, cols = place
        down, across = (torch.arange(s.start, s.stop) // b for s, b in zip((rows, cols), self._block, strict=True))
        return numbers * self._scales[tuple(leading)][..., down[:, None], across]


class _Mxfp4Part:
    """An expert's matrix: stored [E, out, in / 32, 16], the model's is [E, in, out]."""

    def __init__(self, blocks: Part, scales: Tensor) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        experts, rows, groups, width = self._blocks.get_shape()
        return [experts, groups * width * 2, rows]

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        experts, cols, rows = place
        first, last = cols.start // _GROUP, -(-cols.stop // _GROUP)
        groups = slice(first, last)
        packed = self._blocks[(experts, rows, groups, slice(0, _GROUP // 2))]
        values = torch.tensor([*_E2M1, *(-v for v in _E2M1)])[torch.stack([packed & 15, packed >> 4], -1).long()]
        exponents = self._scales[experts, rows, groups].int() - 127
        wide = torch.ldexp(values.flatten(-2), exponents[..., None]).flatten(-2)
        return wide[..., cols.start - first * _GROUP : cols.stop - first * _GROUP].transpose(1, 2)


def without_quantization(config: Any) -> Any:
    """A model's config without the key by which transformers would build quantised layers; changed in place."""
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config
