"""flash-linear-attention's kernels for the gated delta rule, where they are installed and right.

Its backward pass was wrong, or refuses to run, on Hopper cards with Triton 3.4 to 3.7.0. No list of versions decides:
the kernels are tried once against `kernels.gated_delta`, forward and backward, and left alone where the two differ.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.kernels import gated_delta
from lightrl.kernels.gated_delta import Chains, DeltaInputs

logger = logging.getLogger(__name__)

Mix = Callable[[DeltaInputs, Chains], Tensor]

# The convolution has moved between releases.
_CONVOLUTIONS = ("fla.modules.causal_conv1d", "fla.modules.conv.causal_conv1d", "fla.modules.conv", "fla.modules")
_TOLERANCE = 0.03  # relative, of whole tensors; rounding to bfloat16 makes about 0.005


@dataclass(frozen=True)
class Kernels:
    """fla's `chunk_gated_delta_rule` and `causal_conv1d`."""

    rule: Callable[..., Any]
    convolution: Callable[..., Any]


def choose(device: torch.device, dtype: torch.dtype) -> Mix:
    """What runs gated delta layers: fla's kernels for half precision on a GPU, if they work there; or plain torch."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return gated_delta.mix
    return _found(device, dtype)


def find(device: torch.device, dtype: torch.dtype) -> Mix:
    """fla's kernels if they are installed and right on this device; else plain torch, with a warning that says why."""
    problem = "flash-linear-attention is not installed"
    if find_spec("fla") is not None:
        try:
            rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
            run = partial(mix, Kernels(rule, _convolution(_CONVOLUTIONS)))
            problem = check(run, device, dtype)
            if not problem:
                return run
        except Exception as error:  # whatever its import, Triton or the kernels raise here
            problem = f"flash-linear-attention fails here ({' '.join(str(error).split())[:200]})"
    logger.warning("%s: gated delta layers run in plain torch, which is exact but slower", problem)
    return gated_delta.mix


_found = cache(find)  # a policy and its reference ask once


def _convolution(paths: tuple[str, ...]) -> Callable[..., Any]:
    for path in paths:
        try:
            found = getattr(importlib.import_module(path), "causal_conv1d", None)
        except ImportError:
            continue
        if callable(found):
            return found
    raise ImportError(f"no causal_conv1d in {', '.join(paths)}")


def check(run: Mix, device: torch.device, dtype: torch.dtype) -> str:
    """Compare a mixing function with plain torch, values and gradients, prompts shared and not; "" or what differs."""
    for parents in ((-1, -1, -1, -1), (-1, 0, 0, -1)):
        chains = Chains.build((70, 9, 130, 3), parents, device)
        inputs = _example(chains, device, dtype)
        names = ("mixed", "weight", "log_decay", "beta")
        leaves = [getattr(inputs, name) for name in names]
        results = []
        for function in (run, gated_delta.mix):
            out = function(inputs, chains)
            push = torch.linspace(-1, 1, out.numel(), device=device).sin().view_as(out).to(dtype)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, push)])
        for name, found, expected in zip(("output", *names), *results, strict=True):
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            if not error < _TOLERANCE:
                what = "output" if name == "output" else f"gradient of {name}"
                return f"flash-linear-attention is wrong on this card and Triton version ({what} off by {error:.0%})"
    return ""


def _example(chains: Chains, device: torch.device, dtype: torch.dtype) -> DeltaInputs:
    generator = torch.Generator().manual_seed(0)
    key_heads, value_heads, dim, rows = 2, 4, 64, sum(chains.lengths)
    channels = 2 * key_heads * dim + value_heads * dim

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    inputs = DeltaInputs(
        mixed=leaf(rows, channels),
        weight=leaf(channels, 4),
        bias=None,
        activation=F.silu,
        log_decay=leaf(rows, value_heads, dtype=torch.float32),
        beta=leaf(rows, value_heads),
        key_heads=key_heads,
        key_dim=dim,
        value_heads=value_heads,
        value_dim=dim,
    )
    with torch.no_grad():
        log_decay = (-0.1 * inputs.log_decay.square()).requires_grad_()
        beta = inputs.beta.sigmoid().requires_grad_()
    return replace(inputs, log_decay=log_decay.detach().requires_grad_(), beta=beta.detach().requires_grad_())


def mix(kernels: Kernels, inputs: DeltaInputs, chains: Chains) -> Tensor:
    """As `gated_delta.mix`, by fla's kernels; segments that continue others come after those, with their states."""
    q, k, v = (x[None] for x in inputs.heads(_convolve(kernels, inputs, chains)))
    g, beta = inputs.log_decay[None], inputs.beta[None]
    repeats = inputs.value_heads // inputs.key_heads
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    rows: list[Tensor] = []
    outputs: list[Tensor] = []
    state: Tensor | None = None
    for generation in chains.generations:
        tensors = (q, k, v, g, beta)
        if generation.rows is not None:
            tensors = tuple(x[:, generation.rows] for x in tensors)  # type: ignore[assignment]
            rows.append(generation.rows)
        out, state = kernels.rule(
            *tensors,
            initial_state=None if generation.parents is None or state is None else state[generation.parents],
            output_final_state=generation is not chains.generations[-1],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=generation.cu_seqlens,
        )
        outputs.append(out[0])
    if not rows:
        return outputs[0]
    together = torch.cat(outputs)
    return torch.empty_like(together).index_copy(0, torch.cat(rows), together)


def _convolve(kernels: Kernels, inputs: DeltaInputs, chains: Chains) -> Tensor:
    if len(chains.generations) > 1:  # the inputs of a prompt's end would be wanted once for each answer
        return gated_delta.short_convolution(inputs.mixed, inputs.weight, inputs.bias, inputs.activation, chains)
    out = kernels.convolution(
        inputs.mixed[None], inputs.weight, inputs.bias, cu_seqlens=chains.generations[0].cu_seqlens
    )
    return inputs.activation((out[0] if isinstance(out, tuple) else out)[0])
