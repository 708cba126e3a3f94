"""Blockwise FP8 (DeepSeek-V3 report, arXiv:2412.19437, section 3.3): e4m3 numbers, a float32 scale for each block.

Weights have blocks of 128 x 128, activations of 1 x 128. A block's scale is its largest magnitude over 448, e4m3's
largest number; `value = number * scale`. Blocks at the edges are smaller. All arithmetic is float32 and rounds to
nearest even, so the kernels and the plain versions agree bit by bit.

A block of zeros has scale 1. A block with a value that is not finite has scale NaN: what is computed with it is NaN
too, and cannot be taken for a number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126
"""Of float32's normal numbers: below, a division by the scale would overflow."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., R, C] -> e4m3 [..., R, C], contiguous, and scales [..., ceil(R / 128), ceil(C / 128)] float32."""
    if _has_kernel(weight):
        from lightrl.kernels.fp8_triton import quantize

        return quantize(weight, BLOCK, BLOCK)
    return quantize_reference(weight, BLOCK, BLOCK)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., T, K] -> e4m3 [..., T, K], contiguous, and scales [..., T, ceil(K / 128)] float32."""
    if _has_kernel(x):
        from lightrl.kernels.fp8_triton import quantize

        return quantize(x, 1, BLOCK)
    return quantize_reference(x, 1, BLOCK)


def quantize_reference(x: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """What the kernel computes, for blocks of `rows` x `cols`."""
    blocks = _blocks(x.float(), rows, cols)  # [..., blocks down, rows, blocks across, cols]
    most = blocks.abs().amax((-3, -1))
    scales = (most / LARGEST).clamp_min(_SMALLEST_SCALE)
    scales = scales.masked_fill(most == 0, 1.0).masked_fill(~most.isfinite(), torch.nan)
    numbers = (blocks / scales[..., :, None, :, None]).clamp(-LARGEST, LARGEST).nan_to_num(0.0)
    return _from_blocks(numbers, x).to(E4M3), scales


def dequantize(
    numbers: Tensor, scales: Tensor, *, rows: int = BLOCK, cols: int = BLOCK, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`numbers` [..., R, C] times the scale of each one's block; rounded to `dtype` once, exact in float32."""
    wide = _blocks(numbers.float(), rows, cols) * scales.float()[..., :, None, :, None]
    return _from_blocks(wide, numbers).to(dtype)


def _blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """[..., R, C] -> [..., ceil(R / rows), rows, ceil(C / cols), cols], filled up with zeros."""
    padded = F.pad(x, (0, -x.shape[-1] % cols, 0, -x.shape[-2] % rows))
    return padded.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows))


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    whole = blocks.flatten(-4, -3).flatten(-2, -1)
    return whole[..., : like.shape[-2], : like.shape[-1]].contiguous()


def _has_kernel(x: Tensor) -> bool:
    """e4m3 is in hardware from Ada (8.9) on."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)
