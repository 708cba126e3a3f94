"""Generalized advantage estimation of a batch: the parallel scan of `algorithms.advantages.gae`, and a serial loop.

Both get the same rewards and values, float32, answers of all lengths in rows; the loop takes one step a token, as most
trainers do. Before anything is timed, both are held to the loop in float64.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import common

GOAL = 100.0  # times the loop, on a GPU
TOLERANCE = 1e-5
GAMMA, LAMBDA = 1.0, 0.95


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--rows", type=int, default=256, help="rows of the batch")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row; RuntimeError where ours errs by more than 1e-5."""
    import torch

    name = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    tokens = make_tokens(args.rows, args.tokens, device)
    exact = serial(make_tokens(args.rows, args.tokens, device, torch.float64))
    errors = {}
    for who, function in (("ours", ours), ("loop", serial)):
        errors[who] = float(((function(tokens).double() - exact).abs() / exact.abs().clamp(min=1.0)).max())
    if errors["ours"] > TOLERANCE:
        raise RuntimeError(f"gae: {errors['ours']:.1e} from the loop in float64, which is more than {TOLERANCE:g}")
    del exact
    times: dict[str, list[float]] = {"ours": [], "loop": []}
    for _ in range(args.repeats):
        for who, function in (("ours", ours), ("loop", serial)):
            times[who].append(1e3 * seconds(function, tokens, device))
    note = f"relative error to the loop in float64: {errors['ours']:.1e}, the loop's own {errors['loop']:.1e}"
    return [
        common.result_row(
            f"{args.rows} x {args.tokens}, {device.type}", "ms", times["ours"], times["loop"], better="lower",
            peer_name="serial loop", goal=GOAL if device.type == "cuda" else None, note=note,
        )
    ]  # fmt: skip


def make_tokens(rows: int, length: int, device: Any, dtype: Any = None) -> Any:
    """Rows of answers of random lengths, the reward on each one's last token; the same numbers in any dtype."""
    import torch

    from lightrl.algorithms.advantages import TokenRewards

    g = torch.Generator(device).manual_seed(0)
    shape = (rows, length)
    ends = torch.rand(shape, generator=g, device=device) < 4 / length  # long ones, about four a row
    ends[:, -1] = True
    rewards = torch.randn(shape, generator=g, device=device).masked_fill_(~ends, 0.0)
    values = torch.randn(shape, generator=g, device=device)
    dtype = dtype or torch.float32
    return TokenRewards(rewards=rewards.to(dtype), ends=ends, values=values.to(dtype))


def ours(tokens: Any) -> Any:
    from lightrl.algorithms.advantages import gae

    return gae(tokens, gamma=GAMMA, gae_lambda=LAMBDA)


def serial(tokens: Any) -> Any:
    """One token after the other, from the last."""
    import torch

    values, goes_on = tokens.values, (~tokens.ends).to(tokens.values.dtype)
    advantages = torch.empty_like(values)
    running = following = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = tokens.rewards[:, t] + GAMMA * goes_on[:, t] * following - values[:, t]
        running = delta + GAMMA * LAMBDA * goes_on[:, t] * running
        following = values[:, t]
        advantages[:, t] = running
    return advantages


def seconds(function: Any, tokens: Any, device: Any) -> float:
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    function(tokens)
    wait()
    return time.perf_counter() - start
