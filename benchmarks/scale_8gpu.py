"""A mixture of experts of Qwen3-30B-A3B's shape on the GPUs of one machine, random weights: whole GRPO steps, weight
sync, training, ranks that are killed; and how dense models scale.

Parts, each a torchrun job of its own (`--parts`), all with FSDP2 and experts over `--expert-parallel` ranks:

- step: `Trainer.step` with SGLang on the same GPUs, engines over `--tensor-parallel` of them: seconds and memory by
  stage, tokens of prompts and answers a second, the share that neither generates nor trains;
- sync: `load_groups` from float32 shards into these engines, all values compared at the first;
- train: `parallel_step` on one row of `--tokens` a GPU;
- scaling: `weak_scaling` of the dense shapes in `--dense`, ours alone;
- kill: with `--kill-layers`, a rank is killed in a sync, then in training; half of the ranks go on from the checkpoint.

Nowhere is the model whole: it is made without data, sharded, and each rank draws its own part. Peers are figures that
others have published for this model on 8 GPUs; they are in a row only for the whole model on 8. On a CPU the tests'
stand-in takes SGLang's place (`--device cpu`), and figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402
import parallel_step  # noqa: E402
import weak_scaling  # noqa: E402

PACKAGES = ("transformers", "triton", "sglang")
PARTS = ("step", "sync", "train", "scaling", "kill")
LAYERS = {"Qwen3-30B-A3B": 48, "tiny": 2}
OVERHEAD = 0.05  # of a step, at most
NVLINK = 450e9  # bytes a second that a GPU receives
SYNC_PEERS = {"slime, published, 8 x H100": [7000.0], "NeMo-RL, published": [740.0, 1000.0]}
TRAIN_PEER = ("prime-rl, published", 4400.0)
LIMIT = 540  # seconds of a job
GRACE = 120.0  # seconds in which all ranks must be gone once one is
LETTERS = "abcdefghij "


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--earlier", nargs="*", default=[], help="result files whose rows go in front")
    parser.add_argument("--shape", default="Qwen3-30B-A3B", choices=list(LAYERS))
    parser.add_argument("--layers", type=int, help="of the model; all unless given")
    parser.add_argument("--gpus", type=int, default=8, help="ranks")
    parser.add_argument("--expert-parallel", type=int, help="ranks that share the experts; all unless given")
    parser.add_argument("--tensor-parallel", type=int, help="GPUs of an engine; at most 4 unless given")
    parser.add_argument("--engine-experts", action="store_true", help="engines spread experts too (ep_size)")
    parser.add_argument("--memory-fraction", type=float, default=0.3, help="of a GPU, for SGLang")
    parser.add_argument("--offload", default="auto", choices=("auto", "always", "never"), help="parallel.offload")
    parser.add_argument("--prompts", type=int, default=16, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--response", type=int, default=6144, help="tokens at most")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one other")
    parser.add_argument("--tokens", type=int, default=16384, help="a GPU: a row to train on; a microbatch of a step")
    parser.add_argument("--repeats", type=int, default=5, help="measured syncs, and updates")
    parser.add_argument("--dense", default="Qwen3-4B:1:2:4:8,Qwen3-8B:2:4:8", help="SHAPE:GPUS:GPUS…, up to --gpus")
    parser.add_argument("--kill-layers", type=int, default=2, help="of the model whose ranks are killed")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all parts."""
    names = [name for name in args.parts.split(",") if name]
    if unknown := set(names) - set(PARTS):
        raise SystemExit(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    args.layers = args.layers or LAYERS[args.shape]
    args.expert_parallel = args.expert_parallel or args.gpus
    args.tensor_parallel = args.tensor_parallel or min(4, args.gpus)
    parts = {"step": run_step, "sync": run_sync, "train": run_train, "scaling": run_scaling, "kill": run_kill}
    rows: list[dict[str, Any]] = [row for file in args.earlier for row in json.loads(Path(file).read_text())["rows"]]
    for name in names:
        begun = time.monotonic()
        rows += parts[name](args)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    return rows


def case_of(args: argparse.Namespace) -> str:
    return f"{args.shape}, {args.layers} layers, {args.gpus} GPUs, experts over {args.expert_parallel}"


def is_whole(args: argparse.Namespace) -> bool:
    """Whether published figures are of the same."""
    return (args.shape, args.layers, args.gpus) == ("Qwen3-30B-A3B", LAYERS["Qwen3-30B-A3B"], 8)


@contextmanager
def prepared(args: argparse.Namespace, **changes: Any) -> Iterator[tuple[dict[str, Any], Callable[..., Any]]]:
    """A folder with model and prompts; settings, and `job(part, ranks)`, which runs ranks and says how they ended."""
    with tempfile.TemporaryDirectory(prefix="lightrl_scale_") as name:
        folder = Path(name)
        settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)} | {"folder": name} | changes
        write_model(folder / "model", settings)
        rng = random.Random(0)
        prompts = ["".join(rng.choice(LETTERS) for _ in range(settings["prompt"])) for _ in range(64)]
        (folder / "data.jsonl").write_text("\n".join(json.dumps({"input": text}) for text in prompts))
        environment = dict(os.environ)
        if args.device == "cpu":
            sys.path.insert(0, str(HERE.parent / "tests"))
            import sglang_receiving

            paths = [str(sglang_receiving.install(folder)), environment.get("PYTHONPATH", "")]
            environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}

        def job(part: str, ranks: int, **more: Any) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command += [str(Path(__file__)), part, json.dumps(settings | {"ranks": ranks} | more)]
            piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if more else {}
            process = subprocess.Popen(command, env=environment, text=True, **piped)
            try:
                output, _ = process.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks, which end SGLang
                raise RuntimeError(f"{part}: not over after {LIMIT} s\n{process.communicate()[0] or ''}") from None
            if process.returncode and not more:
                raise RuntimeError(f"{part}: ended with {process.returncode}")
            return subprocess.CompletedProcess(command, process.returncode, output)

        yield settings, job


def measured_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 wrote."""
    measured = dict(json.loads(Path(settings["folder"], "measured.json").read_text()))
    print(json.dumps(measured), flush=True)
    return measured


def run_step(args: argparse.Namespace) -> list[dict[str, Any]]:
    with prepared(args) as (settings, job):
        job("step", args.gpus)
        measured = measured_of(settings)
    steps = measured["steps"]
    case = f"{case_of(args)}, {args.prompts} x {args.samples} answers, {args.prompt} + {args.response} tokens"
    case += f", engines over {args.tensor_parallel}"
    rest = [s["total"] - s["generate"] - s["train"] for s in steps]
    middle = {k: statistics.median(s[k] for s in steps) for k in ("generate", "train", "sync", "total")}
    note = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in middle.items())
    shares = [r / s["total"] for r, s in zip(rest, steps, strict=True)]
    rows = [
        common.result_row(f"{case}: neither generates nor trains", "of the step", shares, better="lower", note=note)
    ]
    for stage in ("generate", "train", "sync", "total"):
        seconds = [s[stage] for s in steps]
        rows.append(common.result_row(f"{case}: {stage}", "s", seconds, better="lower"))
    for stage, kind in (("total", "tokens"), ("train", "tokens"), ("generate", "answers")):
        rates = [s[kind] / s[stage] / args.gpus for s in steps]
        rows.append(common.result_row(f"{case}: {stage}", "tokens/s/GPU", rates, better="higher"))
    for stage, peak in measured["peaks"].items():
        rows.append(common.result_row(f"{case}: most in use, {stage}", "GiB", [peak], better="lower"))
    return rows


def run_sync(args: argparse.Namespace) -> list[dict[str, Any]]:
    with prepared(args) as (settings, job):
        job("sync", args.gpus)
        measured = measured_of(settings)
    how = f"engines over {args.tensor_parallel}{', experts spread' if args.engine_experts else ''}"
    case = f"{case_of(args)}, {how}, {measured['bytes'] / 1e9:.2f} GB: sync"
    part = 1e3 * measured["bytes"] / args.gpus / NVLINK
    floor = part * (args.gpus - 1)
    note = (
        f"values compared bit by bit at the first: {measured['compared']:,}; the first, with buffers and comparison, "
        f"{measured['first']:.0f} ms; at NVLink's rate {floor:.0f} ms, as each GPU gets all weights; {part:.0f} if it "
        "got its share alone; aim: at most 500 ms"
    )
    limit = round(floor, 2)
    peers: dict[str | None, list[float]] = {**SYNC_PEERS} if is_whole(args) else {None: []}
    return [
        common.result_row(case, "ms", measured["ms"], theirs, better="lower", peer_name=peer, limit=limit, note=note)
        for peer, theirs in peers.items()
    ]


def run_train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`parallel_step`, without its peer, which would hold all experts of a layer."""
    way = f"{args.expert_parallel}x1"
    given = {"ways": way, "rows": 1, "layers": args.layers}
    rows = parallel_step.run(argparse.Namespace(**vars(args) | given))
    if is_whole(args):
        peer, rate = TRAIN_PEER
        ratio = common.times_better(rows[0]["ours"], rate, "higher")
        rows[0] |= {"peer": rate, "peer_spread": [rate, rate], "peer_name": peer, "ratio": round(ratio, 3), "goal": 1.8}
    return rows


def run_scaling(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for item in args.dense.split(","):
        shape, *counts = item.split(":")
        gpus = ",".join(count for count in counts if int(count) <= args.gpus)
        given = {"shapes": shape, "rows": f"{args.tokens}x1", "variants": "kept", "gpus": gpus, "peer": "none"}
        rows += weak_scaling.run(argparse.Namespace(**vars(args) | given))
    return rows


def run_kill(args: argparse.Namespace) -> list[dict[str, Any]]:
    """RuntimeError where ranks do not end as they must, or do not go on."""
    changes = {"layers": args.kill_layers, "prompt": 64, "response": 32, "prompts": args.gpus, "samples": 2}
    rows, half = [], max(1, args.gpus // 2)
    case = f"{args.shape}, {args.kill_layers} layers, {args.gpus} GPUs"
    with prepared(args, **changes) as (settings, job):
        for place in ("sync", "training"):
            done = job("kill", args.gpus, place=place)
            killed = Path(settings["folder"], "killed_at")
            if not killed.exists() or done.returncode == 0 or "SIGKILL" not in done.stdout:
                raise RuntimeError(f"killed in {place}: ended with {done.returncode}\n{done.stdout}")
            seconds = time.time() - float(killed.read_text())
            killed.unlink()
            name = f"{case}: all gone, a rank killed in {place}"
            rows.append(common.result_row(name, "s", [seconds], better="lower", limit=GRACE))
        begun = time.monotonic()
        groups = {"expert_parallel": half, "tensor_parallel": min(args.tensor_parallel, half)}
        done = job("kill", half, place="nowhere", **groups)
        if done.returncode or measured_of(settings) != {"resumed_at": 1, "steps": 2}:
            raise RuntimeError(f"{half} ranks did not go on: ended with {done.returncode}\n{done.stdout}")
        name = f"{case}: a run on {half} goes on from the checkpoint, whole job"
        rows.append(common.result_row(name, "s", [time.monotonic() - begun], better="lower"))
    return rows


def write_model(folder: Path, settings: dict[str, Any]) -> None:
    """Config and a tokenizer of letters; in place of weights a file that is never read."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    fast.save_pretrained(folder)
    model_config(settings).save_pretrained(folder)
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")


def model_config(settings: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **parallel_step.SHAPES[settings["shape"]], num_hidden_layers=settings["layers"], dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"], eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


# ---- on every rank


def draw_weights(model: Any, *_: Any, **__: Any) -> None:
    """In place of `load.load_weights`: this rank's parts of random weights."""
    import torch

    from lightrl.models import load
    from lightrl.models.shards import local_shard

    torch.manual_seed(torch.distributed.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            local, _ = local_shard(parameter)
            local.normal_(std=0.02) if parameter.ndim > 1 else local.fill_(1.0)
    load.rebuild_buffers(model)


def make_trainer(settings: dict[str, Any], **sections: dict[str, Any]) -> Any:
    """A trainer as in a run, whose weights are drawn."""
    from lightrl.config.load import load_config
    from lightrl.models import load
    from lightrl.training.trainer import Trainer

    load.load_weights = draw_weights  # type: ignore[assignment]
    folder = Path(settings["folder"])
    tensor_parallel = settings["tensor_parallel"]
    engine: dict[str, Any] = {"kind": "sglang", "tensor_parallel": tensor_parallel}
    engine |= {"memory_fraction": settings["memory_fraction"], "hang_timeout": 120.0}
    engine["max_batch"] = -(-settings["prompts"] * settings["samples"] * tensor_parallel // settings["ranks"])
    if settings["engine_experts"]:
        engine["args"] = {"ep_size": tensor_parallel}
    parallel = {"expert_parallel": settings["expert_parallel"], "max_tokens_per_microbatch": settings["tokens"]}
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "steps": 100, "device": "auto"},
        "model": {
            "path": str(folder / "model"),
            "compute_dtype": "bfloat16" if settings["device"] == "cuda" else "float32",
            "activation_checkpointing": True,
        },
        "data": {"path": str(folder / "data.jsonl"), "apply_chat_template": False},
        "reward": {"type": "random"},
        "engine": engine,
        "rollout": {
            "prompts_per_step": settings["prompts"],
            "group_size": settings["samples"],
            "max_response_tokens": settings["response"],
        },
        "parallel": parallel | {"offload": settings["offload"], "timeout": 300.0},
        "sync": {"verify_every": 0},
        "checkpoint": {"every": 0},
        "log": {"trackers": [], "print_samples": 0, "save_samples": False, "progress": False},
    }
    return Trainer(load_config(**{k: v | sections.get(k, {}) for k, v in base.items()}))


def measure_step(settings: dict[str, Any]) -> None:
    from step_overhead import MemoryWatch

    trainer = make_trainer(settings)
    watch = MemoryWatch() if trainer.world.device.type == "cuda" else None
    collect, pack = trainer.collect, trainer.pack

    def stage(name: str) -> None:
        if watch is not None:
            watch.stage = name

    def collecting(*given: Any) -> Any:
        stage("generate")
        groups = collect(*given)
        stage("sync")
        return groups

    def packing(groups: Any) -> Any:
        stage("train")
        return pack(groups)

    trainer.collect, trainer.pack = collecting, packing
    steps = []
    for _ in range(settings["steps"] + 1):
        stage("sync")
        metrics = trainer.step(trainer.source.next(settings["prompts"]))
        times = {k: max(trainer.world.gather(metrics[f"time/{k}"])) for k in ("generate", "train", "sync", "total")}
        answers = metrics["rollout/length_mean"] * settings["prompts"] * settings["samples"]
        prompts = settings["prompt"] * settings["prompts"] * settings["samples"]
        steps.append(times | {"answers": answers, "tokens": answers + prompts})
        if trainer.world.is_main:
            print({k: round(v, 3) for k, v in steps[-1].items()}, flush=True)
    peaks: dict[str, float] = {}
    if watch is not None:
        watch.stop()
        found = trainer.world.gather(watch.peaks)
        peaks = {name: max(peaks.get(name, 0) for peaks in found) / 2**30 for name in ("generate", "train", "sync")}
    finish(trainer.world, settings, {"steps": steps[1:], "peaks": peaks}, trainer.close)


def measure_sync(settings: dict[str, Any]) -> None:
    import torch
    from weight_sync import sum_bytes

    from lightrl.config.schema import EngineConfig, ModelConfig, SyncConfig
    from lightrl.distributed.mesh import consecutive_group, init_world
    from lightrl.engine.sglang import Model, SGLangEngine
    from lightrl.training.policy import Policy

    world = init_world("auto", expert_parallel=settings["expert_parallel"])
    cuda, folder, ranks = world.device.type == "cuda", Path(settings["folder"]), settings["tensor_parallel"]
    config = model_config(settings)
    dtype: Any = "bfloat16" if cuda else "float32"
    policy = Policy.without_weights(ModelConfig(compute_dtype=dtype), config, world, source=folder / "model")
    draw_weights(policy.model)
    stream = policy.stream()
    engine = SGLangEngine(
        Model(
            path=folder / "model", layout=stream.layout(), eos_token_ids=[0], decode=str, dtype=policy.compute_dtype,
            context_length=2048, vocab_size=config.vocab_size,
        ),
        EngineConfig(
            kind="sglang", tensor_parallel=ranks, memory_fraction=settings["memory_fraction"], max_batch=16,
            args={"ep_size": ranks} if settings["engine_experts"] else {}, hang_timeout=120.0,
        ),
        SyncConfig(verify_every=0),
        device=world.device, log_dir=folder / "engine", member=world.rank % ranks,
        group=consecutive_group(world, ranks, "engine.tensor_parallel"),
    )  # fmt: skip

    def timed(version: int) -> float:
        if cuda:
            torch.cuda.synchronize()
        world.barrier()
        start = time.perf_counter()
        engine.load_groups(stream, version)
        return float(max(world.gather(1e3 * (time.perf_counter() - start))))

    first, *times = [timed(version) for version in range(settings["repeats"] + 3)]
    report = engine._pass("verify", stream, 0)
    if wrong := report["differing"]:
        raise RuntimeError(f"the engine holds other weights: {wrong}")
    compared = sum(world.gather(report["compared"]))
    measured = {"bytes": sum_bytes(stream.layout()), "compared": compared, "first": first, "ms": times[2:]}
    finish(world, settings, measured, engine.close)


def lose_a_rank(settings: dict[str, Any]) -> None:
    """A step with a checkpoint, and another, in which the last rank is killed at `place`."""
    trainer = make_trainer(settings, run={"steps": 2}, checkpoint={"every": 1, "async_save": False})
    world, stream = trainer.world, trainer.policy.stream()

    def die() -> None:
        if trainer.steps_done == 1 and world.rank == world.size - 1:
            Path(settings["folder"], "killed_at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    class Dying:
        def __iter__(self) -> Iterator[Any]:
            for number, group in enumerate(stream):
                if number == 1:
                    die()
                yield group

    def hook(_: Any, __: Any, output: Any) -> None:
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: die())

    if settings["place"] == "sync":
        trainer.policy.stream = Dying
    elif settings["place"] == "training":
        trainer.policy.module.register_forward_hook(hook)
    load, resumed = trainer.load_checkpoint, []

    def loading(*given: Any, **more: Any) -> None:
        load(*given, **more)
        resumed.append(trainer.steps_done)

    trainer.load_checkpoint = loading
    trainer.train()
    finish(world, settings, {"resumed_at": max(resumed, default=0), "steps": trainer.steps_done}, trainer.close)


def finish(world: Any, settings: dict[str, Any], measured: dict[str, Any], close: Callable[[], None]) -> None:
    from lightrl.distributed.mesh import close_world

    if world.is_main:
        Path(settings["folder"], "measured.json").write_text(json.dumps(measured))
    world.barrier()
    close()
    close_world()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    {"step": measure_step, "sync": measure_sync, "kill": lose_a_rank}[sys.argv[1]](json.loads(sys.argv[2]))
