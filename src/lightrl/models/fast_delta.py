"""Which kernels run gated delta layers: our own, flash-linear-attention's, or plain torch.

No list of cards and versions decides: kernels are tried once, on the layer's own sizes, against `kernels.gated_delta`,
forward and backward, and left alone where the two differ. (fla's backward pass was wrong, or refuses to run, on Hopper
cards with Triton 3.4 to 3.7.0.)
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.kernels import delta, gated_delta
from lightrl.kernels.delta import Heads
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


_EXAMPLE = Heads(2, 64, 4, 64)
_PLANS = (delta.FAST, delta.SAFE)


def choose(device: torch.device, dtype: torch.dtype, own: Heads | None = None) -> Mix:
    """What runs gated delta layers: kernels for half precision on a GPU, if they work there; or plain torch.

    `own`: the sizes of the layers, for our kernels to be tried first; None: they are not wanted.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return gated_delta.mix
    return (_found_own(device, dtype, own) if own is not None else None) or _found(device, dtype)


def find_own(device: torch.device, dtype: torch.dtype, heads: Heads) -> Mix | None:
    """Our kernels, by the first plan that is right on this device; None, with a warning that says why, if none is."""
    problem = ""
    for plan in _PLANS:
        run = partial(delta.mix, plan=plan)
        try:
            problem = check(run, device, dtype, heads)
        except Exception as error:  # whatever Triton or its kernels raise here
            problem = f"fail here ({' '.join(str(error).split())[:200]})"
        if not problem:
            return run
    logger.warning("LightRL's kernels for gated delta layers are left alone: they %s", problem)
    return None


def find(device: torch.device, dtype: torch.dtype) -> Mix:
    """fla's kernels if they are installed and right on this device; else plain torch, with a warning that says why."""
    problem = "is not installed"
    if find_spec("fla") is not None:
        try:
            problem = check(flash_linear_attention(), device, dtype)
            if not problem:
                return flash_linear_attention()
        except Exception as error:  # whatever its import, Triton or the kernels raise here
            problem = f"fails here ({' '.join(str(error).split())[:200]})"
    logger.warning(
        "flash-linear-attention %s: gated delta layers run in plain torch, which is exact but slower", problem
    )
    return gated_delta.mix


def flash_linear_attention() -> Mix:
    """Its kernels, right or not. ImportError without it."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return partial(mix, Kernels(rule, _convolution(_CONVOLUTIONS)))


_found = cache(find)  # a policy and its reference ask once
_found_own = cache(find_own)


def _convolution(paths: tuple[str, ...]) -> Callable[..., Any]:
    for path in paths:
        try:
            found = getattr(importlib.import_module(path), "causal_conv1d", None)
        except ImportError:
            continue
        if callable(found):
            return found
    raise ImportError(f"no causal_conv1d in {', '.join(paths)}")


def check(run: Mix, device: torch.device, dtype: torch.dtype, heads: Heads = _EXAMPLE) -> str:
    """Compare a mixing function with plain torch, values and gradients, prompts shared and not; "" or what is wrong."""
    for parents in ((-1, -1, -1, -1), (-1, 0, 0, -1)):
        chains = Chains.build((70, 9, 130, 3), parents, device)
        inputs = example(chains, device, dtype, heads)
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
                return f"is wrong on this card and Triton version ({what} off by {error:.0%})"
    return ""


def example(chains: Chains, device: torch.device, dtype: torch.dtype, heads: Heads = _EXAMPLE) -> DeltaInputs:
    """Random inputs, the same each time; with gradients."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(chains.lengths)
    channels = 2 * heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def leaf(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
        return x.to(device, dtype).requires_grad_()

    return DeltaInputs(
        mixed=leaf(normal(rows, channels)),
        weight=leaf(normal(channels, 4)),
        bias=None,
        activation=F.silu,
        log_decay=leaf(-0.1 * normal(rows, heads.value_heads).square(), torch.float32),
        beta=leaf(normal(rows, heads.value_heads).sigmoid()),
        **heads._asdict(),
    )


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
        outputs.append(out.squeeze(0))
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
    return inputs.activation((out[0] if isinstance(out, tuple) else out).squeeze(0))
