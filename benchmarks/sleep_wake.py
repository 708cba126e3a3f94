"""Seconds to move the trainer's state off the GPUs and back, beside bare page-locked copies of as many bytes.

A Qwen3 shape with random weights is sharded as in training; the state is float32 parameters and AdamW's moments.
In turns: bare copies of one large block, `Offloader.offload`, bare copies back, `Offloader.onload`; every figure is
that of the slower rank. The time of ours contains giving the memory back to the driver and taking it again, so that
an engine in another process can have it. Once a case also the plain way on a part of it: `tensor.cpu()`, pageable,
and back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402

PACKAGES = ("transformers",)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen3-4B": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
}  # fmt: skip
GB = 1e9
BLOCK = 1 << 30
RATE_GOAL, CYCLE_GOAL = 0.9, 1 / 1.2
STEP_GOALS = {"Qwen3-0.6B": 0.5}


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--shapes", default="Qwen3-0.6B,Qwen3-4B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ranks", default="1,2", help="numbers of GPUs, one run each")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each, taking turns")
    parser.add_argument("--engine", action="store_true", help="also SGLang's memory, on one GPU")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Three rows for each shape and number of GPUs: offload, onload, both."""
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks.split(","):
        for shape in args.shapes.split(","):
            measured = run_ranks(shape, int(ranks), args.repeats, args.engine and ranks == "1")
            print(json.dumps(measured), flush=True)
            rows += make_rows(shape, int(ranks), measured)
    return rows


def run_ranks(shape: str, ranks: int, repeats: int, engine: bool) -> dict[str, Any]:
    """Measure under torchrun; what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "measured.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(HERE / "sleep_wake.py"), shape, str(repeats), str(int(engine)), str(out)]
        subprocess.run(command, check=True)
        return dict(json.loads(out.read_text()))


def make_rows(shape: str, ranks: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one case; `limit` is the least time of the bare copies."""
    gb = measured["bytes"] / GB
    case = f"trainer {shape}, {ranks} GPU{'s' if ranks > 1 else ''}"
    rows = []
    for what, bare in (("offload", "to_host"), ("onload", "to_device")):
        ours, peer = measured[what], measured[bare]
        note = f"{gb:.2f} GB a GPU; ours {gb / min(ours):.1f} GB/s at best, bare copies {gb / min(peer):.1f}"
        rows.append(
            common.result_row(
                f"{case}, {what}", "s", ours, peer, better="lower", peer_name="bare page-locked copies",
                limit=float(f"{min(peer):.4g}"), goal=RATE_GOAL, note=note,
            )
        )  # fmt: skip
    ours = [a + b for a, b in zip(measured["offload"], measured["onload"], strict=True)]
    peer = [a + b for a, b in zip(measured["to_host"], measured["to_device"], strict=True)]
    note = (
        f"tensor.cpu() and back: {gb / measured['pageable']:.2f} s; {measured['host_gib']:.2f} GiB a GPU "
        f"page-locked once in {measured['lock']:.1f} s; {measured['left_gib']:.2f} GiB stay in use on the GPU"
    )
    row = common.result_row(
        f"{case}, both", "s", ours, peer, better="lower", peer_name="bare page-locked copies",
        limit=float(f"{min(peer):.4g}"), goal=float(f"{CYCLE_GOAL:.3g}"), note=note,
    )  # fmt: skip
    rows.append(row)
    if "engine" in measured:
        sleep, wake, taken = (measured["engine"][key] for key in ("sleep", "wake", "gib"))
        whole = [a + b + c for a, b, c in zip(ours, sleep, wake, strict=True)]
        aim = f"; aim: at most {STEP_GOALS[shape]} s" if shape in STEP_GOALS else ""
        rows += [
            common.result_row(
                f"SGLang {shape}, release and take again", "s", [a + b for a, b in zip(sleep, wake, strict=True)],
                better="lower", note=f"{taken:.1f} GiB: weights, then KV cache; weights come anew by the sync",
            ),
            common.result_row(f"{case} and SGLang, a step", "s", whole, better="lower", note=f"the sum of both{aim}"),
        ]  # fmt: skip
    return rows


def measure(shape: str, repeats: int, with_engine: bool, out: Path) -> None:
    """One rank's part."""
    import torch
    from transformers import Qwen3Config
    from weight_sync import random_policy

    from lightrl.distributed.mesh import close_world, init_world
    from lightrl.distributed.offload import Offloader

    world = init_world("cuda")
    policy = random_policy(Qwen3Config(**SHAPES[shape]), world)
    model = policy.module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors = [p.detach().to_local() for p in model.parameters()]
    for state in optimizer.state.values():
        tensors += [t.to_local() if hasattr(t, "to_local") else t for t in state.values()]
    before = checksum(tensors)

    def timed(action: Callable[[], Any]) -> float:
        """Seconds of the slower rank."""
        torch.cuda.synchronize()
        world.barrier()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        return max(world.gather(time.perf_counter() - start))

    some = [t for t in tensors if t.nbytes >= 1 << 20][:60]

    def pageable() -> None:
        for tensor in some:
            tensor.copy_(tensor.cpu())

    times: dict[str, list[float]] = {"to_host": [], "offload": [], "to_device": [], "onload": []}
    offloader = Offloader(model, optimizer)
    total = offloader.state_bytes()
    pageable_rate = sum(t.nbytes for t in some) / GB / timed(pageable)
    first = timed(offloader.offload)
    left = torch.cuda.mem_get_info()
    offloader.onload()
    host = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
    block = torch.empty(BLOCK, dtype=torch.uint8, device=world.device)
    for repeat in range(repeats + 1):
        now = {
            "to_host": timed(lambda: copy_blocks(host, block, total)),
            "offload": timed(offloader.offload),
            "to_device": timed(lambda: copy_blocks(block, host, total)),
            "onload": timed(offloader.onload),
        }
        for name, seconds in now.items():
            if repeat:  # the first is a warm-up
                times[name].append(seconds)
    assert checksum(tensors) == before
    engine = measure_engine(world, policy, repeats, timed) if with_engine else None
    if world.is_main:
        result = {
            **times, "bytes": total, "host_gib": offloader.host_bytes / 2**30, "pageable": pageable_rate,
            "lock": first - min(times["offload"]), "left_gib": (left[1] - left[0]) / 2**30,
        }  # fmt: skip
        out.write_text(json.dumps(result if engine is None else result | {"engine": engine}))
    world.barrier()
    close_world()


def measure_engine(
    world: Any, policy: Any, repeats: int, timed: Callable[[Callable[[], Any]], float]
) -> dict[str, Any]:
    """Seconds of SGLang's release (weights and KV cache) and of taking both again, beside the policy."""
    import torch

    from lightrl.config.schema import EngineConfig, SyncConfig
    from lightrl.engine.sglang import Model, SGLangEngine

    folder = Path(tempfile.mkdtemp(prefix="lightrl_sleep_"))
    config = policy.hf_config
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    stream = policy.stream()
    engine = SGLangEngine(
        Model(
            path=folder, layout=stream.layout(), eos_token_ids=[0], decode=str, dtype=torch.bfloat16,
            context_length=4096, vocab_size=config.vocab_size,
        ),
        EngineConfig(kind="sglang", memory_fraction=0.4, max_batch=64),
        SyncConfig(),
        device=world.device, log_dir=folder,
    )  # fmt: skip
    engine.load_groups(stream, 0)
    times: dict[str, Any] = {"sleep": [], "wake": []}
    for repeat in range(repeats + 1):
        now = {"sleep": timed(engine.offload)}
        times["gib"] = (engine.room("weights") + engine.room("kv_cache")) / 2**30
        now["wake"] = timed(engine.onload)
        if repeat:
            for name, seconds in now.items():
                times[name].append(seconds)
    engine.close()
    return times


def copy_blocks(target: Any, source: Any, total: int) -> None:
    """Copies of `total` bytes in blocks."""
    while total > 0:
        size = min(total, BLOCK)
        target[:size].copy_(source[:size], non_blocking=True)
        total -= size


def checksum(tensors: list[Any]) -> list[int]:
    """Sums of the bits of each tensor."""
    import torch

    return [int(t.view(torch.int32).sum(dtype=torch.int64)) for t in tensors]


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", Path(sys.argv[4]))
