"""Milliseconds and memory of a mixture-of-experts block, forward and backward, beside transformers' with `grouped_mm`.

The block is that of a Qwen3-MoE model with random weights: router, experts, and their sum. Ours is the same model after
`lightrl.models.experts.exchange`; both share their weights and take turns. `limit` are torch's bare grouped products of
rows that lie sorted already.

`--stages` first times each part alone, our products with several tiles beside torch's, and adds rows for the plan
that is fastest by these times.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402

PACKAGES = ("transformers", "triton")
PEER = "transformers grouped_mm"
TILES = "128x256x64:3:8,128x256x64:4:8,128x128x64:4:8,128x128x64:3:4,256x128x64:3:8"
TILES += ",128x256x64:3:8t,128x256x64:4:8t,128x128x64:4:8t,128x256x64:3:8tp,128x128x64:4:8tp"


def add_arguments(parser: Any) -> None:
    """Options of this op; the defaults are Qwen3-30B-A3B's."""
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and hidden states")
    parser.add_argument("--tokens", type=int, default=32768, help="of one call")
    parser.add_argument("--hidden", type=int, default=2048, help="width of hidden states")
    parser.add_argument("--intermediate", type=int, default=768, help="width of one expert")
    parser.add_argument("--experts", type=int, default=128, help="experts in all")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each, taking turns")
    parser.add_argument("--stages", action="store_true", help="time each part, and the plan that is fastest by parts")
    parser.add_argument(
        "--tiles", default=TILES, help="ROWSxCOLSxDEPTH:STAGES:WARPS, … to try with --stages; t: by TMA, p: persistent"
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of time, forward and both ways, and of memory; with --stages for a second plan, too."""
    import torch

    torch.manual_seed(0)
    theirs, ours = blocks(args)
    x = torch.randn(1, args.tokens, args.hidden, device=args.device, dtype=getattr(torch, args.dtype))
    push = torch.randn_like(x)
    x.requires_grad_()
    contenders: dict[str, Callable[[], Any]] = {"peer": lambda: theirs(x), "ours": lambda: ours(x)}
    plans: dict[str, str] = {"ours": ""}
    if args.stages:
        plan = stages(args, theirs, x.detach()[0], push[0])
        contenders["planned"] = partial(with_plan(ours, plan), x)
        plans["planned"] = str(plan)
    parameters = [x, *theirs.parameters()]
    forward: dict[str, list[float]] = {name: [] for name in contenders}
    both: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(args.repeats + 2):
        for name, contender in contenders.items():
            found = measure(contender, push, parameters)
            if turn > 1:  # kernels are compiled and memory is taken in the first turns
                for times, value in zip((forward, both, memory), found, strict=True):
                    times[name].append(value)
    limits = bare_products(args, theirs) if args.device == "cuda" else (None, None)
    case = f"H {args.hidden}, I {args.intermediate}, {args.top_k} of {args.experts}, {args.tokens} tokens, {args.dtype}"
    rows = []
    for name, note in plans.items():
        for what, unit, found, limit, goal in (
            ("forward", "ms", forward, limits[0], None),
            ("forward + backward", "ms", both, limits[1], 1.8),
            ("memory", "GiB", memory, None, 2.0),
        ):
            if what == "memory" and args.device != "cuda":
                continue
            rows.append(
                common.result_row(
                    f"{what}, {case}{', fastest plan by parts' if note else ''}", unit, found[name], found["peer"],
                    better="lower", peer_name=PEER, limit=limit, goal=goal, note=note,
                )
            )  # fmt: skip
    return rows


def blocks(args: argparse.Namespace) -> tuple[Any, Any]:
    """transformers' block and ours, of the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from lightrl.models import experts

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=args.hidden, intermediate_size=64, moe_intermediate_size=args.intermediate,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16, num_experts=args.experts,
        num_experts_per_tok=args.top_k, norm_topk_prob=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device(args.device):
        stock, model = (
            AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=getattr(torch, args.dtype), experts_implementation=name
            )  # a config of its own: it says whose experts a model computes with
            for name in ("grouped_mm", "eager")
        )
    experts.exchange(model, experts.softmax_router)
    for module in model.modules():
        module.fuse = True  # as with model.kernels = "auto"
    theirs, ours = stock.model.layers[0].mlp, model.model.layers[0].mlp
    torch.nn.init.normal_(theirs.gate.weight, std=args.hidden**-0.5)
    for name, parameter in list(theirs.named_parameters()):
        owner, leaf = name.rsplit(".", 1)
        setattr(ours.get_submodule(owner), leaf, parameter)
    return theirs, ours


def with_plan(ours: Any, plan: Any) -> Callable[[Any], Any]:
    """Our block with other products than the default's."""
    from lightrl.kernels.moe_fused import fused_experts

    def call(x: Any) -> Any:
        _, weights, indices = ours.gate(x)
        experts = ours.experts
        rows = x.view(-1, x.shape[-1])
        return fused_experts(rows, indices, weights, experts.gate_up_proj, experts.down_proj, plan).view(x.shape)

    return call


def measure(call: Callable[[], Any], push: Any, leaves: list[Any]) -> tuple[float, float, float]:
    """(ms forward, ms forward and backward, GiB at once beyond what was there) of one call."""
    import torch

    on_gpu = push.is_cuda
    for leaf in leaves:
        leaf.grad = None
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    marks = [mark(on_gpu)]
    out = call()
    marks.append(mark(on_gpu))
    out.backward(push)
    marks.append(mark(on_gpu))
    if not on_gpu:
        return 1e3 * (marks[1] - marks[0]), 1e3 * (marks[2] - marks[0]), 0.0
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return marks[0].elapsed_time(marks[1]), marks[0].elapsed_time(marks[2]), peak


def mark(on_gpu: bool) -> Any:
    import torch

    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def median_ms(call: Callable[[], Any], repeats: int = 10) -> float:
    """Of a call on the GPU."""
    import torch

    times = []
    for turn in range(repeats + 2):
        marks = [mark(True)]
        call()
        marks.append(mark(True))
        torch.cuda.synchronize()
        if turn > 1:
            times.append(marks[0].elapsed_time(marks[1]))
    return statistics.median(times)


def bare_products(args: argparse.Namespace, block: Any) -> tuple[float, float]:
    """ms of torch's grouped products, forward and both ways; every expert has as many rows, which suits it best."""
    import torch

    from lightrl.kernels.moe_products import product

    rows = args.tokens * args.top_k
    ends = torch.arange(1, args.experts + 1, device="cuda").mul(rows).div(args.experts, rounding_mode="floor").int()
    make = lambda width: torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, act = make(args.hidden).requires_grad_(), make(args.intermediate).requires_grad_()
    pushes = make(2 * args.intermediate), make(args.hidden)

    def call(backward: bool) -> None:
        outs = (
            product(x, block.experts.gate_up_proj.mT, ends),
            product(act, block.experts.down_proj.mT, ends),
        )
        if backward:
            torch.autograd.backward(outs, pushes)
        for leaf in (x, act, *block.parameters()):
            leaf.grad = None

    return tuple(round(median_ms(lambda backward=b: call(backward)), 2) for b in (False, True))


def stages(args: argparse.Namespace, block: Any, x: Any, push: Any) -> Any:
    """Print the time of each part, alone; the fastest plan by them."""
    import torch

    from lightrl.kernels.moe_fused import Plan

    tried = list(map(parse_tiles, args.tiles.split(",")))
    times: dict[str, float] = {}
    best: dict[str, Any] = {}
    with torch.no_grad():
        parts, products = kernels(args, block, x, push)
        for name, (call, amount) in parts.items():
            times[name] = timed(name, call, amount, "TB/s")
        for name, (torchs, ours, operations) in products.items():
            times[f"{name} torch"] = timed(f"{name}, torch", torchs, operations, "TFLOP/s")
            times[f"{name} ours"] = float("inf")
            for tiles in (t for t in tried if suits(name, t)):
                label = f"{name}, {dataclasses.astuple(tiles)}"
                found = timed(label, lambda ours=ours, tiles=tiles: ours(tiles), operations, "TFLOP/s")
                if found < times[f"{name} ours"]:
                    times[f"{name} ours"], best[name] = found, tiles
    plan = Plan(**{name: best[name] for name in fastest(times)})
    print(f"fastest by parts: {plan}", flush=True)
    return plan


def kernels(args: argparse.Namespace, block: Any, x: Any, push: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts around the products: (call, bytes); products: (torch's call, our call of tiles, operations)."""
    from lightrl.kernels import moe_products as products
    from lightrl.kernels import moe_rows as rows
    from lightrl.models.experts import softmax_router

    up, down = block.experts.gate_up_proj, block.experts.down_proj
    block.gate.choices = None  # as our router finds it
    _, weights, indices = softmax_router(block.gate, x)
    order = rows.sort_by_expert(indices, args.experts)
    many = rows.spread(x, order)
    gate_up = products.product(many, up.mT, order.ends)
    act = rows.swiglu(gate_up, weights, order)
    one, moved = act.nbytes, x.nbytes + many.nbytes
    flops = 2 * act.numel() * args.hidden
    parts = {
        "router": (lambda: softmax_router(block.gate, x), 0),
        "sort": (lambda: rows.sort_by_expert(indices, args.experts), 0),
        "spread": (lambda: rows.spread(x, order), moved),
        "combine": (lambda: rows.combine(many, order), moved),
        "swiglu": (lambda: rows.swiglu(gate_up, weights, order), 3 * one),
        "swiglu_backward": (lambda: rows.swiglu_backward(gate_up, act, weights, order, overwrite=False), 6 * one),
    }
    of = products.product, products.outer_product
    return parts, {
        "gate_up": (
            lambda: of[0](many, up.mT, order.ends),
            lambda tiles: products.gate_up_product(x, up.mT, weights, order, tiles),
            2 * flops,
        ),
        "down": (
            lambda: of[0](act, down.mT, order.ends),
            lambda tiles: of[0](act, down.mT, order.ends, tiles),
            flops,
        ),
        "grad_act": (
            lambda: of[0](many, down, order.ends),
            lambda tiles: products.act_gradient_product(push, down, gate_up, weights, order, tiles, overwrite=False),
            flops,
        ),
        "grad_down": (
            lambda: of[1](many, act, order),
            lambda tiles: of[1](push, act, order, tiles, spread="left"),
            flops,
        ),
        "grad_rows": (
            lambda: of[0](gate_up, up, order.ends),
            lambda tiles: of[0](gate_up, up, order.ends, tiles),
            2 * flops,
        ),
        "grad_gate_up": (
            lambda: of[1](gate_up, many, order),
            lambda tiles: of[1](gate_up, x, order, tiles, spread="right"),
            2 * flops,
        ),
    }


def timed(label: str, call: Callable[[], Any], amount: float, unit: str) -> float:
    """ms, printed; infinite where a tile needs more memory or registers than there are."""
    try:
        found = median_ms(call)
    except Exception as error:  # Triton has many kinds
        print(f"{label:42} {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
        return float("inf")
    rate = f"{amount / found / 1e9:8.2f} {unit}" if amount else ""
    print(f"{label:42} {found:8.3f} ms {rate}", flush=True)
    return found


def fastest(times: dict[str, float]) -> list[str]:
    """Which products are to be ours. Where torch's need copied rows, the copy is counted with them."""
    ours = [name for name in ("down", "grad_rows") if times[f"{name} ours"] < times[f"{name} torch"]]
    if times["gate_up ours"] < times["spread"] + times["gate_up torch"] + times["swiglu"]:
        ours.append("gate_up")
    if times["grad_gate_up ours"] < times["spread"] + times["grad_gate_up torch"]:
        ours.append("grad_gate_up")

    def cost(act: bool, down: bool) -> float:
        total = times["grad_act ours"] if act else times["grad_act torch"] + times["swiglu_backward"]
        total += times["grad_down ours"] if down else times["grad_down torch"]
        return total + (0 if act and down else times["spread"])

    act, down = min(itertools.product((False, True), repeat=2), key=lambda pair: cost(*pair))
    return ours + ["grad_act"] * act + ["grad_down"] * down


def parse_tiles(text: str) -> Any:
    """`128x256x64:4:8tp` -> Tiles."""
    from lightrl.kernels.moe_products import Tiles

    shape, stages, warps = text.split(":")
    flags = {"tma": "t" in warps, "persistent": int("p" in warps)}
    return Tiles(*map(int, shape.split("x")), int(stages), int(warps.rstrip("tp")), **flags)


def suits(name: str, tiles: Any) -> bool:
    """Programs with many tiles read gathered rows late; outer products know neither."""
    if name in ("grad_down", "grad_gate_up"):
        return not (tiles.tma or tiles.persistent)
    return name in ("down", "grad_rows") or not tiles.persistent
