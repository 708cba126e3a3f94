"""The embedded engine against stock transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import contract
import pytest
import torch
from tiny_models import CONFIGS, CONTEXT, EOS, OTHERS, SMALL, VOCAB, make_engine, stock
from transformers import FalconConfig, MambaConfig, MiniMaxConfig, PretrainedConfig, T5Config

from lightrl.engine.base import Completion, Engine, GenerateRequest, NotFiniteError, SamplingParams
from lightrl.engine.hosted_model import HostedModel
from lightrl.engine.kv_cache import plan_spans
from lightrl.engine.transformers import TransformersEngine
from lightrl.errors import UserError
from lightrl.types import Status


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[TransformersEngine, torch.nn.Module]]:
    model = stock(CONFIGS[request.param]())
    engine = make_engine(model)
    yield engine, model
    engine.close()


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return stock(CONFIGS["llama"]())


def letters(ids: list[int]) -> str:
    """A one-token-one-character 'tokenizer'."""
    return "".join(chr(ord("a") + i % 26) for i in ids)


Pair = tuple[TransformersEngine, torch.nn.Module]


# ---- the contract of all engines


def test_greedy_equals_stock(pair: Pair) -> None:
    assert isinstance(pair[0], Engine)
    contract.check_greedy(*pair, VOCAB)


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}])
def test_sampled_logprobs_equal_stock(pair: Pair, truncation: dict[str, Any]) -> None:
    contract.check_sampled_logprobs(*pair, VOCAB, temperature=0.7, **truncation)


def test_likeliest_tokens_equal_stock(pair: Pair) -> None:
    contract.check_likeliest(*pair, VOCAB)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss_sinks"])
def test_routing_equals_stock(name: str) -> None:
    model = stock(OTHERS[name]())
    engine = make_engine(model, max_batch=3)
    contract.check_routing(engine, model, VOCAB, 8)
    contract.check_routing(engine, model, VOCAB, 8)  # nothing of the first is left


def test_routing_of_an_answer_that_is_aborted_and_of_a_dense_model(llama: torch.nn.Module) -> None:
    sampling = SamplingParams(max_new_tokens=50, ignore_eos=True, return_routing=True)
    request = GenerateRequest(id="a", tokens=[5, 6, 7], sampling=sampling, n=4, seeds=(1, 2, 3, 4))
    engine = make_engine(stock(OTHERS["qwen3_moe"]()), max_batch=2)
    (whole, *_) = contract.run(engine, [request])[0]

    async def cut() -> list[Completion]:
        task = asyncio.create_task(engine.generate(request))
        for _ in range(9):
            await asyncio.sleep(0)
        engine.abort()
        return await task

    first, _, third, _ = asyncio.run(cut())
    assert 1 < len(first.tokens) < 10
    assert first.routing is not None
    assert whole.routing is not None
    assert torch.equal(first.routing, whole.routing[: 3 + len(first.tokens) - 1])
    assert third.tokens == []
    assert third.routing is None
    with pytest.raises(ValueError, match="request 'a': the model has no experts whose choice could be returned"):
        contract.run(make_engine(llama), [request])


def test_length_and_eos(pair: Pair) -> None:
    contract.check_length_and_eos(pair[0], VOCAB, EOS)


def test_greedy_end() -> None:
    model = stock(CONFIGS["qwen3"]())
    contract.check_greedy_end(make_engine(model), model, VOCAB, EOS)


def test_new_weights(llama: torch.nn.Module) -> None:
    contract.check_new_weights(make_engine(llama), llama, stock(CONFIGS["llama"](), seed=1), VOCAB)


def test_stop_ids_abort_and_bad_requests(llama: torch.nn.Module) -> None:
    engine = make_engine(llama)
    contract.check_stop_ids(engine, VOCAB)
    contract.check_abort(engine, VOCAB)
    contract.check_bad_requests(engine, VOCAB, CONTEXT)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logprobs_equal_a_padded_stock_batch(pair: Pair, side: str) -> None:
    """L2: packed in the engine, padded in the stock model, one by one (`test_greedy_equals_stock`): all the same."""
    engine, model = pair
    sampling = SamplingParams(max_new_tokens=5, temperature=0.7, ignore_eos=True)
    requests = [
        GenerateRequest(id=str(n), tokens=contract.prompt(n, VOCAB, 2), sampling=sampling, seeds=(n,))
        for n in (3, 20, 41)
    ]
    completions = [answers[0] for answers in contract.run(engine, requests)]
    width = max(len(r.tokens) for r in requests) + 5
    ids, mask, starts = [], [], []
    for request, completion in zip(requests, completions, strict=True):
        full, pad = request.tokens + completion.tokens, width - len(request.tokens) - 5
        ids.append([0] * pad + full if side == "left" else full + [0] * pad)
        mask.append([0] * pad + [1] * len(full) if side == "left" else [1] * len(full) + [0] * pad)
        starts.append(len(request.tokens) - 1 + (pad if side == "left" else 0))
    attention_mask = torch.tensor(mask)
    positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(torch.tensor(ids), attention_mask=attention_mask, position_ids=positions, use_cache=False).logits
    for row, (start, completion) in enumerate(zip(starts, completions, strict=True)):
        logprobs = (logits[row, start : start + 5] / 0.7).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
def test_cuda_equals_stock(name: str) -> None:
    model = stock(CONFIGS[name]()).cuda()
    engine = make_engine(model, device="cuda", max_batch=6)
    contract.check_greedy(engine, model, VOCAB, tolerance=1e-4)
    contract.check_sampled_logprobs(engine, model, VOCAB, temperature=0.7, top_k=9, top_p=0.9)
    contract.check_sampled_logprobs(engine, model, VOCAB, temperature=0.7, top_p=0.8)
    contract.check_length_and_eos(engine, VOCAB, EOS)
    half = stock(CONFIGS[name]()).to("cuda", torch.bfloat16)
    engine = make_engine(half, device="cuda", max_batch=6)
    # bfloat16 holds 2 to 3 digits; logits here reach 5
    contract.check_sampled_logprobs(engine, half, VOCAB, temperature=1.0, tolerance=0.25)


# ---- models


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_attention_equals_stock(name: str) -> None:
    model = stock(OTHERS[name]())
    contract.check_greedy(make_engine(model), model, VOCAB, lengths=(1, 19, 70), n=2, tolerance=2e-5)


def test_bfloat16_copy_follows_the_stock_model() -> None:
    # the fused attention path; 2 decimals is what bfloat16 holds at these sizes
    model = stock(CONFIGS["qwen3"]())
    engine = make_engine(model, share=False, dtype=torch.bfloat16)
    request = GenerateRequest(
        id="b", tokens=contract.prompt(30, VOCAB), sampling=SamplingParams(max_new_tokens=8, ignore_eos=True), n=3
    )
    second = GenerateRequest(id="c", tokens=contract.prompt(7, VOCAB), sampling=request.sampling)
    reference = model.to(torch.bfloat16)
    for asked, completions in zip((request, second), contract.run(engine, [request, second]), strict=True):
        for completion in completions:
            logprobs = contract.reference_logits(reference, asked, completion).log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            assert (torch.tensor(completion.logprobs) - expected).abs().mean() < 0.05


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: MiniMaxConfig(**SMALL, head_dim=16), "'minimax'.*linear_attention"),
        (lambda: MambaConfig(hidden_size=32, num_hidden_layers=1), "'mamba'"),
        (lambda: T5Config(), "'t5'.*encoder-decoder"),
        (lambda: FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4), "'falcon': it has a table"),
    ],
)
def test_models_with_other_state_are_refused(config: Callable[[], PretrainedConfig], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TransformersEngine(config())


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_buffers_equal_stock_and_weights_are_not_allocated(name: str) -> None:
    config = {**CONFIGS, **OTHERS}[name]()
    module = HostedModel(config, torch.device("cpu"), torch.float32).module
    assert all(p.is_meta for p in module.parameters())
    expected = dict(stock(config).named_buffers())
    buffers = dict(module.named_buffers())
    assert buffers.keys() == expected.keys()
    for key, value in expected.items():
        if key in module.state_dict():  # a router's bias is a weight
            assert buffers[key].is_meta, key
        else:
            assert torch.equal(buffers[key], value), key


# ---- seeds and batching


def test_seeds_decide_whatever_the_batch(llama: torch.nn.Module) -> None:
    sampling = SamplingParams(max_new_tokens=16)
    requests = [
        GenerateRequest(
            id=f"r{i}", tokens=contract.prompt(5 + 20 * i, VOCAB), sampling=sampling, n=3, seeds=(i, 10 + i, 20 + i)
        )
        for i in range(4)
    ]
    results = []
    for max_batch, order, stagger in [(1, 1, 0), (2, -1, 1), (7, 1, 3), (64, -1, 0)]:
        engine = make_engine(llama, max_batch=max_batch)
        completions = contract.run(engine, requests[::order], stagger)[::order]
        results.append([[(c.tokens, c.status) for c in cs] for cs in completions])
    assert results[0] == results[1] == results[2] == results[3]
    assert len({tuple(tokens) for group in results[0] for tokens, _ in group}) == 12
    # one answer alone, with its seed
    alone = GenerateRequest(id="alone", tokens=requests[2].tokens, sampling=sampling, seeds=(12,))
    ((completion,),) = contract.run(make_engine(llama), [alone])
    assert completion.tokens == results[0][2][1][0]


def test_without_seeds_answers_differ(llama: torch.nn.Module) -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests = [GenerateRequest(id=str(i), tokens=[5, 6], sampling=sampling, n=4) for i in range(2)]
    first, second = contract.run(make_engine(llama), requests)
    assert len({tuple(c.tokens) for c in first + second}) == 8


def test_a_group_is_prefilled_once_even_in_parts(llama: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(llama, max_batch=3)
    fed: list[int] = []
    forward = engine._forward

    def counting(tokens: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        fed.append(tokens.shape[1])
        return forward(tokens, *args)

    monkeypatch.setattr(engine, "_forward", counting)
    sampling = SamplingParams(max_new_tokens=20)
    request = GenerateRequest(
        id="g", tokens=contract.prompt(50, VOCAB), sampling=sampling, n=11, seeds=tuple(range(11))
    )
    (parts,) = contract.run(engine, [request])
    assert [length for length in fed if length > 1] == [50]
    (whole,) = contract.run(make_engine(llama, max_batch=64), [request])
    assert [c.tokens for c in parts] == [c.tokens for c in whole]


def test_prefill_respects_its_limit(llama: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(llama, max_batch=64, max_prefill_tokens=100)
    fed: list[int] = []
    forward = engine._forward
    monkeypatch.setattr(
        engine, "_forward", lambda tokens, *rest: (fed.append(tokens.shape[1]), forward(tokens, *rest))[1]
    )
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    lengths = (60, 40, 41, 250, 30, 2)  # 60+40 fit, 250 goes alone
    requests = [GenerateRequest(id=str(n), tokens=contract.prompt(n, VOCAB), sampling=sampling) for n in lengths]
    contract.run(engine, requests)
    assert [length for length in fed if length > 1] == [100, 41, 250, 32]


def test_several_spans_give_stock_logprobs(llama: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    # a call that costs nothing: every length gets its own span
    monkeypatch.setitem(plan_spans.__globals__["_CALL_BYTES"], "cpu", 0)
    contract.check_greedy(make_engine(llama), llama, VOCAB, stagger=1)


def test_the_cache_grows_by_need_and_is_freed(llama: torch.nn.Module) -> None:
    engine = make_engine(llama, max_batch=64)
    request = GenerateRequest(id="x", tokens=[4, 5], sampling=SamplingParams(max_new_tokens=8), n=2)
    contract.run(engine, [request])
    # 2 layers x (keys, values) x 2 slots x 2 heads x 64 positions x 8 x 4 bytes
    assert engine._cache.num_bytes == 2 * 2 * 2 * 2 * 64 * 8 * 4
    engine.offload(("kv_cache",))
    assert engine._cache.num_bytes == 0
    with pytest.raises(RuntimeError, match="onload"):
        contract.run(engine, [request])
    engine.onload(("kv_cache",))
    contract.run(engine, [request])


# ---- how answers end


def test_stop_strings_by_text(llama: torch.nn.Module) -> None:
    tokens = contract.prompt(6, VOCAB)
    free = SamplingParams(max_new_tokens=30, ignore_eos=True)
    ((reference,),) = contract.run(
        make_engine(llama), [GenerateRequest(id="f", tokens=tokens, sampling=free, seeds=(3,))]
    )
    text = letters(reference.tokens)
    stop = text[10:14]  # spans four tokens
    end = text.index(stop) + 4
    engine = make_engine(llama, decode=letters)
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=("no such", stop))
    ((completion,),) = contract.run(engine, [GenerateRequest(id="s", tokens=tokens, sampling=sampling, seeds=(3,))])
    assert completion.tokens == reference.tokens[:end]
    assert completion.logprobs == pytest.approx(reference.logprobs[:end], abs=1e-6)
    assert completion.status is Status.COMPLETED
    with pytest.raises(ValueError, match="tokenizer"):
        contract.run(make_engine(llama), [GenerateRequest(id="n", tokens=tokens, sampling=sampling)])


def test_the_context_ends_an_answer(llama: torch.nn.Module) -> None:
    engine = make_engine(llama, context_length=20)
    sampling = SamplingParams(max_new_tokens=50, ignore_eos=True)
    ((completion,),) = contract.run(engine, [GenerateRequest(id="c", tokens=[5] * 17, sampling=sampling)])
    assert len(completion.tokens) == 3
    assert completion.status is Status.TRUNCATED


# ---- weights


def test_shared_weights_are_the_lenders(llama: torch.nn.Module) -> None:
    model = stock(CONFIGS["llama"]())
    engine = TransformersEngine(model.config, context_length=CONTEXT, max_batch=4)
    with pytest.raises(RuntimeError, match="load_weights"):
        contract.run(engine, [GenerateRequest(id="w", tokens=[5], sampling=SamplingParams(max_new_tokens=1))])
    assert engine.policy_version == -1
    engine.load_weights(model.named_parameters(), 3, share=True)  # tied head given once
    hosted = engine._model.module
    for name, parameter in model.named_parameters():
        assert hosted.get_parameter(name).data_ptr() == parameter.data_ptr()
    assert hosted.lm_head.weight is hosted.model.embed_tokens.weight
    contract.check_greedy(engine, model, VOCAB, lengths=(12,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    contract.check_greedy(engine, model, VOCAB, lengths=(12,))
    assert engine.policy_version == 3
    engine.offload(("weights",))
    assert all(p.is_meta for p in hosted.parameters())
    assert not any(p.is_meta for p in model.parameters())
    engine.onload()
    with pytest.raises(RuntimeError, match="load_weights"):
        contract.run(engine, [GenerateRequest(id="w", tokens=[5], sampling=SamplingParams(max_new_tokens=1))])


def test_copied_weights_are_the_engines_own() -> None:
    model, other = stock(CONFIGS["qwen3"]()), stock(CONFIGS["qwen3"](), seed=1)
    engine = make_engine(model, share=False)
    hosted = engine._model.module
    pointers = {n: p.data_ptr() for n, p in hosted.named_parameters()}
    assert not set(pointers.values()) & {p.data_ptr() for p in model.parameters()}
    contract.check_greedy(engine, model, VOCAB, lengths=(12,))
    engine.load_weights(((n, t.double()) for n, t in other.state_dict().items()), 8)
    assert {n: p.data_ptr() for n, p in hosted.named_parameters()} == pointers
    contract.check_greedy(engine, other, VOCAB, lengths=(12,))
    # lent after owned after lent: the lender's tensors are never written to
    before = [p.clone() for p in model.parameters()]
    engine.load_weights(model.state_dict().items(), 9, share=True)
    engine.load_weights(other.state_dict().items(), 10)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    ((completion,),) = contract.run(
        engine, [GenerateRequest(id="v", tokens=[5], sampling=SamplingParams(max_new_tokens=1))]
    )
    assert completion.policy_versions == [10]


@pytest.mark.parametrize("share", [True, False])
def test_names_that_do_not_fit_are_named(llama: torch.nn.Module, share: bool) -> None:
    engine = make_engine(llama)
    weights = dict(llama.state_dict())
    norm = "model.norm.weight"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({**weights, "model.extra": torch.ones(2)}, "unknown model.extra"),
        ({n: t for n, t in weights.items() if n != norm}, f"missing {norm}"),
        ({n: t for n, t in weights.items() if "lm_head" not in n and "embed" not in n}, "missing .*embed_tokens"),
        ({**weights, norm: torch.ones(31)}, rf"{norm} has shape \[31\], not \[32\]"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.load_weights(bad.items(), 8, share=share)
        assert engine.policy_version == 7
        with pytest.raises(RuntimeError, match="load_weights"):
            contract.run(engine, [GenerateRequest(id="w", tokens=[5], sampling=SamplingParams(max_new_tokens=1))])
    engine.load_weights(weights.items(), 9, share=share)
    contract.check_greedy(engine, llama, VOCAB, lengths=(5,))


def test_new_weights_while_a_group_waits(llama: torch.nn.Module) -> None:
    # answers that start after the load compute their prompt with the new weights
    other = stock(CONFIGS["llama"](), seed=1)
    engine = make_engine(llama, max_batch=2)
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(id="g", tokens=contract.prompt(9, VOCAB), sampling=greedy, n=4)

    async def scenario() -> list[Completion]:
        task = asyncio.create_task(engine.generate(request))
        for _ in range(4):
            await asyncio.sleep(0)
        engine.load_weights(other.state_dict().items(), 8, share=True)
        return await task

    completions = asyncio.run(scenario())
    assert completions[0].policy_versions == [7, 8]
    assert completions[3].policy_versions == [8]
    ((expected,),) = contract.run(engine, [GenerateRequest(id="e", tokens=request.tokens, sampling=greedy)])
    assert completions[3].tokens == expected.tokens
    assert completions[0].tokens != expected.tokens


# ---- failures


def test_an_error_in_a_step_reaches_every_caller_and_the_engine_recovers(
    llama: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama)
    requests = [
        GenerateRequest(id=str(i), tokens=contract.prompt(5 + i, VOCAB), sampling=SamplingParams(max_new_tokens=9), n=2)
        for i in range(4)
    ]

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    def broken(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_forward", broken)
        results = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert len(results) == 4
    assert all(isinstance(r, torch.OutOfMemoryError) and "lower engine.max_batch (now 5)" in str(r) for r in results)
    contract.check_greedy(engine, llama, VOCAB, lengths=(5,))


def test_weights_that_are_not_finite_are_an_error(llama: torch.nn.Module) -> None:
    weights = {n: t.clone() for n, t in llama.state_dict().items()}
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    engine = make_engine(llama)
    engine.load_weights(weights.items(), 8, share=True)
    request = GenerateRequest(id="nan", tokens=[5, 6], sampling=SamplingParams(max_new_tokens=3))
    with pytest.raises(NotFiniteError, match=r"not finite \(request 'nan'\): .* a lower optim\.lr"):
        contract.run(engine, [request])
    engine.load_weights(llama.state_dict().items(), 9, share=True)
    contract.check_greedy(engine, llama, VOCAB, lengths=(5,))


def test_cancelled_callers_and_closed_loops_leave_nothing_behind(llama: torch.nn.Module) -> None:
    engine = make_engine(llama)
    long = SamplingParams(max_new_tokens=300, ignore_eos=True)

    async def cancelled() -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest(id="a", tokens=[5], sampling=long, n=9)))
        for _ in range(4):
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="under way"):
            engine.offload()
        with pytest.raises(ValueError, match="'a' is under way"):
            await engine.generate(GenerateRequest(id="a", tokens=[5], sampling=long))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    contract.check_greedy(engine, llama, VOCAB, lengths=(5,))
    # a loop that is closed with the engine at work
    loop = asyncio.new_event_loop()
    left = loop.create_task(engine.generate(GenerateRequest(id="b", tokens=[5], sampling=long, n=2)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    driver = engine._driver
    loop.close()
    contract.check_greedy(engine, llama, VOCAB, lengths=(5,))
    for task in (left, driver):
        assert task is not None
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    engine.close()
    engine.close()
    assert engine._cache.num_bytes == 0
