"""What any engine must do, as functions over an engine that holds the weights of `model`, for the tests of each engine.

`model` is the stock transformers model with the same weights: the independent reference. Numbers: log-probs of float32
engines agree to 1e-5 (greedy) or 1e-4 (tempered); engines in other precisions pass their own `tolerance`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from lightrl.engine.base import Completion, Engine, GenerateRequest, SamplingParams
from lightrl.types import Status


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random ids, the lowest three (special tokens) left out."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def run(engine: Engine, requests: Sequence[GenerateRequest], stagger: int = 0) -> list[list[Completion]]:
    """All requests at once, or request i after `i * stagger` turns of the event loop (engine steps)."""

    async def one(request: GenerateRequest, turns: int) -> list[Completion]:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await engine.generate(request)

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(one(r, i * stagger) for i, r in enumerate(requests)))

    return asyncio.run(all_of_them())


def reference_logits(model: torch.nn.Module, request: GenerateRequest, completion: Completion) -> torch.Tensor:
    """[N, V]: the stock model's logits for each response token, from one unpadded forward."""
    device = next(model.parameters()).device
    ids = torch.tensor([request.tokens + completion.tokens], device=device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    return logits[len(request.tokens) - 1 : -1]


def truncated_logprobs(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """[N, V] log-probs after transformers' own processors (-inf outside the kept set)."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.log_softmax(-1)


def check_greedy(
    engine: Engine,
    model: torch.nn.Module,
    vocab_size: int,
    *,
    lengths: Sequence[int] = (1, 63, 257),
    n: int = 3,
    stagger: int = 2,
    tolerance: float = 1e-5,
) -> None:
    """Greedy ids equal stock `generate` one by one; log-probs equal a stock forward of each sequence alone (L2)."""
    requests = [
        GenerateRequest(
            id=f"greedy-{length}",
            tokens=prompt(length, vocab_size),
            sampling=SamplingParams(max_new_tokens=10 + i, temperature=0.0, ignore_eos=True),
            n=n if i else 1,
        )
        for i, length in enumerate(lengths)
    ]
    for request, completions in zip(requests, run(engine, requests, stagger), strict=True):
        expected = model.generate(  # type: ignore[operator]
            torch.tensor([request.tokens], device=next(model.parameters()).device),
            max_new_tokens=request.sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(request.tokens) :].tolist()
        assert len(completions) == request.n
        for completion in completions:
            assert completion.tokens == expected
            assert completion.status is Status.TRUNCATED
            logprobs = reference_logits(model, request, completion).log_softmax(-1)
            expected_logprobs = logprobs.gather(1, torch.tensor(expected)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected_logprobs, atol=tolerance, rtol=0)


def check_sampled_logprobs(
    engine: Engine,
    model: torch.nn.Module,
    vocab_size: int,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    tolerance: float = 1e-4,
) -> None:
    """Sampled log-probs are of the tempered, truncated, renormalised distribution (L3)."""
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=True)
    requests = [
        GenerateRequest(id=f"s{i}", tokens=prompt(length, vocab_size, 1), sampling=sampling, n=4, seeds=(1, 2, 3, i))
        for i, length in enumerate((2, 40, 90))
    ]
    for request, completions in zip(requests, run(engine, requests), strict=True):
        assert len({tuple(c.tokens) for c in completions}) > 1
        for completion in completions:
            logits = reference_logits(model, request, completion)
            logprobs = truncated_logprobs(logits, temperature, top_k, top_p)
            expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=tolerance, rtol=0)


def check_length_and_eos(engine: Engine, vocab_size: int, eos: int) -> None:
    """EOS is kept and completes, even as the last allowed token (M2); the length limit invents no EOS (M3)."""
    sampling = SamplingParams(max_new_tokens=40)
    request = GenerateRequest(id="eos", tokens=prompt(5, vocab_size), sampling=sampling, n=48, seeds=tuple(range(48)))
    (completions,) = run(engine, [request])
    ended = [c for c in completions if c.status is Status.COMPLETED]
    assert ended
    for completion in completions:
        if completion.status is Status.COMPLETED:
            assert completion.tokens[-1] == eos
            assert eos not in completion.tokens[:-1]
        else:
            assert completion.status is Status.TRUNCATED
            assert len(completion.tokens) == 40
            assert eos not in completion.tokens
        assert len(completion.logprobs) == len(completion.tokens)
        assert all(x <= 0 for x in completion.logprobs)
    # the same draws with room for exactly the EOS, and for one token less
    index = completions.index(max(ended, key=lambda c: len(c.tokens)))
    length = len(completions[index].tokens)
    assert length > 1
    for limit, status in ((length, Status.COMPLETED), (length - 1, Status.TRUNCATED)):
        again = GenerateRequest(
            id=f"eos-{limit}",
            tokens=request.tokens,
            sampling=SamplingParams(max_new_tokens=limit),
            seeds=(index,),
        )
        ((completion,),) = run(engine, [again])
        assert completion.status is status
        assert completion.tokens == completions[index].tokens[:limit]


def check_stop_ids(engine: Engine, vocab_size: int) -> None:
    """A stop id ends the answer and stays in it, `ignore_eos` or not."""
    free = SamplingParams(max_new_tokens=20, ignore_eos=True)
    request = GenerateRequest(id="free", tokens=prompt(9, vocab_size), sampling=free, seeds=(5,))
    ((reference,),) = run(engine, [request])
    stop = reference.tokens[7]
    first = reference.tokens.index(stop)
    stopped = SamplingParams(max_new_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    ((completion,),) = run(engine, [GenerateRequest(id="s", tokens=request.tokens, sampling=stopped, seeds=(5,))])
    assert completion.tokens == reference.tokens[: first + 1]
    assert completion.status is Status.COMPLETED


def check_abort(engine: Engine, vocab_size: int) -> None:
    """One request, then all: what was sampled returns, others go on."""

    def request(name: str, length: int) -> GenerateRequest:
        sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
        return GenerateRequest(id=name, tokens=prompt(4, vocab_size), sampling=sampling, n=2, seeds=(1, 2))

    async def scenario() -> tuple[list[Completion], list[Completion], list[Completion]]:
        first = asyncio.create_task(engine.generate(request("first", 100)))
        second = asyncio.create_task(engine.generate(request("second", 100)))
        third = asyncio.create_task(engine.generate(request("third", 8)))
        for _ in range(5):
            await asyncio.sleep(0)
        engine.abort("first")
        engine.abort("no such request")
        result = await third
        engine.abort()
        return await first, await second, result

    first, second, third = asyncio.run(scenario())
    assert [c.status for c in first + second] == [Status.ABORTED] * 4
    assert all(0 < len(c.tokens) < 100 for c in first)
    assert all(len(c.tokens) < 100 and len(c.tokens) == len(c.logprobs) for c in second)
    assert [len(c.tokens) for c in third] == [8, 8]
    assert [c.status for c in third] == [Status.TRUNCATED] * 2
    for a, b in zip(first, second, strict=True):
        common = min(len(a.tokens), len(b.tokens))
        assert a.tokens[:common] == b.tokens[:common]


def check_bad_requests(engine: Engine, vocab_size: int, context_length: int) -> None:
    """ValueError for requests that can never be served, naming them; the engine goes on."""
    good = SamplingParams(max_new_tokens=2)

    def request(tokens: list[int], sampling: SamplingParams = good, **changes: object) -> GenerateRequest:
        return GenerateRequest(id="bad", tokens=tokens, sampling=sampling, **changes)  # type: ignore[arg-type]

    cases = [
        (request([]), "empty"),
        (request([3] * context_length), "context"),
        (request([vocab_size]), "token ids"),
        (request([-1]), "token ids"),
        (request([3], n=0), "n must"),
        (request([3], n=2, seeds=(1,)), "1 seeds for 2"),
        (request([3], SamplingParams(max_new_tokens=0)), "max_new_tokens"),
        (request([3], SamplingParams(max_new_tokens=1, top_p=0.0)), "top_p"),
        (request([3], SamplingParams(max_new_tokens=1, temperature=-1.0)), "temperature"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            run(engine, [bad])
    ((completion,),) = run(engine, [request([3])])
    assert completion.tokens
