"""Mean |trainer - engine| log-prob of sampled tokens, in bfloat16, under settings of SGLang.

Engines of all settings hold the same weights and sample the same prompts at temperature 1; the trainer gives the
log-probs of what they sampled. Once before any update and once after `--updates` of them, every engine synchronised
after each. Cases:

- a Qwen3 shape with random weights, `flat`: as transformers initialises them (0.02), logits spread by 0.6 and nearly
  every token is as likely as another;
- the same, `peaked`: the weight of the last norm times what spreads logits over the vocabulary by 4. With Gaussian
  logits the best of 151,936 is then near 18 and a sampled token's near 15, as with trained models, and the entropy is
  some 4 nats. Only the place of the distribution is like a trained model's, the blocks are still random;
- SmolLM2-135M-Instruct, where `lightrl fetch smollm2-135m` was called.

The peer is bfloat16's own error: stock transformers in bfloat16 against the same weights in float32, on the same
tokens. Two computations that round independently, each as well as that, differ by 1.4 times as much.

What remains with the defaults, from the sources of SGLang 0.5.17 and of transformers' Qwen3 and Llama, which we train:

- RMSNorm: SGLang multiplies by the weight in float32 and rounds once (`kernels/jit/csrc/elementwise/rmsnorm.cuh`);
  transformers rounds before the weight as well. With a residual SGLang takes the mean square of the sum that is not
  rounded yet (`fused_add_rmsnorm.cuh`), transformers of the rounded one.
- Rotation: SGLang has sines and cosines in float32 and rounds the result (`rope.cuh`); transformers rounds both to
  bfloat16 first, then every product.
- SiLU times gate: SGLang in float32 (`activation.cuh`), transformers rounds between.
- Attention: FlashAttention 3 over pages, split along long contexts, against torch's FlashAttention 2 over packed rows.
  Both keep the softmax in float32 and round probabilities to bfloat16; blocks, and so the order of sums, differ.
- Products: cuBLAS takes other tiles for 64 rows than for 16k. Sums are float32 in either; the last bit differs.
- Head: SGLang rounds logits to bfloat16 (`layers/logits_processor.py`), and only then goes on in float32. We never
  round them. The step between neighbours is 0.008 above 1 and 0.125 above 16: by its size the larger part of what
  remains with trained models, and a small one with `flat` ones. `enable_fp32_lm_head` removes it, for a product in
  float32.

`enable_deterministic_inference` makes results independent of the batch (Triton products of fixed tiles, no split
attention), not nearer to others. `rl_on_policy_target = "fsdp"` (0.5.17 knows no other) adds transformers' order in
norms, rotation and SiLU, but residuals, embeddings and norms in float32, which suits a trainer that has them so; ours
computes in bfloat16. It also takes log-softmax of bfloat16 logits *in bfloat16* (`layers/sampler.py`): a log-prob of -8
to -16 is then a multiple of 1/16, and a trainer agrees only by doing the same. Hence not a default here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402
from weight_sync import SHAPES  # noqa: E402

PACKAGES = ("transformers", "sglang")
GOAL = 0.011  # with the defaults on `flat` weights
SPREAD = 4.0  # of `peaked` logits over the vocabulary
SMOLLM2 = "SmolLM2-135M-Instruct"
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "fp32 head": {"enable_fp32_lm_head": True},
    "deterministic": {"enable_deterministic_inference": True},
    "on-policy fsdp": {"rl_on_policy_target": "fsdp"},
    "triton": {"attention_backend": "triton"},
    "flashinfer": {"attention_backend": "flashinfer"},
}
SUBJECTS = (
    "rain",
    "iron",
    "tea",
    "chess",
    "bread",
    "trains",
    "glass",
    "bees",
    "music",
    "ice",
    "maps",
    "clocks",
    "wool",
)
ROWS = 16  # answers a forward of the stock models: their logits are whole


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--models", default=f"Qwen3-0.6B,{SMOLLM2}", help=f"of {', '.join(SHAPES)}, {SMOLLM2}")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="of SGLang; the first makes the updates")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--tokens", type=int, default=100, help="an answer, at most")
    parser.add_argument("--at-once", type=int, default=6, help="engines that start at the same time")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every case, setting and moment. An engine that does not start gives none, and a line of output."""
    rows: list[dict[str, Any]] = []
    for name in args.models.split(","):
        if name == SMOLLM2 and not (common.ROOT / "models" / SMOLLM2 / "config.json").exists():
            print(f"{SMOLLM2} is not here: lightrl fetch smollm2-135m")
            continue
        with tempfile.TemporaryDirectory(prefix="lightrl_mismatch_") as folder:
            out = Path(folder, "measured.json")
            settings = json.dumps(vars(args) | {"model": name, "out": str(out), "folder": folder}, default=str)
            subprocess.run([sys.executable, str(Path(__file__)), settings], check=True)
            rows += [make_row(name, found) for found in json.loads(out.read_text())]
    return rows


def make_row(model: str, found: dict[str, Any]) -> dict[str, Any]:
    """`p99` and `max` are keys of the row as well."""
    mismatch, stock = found["mismatch"], found["stock"]
    is_goal = found["setting"] == "default" and found["kind"] == "flat"
    note = (
        f"p99 {mismatch['p99']:.4f}, max {mismatch['max']:.3f} of {found['tokens']} tokens; against float32: engine "
        f"{found['engine']['mean']:.4f}, trainer {found['trainer']['mean']:.4f}, transformers p99 {stock['p99']:.4f}, "
        f"max {stock['max']:.3f}; entropy {found['entropy']:.2f}, best logit {found['best_logit']:.1f}; sampled in "
        f"{found['seconds']:.2f} s"
    )
    kind = f" {found['kind']}" if found["kind"] else ""
    row = common.result_row(
        f"{model}{kind}, {found['setting']}, {found['updates']} updates",
        "nat",
        [mismatch["mean"]],
        [stock["mean"]],
        better="lower",
        peer_name="transformers bfloat16 against float32",
        limit=GOAL if is_goal else None,
        note=note,
    )
    return row | {"p99": mismatch["p99"], "max": mismatch["max"]}


# ---- in a process of its own, a model each


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All moments of all cases of one model."""
    trainer = make_trainer(settings)
    engines, failed = start_engines(trainer, settings)
    for name, why in failed.items():
        print(f"{settings['model']}, {name}: no engine: {why}", flush=True)
    trainer.engine.close()
    trainer.rollouts.engine = engines[settings["settings"].split(",")[0]]
    start = [local(p).clone() for p in trainer.policy.parameters()]
    results: list[dict[str, Any]] = []
    for kind in ("flat", "peaked") if settings["model"] in SHAPES else ("",):
        begin_again(trainer, start)
        if kind == "peaked":
            scale_logits(trainer)
        for updates in (0, settings["updates"]):
            if updates:
                train(trainer, engines, updates)
            results += look(trainer, engines, {"kind": kind, "updates": updates})
    for engine in engines.values():
        engine.close()
    trainer.close()
    return results


def make_trainer(settings: dict[str, Any]) -> Any:
    """Without SGLang as yet: engines are put in its engine's place."""
    from lightrl.config.load import load_config
    from lightrl.training.trainer import Trainer

    folder, is_shape = Path(settings["folder"]), settings["model"] in SHAPES
    path = folder / "model" if is_shape else common.ROOT / "models" / settings["model"]
    if is_shape and not path.exists():
        from step_overhead import write_model

        write_model(path, settings["model"])
    texts = [s if is_shape else f"Tell me in a few sentences about {s}." for s in SUBJECTS]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"input": text}) for text in texts))
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "steps": 10_000, "device": settings.get("device", "cuda")},
        "model": {"path": str(path), "compute_dtype": settings.get("dtype", "bfloat16")},
        "data": {"path": str(folder / "data.jsonl"), "apply_chat_template": not is_shape},
        "reward": {"type": "random"},
        "algorithm": {"skip_zero_advantage": False},
        "rollout": {
            "prompts_per_step": settings["prompts"],
            "group_size": settings["samples"],
            "max_response_tokens": settings["tokens"],
        },
        "parallel": {"offload": "never"},
        "log": {"trackers": [], "print_samples": 0, "save_samples": False, "progress": False},
    }
    return Trainer(load_config(**sections))


def start_engines(trainer: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """By setting: those that serve, and why the others do not."""
    from lightrl.config.schema import EngineConfig, SyncConfig
    from lightrl.training.engines import build_engine

    batch = settings["prompts"] * settings["samples"]
    base: dict[str, Any] = {"max_total_tokens": 2 * batch * (settings["tokens"] + 128)}  # they share the GPU

    trainer.policy.stream().layout()  # planned once, before threads ask for it
    shared = {"kind": "sglang", "memory_fraction": settings.get("fraction", 0.5), "max_batch": batch}

    def start(name: str) -> Any:
        return build_engine(
            EngineConfig(**shared, hang_timeout=60.0, args=base | SETTINGS[name]),  # some compile late
            trainer.policy,
            trainer.tokenizer,
            trainer.context_length,
            sync=SyncConfig(bucket_mib=128),
            world=trainer.world,
            run_dir=trainer.run_dir / name.replace(" ", "_"),
        )

    begun, engines, failed = time.monotonic(), {}, {}
    names = settings["settings"].split(",")
    with ThreadPoolExecutor(settings["at_once"]) as pool:
        starting = {name: pool.submit(start, name) for name in names}
        for name, future in starting.items():
            try:
                engines[name] = future.result()
            except Exception as error:
                failed[name] = str(error)
    print(f"{len(engines)} engines started in {time.monotonic() - begun:.0f} s", flush=True)
    if names[0] in failed:
        raise SystemExit(f"{names[0]}: {failed[names[0]]}")
    return engines, failed


def begin_again(trainer: Any, start: list[Any]) -> None:
    """Those weights, and an optimizer that has done nothing."""
    import torch

    trainer.policy.reclaim()  # shards again, after a forward
    with torch.no_grad():
        for parameter, weights in zip(trainer.policy.parameters(), start, strict=True):
            local(parameter).copy_(weights)
    trainer.optimizer.state.clear()


def scale_logits(trainer: Any) -> None:
    """Spread logits by `SPREAD`: they are products of rows of the head with a vector of the last norm."""
    import torch

    trainer.policy.reclaim()
    model = trainer.policy.model
    with torch.no_grad():
        head = local(model.get_output_embeddings().weight)
        spread = head.std().item() * head.shape[1] ** 0.5
        local(model.model.norm.weight).mul_(SPREAD / spread)


def train(trainer: Any, engines: dict[str, Any], updates: int) -> None:
    """Steps on what the trainer's engine samples; the others get every version, too."""
    for _ in range(updates):
        trainer.step(trainer.source.next(trainer.config.rollout.prompts_per_step))
        for engine in engines.values():
            synchronise(trainer, engine)


def synchronise(trainer: Any, engine: Any) -> None:
    from lightrl.sync.weights import sync_weights

    sync_weights(trainer.policy, engine, trainer.policy_version)


def look(trainer: Any, engines: dict[str, Any], moment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What every engine samples now, beside the trainer and the stock models."""
    first, prompts = trainer.engine, trainer.prompts[: trainer.config.rollout.prompts_per_step]
    half, exact = stock_models(trainer)
    try:
        for name, engine in engines.items():
            synchronise(trainer, engine)
            trainer.rollouts.engine = engine
            begun = time.monotonic()
            groups = trainer.collect(prompts)
            seconds = time.monotonic() - begun
            found = compare(trainer, groups, half, exact)
            yield moment | found | {"setting": name, "seconds": seconds}
            print(json.dumps(moment | {"setting": name} | found), flush=True)
    finally:
        trainer.rollouts.engine = first


def stock_models(trainer: Any) -> tuple[Any, Any]:
    """transformers' own with the present weights: in the trainer's precision, and those same values in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in trainer.policy.lend()}
    trainer.policy.reclaim()
    models = []
    for dtype in (trainer.policy.compute_dtype, torch.float32):
        model = AutoModelForCausalLM.from_config(trainer.policy.hf_config, dtype=dtype, attn_implementation="sdpa")
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - set(model.all_tied_weights_keys):
            raise RuntimeError(f"stock model: missing {missing}, unexpected {unexpected}")
        models.append(model.eval().to(trainer.world.device))
    return models[0], models[1]


def compare(trainer: Any, groups: list[Any], half: Any, exact: Any) -> dict[str, Any]:
    """Absolute differences over all sampled tokens."""
    import torch

    samples = [s for g in groups for s in g.samples]
    engine = torch.tensor([x for s in samples for x in s.rollout_logprobs])
    ours = trainer_logprobs(trainer, groups, samples)
    rounded, _, _ = stock_logprobs(half, samples)
    truth, entropy, best = stock_logprobs(exact, samples)
    pairs = {
        "mismatch": (engine, ours),
        "stock": (rounded, truth),
        "engine": (engine, truth),
        "trainer": (ours, truth),
    }
    figures = {name: summary((a - b).abs()) for name, (a, b) in pairs.items()}
    return figures | {"tokens": engine.numel(), "entropy": entropy, "best_logit": best}


def trainer_logprobs(trainer: Any, groups: list[Any], samples: list[Any]) -> Any:
    """As in an update: packed."""
    import torch

    from lightrl.training.advantage import set_advantages

    set_advantages(groups, trainer.advantages)
    found: dict[tuple[int, int], Any] = {}
    for batch in (m for minibatch in trainer.pack(groups) for m in minibatch):
        logprobs = trainer.policy.logprobs(batch, 1.0)
        for i, key in enumerate(batch.sample_keys):
            found[key] = logprobs[batch.sample_ids == i]
    return torch.cat([found[s.group_index, s.index] for s in samples])


def stock_logprobs(model: Any, samples: list[Any]) -> tuple[Any, float, float]:
    """Log-probs of all response tokens on the host, mean entropy, mean of the best logit. Padded on the right."""
    import torch

    device = next(model.parameters()).device
    logprobs, entropies, best = [], [], []
    with torch.no_grad():
        for some in (samples[i : i + ROWS] for i in range(0, len(samples), ROWS)):
            ids = torch.zeros(len(some), max(len(s.tokens) for s in some), dtype=torch.long)
            for row, sample in zip(ids, some, strict=True):
                row[: len(sample.tokens)] = torch.tensor(sample.tokens)
            ids = ids.to(device)
            logits = model(input_ids=ids, use_cache=False).logits
            for row, sample, answer in zip(logits, some, ids, strict=True):
                z = row[sample.prompt_length - 1 : len(sample.tokens) - 1].float()
                log_p = z.log_softmax(-1)
                target = answer[sample.prompt_length : len(sample.tokens), None]
                logprobs.append(log_p.gather(-1, target)[:, 0].cpu())
                entropies.append(-(log_p.exp() * log_p).sum(-1).cpu())
                best.append(z.amax(-1).cpu())
    return torch.cat(logprobs), float(torch.cat(entropies).mean()), float(torch.cat(best).mean())


def summary(values: Any) -> dict[str, float]:
    ordered = values.double().sort().values
    return {
        "mean": float(ordered.mean()),
        "p99": float(ordered[int(0.99 * (len(ordered) - 1))]),
        "max": float(ordered[-1]),
    }


def local(parameter: Any) -> Any:
    """This rank's part, sharing memory."""
    detached = parameter.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    Path(given["out"]).write_text(json.dumps(measure(given)))
    import torch.distributed as dist

    dist.destroy_process_group()
