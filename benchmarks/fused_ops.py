"""Microseconds of what lies between matrix products, ours beside transformers' own code and Liger's kernels.

A norm of hidden states; norm and rotation of a layer's queries and keys (Liger: one kernel for each norm, one for the
rotation of both); SwiGLU. bfloat16 (float32 on a CPU), forward, and forward with backward, in turns. `limit` is each
tensor read once and written once at 4.2 TB/s, an H200's for a copy; backward reads what it needs again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import attention
import common

PACKAGES = ("transformers", "liger-kernel", "triton")
SHAPES = {"0.6B": (1024, 3072, 16, 8), "4B": (2560, 9728, 32, 8)}
"""Hidden, intermediate, query heads, key heads; heads are of 128."""
HBM = 4.2e12
STOCK, LIGER = "transformers", "Liger"


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


@dataclass(frozen=True)
class Case:
    name: str
    forward_bytes: int
    backward_bytes: int
    inputs: list[Any]
    calls: dict[str, Callable[[], list[Any]]]
    own_inputs: dict[str, list[Any]] = field(default_factory=dict)
    """Of those that overwrite theirs."""


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each case and direction a row for each peer."""
    rows = []
    for shape in args.shapes.split(","):
        for case in cases(shape, args):
            print(case.name, flush=True)
            rows += measure(case, args.repeats)
    return rows


def measure(case: Case, repeats: int) -> list[dict[str, Any]]:
    import torch

    cotangents = {name: [torch.randn_like(x) for x in call()] for name, call in case.calls.items()}

    def both(name: str) -> None:
        torch.autograd.grad(case.calls[name](), case.own_inputs.get(name, case.inputs), cotangents[name])

    def forward(name: str) -> None:
        with torch.no_grad():
            case.calls[name]()

    rows = []
    for direction, work, size in (
        ("forward", forward, case.forward_bytes),
        ("forward and backward", both, case.forward_bytes + case.backward_bytes),
    ):
        times: dict[str, list[float]] = {name: [] for name in case.calls}
        for turn in range(repeats + 3):
            for name in case.calls:
                spent = 1e6 * attention.timed(partial(work, name), case.inputs[0].is_cuda, calls=20)
                if turn >= 3:
                    times[name].append(spent)
        print(direction, {name: round(statistics.median(values), 1) for name, values in times.items()}, flush=True)
        rows += [
            common.result_row(
                f"{case.name}, {direction}", "us", times["ours"], times[peer], better="lower", peer_name=peer,
                limit=round(1e6 * size / HBM, 1), goal=1.0,
            )
            for peer in case.calls
            if peer != "ours"
        ]  # fmt: skip
    return rows


def cases(shape: str, args: argparse.Namespace) -> list[Case]:
    import torch
    from transformers.models.qwen3 import modeling_qwen3 as stock

    from lightrl.kernels.gate import gated
    from lightrl.kernels.norm import Norm, norm_rotate, rms_norm

    width, inner, heads, kv_heads = SHAPES[shape]
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32

    def normal(*sizes: int) -> Any:
        return torch.randn(*sizes, device=args.device, dtype=dtype).requires_grad_()

    liger = liger_ops() if args.device == "cuda" else None
    norm = stock.Qwen3RMSNorm(width).to(args.device, dtype)
    x = normal(args.rows, width)
    calls: dict[str, Any] = {
        "ours": lambda: [rms_norm(x, Norm(weight=norm.weight, eps=1e-6))],
        STOCK: lambda: [norm(x)],
    }
    if liger:
        calls[LIGER] = lambda: [liger.norm(x, norm.weight)]
    found = [Case(f"{shape}: norm", 2 * x.nbytes, 3 * x.nbytes, [x, norm.weight], calls)]

    q, k = normal(args.rows, heads, 128), normal(args.rows, kv_heads, 128)
    norms = [stock.Qwen3RMSNorm(128).to(args.device, dtype) for _ in range(2)]
    angle = torch.randn(args.rows, 128, device=args.device)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def stock_heads() -> list[Any]:
        states = (n(y[None]).transpose(1, 2) for n, y in zip(norms, (q, k), strict=True))
        return list(stock.apply_rotary_pos_emb(*states, cos[None], sin[None]))

    calls = {
        "ours": lambda: [
            norm_rotate(y, Norm(weight=n.weight, eps=1e-6), cos, sin) for n, y in zip(norms, (q, k), strict=True)
        ],
        STOCK: stock_heads,
    }
    if liger:
        calls[LIGER] = lambda: liger.heads(q, k, norms, cos, sin)
    size = q.nbytes + k.nbytes
    inputs = [q, k, *(n.weight for n in norms)]
    found.append(Case(f"{shape}: norm and rotation of heads", 2 * size, 3 * size, inputs, calls))

    gate, up = normal(args.rows, inner), normal(args.rows, inner)
    calls = {
        "ours": lambda: [gated(gate, up, "silu")],
        STOCK: lambda: [torch.nn.functional.silu(gate) * up],
    }
    own = [normal(args.rows, inner), normal(args.rows, inner)]
    if liger:  # its backward writes gradients over its inputs
        calls[LIGER] = lambda: [liger.silu(*own)]
    found.append(Case(f"{shape}: SwiGLU", 3 * gate.nbytes, 5 * gate.nbytes, [gate, up], calls, {LIGER: own}))
    return found


class Liger:
    """Its kernels as its own patches call them, but that norms leave the gradients that come in as they are."""

    def __init__(self) -> None:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        self._norm, self._rope, self.silu = LigerRMSNormFunction, LigerRopeFunction.apply, LigerSiLUMulFunction.apply

    def norm(self, x: Any, weight: Any) -> Any:
        return self._norm.apply(x, weight, 1e-6, 0.0, "llama", False)

    def heads(self, q: Any, k: Any, norms: list[Any], cos: Any, sin: Any) -> list[Any]:
        normed = (self.norm(x[None], n.weight).transpose(1, 2) for n, x in zip(norms, (q, k), strict=True))
        return list(self._rope(*normed, cos[None], sin[None]))


def liger_ops() -> Liger | None:
    try:
        return Liger()
    except ImportError:
        return None
