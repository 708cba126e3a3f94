"""Milliseconds to pass new weights from FSDP2 shards into SGLang on the same GPUs, ours beside two known ways.

A Qwen3 shape with random weights is sharded as in training and an engine of the same shape started, both on every GPU
of the run (the engine split over them by tensor parallelism). In turns, through the same engine, with all of its memory
taken and nothing running:

- ours: `load_groups`, from float32 shards until the engine's device holds the new values;
- per tensor: whole bfloat16 copies, then `update_weights_from_tensor` with one handle a tensor (the memory for whole
  copies is held throughout; their making counts);
- one bucket at a time: SGLang's `FlattenedTensorBucket` of at most 512 MB, one call each, as slime did it.

Every figure is that of the slowest rank. `limit` is each weight read once and written once at the memory's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402

PACKAGES = ("transformers", "sglang")
QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "Qwen3-4B": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": True},
    "Qwen3-8B": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
}
GOALS_MS = {("Qwen3-4B", 1): 40.0, ("Qwen3-8B", 2): 90.0}
HBM = 4.2e12  # bytes a second read and written, as measured for a device copy on an H200
BUCKET = 512 << 20


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--cases", default="Qwen3-0.6B:1,Qwen3-4B:1", help=f"SHAPE:GPUS, …; of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each, taking turns")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Two rows a case, one for each peer."""
    rows: list[dict[str, Any]] = []
    for case in args.cases.split(","):
        shape, ranks = case.split(":")
        measured = run_ranks(shape, int(ranks), args.repeats)
        print(json.dumps(measured), flush=True)
        rows += make_rows(shape, int(ranks), measured)
    return rows


def run_ranks(shape: str, ranks: int, repeats: int) -> dict[str, Any]:
    """Measure under torchrun; what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "measured.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        subprocess.run([*command, str(Path(__file__)), shape, str(repeats), str(out)], check=True)
        return dict(json.loads(out.read_text()))


def make_rows(shape: str, ranks: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    limit = round(1e3 * 2 * measured["bytes"] / HBM, 2)
    goal_ms = GOALS_MS.get((shape, ranks))
    growth = f"device memory over {measured['syncs']} syncs, both sides: {measured['growth_mib']:+.1f} MiB"
    aim = "" if goal_ms is None else f"; aim: at most {goal_ms:.0f} ms"
    return [
        common.result_row(
            f"{shape}, {ranks} GPU{'s' if ranks > 1 else ''}, {measured['bytes'] / 1e9:.2f} GB",
            "ms",
            measured["ours"],
            measured[peer],
            better="lower",
            peer_name=name,
            limit=limit,
            goal=1.0,
            note=f"{growth}; values compared bit by bit after the first: {measured['compared']:,}{aim}",
        )
        for peer, name in (
            ("per_tensor", "SGLang update_weights_from_tensor, per tensor"),
            ("bucket", "flattened buckets, one at a time"),
        )
    ]


# ---- on every rank


def measure(shape: str, repeats: int, out: Path) -> None:
    import torch
    from transformers import Qwen3Config

    from lightrl.config.schema import EngineConfig, SyncConfig
    from lightrl.distributed.mesh import close_world, init_world
    from lightrl.engine.sglang import Model, SGLangEngine

    world = init_world("cuda")
    folder = Path(tempfile.mkdtemp(prefix="lightrl_sync_"))
    config = Qwen3Config(**SHAPES[shape], architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    policy = random_policy(config, world)
    group = world.cpu_group
    stream = policy.stream()
    engine = SGLangEngine(
        Model(
            path=folder, layout=stream.layout(), eos_token_ids=[0], decode=str, dtype=torch.bfloat16,
            context_length=2048, vocab_size=config.vocab_size,
        ),
        EngineConfig(kind="sglang", tensor_parallel=world.size, memory_fraction=0.3, max_batch=16),
        SyncConfig(),
        device=world.device, log_dir=folder, group=group, member=world.rank,
    )  # fmt: skip

    def timed(work: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        world.barrier()
        start = time.perf_counter()
        work()
        return max(world.gather(1e3 * (time.perf_counter() - start)))

    version = iter(range(10**9))
    ours = lambda: engine.load_groups(stream, next(version))  # noqa: E731
    for _ in range(3):
        ours()
    compared = engine._pass("verify", stream, 0)["compared"]
    times: dict[str, list[float]] = {"ours": [], "per_tensor": [], "bucket": []}
    peers = {"per_tensor": lambda: per_tensor(policy, engine), "bucket": lambda: one_bucket(policy, engine)}
    for turn in range(repeats + 1):
        found = {"ours": timed(ours)} | {name: timed(work) for name, work in peers.items()}
        if turn:  # the first of the peers sets up
            for name, value in found.items():
                times[name].append(value)
    before = used()
    for _ in range(100):
        ours()
    measured = {"bytes": sum_bytes(stream.layout()), "compared": sum(world.gather(compared)), "syncs": 100}
    measured |= {"growth_mib": max(world.gather(used() - before))}
    if world.is_main:
        out.write_text(json.dumps(measured | times))
    engine.close()
    close_world()


def random_policy(config: Any, world: Any) -> Any:
    """A policy of this shape, never written to a disk."""
    import torch

    from lightrl.distributed import fsdp
    from lightrl.models import load
    from lightrl.training.policy import Policy, PolicyModule

    model = load.empty_model(config)
    module = PolicyModule(model, packed=True)
    fsdp.shard(module, model, world.mesh, compute_dtype=torch.bfloat16)
    module.to_empty(device=world.device)
    torch.manual_seed(world.rank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().normal_(std=0.02)
    load.rebuild_buffers(model)
    return Policy(module=module, hf_config=config, source=Path("."), compute_dtype=torch.bfloat16, device=world.device)


def whole(policy: Any) -> Iterator[list[tuple[str, Any]]]:
    """Every group in bfloat16, as the peers send it."""
    import torch

    for group in policy.stream():
        yield [(name, tensor.to(torch.bfloat16, copy=True)) for name, tensor in group]


def per_tensor(policy: Any, engine: Any) -> None:
    from lightrl.sync.shared import ipc_payload

    tensors = [pair for group in whole(policy) for pair in group]
    send(engine, ipc_payload(tensors), None)


def one_bucket(policy: Any, engine: Any) -> None:
    pending: list[tuple[str, Any]] = []
    size = 0
    for group in whole(policy):
        for name, tensor in group:
            if pending and size + tensor.nbytes > BUCKET:
                send_bucket(engine, pending)
                pending, size = [], 0
            pending.append((name, tensor))
            size += tensor.nbytes
    send_bucket(engine, pending)


def send_bucket(engine: Any, tensors: list[tuple[str, Any]]) -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    bucket = FlattenedTensorBucket(named_tensors=tensors)
    content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    send(engine, MultiprocessingSerializer.serialize(content, output_str=True), "flattened_bucket")


def send(engine: Any, payload: str, load_format: str | None) -> None:
    import torch

    torch.cuda.current_stream().synchronize()
    payloads = engine._gather(payload)
    if engine._host is not None:
        engine._host.call("update", loader=load_format, payloads=payloads, flush=False)
    engine._barrier()
    torch.cuda.synchronize()


def used() -> float:
    """MiB of this GPU, all processes."""
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def sum_bytes(layout: Any) -> int:
    import math

    return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in layout)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    measure(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
