"""The experts that SGLang's routers chose, as it returns them.

With `enable_return_routed_experts`, an answer of n tokens to a prompt of p has [p + n - 1, layers, k] int32 numbers:
every token that was fed, cached prefixes too (its records lie beside its KV cache), in every decoder block. Blocks
without a router hold zeros, and so do those whose expert kernel chooses by itself (`moe_runner_backend` triton_kernel,
flashinfer_trtllm …): k equal experts are no choice. 0.5.17 to 0.5.23 do all of this alike.
"""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from lightrl.models.routing import RoutingShape


def routing_of(
    shape: RoutingShape | None, sent: tuple[int, str] | None, *, rows: int, aborted: bool, where: str
) -> Tensor:
    """[rows, L, k] of `shape.dtype`, of what `sglang_answers.narrow` made of an answer's; NOT_RECORDED where SGLang has
    none, as for all of an answer that was `aborted` before it was put away.

    RuntimeError, which begins with `where`, for an answer without any, or of another model.
    """
    if shape is None:
        raise RuntimeError(f"{where}: asks for routing, which the engine was not started for")
    whole = torch.full((rows, len(shape.layers), shape.top_k), -1, dtype=torch.int16)
    if sent is None or not sent[1]:
        if aborted:
            return shape.compact(whole)
        raise RuntimeError(f"{where}: SGLang returned no routed experts: is it run with enable_return_routed_experts?")
    width, text = sent
    numbers = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8 if width == 1 else torch.int16)
    per_row = shape.num_layers * shape.top_k
    if len(numbers) % per_row:
        layers = f"{shape.num_layers} layers x {shape.top_k} experts"
        raise RuntimeError(f"{where}: SGLang returned {len(numbers)} routed experts, no multiple of {layers}")
    found = numbers.view(-1, shape.num_layers, shape.top_k)[:rows, list(shape.layers)].to(torch.int16)
    if found.numel() and int(found.max()) >= shape.num_experts:
        raise RuntimeError(f"{where}: SGLang chose expert {int(found.max())}, the policy has {shape.num_experts}")
    if shape.top_k > 1:
        found.masked_fill_((found[..., :1] == found[..., 1:2]) | (found < 0).any(-1, keepdim=True), -1)
    if not aborted and bool((found < 0).all()):
        raise RuntimeError(
            f"{where}: SGLang recorded no expert: its kernel for them chooses by itself; set "
            "engine.args.moe_runner_backend = 'triton' (a server: --moe-runner-backend triton)"
        )
    whole[: len(found)] = found
    return shape.compact(whole)
