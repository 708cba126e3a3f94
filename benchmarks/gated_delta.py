"""Milliseconds and memory of a gated delta layer's mixing (short convolution and delta rule) over packed rows.

Ours are the kernels of `lightrl.kernels.delta`. Peers, in turns with them: our plain torch path; transformers' own code
(`conv1d`, `torch_chunk_gated_delta_rule`), which takes rows of one length as a batch only; flash-linear-attention's
kernels where they can be imported: their name says whether they pass LightRL's check on this card. The sizes are
Qwen3.5-9B's, bfloat16 (float32 on a CPU, where Triton must interpret: TRITON_INTERPRET=1).

`limit`: inputs and gradients read once and results written once at 4.2 TB/s, or the products at 780 TFLOP/s, whichever
takes longer. Notes hold the largest relative difference of outputs and gradients from plain torch.

`--stages` lists the time of each kernel; `--sweep` tries kernels with other launches, one at a time, leaves out what is
wrong or does not compile, and adds rows for the plan that is fastest by these times.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import hybrid_stack
import moe_block

PACKAGES = ("transformers", "triton", "fla-core", "flash-linear-attention")
CASES = {
    "one": "1 row",
    "eight": "8 rows of one length",
    "mixed": "lognormal lengths",
    "shared": "4 prompts of 4 answers",
}
PLAIN, STOCK = "plain torch", "transformers"
HBM, RATE = 4.2e12, 780e12
SWEEP = {
    "states": "4:2:16,4:3:16,4:1:32,4:2:32,4:3:32,4:2:64,8:2:32",
    "state_gradients": "4:2:16,4:3:16,4:1:32,4:2:32,4:2:64,8:2:32",
    "last": "4:1,8:1",
    "key": "4:1:32,4:1:64,8:1:32",
    "query": "4:1,8:1",
    "outputs": "4:1:64,4:1:128,8:1:128",
    "prepare": "2:1,4:1,8:1",
    "system": "4:1,8:1",
    "inner": "4:1,8:1",
}
KERNELS = {
    "inner": "inner_gradients", "query": "query_gradients", "key": "key_gradients", "system": "system_gradients",
    "last": "last_gradients",
}  # fmt: skip


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", default="16:128:32:128", help="key heads : size : value heads : size")
    parser.add_argument("--cases", default="one,mixed,shared", help="; ".join(f"{k}: {v}" for k, v in CASES.items()))
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each, taking turns")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--stages", action="store_true", help="time each kernel, on the first case")
    parser.add_argument("--sweep", action="store_true", help="try launches, on the first case")
    parser.add_argument("--only", default=",".join(SWEEP), help="kernels of the sweep")


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    chains: Any
    inputs: Any
    push: Any

    @property
    def leaves(self) -> list[Any]:
        return [self.inputs.mixed, self.inputs.weight, self.inputs.log_decay, self.inputs.beta]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each case forward, both ways and memory, a row for each peer."""
    if args.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("on a CPU set TRITON_INTERPRET=1, and small --tokens and --heads")
    from lightrl.kernels import delta

    rows, plan = [], None
    for number, name in enumerate(args.cases.split(",")):
        case = make_case(name, args)
        print(f"{CASES[name]}: {len(case.lengths)} segments", flush=True)
        if number == 0 and args.stages:
            show_stages(case, delta.FAST)
        if number == 0 and args.sweep:
            plan = sweep(case, args.only.split(","))
        rows += measure_case(case, contenders(case, args, plan), args)
    return rows


def make_case(name: str, args: argparse.Namespace) -> Case:
    import torch

    from lightrl.kernels.delta import Heads
    from lightrl.kernels.gated_delta import Chains
    from lightrl.models import fast_delta

    lengths, parents = layout(name, args.tokens)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    chains = Chains.build(lengths, parents, device)
    inputs = fast_delta.example(chains, device, dtype, Heads(*map(int, args.heads.split(":"))))
    push = torch.randn(sum(lengths), inputs.value_heads, inputs.value_dim, device=device, dtype=dtype)
    return Case(name, lengths, parents, chains, inputs, push)


def layout(name: str, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of segments, and the ones that they continue."""
    if name == "one":
        return (tokens,), (-1,)
    if name == "eight":
        return (tokens // 8,) * 8, (-1,) * 8
    if name == "mixed":
        lengths = hybrid_stack.mixed_lengths(tokens, max(4, tokens // 4))
        return tuple(lengths), (-1,) * len(lengths)
    prompt = max(1, tokens // 16)
    group = (prompt, *(prompt * 3 // 4 + 1 for _ in range(4)))
    return group * 4, tuple(p for g in range(4) for p in (-1, *(5 * g,) * 4))


def contenders(case: Case, args: argparse.Namespace, plan: Any) -> dict[str, Callable[[], Any]]:
    """Ours first; a plan of the sweep is one of ours."""
    import torch

    from lightrl.kernels import delta, gated_delta
    from lightrl.models import fast_delta

    found = {"ours": partial(delta.mix, case.inputs, case.chains)}
    if plan is not None:
        found["ours, swept"] = partial(delta.mix, case.inputs, case.chains, plan)
    found["ours, kept"] = partial(
        delta.mix, case.inputs, case.chains, dataclasses.replace(plan or delta.FAST, keep=True)
    )
    found[PLAIN] = partial(gated_delta.mix, case.inputs, case.chains)
    if len(set(case.lengths)) == 1 and max(case.parents) < 0:
        found[STOCK] = partial(stock, case)
    try:
        theirs = fast_delta.flash_linear_attention()
        call = partial(theirs, case.inputs, case.chains)
        torch.autograd.grad(call(), case.leaves, case.push)
        problem = fast_delta.check(theirs, case.push.device, case.push.dtype)
        found[f"fla, which {problem}" if problem else "fla, which passes"] = call
    except Exception as error:  # whatever its import, Triton or the kernels raise
        print(f"fla: {type(error).__name__}: {' '.join(str(error).split())[:160]}", flush=True)
    return found


def stock(case: Case) -> Any:
    """transformers' convolution and rule, in rows of one length."""
    import inspect

    import torch.nn.functional as F
    from transformers.models.qwen3_5 import modeling_qwen3_5

    rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    x, length = case.inputs, case.lengths[0]
    rows = x.mixed.unflatten(0, (-1, length)).mT
    convolved = F.silu(F.conv1d(rows, x.weight[:, None], padding=x.weight.shape[1] - 1, groups=x.weight.shape[0]))
    q, k, v = x.heads(convolved[..., :length].mT.flatten(0, 1))
    repeats = x.value_heads // x.key_heads
    q, k = (y.repeat_interleave(repeats, dim=1) for y in (q, k))
    q, k, v, g, beta = (y.unflatten(0, (-1, length)) for y in (q, k, v, x.log_decay, x.beta))
    return rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0].flatten(0, 1)


def measure_case(case: Case, calls: dict[str, Callable[[], Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    forward: dict[str, list[float]] = {name: [] for name in calls}
    both: dict[str, list[float]] = {name: [] for name in calls}
    memory: dict[str, list[float]] = {name: [] for name in calls}
    exact = results(case, calls[PLAIN])
    notes = {
        name: f"differs from plain torch by {difference(results(case, call), exact):.2g}"
        for name, call in calls.items()
    }
    del exact
    for turn in range(args.repeats + 1):
        for name, call in calls.items():
            found = moe_block.measure(call, case.push, case.leaves)
            if turn:  # memory is taken in the first
                for times, value in zip((forward, both, memory), found, strict=True):
                    times[name].append(value)
    rows = []
    limits = floor(case) if args.device == "cuda" else (None, None)
    for mine in (name for name in calls if name.startswith("ours")):
        for peer in (name for name in calls if not name.startswith("ours")):
            for what, unit, found, limit in (
                ("forward", "ms", forward, limits[0]),
                ("forward + backward", "ms", both, limits[1]),
                ("memory", "GiB", memory, None),
            ):
                if what == "memory" and args.device != "cuda":
                    continue
                label = f"{CASES[case.name]}, {args.tokens} tokens, {what}{mine.removeprefix('ours')}"
                rows.append(
                    common.result_row(
                        label, unit, found[mine], found[peer], better="lower", peer_name=peer, limit=limit,
                        goal=1.0, note=notes[mine],
                    )
                )  # fmt: skip
    return rows


def results(case: Case, call: Callable[[], Any]) -> list[Any]:
    import torch

    out = call()
    return [out.detach(), *torch.autograd.grad(out, case.leaves, case.push)]


def difference(found: list[Any], exact: list[Any]) -> float:
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, exact, strict=True))


def floor(case: Case) -> tuple[float, float]:
    """ms forward, and forward and backward."""
    x, out = case.inputs, case.push
    small = x.log_decay.nbytes + x.beta.nbytes
    moved = x.mixed.nbytes + small + out.nbytes, 3 * x.mixed.nbytes + 3 * small + 2 * out.nbytes
    products = 2 * 64 * x.key_dim * 3 + 2 * 64 * x.value_dim * 2 + 6 * x.key_dim * x.value_dim  # a row and head
    flops = sum(case.lengths) * x.value_heads * products
    return tuple(round(1e3 * max(b / HBM, f * flops / RATE), 3) for b, f in zip(moved, (1, 3), strict=True))  # type: ignore[return-value]


# ---- kernels one by one


def kernel_times(call: Callable[[], Any], cuda: bool) -> dict[str, float]:
    """ms of each kernel in a call, the lesser of two; on a CPU of the whole, as "all"."""
    import torch

    if not cuda:
        start = time.perf_counter()
        call()
        return {"all": 1e3 * (time.perf_counter() - start)}
    from torch.profiler import ProfilerActivity, profile

    call()
    found: dict[str, float] = {}
    for _ in range(2):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            call()
            torch.cuda.synchronize()
        for event in recorded.key_averages():
            if event.device_time_total:
                spent = event.device_time_total / 1e3
                found[event.key] = min(found.get(event.key, spent), spent)
    return found


def show_stages(case: Case, plan: Any) -> None:
    from lightrl.kernels import delta

    times = kernel_times(lambda: results(case, lambda: delta.mix(case.inputs, case.chains, plan)), case.push.is_cuda)
    print(f"kernels, forward + backward: {sum(times.values()):.3f} ms", flush=True)
    for name, spent in sorted(times.items(), key=lambda item: -item[1])[:30]:
        print(f"{name[:70]:70} {spent:8.3f} ms", flush=True)


def sweep(case: Case, names: list[str]) -> Any:
    """The plan of the fastest launches, each tried with all others as they are."""
    from lightrl.kernels import delta

    best: dict[str, Any] = {}
    expected = results(case, lambda: delta.mix(case.inputs, case.chains))
    for name in names:
        least = float("inf")
        for text in SWEEP[name].split(","):
            launch = delta.Launch(*map(int, text.split(":")))
            plan = dataclasses.replace(delta.FAST, **{name: launch})
            call = partial(delta.mix, case.inputs, case.chains, plan)
            try:
                error = difference(results(case, call), expected)
                times = kernel_times(partial(results, case, call), case.push.is_cuda)
            except Exception as problem:  # Triton has many kinds
                print(f"{name:16} {text:8} {type(problem).__name__}: {str(problem).splitlines()[0][:90]}", flush=True)
                continue
            spent = times.get(KERNELS.get(name, name), times.get("all", float("inf")))
            wrong = not error < 0.02
            print(f"{name:16} {text:8} {spent:8.3f} ms{f', WRONG by {error:.2g}' if wrong else ''}", flush=True)
            if not wrong and spent < least:
                least, best[name] = spent, launch
    plan = dataclasses.replace(delta.FAST, **best)
    print(f"fastest by kernels: {plan}", flush=True)
    return plan
