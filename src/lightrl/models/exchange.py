"""Rows between ranks, differentiable."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(rows: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
    """Send `outgoing[r]` rows to rank r, in order; [sum(outgoing), …] -> [sum(incoming), …], by sender. A collective.

    Gradients go back the way the rows came.
    """
    out: Tensor = _Exchange.apply(rows, outgoing, incoming, group)
    return out


def _send(rows: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
    received = rows.new_empty(sum(incoming), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), incoming, outgoing, group=group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
        ctx.back = (incoming, outgoing, group)
        return _send(rows, outgoing, incoming, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(grad, *ctx.back), None, None, None
