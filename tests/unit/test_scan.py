"""The parallel scan against its serial reference."""

from __future__ import annotations

import pytest
import torch

from lightrl.kernels.scan import reverse_scan, reverse_scan_reference


def test_hand_worked():
    """y3 = 8; y2 = 4 (ends there); y1 = 2 + 4/2; y0 = 1 + 4/2."""
    decay, inputs = torch.tensor([0.5, 0.5, 0.0, 0.9]), torch.tensor([1.0, 2.0, 4.0, 8.0])
    for scan in (reverse_scan, reverse_scan_reference):
        assert scan(decay, inputs).tolist() == [3.0, 4.0, 4.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 63, 256, 257, 4097])
def test_equals_the_serial_one(length, dtype):
    """Lengths around and beyond the chunks, sequences of all lengths in a row, decays of 1 and above among them."""
    g = torch.Generator().manual_seed(length)
    inputs = torch.randn(3, length, generator=g, dtype=torch.float64)
    decay = 0.5 + 0.55 * torch.rand(3, length, generator=g, dtype=torch.float64)
    decay[0] = 1.0
    decay[:, ::29] = 0.0
    expected = reverse_scan_reference(decay, inputs)
    found = reverse_scan(decay.to(dtype), inputs.to(dtype))
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    for row in range(3):  # one row by itself, as packed microbatches are
        torch.testing.assert_close(reverse_scan(decay[row], inputs[row]), expected[row], atol=1e-12, rtol=1e-12)


def test_inputs_are_left_alone():
    decay, inputs = torch.full((40,), 0.9), torch.ones(40)
    reverse_scan(decay, inputs)
    assert torch.equal(decay, torch.full((40,), 0.9))
    assert torch.equal(inputs, torch.ones(40))
    one = torch.ones(1)
    reverse_scan(one, one).fill_(7.0)
    assert one.item() == 1.0


@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_long_rows(decay):
    """T = 131,072: no power of the decay under- or overflows on the way."""
    length = 131_072
    inputs = torch.randn(2, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rates = torch.full_like(inputs, decay)
    rates[1, 50_000] = 0.0
    torch.testing.assert_close(reverse_scan(rates, inputs), reverse_scan_reference(rates, inputs), atol=1e-9, rtol=1e-9)
