"""Blockwise FP8: numbers worked by hand, edges, and the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightrl.kernels import fp8


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


def test_a_block_by_hand() -> None:
    """Largest 896: scale 2. e4m3 has 3 bits of mantissa: 17 lies between 16 and 18, and goes to the even one."""
    weight = torch.zeros(2, 130)
    weight[0, :5] = torch.tensor([896.0, -34.0, 38.0, 3.0, 2.0**-9])
    weight[1, 129] = 7.0
    numbers, scales = fp8.quantize_weight(weight)
    assert scales.tolist() == [[2.0, 7.0 / 448.0]]  # 1 / 64
    assert numbers[0, :5].float().tolist() == [448.0, -16.0, 20.0, 1.5, 0.0]  # 2^-10 is half the smallest: to even
    assert numbers[1, 129].float() == 448.0
    back = fp8.dequantize(numbers, scales)
    assert back[0, :5].tolist() == [896.0, -32.0, 40.0, 3.0, 0.0]
    assert back[1, 129] == 7.0


def test_each_row_of_activations_has_its_own_scale() -> None:
    x = torch.tensor([[448.0, 1.0], [1.0, 1.0 / 512]])
    numbers, scales = fp8.quantize_activations(x)
    assert torch.equal(scales, torch.tensor([[1.0], [1.0 / 448]]))
    assert numbers.float().tolist() == [[448.0, 1.0], [448.0, 0.875]]


@pytest.mark.parametrize("shape", [(1, 1), (63, 257), (128, 128), (3, 130, 129)])
@pytest.mark.parametrize("quantize", [fp8.quantize_weight, fp8.quantize_activations])
def test_error_is_within_half_a_step(shape: tuple[int, ...], quantize: object) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.rand(shape[-1]).exp()
    numbers, scales = quantize(x)  # type: ignore[operator]
    rows = 1 if quantize is fp8.quantize_activations else 128
    assert scales.shape == (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // 128))
    wide = scales.repeat_interleave(rows, -2)[..., : shape[-2], :].repeat_interleave(128, -1)[..., : shape[-1]]
    error = (fp8.dequantize(numbers, scales, rows=rows) - x).abs()
    step = torch.maximum(x.abs() / 16, wide * 2**-10)  # half a unit of 3 bits; of a subnormal
    assert (error <= step * (1 + 1e-6)).all()
    assert torch.equal(fp8.dequantize(numbers, scales, rows=rows), numbers.float() * wide)


def test_zeros_and_values_that_are_not_finite() -> None:
    weight = torch.randn(256, 384)
    weight[:128, :128] = 0
    weight[130, 140] = torch.inf
    weight[3, 300] = torch.nan
    weight[200, 10] = 1e-42  # alone in its block below, a subnormal
    weight[128:, :128] = weight[128:, :128].where(weight[128:, :128] == 1e-42, 0.0)
    numbers, scales = fp8.quantize_weight(weight)
    back = fp8.dequantize(numbers, scales)
    assert scales[0, 0] == 1
    assert not back[:128, :128].any()
    assert scales.isnan().tolist() == [[False, False, True], [False, True, False]]
    assert torch.stack([back[128:, 128:256], back[:128, 256:]]).isnan().all()
    assert torch.stack([back[128:, :128], back[:128, 128:256]]).isfinite().all()


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(1, 1), (63, 257), (128, 256), (2, 130, 129)])
@pytest.mark.parametrize("rows", [1, 128])
def test_kernel_equals_the_plain_version_bit_by_bit(shape: tuple[int, ...], rows: int) -> None:
    from lightrl.kernels import fp8_triton

    torch.manual_seed(0)
    x = torch.randn(shape) * torch.randn(shape[-1]).exp()
    if x.numel() > 1000:
        x[..., :128] *= 1e30
        x[..., -1, 130 if shape[-1] > 130 else 3] = torch.inf
        x[..., 0, 128:] = 0
        x[..., 5, -1] = torch.nan
    for given in (x, x.to(torch.float16), x.transpose(-1, -2)):
        numbers, scales = fp8_triton.quantize(given, rows, 128)
        expected, expected_scales = fp8.quantize_reference(given, rows, 128)
        assert numbers.is_contiguous()
        assert torch.equal(bits(numbers), bits(expected))
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreter
def test_kernel_rounds_as_torch_does() -> None:
    """All of e4m3's numbers and the middles between them."""
    from lightrl.kernels import fp8_triton

    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[:-1] + numbers[1:]) / 2
    x = torch.cat([numbers, ties, -ties, ties * (1 + 1e-6), ties * (1 - 1e-6)])
    row = torch.zeros(1, 8 * 128)
    row[0, : len(x)] = x
    row.view(8, 128)[:, 127] = 448.0  # scale 1
    found, scales = fp8_triton.quantize(row, 1, 128)
    assert scales.eq(1).all()
    assert torch.equal(bits(found), bits(row.to(torch.float8_e4m3fn)))
