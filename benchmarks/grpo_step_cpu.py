"""A GRPO step on the CPU: ours against TRL's GRPOTrainer, on the quickstart's model and sums.

Both make the same step: 8 prompts x 8 samples of at most 12 tokens at temperature 1, rewards, group-normalised
advantages, one float32 AdamW update with token-mean loss and clipped gradients, no KL. Prompts come in file order, so
that step k has the same prompts in both. Each runs in a process of its own with all threads; they take turns step by
step, and the one that waits uses no CPU.

With lr = 0 (the headline) the model stays what it is, so both keep sampling from one distribution; ours then computes
every sample, as TRL does, although most groups fail as a whole and have no advantage. In training proper ours leaves
samples without advantage out of the update (its default: their gradient is zero), and the answers shrink, at a like
pace.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, Turns, Worker, result_row

PACKAGES = ("trl", "accelerate")
PROMPTS, GROUP, MAX_NEW_TOKENS = 8, 8, 12
SAMPLES = PROMPTS * GROUP
LEARNING_RATE = 4e-5
GOAL = 2.0


def add_arguments(parser: Any) -> None:
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="lightrl fetch smollm2-135m")
    parser.add_argument("--data", default="data/arithmetic/train.jsonl", help="lightrl fetch arithmetic")
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--steps", type=int, default=9, help="measured steps with lr = 0")
    parser.add_argument("--train-steps", type=int, default=10, help="measured steps with lr = 4e-5; 0 leaves them out")
    parser.add_argument("--warmup", type=int, default=1, help="steps before, not measured")
    parser.add_argument("--max-tokens", type=int, default=2048, help="ours: parallel.max_tokens_per_microbatch")
    parser.add_argument("--trl-batch", type=int, default=32, help="TRL: per_device_train_batch_size, divides 64")
    parser.add_argument("--trl-continuous", action="store_true", help="TRL: transformers' continuous batching")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    for path, fetch in ((args.model, "smollm2-135m"), (args.data, "arithmetic")):
        if not (ROOT / path).exists():
            raise SystemExit(f"{path} is missing: run `lightrl fetch {fetch}`")
    rows = _rows_fixed(*_alternate(args, lr=0.0, steps=args.steps))
    if args.train_steps:
        rows.append(_row_training(*_alternate(args, lr=LEARNING_RATE, steps=args.train_steps)))
    return rows


def _alternate(
    args: argparse.Namespace, *, lr: float, steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Answers of both workers for each measured step, and TRL's name."""
    with tempfile.TemporaryDirectory(prefix="grpo_step_") as folder:
        settings = vars(args) | {"lr": lr, "total_steps": steps + args.warmup, "folder": folder}
        text = json.dumps({k: v for k, v in settings.items() if not isinstance(v, Path)})
        workers = [
            Worker(name, Path(__file__), [name, text], threads=args.threads, log=Path(folder) / f"{name}.log")
            for name in ("ours", "trl")
        ]
        answers: list[list[dict[str, Any]]] = [[], []]
        try:
            version = [worker.wait_ready() for worker in workers][1]["version"]
            for step in range(args.warmup + steps):
                order = (0, 1) if step % 2 == 0 else (1, 0)  # neither always comes second
                for which in order:
                    measured = workers[which].ask()
                    if step >= args.warmup:
                        answers[which].append(measured)
                    print(f"lr {lr:g} step {step}: {workers[which].name} {_brief(measured)}", flush=True)
        finally:
            for worker in workers:
                worker.close()
    return answers[0], answers[1], f"TRL {version}"


def _brief(measured: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.3g}" for key, value in measured.items())


def _rows_fixed(ours: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    note = (
        f"response tokens (mean): ours {_mean(ours, 'length'):.2f}, TRL {_mean(peer, 'length'):.2f}; "
        f"CPU seconds a step: ours {_median(ours, 'cpu_seconds'):.1f}, TRL {_median(peer, 'cpu_seconds'):.1f}; "
        "limit: our matrix products at the speed of a large one, nothing else"
    )
    rates = [[SAMPLES / m["seconds"] for m in side] for side in (ours, peer)]
    limit = float(f"{SAMPLES * max(m['gflops'] for m in ours) / _median(ours, 'gflop'):.4g}")
    rows = [
        result_row("step lr=0", "samples/s", *rates, better="higher", peer_name=name, limit=limit, goal=GOAL, note=note)
    ]
    for stage, note in (
        ("generate", "with rewards; ours also lends the weights to the engine"),
        ("train", "advantages, forward, backward, clipping, AdamW"),
    ):
        times = [[m[stage] for m in side] for side in (ours, peer)]
        rows.append(result_row(f"{stage} lr=0", "s", *times, better="lower", peer_name=name, note=note))
    memory = [[max(m["peak_gib"] for m in side)] for side in (ours, peer)]
    rows.append(result_row("peak memory", "GiB", *memory, better="lower", peer_name=name, note="of the process"))
    return rows


def _row_training(ours: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    def course(side: Sequence[dict[str, Any]], key: str) -> str:
        half = len(side) // 2
        return f"{_mean(side[:half], key):.2f} -> {_mean(side[half:], key):.2f}"

    note = (
        f"first half -> second half of {len(ours)} steps: response tokens ours {course(ours, 'length')}, "
        f"TRL {course(peer, 'length')}; reward ours {course(ours, 'reward')}, TRL {course(peer, 'reward')}"
    )
    rates = [[SAMPLES / m["seconds"] for m in side] for side in (ours, peer)]
    case = f"training lr={LEARNING_RATE:g}"
    return result_row(case, "samples/s", *rates, better="higher", peer_name=name, goal=GOAL, note=note)


def _median(side: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(m[key] for m in side)


def _mean(side: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.mean(m[key] for m in side) if side else float("nan")


def _peak_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


# ---- the workers: this file as a script ----


def ours(settings: dict[str, Any], turns: Turns) -> None:
    import torch

    from lightrl.config import load_config
    from lightrl.training.trainer import Trainer

    torch.set_num_threads(settings["threads"])
    config = load_config(
        run={"dir": f"{settings['folder']}/run", "steps": settings["total_steps"], "device": "cpu"},
        model={"path": settings["model"], "compute_dtype": "float32"},
        data={"path": settings["data"], "label_key": "label", "apply_chat_template": True, "shuffle": False},
        reward={"type": "number"},
        rollout={"prompts_per_step": PROMPTS, "group_size": GROUP, "max_response_tokens": MAX_NEW_TOKENS},
        engine={"max_batch": SAMPLES},
        algorithm={"skip_zero_advantage": settings["lr"] > 0},
        optim={"lr": settings["lr"]},
        parallel={"max_tokens_per_microbatch": settings["max_tokens"]},
        log={"trackers": [], "progress": False, "print_samples": 0, "save_samples": False},
    )
    trainer = Trainer(config)
    turns.ready()
    for _ in range(settings["total_steps"]):
        turns.wait()
        gflops = _product_gflops()
        start, cpu = time.perf_counter(), time.process_time()
        metrics = trainer.step(trainer.source.next(PROMPTS))
        seconds = time.perf_counter() - start
        turns.answer(
            seconds=seconds,
            cpu_seconds=time.process_time() - cpu,
            generate=metrics["time/generate"] + metrics["time/sync"],
            train=metrics["time/train"],
            length=metrics["rollout/length_mean"],
            reward=metrics["reward/mean"],
            gflop=_step_gflop(trainer.policy.model, metrics),
            gflops=gflops,
            peak_gib=_peak_gib(),
        )
    trainer.close()


def _step_gflop(model: Any, metrics: dict[str, float]) -> float:
    """Matrix products of a step, 1e9 operations: each prompt is fed once for its group, attention is left out."""
    from lightrl.distributed.fsdp import decoder_blocks

    blocks = sum(p.numel() for p in decoder_blocks(model).parameters() if p.ndim == 2)
    head = model.get_output_embeddings().weight.numel()
    responses = metrics["rollout/response_tokens"]
    fed = metrics["rollout/prompt_length_mean"] * PROMPTS + responses - SAMPLES  # the last token predicts nothing
    forward, train = 2, 6
    return ((forward + train) * blocks * fed + (forward + train) * head * responses) / 1e9


def _product_gflops() -> float:
    """Speed of one large float32 product with this process's threads, 1e9 operations a second."""
    import torch

    size = 1536
    matrix = torch.ones(size, size)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e9


def trl(settings: dict[str, Any], turns: Turns) -> None:
    """TRL's trainer with the settings that make this step fastest on a CPU (README.md says what was tried)."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, __version__

    from lightrl.rewards.answer import Answer
    from lightrl.rewards.text import grade_number

    torch.set_num_threads(settings["threads"])
    measured: dict[str, float] = {}

    def reward(completions: list[Any], completion_ids: list[list[int]], label: list[str], **_: Any) -> Any:
        """Our own rule, so that both sides grade alike."""
        scores = []
        for messages, ids, gold in zip(completions, completion_ids, label, strict=True):
            status = "completed" if ids[-1] in trainer.eos_token_ids else "truncated"
            scores.append(float(grade_number(Answer(response=messages[0]["content"], label=gold, status=status))))
        measured["reward"] = statistics.mean(scores)
        return scores

    class StageTimed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            measured["generate"] = time.perf_counter() - start
            measured["length"] = float(batch["completion_mask"].sum(1).float().mean())
            return batch

    class TakeTurns(TrainerCallback):
        start = cpu = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.ready(version=__version__)
            self._next_turn()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.start
            cpu = time.process_time() - self.cpu
            train = seconds - measured["generate"]
            turns.answer(seconds=seconds, cpu_seconds=cpu, train=train, peak_gib=_peak_gib(), **measured)
            if state.global_step < settings["total_steps"]:
                self._next_turn()

        def _next_turn(self) -> None:
            turns.wait()
            self.start, self.cpu = time.perf_counter(), time.process_time()

    batch = settings["trl_batch"]
    config = GRPOConfig(
        output_dir=f"{settings['folder']}/trl",
        max_steps=settings["total_steps"],
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=SAMPLES // batch,
        num_generations=GROUP,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        use_transformers_continuous_batching=settings["trl_continuous"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",  # the mean over all tokens of the update
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = load_dataset("json", data_files=settings["data"], split="train", cache_dir=f"{settings['folder']}/cache")
    dataset = rows.rename_column("input", "prompt").select_columns(["prompt", "label"])
    trainer = StageTimed(
        model=settings["model"], reward_funcs=reward, args=config, train_dataset=dataset, callbacks=[TakeTurns()]
    )
    trainer.train()


if __name__ == "__main__":
    {"ours": ours, "trl": trl}[sys.argv[1]](json.loads(sys.argv[2]), Turns())
