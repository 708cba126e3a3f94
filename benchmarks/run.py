"""Measure one operation beside its peers: `python benchmarks/run.py --op NAME`.

An op is the module NAME.py in this folder with `run(args) -> list of row dicts` (see `common.result_row`). It may also
have `add_arguments(parser)` for its own options and `PACKAGES`, the peers' distributions whose versions are recorded.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402

OPS = {
    "startup": "seconds until help, a config error, an import",
    "embedded_generate": "tokens/s of the embedded engine; peer: transformers' generate",
    "train_step": "tokens/s of an update on one GPU; peer: transformers under FSDP2",
    "hybrid_stack": "tokens/s of an update of Qwen3.5-9B's blocks; peer: transformers with fla",
    "rl_update": "real tokens/s of an RL update on a mix of lengths; peer: TRL's GRPOTrainer, fed the same ids",
    "weak_scaling": "share of one GPU's rate that is left on two; peer: transformers under FSDP2",
    "attention": "TFLOP/s of attention over packed rows; peers: SDPA's flash kernel, torch's varlen_attn",
    "gated_delta": "ms and memory of a gated delta layer's mixing; peers: plain torch, transformers, fla",
    "fused_ops": "us of norms, rotations and SwiGLU; peers: transformers' own code, Liger",
    "grpo_step_cpu": "seconds a GRPO step on the CPU; peer: TRL's GRPOTrainer",
    "logprob": "ms of log-probs and entropies from hidden states; peers: whole logits, checkpointed chunks, Liger",
    "algorithms": "reward of the quickstart on the CPU by algorithm, three seeds",
    "gae": "ms of generalized advantage estimation; peer: a serial loop",
    "sleep_wake": "seconds to move the trainer off the GPUs and back; peer: bare page-locked copies",
    "weight_sync": "ms to pass weights into SGLang; peers: per tensor, one bucket at a time",
    "moe_block": "ms and memory of a mixture-of-experts block; peer: transformers with grouped_mm",
    "step_overhead": "share of a step that neither generates nor trains, SGLang on the same GPUs",
    "parallel_step": "tokens/s of an update of a mixture, experts or rows over ranks; peer: FSDP2 alone",
    "scale_8gpu": "a 30B-A3B mixture on 8 GPUs: whole steps, weight sync, training, killed ranks, dense scaling",
    "rollout_schedules": "samples/s by schedule, partial rollouts and over-sampling; peer: sync on the same GPUs",
    "mismatch": "nats between log-probs of trainer and SGLang, by setting; peer: bfloat16's own error",
    "sglang_generate": "tokens/s of SGLang through our engine; peer: its own offline generate",
    "quickstart_sglang": "reward of the quickstart with SGLang on the trainer's GPUs, and seconds a step",
}


def load_op(name: str) -> ModuleType:
    """The module of one op; imports neither torch nor the peers."""
    return importlib.import_module(name)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    parser.add_argument("--op", choices=list(OPS), help="what to measure")
    parser.add_argument("--list", action="store_true", help="name all ops and end")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the result file NAME.json")
    known, _ = parser.parse_known_args(argv)
    op = load_op(known.op) if known.op else None
    parser.add_argument("-h", "--help", action="help", help="this text; with --op also that op's own options")
    if op is not None and hasattr(op, "add_arguments"):
        op.add_arguments(parser.add_argument_group(known.op))
    args = parser.parse_args(argv)
    if args.list:
        for name, summary in OPS.items():
            print(f"{name:20} {summary}")
        return 0
    if op is None:
        parser.error("name an op with --op, or see --list")
    rows = op.run(args)
    command = shlex.join(["python", "benchmarks/run.py", *argv])
    result = common.report(known.op, rows, command=command, packages=getattr(op, "PACKAGES", ()))
    path = common.write_report(result, args.out)
    common.print_report(result)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
