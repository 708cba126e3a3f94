"""AdamW (arXiv:1711.05101) on shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.models.shards import own_part


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, the same states and numbers, called with each rank's own parts of the tensors.

    Each element's update needs nothing of others. torch would take the sharded tensors through DTensor's dispatch: tens
    of milliseconds on the host for a few hundred parameters, while the GPU waits.

    As torch's own it takes `grad_scale`, which gradients are divided by, and `found_inf`, which is 1 where the step is
    to be left out: scalars on the parameters' device, float32.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options, fused=True)
        self.grad_scale = self.found_inf = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("no closure is taken: gradients are there")
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # torch's own, which makes the states
            params, grads, averages, squares = ([own_part(t) for t in tensors] for tensors in lists[:4])
            largest, steps = lists[4:]
            if not params:
                continue
            torch._foreach_add_(steps, 1)
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                params,
                grads,
                averages,
                squares,
                largest,
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))
