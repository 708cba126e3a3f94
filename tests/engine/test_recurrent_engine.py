"""Models with gated delta layers in the embedded engine: the contract of all engines, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import contract
import pytest
import torch
from tiny_models import CONTEXT, EOS, RECURRENT, VOCAB, make_engine, stock

from lightrl.engine.base import GenerateRequest, SamplingParams
from lightrl.engine.transformers import TransformersEngine

Pair = tuple[TransformersEngine, torch.nn.Module]


def slow(model: torch.nn.Module) -> torch.nn.Module:
    """Decays of 0.9 and more a token: what a state should not hold stays visible."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-4, -2, len(parameter)))
    return model


@pytest.fixture(scope="module", params=list(RECURRENT))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    model = slow(stock(RECURRENT[request.param]()))
    engine = make_engine(model)
    yield engine, model
    engine.close()


@pytest.fixture(scope="module")
def qwen3_5() -> torch.nn.Module:
    return slow(stock(RECURRENT["qwen3_5"]()))


def test_greedy_equals_stock(pair: Pair) -> None:
    contract.check_greedy(*pair, VOCAB)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 9, "top_p": 0.9}])
def test_sampled_logprobs_equal_stock(pair: Pair, truncation: dict[str, Any]) -> None:
    contract.check_sampled_logprobs(*pair, VOCAB, temperature=0.7, **truncation)


def test_the_rest_of_the_contract(qwen3_5: torch.nn.Module) -> None:
    engine = make_engine(qwen3_5)
    contract.check_length_and_eos(engine, VOCAB, EOS)
    contract.check_stop_ids(engine, VOCAB)
    contract.check_abort(engine, VOCAB)
    contract.check_bad_requests(engine, VOCAB, CONTEXT)
    contract.check_new_weights(engine, qwen3_5, slow(stock(RECURRENT["qwen3_5"](), seed=1)), VOCAB)


def test_answers_that_start_late_go_on_from_the_prompt(qwen3_5: torch.nn.Module) -> None:
    """Eight answers in two slots: by the time the last ones start, every state has gone on with another answer."""
    engine = make_engine(qwen3_5, max_batch=2)
    sampling = SamplingParams(max_new_tokens=6, temperature=1.0, ignore_eos=True)
    request = GenerateRequest(
        id="late", tokens=contract.prompt(20, VOCAB), sampling=sampling, n=8, seeds=tuple(range(8))
    )
    (completions,) = contract.run(engine, [request])
    assert len({tuple(c.tokens) for c in completions}) == 8
    for completion in completions:
        logprobs = contract.reference_logits(qwen3_5, request, completion).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
    assert not any(job.states for job in engine._jobs.values())


def test_states_grow_by_need_and_are_freed(qwen3_5: torch.nn.Module) -> None:
    engine = make_engine(qwen3_5, max_batch=64)
    request = GenerateRequest(id="x", tokens=[4, 5], sampling=SamplingParams(max_new_tokens=8), n=2)
    contract.run(engine, [request])
    # 1 layer x 2 slots x (3 inputs of 2 x 16 + 32 channels + 4 heads of 8 x 8) x 4 bytes
    assert engine._cache.recurrent.num_bytes == 2 * (3 * 64 + 4 * 64) * 4
    engine.offload(("kv_cache",))
    assert engine._cache.num_bytes == 0
    engine.onload(("kv_cache",))
    contract.run(engine, [request])


def test_decays_are_float32_in_a_bfloat16_copy(qwen3_5: torch.nn.Module) -> None:
    engine = TransformersEngine(qwen3_5.config, dtype=torch.bfloat16, context_length=CONTEXT)
    engine.load_weights(qwen3_5.state_dict().items(), 1)
    hosted = dict(engine._model.module.named_parameters())
    for name, parameter in qwen3_5.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            assert torch.equal(hosted[name], parameter)
        else:
            assert hosted[name].dtype == torch.bfloat16
