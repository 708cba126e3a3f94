"""Tokens a second and GPU of one update of a mixture of experts, experts spread over ranks or rows shared by them,
beside the same ranks with all experts gathered and rows of their own (FSDP2).

An update is `training/update.py` on a policy made as in a run: log-probs and entropies of all tokens, the policy loss,
backward with every block recomputed, clipping, AdamW. Random weights, so tokens spread over experts as a random router
has it. The ways are measured one after the other, as two models do not fit; each step's time is the slowest rank's.

MFU is model FLOPs over time and 989.4 TFLOP/s (H200, bfloat16 dense): 6 for each weight a token meets in a matrix
product, and 6 x layers x heads x head size x row length for causal attention; what is recomputed does not count.

By arithmetic, for a layer of Qwen3-30B-A3B, 16k tokens a GPU, at the 260 GB/s that a rank exchanges over NVLink: 20 ms
to compute; all experts gathered twice (1.2 GB each) and their gradients summed (2.4 GB) 17 ms on 8 GPUs, beside the
products; rows of experts spread over 8 six times (0.35 GB each) 8 ms, between the products.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402

PACKAGES = ("transformers", "triton")
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 1 << 18,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 97, "tie_word_embeddings": False,
    },
}  # fmt: skip
PEAK = 989.4e12
PEER = "the same ranks, all experts gathered (FSDP2)"


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--shape", default="Qwen3-30B-A3B", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=8, help="of the model's; 10 GB of state each, over all GPUs")
    parser.add_argument("--gpus", type=int, default=2, help="ranks; figures are per GPU")
    parser.add_argument("--ways", default="1x1,2x1", help="EXPERTSxROWS: ranks that share each; the first is the peer")
    parser.add_argument("--tokens", type=int, default=16384, help="of each of a rank's rows")
    parser.add_argument("--rows", type=int, default=1, help="rows of a rank, in one microbatch")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rates, and peak memory where there is a GPU."""
    names = ("shape", "layers", "ways", "tokens", "rows", "repeats", "device")
    options = {name: getattr(args, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "measured.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
        subprocess.run([*command, str(Path(__file__)), json.dumps(options), str(out)], check=True)
        measured = json.loads(out.read_text())
    print(json.dumps(measured), flush=True)
    return make_rows(options, args.gpus, measured)


def make_rows(options: dict[str, Any], gpus: int, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    flops = flops_per_token(SHAPES[options["shape"]], options["layers"], options["tokens"])
    tokens = options["tokens"] * options["rows"]
    rows = []
    peer, *others = measured
    for case in others or [peer]:
        name = f"{options['shape']}, {options['layers']} layers, {options['rows']} x {options['tokens']}, {gpus} GPUs, "
        name += f"experts over {case['experts']}, rows over {case['sharing']}"
        rates, theirs = ([tokens / seconds for seconds in found["seconds"]] for found in (case, peer))
        mfu, its = (100 * statistics.median(found) * flops / PEAK for found in (rates, theirs))
        note = f"MFU {mfu:.1f} %, peer {its:.1f} %" if case["peak"] else ""
        alone = case is peer
        rows.append(
            common.result_row(
                name, "tokens/s/GPU", rates, () if alone else theirs, better="higher",
                peer_name=None if alone else PEER, limit=round(PEAK / flops), note=note,
            )
        )  # fmt: skip
        if case["peak"]:
            peaks = ([case["peak"]], () if alone else [peer["peak"]])
            peer_name = None if alone else PEER
            rows.append(common.result_row(f"{name}: peak", "GiB", *peaks, better="lower", peer_name=peer_name))
    return rows


def flops_per_token(shape: dict[str, Any], layers: int, length: int) -> float:
    """Forward and backward, nothing twice."""
    width = shape["hidden_size"]
    heads, kv_heads = (shape[k] * shape["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    experts = 3 * shape["num_experts_per_tok"] * shape["moe_intermediate_size"] + shape["num_experts"]
    return 6 * (layers * width * (2 * heads + 2 * kv_heads + experts) + shape["vocab_size"] * width) + (
        6 * layers * heads * length
    )


# ---- on every rank


def measure(options: dict[str, Any], out: Path) -> None:
    from lightrl.distributed.mesh import close_world, init_world

    cases = []
    for way in options["ways"].split(","):
        experts, sharing = map(int, way.split("x"))
        world = init_world(options["device"], expert_parallel=experts, context_parallel=sharing)
        cases.append({"experts": experts, "sharing": sharing, **timed(options, world)})
    if world.is_main:
        out.write_text(json.dumps(cases))
    close_world()


def timed(options: dict[str, Any], world: Any) -> dict[str, Any]:
    """Seconds of each step, of the slowest rank; GiB at most."""
    import torch

    cuda = world.device.type == "cuda"
    step = prepared(options, world)
    seconds, peak = [], 0.0
    for turn in range(options["repeats"] + 2):  # two to set up
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        world.barrier()
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        spent = max(world.gather(time.perf_counter() - start))
        if turn >= 2:
            seconds.append(spent)
            if cuda:
                peak = max(peak, max(world.gather(torch.cuda.max_memory_allocated() / 2**30)))
    del step
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return {"seconds": seconds, "peak": peak}


def prepared(options: dict[str, Any], world: Any) -> Any:
    """An update on the same samples every time."""
    import torch
    from transformers import Qwen3MoeConfig

    from lightrl.config.schema import AlgorithmConfig, ModelConfig, OptimConfig
    from lightrl.models import load
    from lightrl.observe.metrics import Tally
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.objective import Objective
    from lightrl.training.optim import build_optimizer, build_schedule
    from lightrl.training.packing import TrainSample
    from lightrl.training.policy import Policy
    from lightrl.training.update import update

    config = Qwen3MoeConfig(**SHAPES[options["shape"]], num_hidden_layers=options["layers"])
    policy = Policy.without_weights(
        ModelConfig(activation_checkpointing=True, kernels="auto"), config, world, source=Path(".")
    )
    torch.manual_seed(world.rank)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            local = parameter.to_local()
            local.normal_(std=0.02) if parameter.ndim > 1 else local.fill_(1.0)
    load.rebuild_buffers(policy.model)
    optimizer = build_optimizer(policy.parameters(), OptimConfig())
    schedule = build_schedule(optimizer, OptimConfig(), 100)
    length = options["tokens"]
    g = torch.Generator().manual_seed(world.rank)
    samples = []
    for i in range(options["rows"]):
        row = torch.randint(config.vocab_size, (length + 1,), generator=g).tolist()
        samples.append(
            TrainSample(
                group_index=world.rank * options["rows"] + i, index=0, prompt=row[:1], response=row[1:],
                loss_mask=[1] * length, rollout_logprobs=None, advantage=(-1.0) ** i,
            )
        )  # fmt: skip
    (minibatch,) = build_minibatches(
        samples, world, minibatches=1, max_tokens=length * options["rows"], share_prompts=False,
        skip_zero_advantage=False, aggregation="token_mean", constant_length=length, cost=CostModel.from_config(config),
    )  # fmt: skip
    assert len(minibatch) == 1
    settings: Any = {"temperature": 1.0, "max_grad_norm": 1.0}
    return lambda: update(
        policy, optimizer, schedule, minibatch, Objective.of(AlgorithmConfig()), tally=Tally(), **settings
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    measure(json.loads(sys.argv[1]), Path(sys.argv[2]))
