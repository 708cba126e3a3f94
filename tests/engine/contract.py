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


def truncated_logprobs(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, *, joint: bool = False
) -> torch.Tensor:
    """[N, V] log-probs after transformers' own processors (-inf outside the kept set).

    transformers takes `top_p` of what `top_k` left; with `joint`, as in SGLang, both are of the whole distribution.
    """
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = tempered = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        kept = TopPLogitsWarper(top_p)(None, tempered if joint else scores).isfinite()
        scores = scores.masked_fill(~kept, -torch.inf)
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
    joint: bool = False,
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
            logprobs = truncated_logprobs(logits, temperature, top_k, top_p, joint=joint)
            expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=tolerance, rtol=0)


def check_likeliest(
    engine: Engine, model: torch.nn.Module, vocab_size: int, *, temperature: float = 0.7, tolerance: float = 1e-4
) -> None:
    """The likeliest tokens at each place, of the tempered distribution; none for an answer that asked for none."""
    sampling = SamplingParams(max_new_tokens=9, temperature=temperature, ignore_eos=True, top_logprobs=5)
    plain = SamplingParams(max_new_tokens=9, temperature=temperature, ignore_eos=True)
    requests = [
        GenerateRequest(id=f"l{i}", tokens=prompt(7 + i, vocab_size, 2), sampling=s, n=2, seeds=(1, 2))
        for i, s in enumerate((sampling, plain, sampling))
    ]
    for request, completions in zip(requests, run(engine, requests), strict=True):
        for completion in completions:
            if request.sampling is plain:
                assert completion.top_ids == completion.top_logprobs == []
                continue
            logprobs = (reference_logits(model, request, completion) / temperature).log_softmax(-1)
            values = torch.tensor(completion.top_logprobs)
            assert values.shape == (len(completion.tokens), 5)
            torch.testing.assert_close(values, logprobs.topk(5).values, atol=tolerance, rtol=0)
            chosen = logprobs.gather(1, torch.tensor(completion.top_ids))
            torch.testing.assert_close(values, chosen, atol=tolerance, rtol=0)


def check_routing(engine: Engine, model: torch.nn.Module, vocab_size: int, num_experts: int) -> None:
    """The experts of every token that was fed are those of a stock forward of the whole sequence; one of two requests
    that share batches asks, with answers that end at different times and more of them than run at once."""
    chosen: list[torch.Tensor] = []
    mixtures = [m for m in model.modules() if isinstance(getattr(m, "experts", None), torch.nn.Module)]
    routers = [m.gate if hasattr(m, "gate") else m.router for m in mixtures]
    requests = [
        GenerateRequest(
            id=f"routing-{length}",
            tokens=prompt(length, vocab_size, 3),
            sampling=SamplingParams(max_new_tokens=2 + 3 * i, ignore_eos=True, return_routing=i != 1),
            n=4,
        )
        for i, length in enumerate((1, 23, 40))
    ]
    found = run(engine, requests, stagger=1)
    for router in routers:
        router.hook = router.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    for request, completions in zip(requests, found, strict=True):
        for completion in completions:
            if not request.sampling.return_routing:
                assert completion.routing is None
                continue
            assert completion.routing is not None
            chosen.clear()
            reference_logits(model, request, completion)
            expected = torch.stack(chosen, dim=1)[:-1]  # of the last token there is no record: it was not fed
            assert completion.routing.shape == expected.shape
            assert completion.routing.dtype == (torch.uint8 if num_experts < 256 else torch.int16)
            assert torch.equal(completion.routing.long().sort(-1).values, expected.sort(-1).values)
    for router in routers:
        router.hook.remove()
        del router.hook


def check_length_and_eos(engine: Engine, vocab_size: int, eos: int, *, seeded: bool = True) -> None:
    """EOS is kept and completes, even as the last allowed token (M2); the length limit invents no EOS (M3).

    Not `seeded`: for engines that draw another answer every time; `check_greedy_end` has the last allowed token.
    """
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
    if not seeded:
        return
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


def check_greedy_end(engine: Engine, model: torch.nn.Module, vocab_size: int, eos: int) -> None:
    """The likeliest token is EOS: it ends the answer, as the last allowed token too, and is no end when ignored."""
    tokens = _prompt_that_ends(model, vocab_size, eos)
    for name, limit, ignore, length, status in (
        ("room", 9, False, 2, Status.COMPLETED),
        ("last", 2, False, 2, Status.COMPLETED),
        ("short", 1, False, 1, Status.TRUNCATED),
        ("ignored", 5, True, 5, Status.TRUNCATED),
    ):
        sampling = SamplingParams(max_new_tokens=limit, temperature=0.0, ignore_eos=ignore)
        ((completion,),) = run(engine, [GenerateRequest(id=name, tokens=tokens, sampling=sampling)])
        assert (completion.status, len(completion.tokens)) == (status, length)
        assert len(completion.logprobs) == length
        assert [token == eos for token in completion.tokens[:2]] == [False, True][:length]


def _prompt_that_ends(model: torch.nn.Module, vocab_size: int, eos: int) -> list[int]:
    """A prompt whose greedy answer is one token and then EOS, by a margin that rounding does not reach.

    The model's head must not be its embedding: the row of EOS, which is the padding token too, starts as zeros there.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab_size, (1024, 5), generator=generator).to(next(model.parameters()).device)
    with torch.no_grad():
        first = model(input_ids=ids, use_cache=False).logits[:, -1].float()
        second = model(input_ids=torch.cat([ids, first.argmax(-1)[:, None]], 1), use_cache=False).logits[:, -1].float()
    best = second.topk(2).values
    margins = torch.minimum(first.max(-1).values - first[:, eos], best[:, 0] - best[:, 1])
    margins[(second.argmax(-1) != eos) | (first.argmax(-1) == eos)] = 0
    assert margins.max() > 0.1, "no prompt ends"
    return ids[margins.argmax()].tolist()


def check_stop_ids(engine: Engine, vocab_size: int) -> None:
    """A stop id ends the answer and stays in it, `ignore_eos` or not."""

    def greedy(name: str, **sampling: object) -> Completion:
        params = SamplingParams(max_new_tokens=20, temperature=0.0, **sampling)  # type: ignore[arg-type]
        return run(engine, [GenerateRequest(id=name, tokens=prompt(9, vocab_size), sampling=params)])[0][0]

    free, ended = (greedy("free", ignore_eos=ignored).tokens for ignored in (True, False))
    assert free[: len(ended)] == ended
    first = max(map(ended.index, ended))  # before an end of its own: the token that comes latest for the first time
    for ignore_eos in (True, False):
        stopped = greedy("stopped", ignore_eos=ignore_eos, stop_token_ids=(free[first],))
        assert stopped.tokens == free[: first + 1]
        assert stopped.status is Status.COMPLETED


def check_abort(engine: Engine, vocab_size: int) -> None:
    """One request, then all, then one that has not begun: what was sampled returns, others go on."""

    def request(name: str, length: int) -> GenerateRequest:
        sampling = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
        return GenerateRequest(id=name, tokens=prompt(4, vocab_size), sampling=sampling, n=2)

    async def scenario() -> list[list[Completion]]:
        first = asyncio.create_task(engine.generate(request("first", 390)))
        second = asyncio.create_task(engine.generate(request("second", 390)))
        third = await engine.generate(request("third", 8))  # the others have begun
        engine.abort("first")
        engine.abort("no such request")
        results = [await first]
        fourth = await engine.generate(request("fourth", 8))
        engine.abort()
        late = asyncio.create_task(engine.generate(request("late", 390)))
        await asyncio.sleep(0)
        engine.abort("late")
        return [*results, await second, await late, third, fourth]

    first, second, late, third, fourth = asyncio.run(scenario())
    for completion in first + second + late:
        assert completion.status is Status.ABORTED
        assert len(completion.tokens) == len(completion.logprobs) < 390
    assert all(completion.tokens for completion in first + second)
    for completion in third + fourth:
        assert (len(completion.tokens), completion.status) == (8, Status.TRUNCATED)
    longest = max((c.tokens for c in first + second), key=len)
    assert all(c.tokens == longest[: len(c.tokens)] for c in first + second + late + third + fourth)


def check_new_weights(
    engine: Engine, model: torch.nn.Module, other: torch.nn.Module, vocab_size: int, tolerance: float = 1e-5
) -> None:
    """A step's order of things, twice: memory is released by tag, new weights answer, the old ones' cache is gone (W5).

    `engine` holds `model` as version 7, and does so again in the end.
    """
    request = GenerateRequest(
        id="again", tokens=prompt(90, vocab_size), sampling=SamplingParams(max_new_tokens=4, ignore_eos=True)
    )
    run(engine, [request])  # caches the prompt that `check_greedy` asks for
    for weights, version in ((other, 8), (model, 7)):
        engine.offload()
        engine.offload()
        with pytest.raises(RuntimeError, match=r"onload|load_weights"):
            run(engine, [request])
        engine.onload(("weights",))
        engine.load_weights(((name, p.detach()) for name, p in weights.named_parameters()), version)
        engine.onload(("kv_cache",))
        assert engine.policy_version == version
        check_greedy(engine, weights, vocab_size, lengths=(90,), tolerance=tolerance)
        assert run(engine, [request])[0][0].policy_versions == [version]


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
        (request([3], SamplingParams(max_new_tokens=1, top_p=0.9, top_logprobs=2)), "top_logprobs"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            run(engine, [bad])
    for change in (engine.offload, engine.onload):
        with pytest.raises(ValueError, match="unknown tags"):
            change(("weight",))
    ((completion,),) = run(engine, [request([3])])
    assert completion.tokens
