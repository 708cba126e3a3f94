"""Rows to pairs of tokens and choices and back: against loops, and the Triton kernel against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightrl.kernels.picks import Picks, sum_rows_reference


def keys_of(tokens: int, choices: int) -> Tensor:
    """Keys 0 to 3; 3 is what is not taken."""
    return torch.randint(0, 4, (tokens, choices), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("tokens", [0, 1, 63, 257])
@pytest.mark.parametrize("choices", [1, 5])
def test_smallest_gather_and_sum(tokens: int, choices: int) -> None:
    keys = keys_of(tokens, choices)
    pairs = [(int(keys[t, j]), t, j) for t in range(tokens) for j in range(choices) if keys[t, j] < 3]
    pairs.sort(key=lambda pair: pair[0])
    most = max((int(row.lt(3).sum()) for row in keys), default=0)
    for limit in (None, max(most, 1)):
        picks = Picks.smallest(keys, len(pairs), limit)
        assert picks.token.tolist() == [t for _, t, _ in pairs]
        assert picks.source.tolist() == [t * choices + j for _, t, j in pairs]
        rows = torch.randn(tokens, 3, dtype=torch.float32, requires_grad=True)
        gathered = picks.gather(rows)
        assert torch.equal(gathered, rows[[t for _, t, _ in pairs]] if pairs else rows[:0])
        cotangent = torch.randn(len(pairs), 3)
        (gradient,) = torch.autograd.grad(gathered, rows, cotangent)
        expected = torch.zeros(tokens, 3)
        for row, (_, t, _) in zip(cotangent, pairs, strict=True):
            expected[t] += row
        torch.testing.assert_close(gradient, expected)
        leaf = cotangent.clone().requires_grad_()
        torch.testing.assert_close(picks.sum(leaf), expected)
        push = torch.randn(tokens, 3)
        (gradient,) = torch.autograd.grad(picks.sum(leaf), leaf, push)
        assert torch.equal(gradient, push[[t for _, t, _ in pairs]] if pairs else push[:0])


def test_sums_are_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0], [-256.0]]).bfloat16()
    assert sum_rows_reference(rows, torch.tensor([[0, 1, -1, 2, 3]])).item() == 2.0


@pytest.mark.interpreter
@pytest.mark.parametrize(("tokens", "most", "width"), [(1, 1, 1), (63, 2, 33), (17, 8, 1500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_equals_plain_torch(tokens: int, most: int, width: int, dtype: torch.dtype) -> None:
    from lightrl.kernels.picks_triton import sum_rows

    g = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens * 2, width, generator=g).to(dtype)
    place = torch.randint(-1, tokens * 2, (tokens, most), generator=g)
    torch.testing.assert_close(sum_rows(rows, place), sum_rows_reference(rows, place), atol=1e-6, rtol=1e-3)
    nothing = torch.full((tokens, most), -1)
    assert not sum_rows(rows, nothing).any()
