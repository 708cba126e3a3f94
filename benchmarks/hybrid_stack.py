"""Tokens a second of one update of a stack of Qwen3.5-9B's blocks: three of four have gated delta layers.

Everything is as in `train_step`, but the model: blocks of the 9B's shape, cut in number, under a small vocabulary, so
that head and embedding cost nothing. The peer is transformers' own model with flash-linear-attention where that is
installed and computes the backward pass on this GPU (it refuses on Hopper with Triton 3.4 to 3.7.0; the peer then runs
transformers' torch code, and its name says so). It gets rows of one length as a batch: packed, its convolution would
run on from one row into the next. Rows of many lengths (`mixed`: lognormal, longest 4,096, in all 16,384 tokens) are
packed for ours and padded on the right for the peer, where nothing looks at padding; padding does not count.

Before anything is timed, gradients of both on rows of 300 and 724 tokens are compared with transformers' in float32:
the largest relative error of a parameter's is in the notes, of ours and of the peer. MFU as in `train_step`; a delta
layer counts 18 x value heads x key size x value size a token for its state (decayed, corrected, read: 6 forward).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402
import train_step  # noqa: E402

PACKAGES = ("transformers", "triton", "fla-core", "flash-linear-attention", "flash-attn-4")
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3.5-9B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "vocab_size": 1024,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "vocab_size": 97,
    },
}  # fmt: skip
GOAL = 1.3
KINDS = ("linear_attention",) * 3 + ("full_attention",)


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--shape", default="Qwen3.5-9B", choices=list(SHAPES))
    parser.add_argument("--blocks", type=int, default=8, help="how many; every fourth has full attention")
    parser.add_argument("--rows", default="16384x1,2048x8,mixed", help="LENGTHxCOUNT or mixed, …")
    parser.add_argument("--variants", default="kept", help="of train_step")
    parser.add_argument("--tokens", type=int, default=16384, help="of mixed rows together")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each, taking turns")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rates and peak memory of each case."""
    options = {k: getattr(args, k) for k in ("shape", "blocks", "rows", "variants", "tokens", "repeats", "device")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "measured.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        subprocess.run([*command, str(Path(__file__)), json.dumps(options), str(out)], check=True)
        measured = json.loads(out.read_text())
    print(json.dumps(measured), flush=True)
    return [row for case in measured for row in make_rows(args.shape, args.blocks, case)]


def make_rows(shape: str, blocks: int, case: dict[str, Any]) -> list[dict[str, Any]]:
    lengths = case["lengths"]
    name = f"{shape}, {blocks} blocks, {case['rows']}, {train_step.VARIANTS[case['variant']]}"
    flops = sum(n * flops_per_token(SHAPES[shape], blocks, n) for n in lengths) / sum(lengths)
    rates = {who: [sum(lengths) / s for s in case["seconds"][who]] for who in ("ours", "peer")}
    name_of_peer = case["peer"]
    note = "largest relative error of a parameter's gradient: "
    note += ", ".join(f"{who} {error:.2g} ({name})" for who, (error, name) in case["errors"].items())
    cuda = bool(case["peak"]["ours"])
    if cuda:
        mfu = {who: 100 * statistics.median(rates[who]) * flops / train_step.PEAK for who in rates}
        note += f"; MFU {mfu['ours']:.1f} %, peer {mfu['peer']:.1f} %"
    rows = [
        common.result_row(
            name, "tokens/s", rates["ours"], rates["peer"], better="higher", peer_name=name_of_peer, goal=GOAL,
            limit=round(train_step.PEAK / flops) if cuda else None, note=note,
        )
    ]  # fmt: skip
    if cuda:
        peaks = ([case["peak"][who]] for who in ("ours", "peer"))
        rows.append(common.result_row(f"{name}: peak", "GiB", *peaks, better="lower", peer_name=name_of_peer, goal=1.0))
    return rows


def flops_per_token(shape: dict[str, Any], blocks: int, length: int) -> float:
    """Forward and backward, nothing twice; in rows of `length`."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv_heads = shape["num_key_value_heads"] * shape["head_dim"]
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
    full = blocks // 4
    weights = blocks * 3 * width * shape["intermediate_size"]
    weights += full * width * (3 * heads + 2 * kv_heads)  # queries with their gates, and the output
    weights += (blocks - full) * width * (2 * keys + 3 * values + 2 * shape["linear_num_value_heads"])
    states = 18 * (blocks - full) * values * shape["linear_key_head_dim"]
    return 6 * (weights + shape["vocab_size"] * width) + 6 * full * heads * length + states


def mixed_lengths(tokens: int, longest: int) -> list[int]:
    """Lognormal (median 800, sigma 0.8), the last one cut so that they sum up to `tokens`."""
    rng, lengths = random.Random(0), []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, longest, max(1, round(rng.lognormvariate(0, 0.8) * min(800, longest / 4)))))
    return lengths


# ---- on the GPU


def measure(options: dict[str, Any], out: Path) -> None:
    import torch

    from lightrl.distributed.mesh import close_world, init_world

    world = init_world(options["device"])
    config = stack_config(options["shape"], options["blocks"])
    cases = []
    for variant in options["variants"].split(","):
        exact = make_peer(config, world, half=False)
        expected = gradients(exact, some_rows(config))
        exact.free()
        peer, ours = make_peer(config, world), train_step.Ours(config, world, variant=variant)
        both = {"ours": ours, "peer": peer}
        found = {who: largest_error(gradients(mine, some_rows(config)), expected) for who, mine in both.items()}
        for rows in options["rows"].split(","):
            lengths = lengths_of(rows, options["tokens"])
            g = torch.Generator().manual_seed(0)
            tokens = [torch.randint(config.vocab_size, (n + 1,), generator=g) for n in lengths]
            case = {"variant": variant, "rows": rows, "lengths": lengths, "peer": peer.name}
            case["errors"] = found
            cases.append(case | train_step.take_turns(world, ours, peer, tokens, options["repeats"]))
        ours.free()
        peer.free()
    out.write_text(json.dumps(cases))
    close_world()


def lengths_of(rows: str, tokens: int) -> list[int]:
    if rows == "mixed":
        return mixed_lengths(tokens, max(4, tokens // 4))
    length, count = map(int, rows.split("x"))
    return [length] * count


def stack_config(shape: str, blocks: int) -> Any:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    kinds = [KINDS[i % len(KINDS)] for i in range(blocks)]
    sizes = SHAPES[shape] | {"num_hidden_layers": blocks, "layer_types": kinds, "max_position_embeddings": 1 << 17}
    return Qwen3_5TextConfig(**sizes, tie_word_embeddings=False, architectures=["Qwen3_5ForCausalLM"])


def make_peer(config: Any, world: Any, *, half: bool = True) -> Any:
    """transformers' model, with what computes its delta layers in its name."""
    name = "transformers with fla" if use_what_works(world.device) else "transformers, torch delta rule"

    class Padded(train_step.Peer):
        def prepared(self, tokens: Sequence[Any]) -> Callable[[], object]:
            import torch

            width = max(len(row) for row in tokens)
            padded = torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=-100) for row in tokens])
            return self.step(padded[:, :-1].clamp_min(0), padded[:, 1:].flatten())

    peer = Padded(config, world, half=half)
    peer.name = name
    return peer


def use_what_works(device: Any) -> bool:
    """Whether transformers' delta layers run fla's kernels; they are exchanged for its torch code where those fail."""
    import inspect
    from importlib.util import find_spec

    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    if find_spec("fla") is None:
        return False
    rule = modeling.torch_chunk_gated_delta_rule
    try:
        q, k, v = (torch.randn(1, 64, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        g, beta = -torch.rand(1, 64, 2, device=device), torch.rand(1, 64, 2, device=device).bfloat16().requires_grad_()
        rule(q, k, v, g=g.requires_grad_(), beta=beta, use_qk_l2norm_in_kernel=True)[0].sum().backward()
    except Exception as error:
        print(f"fla: {' '.join(str(error).split())[:200]}", flush=True)
        plain = inspect.unwrap(rule)
        known = inspect.signature(plain).parameters
        modeling.torch_chunk_gated_delta_rule = lambda *args, **kwargs: plain(
            *args, **{key: value for key, value in kwargs.items() if key in known}
        )
        return False
    return True


def some_rows(config: Any, lengths: Sequence[int] = (300, 724)) -> list[Any]:
    import torch

    g = torch.Generator().manual_seed(1)
    return [torch.randint(config.vocab_size, (n + 1,), generator=g) for n in lengths]


def gradients(trained: Any, tokens: Sequence[Any]) -> dict[str, Any]:
    """The first moments that a step leaves: gradients, clipped. On the host, in float32."""
    from lightrl.models.shards import own_part
    from lightrl.wrappers import clean_name

    trained.fill()
    trained.optimizer.state.clear()
    trained.prepared(tokens)()
    named = {clean_name(n): p for n, p in trained.module.named_parameters()}
    return {n: own_part(trained.optimizer.state[p]["exp_avg"]).float().cpu() for n, p in named.items()}


def largest_error(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """Relative, of a parameter; and which."""
    assert found.keys() == expected.keys()
    errors = {n: float((found[n] - e).norm() / e.norm().clamp_min(1e-30)) for n, e in expected.items()}
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]), Path(sys.argv[2]))
