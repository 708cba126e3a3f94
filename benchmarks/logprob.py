"""Log-probs and entropies from hidden states, forward and backward, and the memory it takes.

All get the same hidden states, head, targets and gradients of both outputs. Peers: whole logits under autograd; rows a
chunk at a time under torch's checkpoint; our own plain torch path; Liger's fused linear cross entropy, where it is
installed, which does less: no entropy, and one number for all tokens instead of a gradient for each. The limit of time
is the four matrix products alone, as torch does them, measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import common

PACKAGES = ("triton", "liger-kernel")
PLAIN = "plain torch, ours"


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    cases = "1024:151936,4096:151936,2048:248320"
    parser.add_argument("--cases", default=cases, help=f"HIDDEN:VOCABULARY of each, default {cases}")
    parser.add_argument("--rows", type=int, default=16_384, help="tokens")
    parser.add_argument("--peer-rows", type=int, default=1024, help="of a chunk of the peer with checkpoint")
    parser.add_argument("--device", default="auto", help="auto: a GPU where there is one, in bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="ours alone, in all the ways it can be cut (GPU)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each case: time against each peer, the forward pass alone, memory."""
    rows: list[dict[str, Any]] = []
    for case in args.cases.split(","):
        work = Work.make(args.rows, *map(int, case.split(":")), device=args.device)
        name = f"{args.rows} x {case.replace(':', ' x ')}"
        rows += sweep_rows(work, name, args.repeats) if args.sweep else case_rows(work, name, args)
    return rows


def case_rows(work: Work, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    from lightrl.kernels.logprob import linear_logprobs, linear_logprobs_torch

    calls: dict[str, Callable[[Work], Any]] = {
        "ours": partial(forward, linear_logprobs),
        PLAIN: partial(forward, linear_logprobs_torch),
        "whole logits": partial(forward, whole_logits),
        "chunks, checkpoint": partial(forward, partial(checkpointed, args.peer_rows)),
    }
    if work.hidden.is_cuda and (liger := liger_call()):
        calls["Liger"] = liger
    measured = measure(calls, work, args.repeats)
    limit = common._round(1000 * work.seconds(lambda: products(work)))
    ours = measured.pop("ours")
    rows = []
    for peer, theirs in measured.items():
        rows.append(
            common.result_row(
                f"{name}, forward and backward", "ms", ours.both, theirs.both, better="lower", peer_name=peer,
                limit=limit, note=f"limit: four matrix products; {peer} takes {theirs.memory:.2f} GiB",
            )
        )  # fmt: skip
        if peer != "Liger":  # makes gradients in the forward pass
            rows.append(
                common.result_row(
                    f"{name}, forward", "ms", ours.forward, theirs.forward, better="lower", peer_name=peer,
                    limit=common._round(limit / 4),
                )
            )  # fmt: skip
    if work.hidden.is_cuda:
        for peer, theirs in measured.items():
            what = f"{name}, memory beyond inputs and the head's gradient"
            rows.append(
                common.result_row(what, "GiB", [ours.memory], [theirs.memory], better="lower", peer_name=peer)
            )  # fmt: skip
    return rows


def sweep_rows(work: Work, name: str, repeats: int) -> list[dict[str, Any]]:
    """A row of forward and backward, and one of forward, for each way."""
    from lightrl.kernels.logprob_triton import linear_logprobs_triton

    def cut(plan: Any) -> Callable[[Work], Any]:
        return partial(forward, partial(linear_logprobs_triton, plan=plan))

    rows = []
    for way, plan in plans().items():
        try:
            found = measure({way: cut(plan)}, work, repeats)[way]
        except Exception as error:  # one cut that does not fit says so, and the others are measured
            print(f"{name}: {way}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        print(f"{name}: {way}: {min(found.both):.2f} forward {min(found.forward):.2f} ms, {found.memory:.2f} GiB")
        note = f"{found.memory:.2f} GiB"
        rows.append(common.result_row(f"{name}: {way}", "ms", found.both, better="lower", note=note))
        rows.append(common.result_row(f"{name}: {way}, forward", "ms", found.forward, better="lower"))
    return rows


def plans() -> dict[str, Any]:
    """The ways to cut the work that are compared."""
    from lightrl.kernels.logprob_triton import Plan, Tile

    tiles = {
        "128x256, groups of 32": (Tile(), Tile()),
        "128x256, 4 stages": (Tile(stages=4), Tile()),
        "128x256, a program a tile": (Tile(programs=0, stages=4), Tile(programs=0)),
        "128x256, groups of 8": (Tile(group=8), Tile(group=8)),
        "128x256, groups of 16": (Tile(group=16), Tile(group=16)),
        "256x128": (Tile(rows=256, columns=128), Tile(rows=256, columns=128)),
        "128x128, two a processor": (
            Tile(columns=128, warps=4, programs=2),
            Tile(columns=128, warps=4, programs=2, stages=2),
        ),
        "128x128, 8 warps": (Tile(columns=128, stages=4), Tile(columns=128, stages=4)),
    }
    found = {name: Plan(tile=forward, backward_tile=backward) for name, (forward, backward) in tiles.items()}
    for mib in (128, 512):
        found[f"{mib} MiB of gradient"] = Plan(gradient_bytes=mib << 20)
    return found


# ---- what is measured


@dataclass(frozen=True)
class Work:
    """hidden [N, H] and weight [V, H] that want gradients, targets [N], gradients of log-probs and entropies [2, N]."""

    hidden: Any
    weight: Any
    targets: Any
    cotangents: Any

    @classmethod
    def make(cls, rows: int, width: int, vocab: int, *, device: str) -> Work:
        import torch

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        g = torch.Generator(device).manual_seed(0)
        make = partial(torch.randn, generator=g, device=device)
        return cls(
            make(rows, width).to(dtype).requires_grad_(),
            (make(vocab, width) * 3 / width**0.5).to(dtype).requires_grad_(),
            torch.randint(vocab, (rows,), generator=g, device=device),
            make(2, rows),
        )

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of a second call: the first one compiles, and fills the allocator."""
        call()
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        import torch

        if self.hidden.is_cuda:
            torch.cuda.synchronize()

    def peak_gib(self, call: Callable[[], Any]) -> float:
        """Most memory at a time beyond what was there and one gradient of the head; 0 on a CPU."""
        import torch

        if not self.hidden.is_cuda:
            return 0.0
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        state = self.weight.numel() * self.weight.element_size()
        return max(0.0, (torch.cuda.max_memory_allocated() - before - state) / 2**30)


@dataclass(frozen=True)
class Measured:
    forward: list[float]  # ms
    both: list[float]  # ms
    memory: float  # GiB


def measure(calls: dict[str, Callable[[Work], Any]], work: Work, repeats: int) -> dict[str, Measured]:
    """All in turns; who runs out of memory is left out."""
    import torch

    def both(call: Callable[[Work], Any]) -> None:
        work.hidden.grad = work.weight.grad = None
        backward(call(work), work)

    def without_gradients(call: Callable[[Work], Any]) -> None:
        with torch.no_grad():
            call(work)

    memory: dict[str, float] = {}
    for name, call in calls.items():
        try:
            both(call)  # the first call compiles
            work.hidden.grad = work.weight.grad = None
            memory[name] = work.peak_gib(partial(both, call))
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory", flush=True)
    times: dict[str, Measured] = {name: Measured([], [], memory[name]) for name in memory}
    for _ in range(repeats):
        for name, found in times.items():
            found.both.append(1000 * work.seconds(partial(both, calls[name])))
            found.forward.append(1000 * work.seconds(partial(without_gradients, calls[name])))
    return times


def forward(call: Callable[..., Any], work: Work) -> Any:
    return call(work.hidden, work.weight, work.targets)


def backward(outputs: Any, work: Work) -> None:
    import torch

    if isinstance(outputs, tuple):
        torch.autograd.backward(outputs, tuple(work.cotangents))
    else:
        outputs.backward()


def products(work: Work) -> None:
    """The four that cannot be saved, in the inputs' precision."""
    import torch

    with torch.no_grad():
        logits = work.hidden @ work.weight.T
        logits = work.hidden @ work.weight.T
        torch.mm(logits, work.weight)
        torch.mm(logits.T, work.hidden)


# ---- peers


def whole_logits(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def checkpointed(chunk: int, hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    import torch
    from torch.utils.checkpoint import checkpoint

    parts = [
        checkpoint(whole_logits, h, weight, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def liger_call() -> Callable[[Work], Any] | None:
    """Liger's op as a sum over tokens, or None without it."""
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return None
    return lambda work: liger_fused_linear_cross_entropy(work.hidden, work.weight, work.targets, reduction="sum")
