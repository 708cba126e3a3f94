"""Tokens/s of the embedded engine against transformers' own `model.generate`, on a lognormal mix of response lengths.

Both get the same prompts, the same number of tokens to sample for every answer, the same weights, dtype and batch
size. The peer is used as one would: left padding, static batches of `max_batch`, sampling and KV cache on. A static
batch runs until its longest answer is done, and only the tokens that were asked for count. `--sorted-peer` adds a peer
that knows every length beforehand and batches like with like, which nobody can: what then remains is not from batching.

Ours and the peer take turns in one process. Every answer is a request of its own, because a forced length belongs to a
request: the engine computes a prompt once for a whole group, which this does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402

PACKAGES = ("transformers",)


@dataclass(frozen=True)
class Work:
    """Answers to sample: `lengths[i]` tokens for the prompt `prompts[i]`."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def make_work(vocab_size: int, answers: int, *, median: float, sigma: float, longest: int) -> Work:
    """Response lengths from a lognormal distribution, prompts of 20 to 119 random ids."""
    rng = random.Random(0)
    lengths = [max(1, min(longest, round(rng.lognormvariate(0, sigma) * median))) for _ in range(answers)]
    prompts = [[rng.randrange(3, vocab_size) for _ in range(rng.randrange(20, 120))] for _ in range(answers)]
    return Work(prompts, lengths)


def run_ours(engine: Any, work: Work) -> None:
    """All requests at once: the engine batches them."""
    from lightrl.engine.base import GenerateRequest, SamplingParams

    async def all_of_them() -> None:
        requests = [
            GenerateRequest(
                id=str(i),
                tokens=prompt,
                sampling=SamplingParams(max_new_tokens=length, ignore_eos=True),
                seeds=(i,),
            )
            for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [len(c[0].tokens) for c in done] == work.lengths

    asyncio.run(all_of_them())


def run_peer(model: Any, work: Work, max_batch: int, *, by_length: bool = False) -> None:
    """Static batches, in order of arrival or (`by_length`) sorted by the lengths that are to come."""
    import torch

    order = list(range(len(work.lengths)))
    if by_length:
        order.sort(key=lambda i: -work.lengths[i])
    for start in range(0, len(order), max_batch):
        batch = order[start : start + max_batch]
        width = max(len(work.prompts[i]) for i in batch)
        ids = [[0] * (width - len(work.prompts[i])) + work.prompts[i] for i in batch]
        mask = [[0] * (width - len(work.prompts[i])) + [1] * len(work.prompts[i]) for i in batch]
        longest = max(work.lengths[i] for i in batch)
        out = model.generate(
            torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape == (len(batch), width + longest)


def load_model(path: str | None, device: str, dtype: str) -> Any:
    """The model at `path`, or a random Llama of 30M parameters."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).to(device).eval()


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--model", help="folder or hub name; default: a random Llama of 30M parameters")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="of weights and keys")
    parser.add_argument("--answers", type=int, default=64, help="answers to sample")
    parser.add_argument("--max-batch", type=int, default=16, help="sequences decoded together")
    parser.add_argument("--median", type=float, default=60, help="median response length, tokens")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of the lengths")
    parser.add_argument("--longest", type=int, default=400, help="length limit, tokens")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each, taking turns")
    parser.add_argument("--sorted-peer", action="store_true", help="also a peer that knows all lengths beforehand")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a peer."""
    import torch

    from lightrl.engine.transformers import TransformersEngine

    model = load_model(args.model, args.device, args.dtype)
    vocab_size = model.config.vocab_size
    work = make_work(vocab_size, args.answers, median=args.median, sigma=args.sigma, longest=args.longest)
    engine = TransformersEngine(model.config, device=args.device, max_batch=args.max_batch)
    engine.load_weights(model.state_dict().items(), 0, share=True)
    contenders: dict[str, Callable[[], None]] = {
        "ours": lambda: run_ours(engine, work),
        "transformers generate": lambda: run_peer(model, work, args.max_batch),
    }
    if args.sorted_peer:
        contenders["generate, lengths known"] = lambda: run_peer(model, work, args.max_batch, by_length=True)
    warm = make_work(vocab_size, args.max_batch, median=4, sigma=0.1, longest=8)
    run_ours(engine, warm)
    run_peer(model, warm, args.max_batch)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.repeats):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            if args.device == "cuda":
                torch.cuda.synchronize()
            rates[name].append(work.num_tokens / (time.perf_counter() - start))
    model_name = Path(args.model).name if args.model else "random Llama 30M"
    return [
        common.result_row(
            f"{model_name} {args.dtype} {args.device}, {args.answers} answers, batch {args.max_batch}",
            "tokens/s",
            rates["ours"],
            rates[peer],
            better="higher",
            peer_name=peer,
            goal=1.5 if peer == "transformers generate" else None,
            note=f"response lengths lognormal: median {args.median:g}, sigma {args.sigma:g}, at most {args.longest}; "
            f"{work.num_tokens} tokens; {torch.get_num_threads()} threads",
        )
        for peer in list(contenders)[1:]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    common.print_report(common.report("embedded_generate", run(args), command="", packages=PACKAGES))


if __name__ == "__main__":
    main()
