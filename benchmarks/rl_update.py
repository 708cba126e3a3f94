"""Real tokens a second of one GRPO update on given answers of many lengths: ours beside TRL's `GRPOTrainer`.

Nothing is generated: both get the same ids, TRL through its `rollout_func`, with the same rewards. An update is what
follows: advantages, batching, forward, backward, clipping, AdamW; token mean, no KL, one update a generation, so that
neither computes old log-probs. 32 prompts of 128 tokens, 8 answers to each, their lengths lognormal (mean 512, longest
2,048). Real tokens are those of prompts and answers, each answer's prompt counted, without padding.

Both have float32 masters and compute in bfloat16 (float32 on a CPU), from the same weights, each in a process of its
own; they take turns, and the one that waits does nothing. Of what TRL offers, set what is fastest: `--trl-batch`,
`--trl-liger`, and no gradient checkpointing, as ours (`--recompute`: both).

Why ours takes less: rows are packed, where TRL pads every answer to the longest; a prompt is computed once for its
answers; log-probs and entropies come from hidden states, without logits in memory. The gradient's norm of the first
measured step, before clipping, is in the notes: it is the same but for rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import train_step  # noqa: E402
from common import Turns, Worker, result_row  # noqa: E402

PACKAGES = ("trl", "accelerate", "liger-kernel", "triton", "flash-attn-4")
GOAL = 4.0
LEARNING_RATE = 1e-6


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=list(train_step.SHAPES))
    parser.add_argument("--groups", type=int, default=32, help="prompts")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--mean", type=int, default=512, help="of the lengths of answers")
    parser.add_argument("--longest", type=int, default=2048, help="answer")
    parser.add_argument("--steps", type=int, default=4, help="measured, of each")
    parser.add_argument("--warmup", type=int, default=1, help="steps before, not measured")
    parser.add_argument("--max-tokens", type=int, default=16384, help="ours: parallel.max_tokens_per_microbatch")
    parser.add_argument(
        "--trl-batch", type=int, default=8, help="TRL: per_device_train_batch_size, divides the answers"
    )
    parser.add_argument("--trl-liger", action="store_true", help="TRL: use_liger_kernel")
    parser.add_argument("--recompute", action="store_true", help="both recompute blocks in the backward pass")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--threads", type=int, default=2, help="of each process")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rate, and peak memory where there is a GPU."""
    with tempfile.TemporaryDirectory(prefix="rl_update_") as folder:
        settings = vars(args) | {"folder": folder, "total_steps": args.steps + args.warmup}
        text = json.dumps({k: v for k, v in settings.items() if not isinstance(v, Path)})
        samples = make_samples(args)
        Path(folder, "samples.json").write_text(json.dumps(samples))
        save_model(args.shape, args.prompt + args.longest, Path(folder, "model"))
        workers = [
            Worker(name, Path(__file__), [name, text], threads=args.threads, log=Path(folder) / f"{name}.log")
            for name in ("ours", "trl")
        ]
        answers: list[list[dict[str, Any]]] = [[], []]
        try:
            version = [worker.wait_ready() for worker in workers][1]["version"]
            for step in range(settings["total_steps"]):
                for which in (0, 1) if step % 2 == 0 else (1, 0):  # neither always comes second
                    measured = workers[which].ask()
                    print(f"step {step}: {workers[which].name} {measured}", flush=True)
                    if step >= args.warmup:
                        answers[which].append(measured)
        finally:
            for worker in workers:
                worker.close()
    return make_rows(args, samples, *answers, peer_name=f"TRL {version}{' with Liger' if args.trl_liger else ''}")


def make_samples(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompt, response and reward of each; those of a group in a row."""
    rng = random.Random(0)
    vocabulary, sigma = train_step.SHAPES[args.shape]["vocab_size"], 0.8
    middle = math.log(args.mean) - sigma**2 / 2
    samples = []
    for _ in range(args.groups):
        prompt = [rng.randrange(3, vocabulary) for _ in range(args.prompt)]
        for _ in range(args.group_size):
            length = min(args.longest, max(1, round(rng.lognormvariate(middle, sigma))))
            response = [rng.randrange(3, vocabulary) for _ in range(length)]
            samples.append({"prompt": prompt, "response": response, "reward": rng.random()})
    return samples


def save_model(shape: str, context: int, folder: Path) -> None:
    """Random weights, and a tokenizer, which TRL must have, that knows three words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**train_step.SHAPES[shape] | {"max_position_embeddings": max(context, 1024)}, eos_token_id=1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "<pad>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    names = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def make_rows(
    args: argparse.Namespace,
    samples: Sequence[dict[str, Any]],
    ours: Sequence[dict[str, Any]],
    peer: Sequence[dict[str, Any]],
    peer_name: str,
) -> list[dict[str, Any]]:
    real = sum(len(s["prompt"]) + len(s["response"]) for s in samples)
    longest = max(len(s["response"]) for s in samples)
    name = f"{args.shape}, {len(samples)} answers, {real:,} tokens"
    flops = sum(len(r) * train_step.flops_per_token(train_step.SHAPES[args.shape], len(r)) for r in map(row, samples))
    rates = [[real / m["seconds"] for m in side] for side in (ours, peer)]
    norms = [side[0]["grad_norm"] for side in (ours, peer)]
    note = (
        f"gradient norm ours {norms[0]:.5g}, TRL {norms[1]:.5g}; TRL computes {len(samples)} x {args.prompt + longest} "
        f"= {len(samples) * (args.prompt + longest):,} tokens"
    )
    if args.device == "cuda":
        mfu = [100 * flops / statistics.median(m["seconds"] for m in side) / train_step.PEAK for side in (ours, peer)]
        note += f"; of the peak at real tokens ours {mfu[0]:.1f} %, TRL {mfu[1]:.1f} %"
    limit = round(train_step.PEAK * real / flops) if args.device == "cuda" else None
    rows = [
        result_row(
            name, "real tokens/s", *rates, better="higher", peer_name=peer_name, limit=limit, goal=GOAL, note=note
        )
    ]
    if args.device == "cuda":
        peaks = [[max(m["peak_gib"] for m in side)] for side in (ours, peer)]
        rows.append(result_row(f"{name}: peak", "GiB", *peaks, better="lower", peer_name=peer_name, goal=1.0))
    return rows


def row(sample: dict[str, Any]) -> list[int]:
    return [*sample["prompt"], *sample["response"]]


# ---- the workers: this file as a script


def seconds_and_peak(device: str, start: float) -> dict[str, float]:
    """Since `start`, with all that the GPU was given."""
    import torch

    if device == "cpu":
        return {"seconds": time.perf_counter() - start, "peak_gib": 0.0}
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def ours(settings: dict[str, Any], turns: Turns) -> None:
    import torch

    from lightrl.config.schema import AlgorithmConfig, ModelConfig, OptimConfig
    from lightrl.distributed.mesh import close_world, init_world
    from lightrl.observe.metrics import Tally
    from lightrl.training.balance import CostModel
    from lightrl.training.batch import build_minibatches
    from lightrl.training.objective import Objective
    from lightrl.training.optim import build_optimizer, build_schedule
    from lightrl.training.packing import TrainSample
    from lightrl.training.policy import Policy
    from lightrl.training.update import update

    torch.set_num_threads(settings["threads"])
    device, size = settings["device"], settings["group_size"]
    world = init_world(device)
    dtype: Any = "bfloat16" if device == "cuda" else "float32"
    model = ModelConfig(
        path=f"{settings['folder']}/model", compute_dtype=dtype, activation_checkpointing=settings["recompute"]
    )
    policy = Policy.load(model, world)
    optim = OptimConfig(lr=LEARNING_RATE)
    optimizer = build_optimizer(policy.parameters(), optim)
    schedule = build_schedule(optimizer, optim, settings["total_steps"])
    given = json.loads(Path(settings["folder"], "samples.json").read_text())
    turns.ready()
    for _ in range(settings["total_steps"]):
        turns.wait()
        start = time.perf_counter()
        samples = []
        for number in range(0, len(given), size):
            group = given[number : number + size]
            rewards = [s["reward"] for s in group]
            mean, spread = statistics.mean(rewards), statistics.stdev(rewards) + 1e-4
            samples += [
                TrainSample(
                    group_index=number // size, index=i, prompt=s["prompt"], response=s["response"],
                    loss_mask=[1] * len(s["response"]), rollout_logprobs=None, advantage=(s["reward"] - mean) / spread,
                )
                for i, s in enumerate(group)
            ]  # fmt: skip
        [minibatch] = build_minibatches(
            samples,
            world,
            minibatches=1,
            max_tokens=settings["max_tokens"],
            share_prompts=True,
            skip_zero_advantage=True,
            aggregation="token_mean",
            constant_length=1,
            cost=CostModel.from_config(policy.hf_config),
        )
        objective = Objective.of(AlgorithmConfig())
        result = update(
            policy, optimizer, schedule, minibatch, objective, temperature=1.0, max_grad_norm=1.0, tally=Tally()
        )
        turns.answer(**seconds_and_peak(device, start), grad_norm=result.grad_norm)
    close_world()


def trl(settings: dict[str, Any], turns: Turns) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, __version__

    torch.set_num_threads(settings["threads"])
    device = settings["device"]
    given = json.loads(Path(settings["folder"], "samples.json").read_text())
    measured: dict[str, float] = {}

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        """The given answers; a prompt is its group's number, once for each answer."""
        assert [int(p) for p in prompts] == [i // settings["group_size"] for i in range(len(given))]
        responses = [s["response"] for s in given]
        return {
            "prompt_ids": [s["prompt"] for s in given],
            "completion_ids": responses,
            "logprobs": [[0.0] * len(r) for r in responses],  # of an engine's; used with vLLM alone
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        assert len(completions) == len(given)
        return [float(s["reward"]) for s in given]

    class TakeTurns(TrainerCallback):
        start = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.ready(version=__version__)
            self._next_turn()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            measured.update(seconds_and_peak(device, self.start))

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs is None or "grad_norm" not in logs:
                return
            turns.answer(**measured, grad_norm=float(logs["grad_norm"]))
            if state.global_step < settings["total_steps"]:
                self._next_turn()

        def _next_turn(self) -> None:
            turns.wait()
            self.start = time.perf_counter()

    batch = settings["trl_batch"]
    config = GRPOConfig(
        output_dir=f"{settings['folder']}/trl",
        max_steps=settings["total_steps"],
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=len(given) // batch,
        num_generations=settings["group_size"],
        max_completion_length=settings["longest"],
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",  # the mean over all tokens of the update
        shuffle_dataset=False,
        bf16=device == "cuda",
        gradient_checkpointing=settings["recompute"],
        use_liger_kernel=settings["trl_liger"],
        use_cpu=device == "cpu",
        dataloader_pin_memory=False,
        logging_strategy="steps",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    prompts = Dataset.from_dict({"prompt": [str(i) for i in range(settings["groups"])]})
    trainer = GRPOTrainer(
        model=f"{settings['folder']}/model",
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        rollout_func=rollout,
        callbacks=[TakeTurns()],
    )
    trainer.train()


if __name__ == "__main__":
    {"ours": ours, "trl": trl}[sys.argv[1]](json.loads(sys.argv[2]), Turns())
