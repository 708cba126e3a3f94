"""Tokens/s of SGLang through our engine against its own offline `Engine.generate`, same prompts, same settings.

Both engines are on the same GPU in processes of their own and take turns; the one that waits computes nothing. Every
prompt is sampled several times to a fixed length, log-probs included. Ours are single requests through the seam that
rollouts use; the peer gets everything in one call.
"""

from __future__ import annotations

import argparse
import asyncio
import random
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
from weight_sync import SHAPES, random_policy  # noqa: E402

PACKAGES = ("transformers", "sglang")


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--shape", default="Qwen3-0.6B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="an answer")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each, taking turns")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row."""
    import torch

    from lightrl.config.schema import EngineConfig, SyncConfig
    from lightrl.distributed.mesh import close_world, init_world
    from lightrl.engine.sglang import Model, SGLangEngine
    from lightrl.engine.sglang_start import child_environment

    folder = Path(tempfile.mkdtemp(prefix="lightrl_generate_"))
    config = model_folder(args.shape, folder)
    batch = args.prompts * args.samples
    world = init_world("cuda")
    policy = random_policy(config, world)
    engine = SGLangEngine(
        Model(
            path=folder, layout=policy.stream().layout(), eos_token_ids=[0], decode=str, dtype=torch.bfloat16,
            context_length=4096, vocab_size=config.vocab_size,
        ),
        EngineConfig(kind="sglang", memory_fraction=0.3, max_batch=batch),
        SyncConfig(),
        device=world.device, log_dir=folder,
    )  # fmt: skip
    assert child_environment({"RANK": "0"}).keys() == {"PYTHONPATH"}
    engine.load_groups(policy.stream(), 0)
    # after ours: an engine that starts measures what another one takes meanwhile
    peer = common.Worker(
        "sglang", Path(__file__), [str(folder), str(batch), str(args.prompts), str(args.samples), str(args.tokens)],
        threads=4, log=folder / "peer.log",
    )  # fmt: skip
    peer.wait_ready()
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    work = make_prompts(args.prompts)
    for turn in range(args.repeats + 1):
        seconds = {"ours": ours(engine, work, args.samples, args.tokens), "peer": peer.ask()["seconds"]}
        if turn:
            for name, value in seconds.items():
                rates[name].append(batch * args.tokens / value)
    engine.close()
    peer.close()
    close_world()
    return [
        common.result_row(
            f"{args.shape}, {args.prompts} prompts x {args.samples} answers of {args.tokens} tokens",
            "tokens/s",
            rates["ours"],
            rates["peer"],
            better="higher",
            peer_name="SGLang offline Engine.generate",
            goal=0.97,
        )
    ]


def model_folder(shape: str, folder: Path) -> Any:
    """config.json of the shape; weights are random in both engines."""
    from transformers import Qwen3Config

    config = Qwen3Config(**SHAPES[shape], architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    return config


def make_prompts(count: int) -> list[list[int]]:
    """20 to 119 random ids."""
    rng = random.Random(0)
    return [[rng.randrange(3, 150000) for _ in range(rng.randrange(20, 120))] for _ in range(count)]


def ours(engine: Any, prompts: list[list[int]], samples: int, tokens: int) -> float:
    """Seconds from new caches to the last answer."""
    from lightrl.engine.base import GenerateRequest, SamplingParams

    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)

    async def all_of_them() -> None:
        requests = [
            GenerateRequest(id=str(i), tokens=prompt, sampling=sampling, n=samples) for i, prompt in enumerate(prompts)
        ]
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert all(len(c.tokens) == len(c.logprobs) == tokens for completions in done for c in completions)

    engine.flush_cache()
    start = time.perf_counter()
    asyncio.run(all_of_them())
    return time.perf_counter() - start


def serve_peer(folder: str, batch: int, prompts: int, samples: int, tokens: int) -> None:
    turns = common.Turns()
    import sglang

    engine = sglang.Engine(
        model_path=folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, context_length=4096,
        attention_backend="fa3", sampling_backend="pytorch", grammar_backend="none", mem_fraction_static=0.3,
        max_running_requests=batch, cuda_graph_max_bs_decode=batch, disable_prefill_cuda_graph=True,
        max_prefill_tokens=8192, log_level="error",
    )  # fmt: skip
    work = [prompt for prompt in make_prompts(prompts) for _ in range(samples)]
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    turns.ready()
    try:
        while True:
            turns.wait()
            engine.flush_cache()
            start = time.perf_counter()
            outputs = engine.generate(input_ids=work, sampling_params=sampling, return_logprob=True)
            seconds = time.perf_counter() - start
            assert all(len(o["output_ids"]) == tokens for o in outputs)
            turns.answer(seconds=seconds)
    except EOFError:
        engine.shutdown()


if __name__ == "__main__":
    serve_peer(sys.argv[1], *map(int, sys.argv[2:]))
