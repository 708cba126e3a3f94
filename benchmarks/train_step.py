"""Tokens a second and GPU of one update (forward, backward, clipping, AdamW), blocks recomputed for their backward
pass (`--variants`), ours beside transformers under FSDP2.

Ours is `training/update.py` on a policy made as in a run: log-probs and entropies of all tokens, the policy loss, its
metrics; with advantages of 1 its gradient is that of the mean cross entropy. The peer computes that one with
transformers' own model, `fully_shard` on each block, its gradient checkpointing, SDPA's flash kernel, cross entropy in
chunks of 1,024 rows, torch's clipping and fused AdamW; rows of one length as a batch, without padding. A second row
holds ours against the same peer with the attention that torch chooses by itself. All: the same weights and tokens,
float32 masters, bfloat16 compute (float32 on a CPU), in one process, in turns.

Four blocks of a mixture of experts (`Qwen3-30B-A3B-stack`) have a small vocabulary, so that head and embedding cost
nothing; the peer's experts are transformers' `grouped_mm`.

MFU is model FLOPs over time and 989.4 TFLOP/s (H200, bfloat16 dense). Model FLOPs a token: 6 for each weight of a
matrix product (blocks and head), and 6 x layers x heads x head size x row length for causal attention; what is
recomputed does not count. `limit` is the rate at an MFU of 1. Peak memory is torch's, without what the other holds.

Where the time goes, by arithmetic, in ms of a step of Qwen3-0.6B on one row of 16,384, everything recomputed:

| part | work | stock | ours |
|---|---|---|---|
| attention, 2 forward + 1 backward | 62 + 77 TFLOP, causal | 450, flash | 245, cuDNN; 195 with outputs kept |
| products in blocks, 2 forward + 2 | 58 TFLOP at 600 TFLOP/s | 95 | 90: the last of a block is not repeated |
| norms, rotations, SwiGLU, sums | 28 layers x 18 GB, fused 4 GB | 115 | 25 |
| head | 15 TFLOP, and logits read | 100 | 45 to 60 |
| optimizer, FSDP's copies | 30 GB | 8, and 25 to 50 on the host | 8 |

The longer the row, the more attention is: first its kernel, then not to do it twice. At 8 rows of 2,048 it is an eighth
of that, and what lies between products comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402
import parallel_step  # noqa: E402
import weight_sync  # noqa: E402

PACKAGES = ("transformers", "triton", "flash-attn-4")
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, Any]] = weight_sync.SHAPES | {
    "tiny": TINY | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "tie_word_embeddings": True}
}
MIXTURES = {  # a small vocabulary: of the blocks alone
    "Qwen3-30B-A3B-stack": parallel_step.SHAPES["Qwen3-30B-A3B"] | {"num_hidden_layers": 4, "vocab_size": 1024},
    "tiny-stack": parallel_step.SHAPES["tiny"] | {"num_hidden_layers": 2},
}
SHAPES |= MIXTURES
GOALS = {("Qwen3-0.6B", 1): 2.0, ("Qwen3-4B", 1): 1.7, ("Qwen3-0.6B", 8): 1.7, ("Qwen3-4B", 8): 1.7}
GOALS |= {("Qwen3-30B-A3B-stack", count): 1.5 for count in (1, 8)}
PEAK = 989.4e12
VARIANTS = {  # of ours
    "kept": "attention kept",
    "gathered": "attention kept, weights gathered once",
    "all": "all recomputed",
    "none": "nothing recomputed",
}
PEER = "transformers, FSDP2, SDPA flash"
PEERS = {"peer": PEER, "peer_default": "transformers, FSDP2, SDPA as torch chooses"}
OPTIONS = ("rows", "variants", "repeats", "device", "kernels", "profile", "compile_peer")
CHUNK = 1024  # rows of the peer's logits at a time


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--shapes", default="Qwen3-0.6B,Qwen3-4B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="16384x1,2048x8", help="LENGTHxCOUNT, …: rows of a step, on each GPU")
    parser.add_argument("--variants", default="kept,all", help="; ".join(f"{k}: {v}" for k, v in VARIANTS.items()))
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each, taking turns")
    parser.add_argument("--gpus", type=int, default=1, help="ranks; figures are per GPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kernels", default="auto", choices=("auto", "off"), help="model.kernels of ours")
    parser.add_argument("--compile-peer", action="store_true", help="the peer's blocks by torch.compile")
    parser.add_argument("--profile", action="store_true", help="also print what one step of ours runs, on GPU and host")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rates, and peak memory where there is a GPU."""
    rows: list[dict[str, Any]] = []
    for shape in args.shapes.split(","):
        options = {k: getattr(args, k) for k in OPTIONS}
        measured = run_ranks(options | {"shape": shape}, args.gpus)
        print(json.dumps(measured), flush=True)
        for case in measured:
            rows += make_rows(shape, args.gpus, case)
    return rows


def run_ranks(options: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Measure under torchrun; what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "measured.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        subprocess.run([*command, str(Path(__file__)), json.dumps(options), str(out)], check=True)
        return list(json.loads(out.read_text()))


def make_rows(shape: str, gpus: int, case: dict[str, Any]) -> list[dict[str, Any]]:
    name = f"{shape}, {case['count']} x {case['length']}, {VARIANTS[case['variant']]}"
    name += f", {gpus} GPUs" if gpus > 1 else ""
    flops = flops_per_token(SHAPES[shape], case["length"])
    tokens = case["length"] * case["count"]
    rates = {who: [tokens / seconds for seconds in spent] for who, spent in case["seconds"].items()}
    mfu = {who: 100 * statistics.median(rates[who]) * flops / PEAK for who in rates if rates[who]}
    alone = not rates["peer"]
    compiled = ", blocks compiled" if case.get("compiled") else ""
    names = {who: None if alone else peer + compiled for who, peer in PEERS.items()}
    rows = [
        common.result_row(
            name, "tokens/s/GPU", rates["ours"], rates[who], better="higher", peer_name=names[who],
            limit=round(PEAK / flops) if case["peak"]["ours"] else None, goal=GOALS.get((shape, case["count"])),
            note=note(mfu, who, alone) if case["peak"]["ours"] else "",
        )
        for who in PEERS if rates.get(who) or (alone and who == "peer")
    ]  # fmt: skip
    if case["peak"]["ours"]:
        peaks = ([case["peak"]["ours"]], [] if alone else [case["peak"]["peer"]])
        goal, peer = None if alone else 1.0, names["peer"]
        rows.append(common.result_row(f"{name}: peak", "GiB", *peaks, better="lower", peer_name=peer, goal=goal))
    return rows


def note(mfu: dict[str, float], who: str, alone: bool) -> str:
    return f"MFU {mfu['ours']:.1f} %" + ("" if alone else f", peer {mfu[who]:.1f} %")


def flops_per_token(shape: dict[str, Any], length: int) -> float:
    """Forward and backward, nothing twice."""
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads, kv_heads = (shape[k] * shape["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    wide = 3 * shape["intermediate_size"]
    if "num_experts" in shape:  # those that a token meets, and the router
        wide = 3 * shape["num_experts_per_tok"] * shape["moe_intermediate_size"] + shape["num_experts"]
    block = width * (2 * heads + 2 * kv_heads + wide)
    return 6 * (layers * block + shape["vocab_size"] * width) + 6 * layers * heads * length


# ---- on every rank


def measure(options: dict[str, Any], out: Path) -> None:
    import torch

    from lightrl.distributed.mesh import close_world, init_world

    world = init_world(options["device"])
    config = model_config(options["shape"])
    compiled = bool(options.get("compile_peer"))
    peer = Peer(config, world, compiled=compiled) if options.get("peer", "stock") == "stock" else None
    cases = []
    for variant in options["variants"].split(","):
        ours = Ours(config, world, variant=variant, kernels=options["kernels"])
        for rows in options["rows"].split(","):
            length, count = map(int, rows.split("x"))
            g = torch.Generator().manual_seed(world.rank)
            tokens = torch.randint(config.vocab_size, (count, length + 1), generator=g)
            case = {"variant": variant, "length": length, "count": count, "compiled": compiled}
            cases.append(case | take_turns(world, ours, peer, tokens, options["repeats"]))
            if options["profile"]:
                profile(world, ours.prepared(tokens))
        ours.free()
    if world.is_main:
        out.write_text(json.dumps(cases))
    close_world()


def model_config(shape: str) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    sizes = SHAPES[shape] | {"max_position_embeddings": 1 << 17}
    return Qwen3MoeConfig(**sizes) if shape in MIXTURES else Qwen3Config(**sizes)


def take_turns(world: Any, ours: Any, peer: Any, tokens: Any, repeats: int) -> dict[str, Any]:
    """Seconds of each step, of the slowest rank; GiB at most."""
    import torch

    cuda = world.device.type == "cuda"
    both = {"ours": (ours, peer)} | ({} if peer is None else {"peer": (peer, ours)})
    steps = {who: mine.prepared(tokens) for who, (mine, _) in both.items()}
    if type(peer) is Peer:  # others choose by themselves
        both["peer_default"], steps["peer_default"] = (peer, ours), peer.prepared(tokens, flash=False)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []} | {who: [] for who in both}
    peak = dict.fromkeys(seconds, 0.0)
    for turn in range(repeats + 2):  # two to set up
        for who, (_, other) in both.items():
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            world.barrier()
            start = time.perf_counter()
            steps[who]()
            if cuda:
                torch.cuda.synchronize()
            spent = max(world.gather(time.perf_counter() - start))
            if turn >= 2:
                seconds[who].append(spent)
                if cuda:
                    others = 0 if other is None else other.bytes()
                    peak[who] = max(peak[who], (torch.cuda.max_memory_allocated() - others) / 2**30)
    return {"seconds": seconds, "peak": peak}


class Trained:
    """A sharded model with its optimizer."""

    module: Any
    optimizer: Any

    def bytes(self) -> int:
        """What it holds between steps."""
        from lightrl.models.shards import own_part

        states = [t for state in self.optimizer.state.values() for t in state.values()]
        return sum(own_part(t).nbytes for t in [*self.module.parameters(), *self.module.buffers(), *states])

    def fill(self) -> None:
        """Random weights."""
        import torch

        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.module.parameters():
                local = parameter.to_local()
                local.normal_(std=0.02) if parameter.ndim > 1 else local.fill_(1.0)

    def free(self) -> None:
        import gc

        import torch

        del self.module, self.optimizer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Ours(Trained):
    def __init__(self, config: Any, world: Any, *, variant: str, kernels: Any = "auto") -> None:
        from lightrl.config.schema import ModelConfig, OptimConfig
        from lightrl.models import load
        from lightrl.training.optim import build_optimizer, build_schedule
        from lightrl.training.policy import Policy

        dtype: Any = "bfloat16" if world.device.type == "cuda" else "float32"
        settings = ModelConfig(
            compute_dtype=dtype,
            activation_checkpointing=variant != "none",
            recompute_attention=variant == "all",
            reshard_after_forward=variant != "gathered",
            kernels=kernels,
        )
        self.policy = Policy.without_weights(settings, config, world, source=Path("."))
        self.module = self.policy.module
        self.fill()
        load.rebuild_buffers(self.policy.model)
        self.optimizer = build_optimizer(self.policy.parameters(), OptimConfig())
        self.schedule = build_schedule(self.optimizer, OptimConfig(), 100)

    def prepared(self, tokens: Any) -> Callable[[], object]:
        """A step on rows of tokens, each a prompt of one token and its answer."""
        from lightrl.config.schema import AlgorithmConfig
        from lightrl.observe.metrics import Tally
        from lightrl.training.objective import Objective
        from lightrl.training.packing import TrainSample, pack
        from lightrl.training.update import update

        samples = [
            TrainSample(
                group_index=i, index=0, prompt=row[:1], response=row[1:], loss_mask=[1] * (len(row) - 1),
                rollout_logprobs=None, advantage=1.0,
            )
            for i, row in enumerate(row.tolist() for row in tokens)
        ]  # fmt: skip
        total = sum(len(s.response) for s in samples)
        batch = pack([[s] for s in samples], [[1 / total]] * len(samples))
        assert len(batch.input_ids) == len(batch.targets) == total
        settings: Any = {"temperature": 1.0, "max_grad_norm": 1.0}
        return lambda: update(
            self.policy,
            self.optimizer,
            self.schedule,
            [batch],
            Objective.of(AlgorithmConfig()),
            tally=Tally(),
            **settings,
        )

    def free(self) -> None:
        del self.policy, self.schedule
        super().free()


class Peer(Trained):
    def __init__(self, config: Any, world: Any, *, compiled: bool = False, half: bool = True) -> None:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from lightrl.models import load

        self.device, self.half = world.device, half  # the flash kernel takes no float32
        dtype = torch.bfloat16 if half and world.device.type == "cuda" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        experts = {"experts_implementation": "grouped_mm"} if hasattr(config, "num_experts") else {}
        model: Any = load.empty_model(config, attn_implementation="sdpa", **experts)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module = stock_module(model)
        for block in model.model.layers:
            if compiled:  # what is computed again, too; what checkpoints and shards is around it
                block.forward = torch.compile(block.forward, dynamic=False)
            fully_shard(block, mesh=world.mesh["shard"], mp_policy=policy)
        fully_shard(self.module, mesh=world.mesh["shard"], mp_policy=policy, reshard_after_forward=False)
        self.module.to_empty(device=world.device)
        self.fill()
        load.rebuild_buffers(model)
        self.module.train()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-6, fused=True)

    def prepared(self, tokens: Any, flash: bool = True) -> Callable[[], object]:
        """A step on [rows, length + 1] tokens, by SDPA's flash kernel or by that which torch chooses."""
        return self.step(tokens[:, :-1], tokens[:, 1:].flatten(), flash)

    def step(self, ids: Any, targets: Any, flash: bool = True) -> Callable[[], object]:
        """On [rows, length] and [rows x length], -100 where there is none."""
        import torch

        def step() -> None:
            with self.kernel() if flash and self.half else nullcontext():
                self.module(*(t.to(self.device, non_blocking=True) for t in (ids, targets))).backward()
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            if torch.isfinite(norm.full_tensor()):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        return step

    def kernel(self) -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return nullcontext() if self.device.type == "cpu" else sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def stock_module(model: Any) -> Any:
    """The model with its loss inside, where FSDP has the head's weight whole."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def chunk_loss(hidden: Any, weight: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")

    class Stock(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, targets: Any) -> Any:
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
            weight = self.model.lm_head.weight
            parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
            losses = [checkpoint(chunk_loss, h, weight, t, use_reentrant=False) for h, t in parts]
            return torch.stack(losses).sum() / (targets >= 0).sum()

    return Stock()


def profile(world: Any, step: Callable[[], object], most: int = 40) -> None:
    """Kernels of one step by time, summed by name, and Python's functions of another, on rank 0."""
    import cProfile
    import pstats

    import torch
    from torch.profiler import ProfilerActivity

    step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities) as recorded:
        step()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
    wall = 1e3 * (time.perf_counter() - start)
    on_device = world.device.type == "cuda"
    entries = [
        (e.self_device_time_total if on_device else e.self_cpu_time_total, e.count, e.key)
        for e in recorded.key_averages()
        if not on_device or e.device_type == torch.autograd.DeviceType.CUDA
    ]
    host = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # the backward pass in this thread
        host.runcall(step)
    if world.is_main:
        print(f"one step {wall:.1f} ms under the profiler, {sum(e[0] for e in entries) / 1e3:.1f} ms in what follows")
        for microseconds, count, name in sorted(entries, reverse=True)[:most]:
            print(f"{microseconds / 1e3:9.2f} ms {count:6} x  {name[:110]}", flush=True)
        pstats.Stats(host).strip_dirs().sort_stats("tottime").print_stats(most)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    measure(json.loads(sys.argv[1]), Path(sys.argv[2]))
