"""Share of a step that neither generates nor trains: weights, releasing and taking memory, all that is between.

Whole `Trainer.step`s of a Qwen3 shape with random weights and SGLang on the same GPUs: prompts of some 60 tokens,
answers of a fixed length, a reward of no cost. Once with the trainer's state left on the GPU, once with the state
going to the host while the engine generates (`parallel.offload`).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402
from weight_sync import SHAPES  # noqa: E402

PACKAGES = ("transformers", "sglang")
GOAL = 0.05


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--shape", default="Qwen3-0.6B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ranks", default="1", help="numbers of GPUs, one run each")
    parser.add_argument("--offload", default="never,always", help="values of parallel.offload, one run each")
    parser.add_argument("--prompts", type=int, default=32, help="a step, a GPU")
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="an answer")
    parser.add_argument("--steps", type=int, default=6, help="measured, after two others")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Two rows a run: the share, and the seconds of all that is neither."""
    rows: list[dict[str, Any]] = []
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory(prefix="lightrl_overhead_") as folder:
            for mode in args.offload.split(","):
                out = Path(folder, "measured.json")
                command = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    str(ranks),
                ]
                settings = json.dumps(vars(args) | {"out": str(out), "offload": mode, "folder": folder})
                subprocess.run([*command, str(Path(__file__)), settings], check=True)
                measured = json.loads(out.read_text())
                print(json.dumps(measured), flush=True)
                rows += make_rows(args, ranks, mode, measured)
    return rows


def make_rows(args: argparse.Namespace, ranks: int, mode: str, measured: dict[str, Any]) -> list[dict[str, Any]]:
    case = f"{args.shape}, {ranks} GPU{'s' if ranks > 1 else ''}, offload {mode}"
    steps = measured["steps"]
    rest = [s["total"] - s["generate"] - s["train"] for s in steps]
    middle = {k: sorted(s[k] for s in steps)[len(steps) // 2] for k in ("generate", "train", "sync", "total")}
    note = (
        f"{args.prompts} x {args.samples} answers of {args.tokens} tokens a GPU; generate {middle['generate']:.2f} s, "
        f"train {middle['train']:.2f}, sync and memory {middle['sync']:.2f}, step {middle['total']:.2f}; at most "
        f"{measured['peak_gib']:.1f} GiB of the GPU in use while training, {measured['peak_generate_gib']:.1f} "
        f"while generating, {measured['peak_sync_gib']:.1f} in between"
    )
    shares = [r / s["total"] for r, s in zip(rest, steps, strict=True)]
    return [
        common.result_row(f"{case}: share", "of the step", shares, better="lower", limit=GOAL, note=note),
        common.result_row(f"{case}: seconds", "s", rest, better="lower"),
    ]


# ---- on every rank


class MemoryWatch:
    """The most of the GPU in use, by all processes, by stage; looked at every millisecond or so."""

    def __init__(self) -> None:
        import torch

        self.stage, self.peaks, self._torch, self._stop = "sync", {}, torch, False  # type: ignore[var-annotated]
        self._device = torch.cuda.current_device()  # a new thread's is the first of all
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stop:
            free, total = self._torch.cuda.mem_get_info(self._device)
            self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), total - free)
            time.sleep(0.002)

    def stop(self) -> None:
        self._stop = True


def measure(settings: dict[str, Any]) -> None:
    import torch

    from lightrl.config.load import load_config
    from lightrl.training.trainer import Trainer

    folder = Path(settings["folder"])
    config = make_run(folder, settings, load_config)
    trainer = Trainer(config)
    watch = MemoryWatch()
    steps = []
    original = trainer.collect

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        before, watch.stage = watch.stage, name
        try:
            yield
        finally:
            watch.stage = before

    def collect(*given: Any) -> Any:
        with stage("generate"):
            return original(*given)

    trainer.collect = collect  # type: ignore[method-assign]
    pack = trainer.pack

    def packing(groups: Any) -> Any:
        watch.stage = "train"
        return pack(groups)

    trainer.pack = packing  # type: ignore[method-assign]
    for _ in range(settings["steps"] + 2):
        watch.stage = "sync"
        metrics = trainer.step(trainer.source.next(config.rollout.prompts_per_step))
        times = {k: max(trainer.world.gather(metrics[f"time/{k}"])) for k in ("generate", "train", "sync", "total")}
        steps.append(times)
        if trainer.world.is_main:
            print({k: round(v, 3) for k, v in times.items()}, flush=True)
    watch.stop()
    if trainer.world.is_main:
        result = {"steps": steps[2:], "tokens": metrics["rollout/response_tokens"]}
        for key, name in (("peak_gib", "train"), ("peak_generate_gib", "generate"), ("peak_sync_gib", "sync")):
            result[key] = watch.peaks.get(name, 0) / 2**30
        Path(settings["out"]).write_text(json.dumps(result))
    trainer.world.barrier()
    trainer.close()
    torch.distributed.destroy_process_group()


def make_run(folder: Path, settings: dict[str, Any], load_config: Any) -> Any:
    """A checkpoint of the shape with random weights, a tokenizer of letters, prompts, and the config."""
    import os

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ready = folder / "ready"
    if rank == 0 and not ready.exists():
        write_model(folder / "model", SHAPES[settings["shape"]], device="cuda")
        rng = random.Random(0)
        lines = [
            json.dumps({"input": "".join(rng.choice("abcdefghij ") for _ in range(rng.randrange(40, 80)))})
            for _ in range(64)
        ]
        (folder / "data.jsonl").write_text("\n".join(lines))
        ready.touch()
    while not ready.exists():
        time.sleep(0.1)
    batch = settings["prompts"] * settings["samples"]
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / f"run_{settings['offload']}"), "steps": 100, "device": "cuda"},
        "model": {"path": str(folder / "model"), "compute_dtype": "bfloat16"},
        "data": {"path": str(folder / "data.jsonl"), "apply_chat_template": False},
        "reward": {"type": "random"},
        "engine": {"kind": "sglang", "memory_fraction": 0.5, "max_batch": batch},
        "rollout": {
            "prompts_per_step": settings["prompts"] * world,
            "group_size": settings["samples"],
            "max_response_tokens": settings["tokens"],
        },
        "parallel": {"offload": settings["offload"], "max_tokens_per_microbatch": 32768},
        "sync": {"verify_every": 0},
        "log": {"trackers": [], "print_samples": 0, "save_samples": False, "progress": False},
    }
    return load_config(**sections)


def write_model(folder: Path, shape: Mapping[str, Any], *, device: str) -> None:
    """Random weights of a Qwen3, drawn on `device`, and a tokenizer of letters and digits."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    names = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz 0123456789"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    fast.save_pretrained(folder)
    config = Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"], eos_token_id=1, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16)  # drawn twice as fast
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
