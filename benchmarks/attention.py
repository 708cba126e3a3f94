"""TFLOP/s of attention over packed rows, forward, and forward with backward, ours beside what torch has.

Ours is the attention function that models call, with the kernel it chooses for the packing (`kernels/attention.py`).
Peers, in turns with it: SDPA's flash kernel, sequence by sequence (those of one length in one call), and torch's
`varlen_attn` (FlashAttention-2 over `cu_seqlens`). bfloat16 (float32 on a CPU), causal, query heads sharing keys.

A forward counts 4 x heads x head size for each pair of a row and a key it sees, a backward 2.5 times that. Where a
prompt is shared, it is packed once; SDPA gets each answer with a prompt of its own, and all are credited with the pairs
of the packed rows only, which is the work to be done.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import common

PACKAGES = ("flash-attn-4",)
CASES = {
    "one": "1 sequence",
    "eight": "8 of one length",
    "ragged": "20 lognormal lengths",
    "shared": "8 answers, shared prompt",
    "long": "2 long answers, shared prompt",
}
VARLEN = "torch varlen_attn"
SDPA = "SDPA flash"


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--heads", default="16:8:128", help="query heads : key heads : head size")
    parser.add_argument("--cases", default=",".join(CASES), help="; ".join(f"{k}: {v}" for k, v in CASES.items()))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each case and direction a row for each peer."""
    rows = []
    for case in args.cases.split(","):
        rows += measure(case, args)
    return rows


def measure(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from lightrl.kernels.attention import attend, choose
    from lightrl.kernels.attention_flash import FlashBody
    from lightrl.models.attention import Segments, packed_attention
    from lightrl.training.packing import pack

    heads, kv_heads, width = map(int, args.heads.split(":"))
    units = samples(case, args.rows)
    batch = pack(units, [[1.0] * len(unit) for unit in units])
    device = torch.device(args.device)
    segments = Segments.from_microbatch(batch, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)

    def qkv(rows: int) -> list[Any]:
        """[1, heads, rows, D] each, as models hand them over: of each row, its heads lie together."""
        shapes = ((1, rows, n, width) for n in (heads, kv_heads, kv_heads))
        made = (torch.randn(s, generator=g, device=device, dtype=dtype).transpose(1, 2) for s in shapes)
        return [x.requires_grad_() for x in made]

    packed, lengths = qkv(len(batch.input_ids)), [len(s.prompt) + len(s.response) - 1 for u in units for s in u]
    module = torch.nn.Module()
    module.fuse = True  # as with model.kernels = "auto"
    bodies = [
        Body("ours", packed, lambda q, k, v: [packed_attention(module, q, k, v, None, segments=segments)[0]]),
        Body(SDPA, packed if segments.kv_index is None else qkv(sum(lengths)), sdpa_loop(lengths)),
    ]
    note = "SDPA by block"
    if device.type == "cuda":
        plain = FlashBody(segments.packing, width**-0.5)

        bodies.append(Body(VARLEN, packed, lambda *x: [attend(*(y[0].transpose(0, 1) for y in x), plain)]))
        q, _, v = (x[0].transpose(0, 1) for x in packed)
        note = type(choose(segments.packing, q, v, 1.0, None, False)).__name__
    flops = 4 * heads * width * pairs(batch)
    return [
        common.result_row(
            f"{CASES[case]}, {direction}", "TFLOP/s", rates["ours"], rates[body.name],
            better="higher", peer_name=body.name, note=note,
        )
        for direction, rates in directions(bodies, flops, args.repeats).items()
        for body in bodies[1:]
    ]  # fmt: skip


@dataclass(frozen=True)
class Body:
    name: str
    inputs: list[Any]
    call: Callable[..., list[Any]]
    """Outputs, which together are those of all rows."""


def samples(case: str, rows: int) -> list[list[Any]]:
    """Units of packing whose rows add up to `rows`, a prompt of one token each, or one for all."""
    import torch

    from lightrl.training.packing import TrainSample

    prompt = 1
    if case == "one":
        lengths = [rows]
    elif case == "eight":
        lengths = [rows // 8] * 8
    elif case == "ragged":
        drawn = torch.randn(20, generator=torch.Generator().manual_seed(0)).exp()
        borders = (drawn.cumsum(0) / drawn.sum() * (rows - 40)).round().int().tolist()
        lengths = [b - a + 2 for a, b in pairwise([0, *borders])]
    else:
        prompt, answers = (rows // 16, 8) if case == "shared" else (rows // 64, 2)
        lengths = [prompt + (rows - prompt) // answers - i for i in range(answers)]
    made = [
        TrainSample(
            group_index=0, index=i, prompt=[0] * prompt, response=[0] * (n - prompt + 1),
            loss_mask=[1] * (n - prompt + 1), rollout_logprobs=None, advantage=0.0,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    return [made] if prompt > 1 else [[sample] for sample in made]


def pairs(batch: Any) -> float:
    """Pairs of a row and a key that it sees, in the packed rows."""
    borders = zip(*(pairwise(b.tolist()) for b in (batch.cu_seqlens_q, batch.cu_seqlens_k)), strict=True)
    total = 0.0
    for (start_q, end_q), (start_k, end_k) in borders:
        rows, keys = end_q - start_q, end_k - start_k
        total += rows * (keys - rows) + rows * (rows + 1) / 2
    return total


def sdpa_loop(lengths: list[int]) -> Callable[..., Any]:
    """Each sample alone, but those of one length in one call."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    runs = [(length, len(list(run))) for length, run in groupby(lengths)]

    def call(q: Any, k: Any, v: Any) -> list[Any]:
        start, results = 0, []
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext():
            for length, count in runs:
                rows = slice(start, start + length * count)
                mine = (x[0, :, rows].unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
                attention = torch.nn.functional.scaled_dot_product_attention
                results.append(attention(*mine, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]))
                start = rows.stop
        return results

    return call


def directions(bodies: list[Body], flops: float, repeats: int) -> dict[str, dict[str, list[float]]]:
    """TFLOP/s of each, in turns."""
    import torch

    cotangents = {body.name: [torch.randn_like(x) for x in body.call(*body.inputs)] for body in bodies}

    def both(body: Body) -> None:
        torch.autograd.grad(body.call(*body.inputs), body.inputs, cotangents[body.name])

    def forward(body: Body) -> None:
        with torch.no_grad():
            body.call(*body.inputs)

    found = {}
    for direction, work, factor in (("forward", forward, 1.0), ("forward and backward", both, 3.5)):
        rates: dict[str, list[float]] = {body.name: [] for body in bodies}
        for turn in range(repeats + 3):
            for body in bodies:
                seconds = timed(partial(work, body), body.inputs[0].is_cuda)
                if turn >= 3:
                    rates[body.name].append(factor * flops / seconds / 1e12)
        print(direction, {name: round(statistics.median(values), 3) for name, values in rates.items()}, flush=True)
        found[direction] = rates
    return found


def timed(work: Callable[[], None], cuda: bool, calls: int = 5) -> float:
    """Seconds of a call; on a GPU of several, which the host can hand over ahead of it, as in a model."""
    import torch

    if not cuda:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls
