"""The sampler against exact probabilities and transformers' own truncation."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lightrl.engine.base import SamplingParams
from lightrl.engine.sampling import check_sampling, sample

ALMOST_ONE = math.nextafter(1.0, 0.0)


def params(**changes: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **changes)  # type: ignore[arg-type]


def exact(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """[V] log-probs in float64 by transformers' processors."""
    scores = TemperatureLogitsWarper(temperature)(None, logits.double()[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.log_softmax(-1)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"top_k": 1000},
    ],
)
@pytest.mark.parametrize("vocab", [37, 256, 300])
def test_frequencies_are_the_exact_probabilities(changes: dict[str, float], vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    count = 20_000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    ids, logprobs = sample(logits.expand(count, -1), [params(**changes)] * count, uniforms)
    expected = exact(logits, **changes)  # type: ignore[arg-type]
    torch.testing.assert_close(logprobs.double(), expected[ids], atol=2e-6, rtol=0)
    observed = torch.bincount(ids, minlength=vocab).double()
    probable = expected.exp() * count
    assert observed[probable == 0].sum() == 0
    # pool rare tokens, as the chi-square statistic needs about 5 expected counts a cell
    rare = probable < 5
    cells = torch.cat([probable[~rare], probable[rare].sum()[None]])
    seen = torch.cat([observed[~rare], observed[rare].sum()[None]])
    seen, cells = seen[cells > 0], cells[cells > 0]
    chi2 = ((seen - cells) ** 2 / cells).sum().item()
    freedom = len(cells) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)  # about 1 in 10^4


def test_a_uniform_maps_to_the_same_token_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 500, generator=generator)
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64).tolist()
    kinds = [params(), params(temperature=0.0), params(top_k=7), params(top_p=0.5), params(temperature=0.3)]
    mixed = [kinds[i % 5] for i in range(40)]
    ids, logprobs = sample(logits, mixed, uniforms)
    for row in range(40):
        one_id, one_logprob = sample(logits[row : row + 1], [mixed[row]], [uniforms[row]])
        assert one_id.item() == ids[row].item()
        assert one_logprob.item() == pytest.approx(logprobs[row].item(), abs=1e-6)


def test_greedy_is_the_likeliest_with_its_untempered_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, float("-inf")]])
    ids, logprobs = sample(logits, [params(temperature=0.0)] * 2, [0.9, 0.9])
    assert ids.tolist() == [1, 0]
    by_hand = [2 - math.log(1 + math.e**2 + math.e), 5 - math.log(math.e**5 + math.e**-1)]
    torch.testing.assert_close(logprobs, torch.tensor(by_hand), atol=1e-6, rtol=0)


def test_inverse_cdf_by_hand() -> None:
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    for u, token in [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7499, 1), (0.7501, 2), (ALMOST_ONE, 2), (1.0, 2)]:
        ids, logprobs = sample(logits[None], [params()], [u])
        assert ids.item() == token
        assert logprobs.item() == pytest.approx(math.log(0.5 if token == 0 else 0.25), abs=1e-6)


@pytest.mark.parametrize("changes", [{}, {"top_k": 400}, {"top_p": 0.999}, {"temperature": 1e-3}])
@pytest.mark.parametrize("u", [0.0, 0.5, ALMOST_ONE, 1.0])
def test_impossible_tokens_are_never_drawn(changes: dict[str, float], u: float) -> None:
    # -inf at both ends, in whole blocks and inside blocks
    logits = torch.full((1, 400), float("-inf"))
    logits[0, 131] = 1.0
    logits[0, 140] = 1.1
    ids, logprobs = sample(logits, [params(**changes)], [u])
    assert ids.item() in (131, 140)
    expected = exact(logits[0], **changes)  # type: ignore[arg-type]
    assert logprobs.item() == pytest.approx(expected[ids.item()].item(), abs=1e-5)


def test_edges_of_truncation() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    for changes in ({"top_p": 1e-9}, {"top_k": 1}, {"temperature": 1e-3}, {"temperature": 1e-30}):
        ids, logprobs = sample(logits, [params(**changes)], [ALMOST_ONE])
        assert (ids.item(), logprobs.item()) == (1, 0.0)
    # nucleus of 0.7: 3.0 alone holds .644, so the token that crosses is kept too
    ids, logprobs = sample(logits, [params(top_p=0.7)], [ALMOST_ONE])
    assert ids.item() == 2
    assert logprobs.item() == pytest.approx(2 - math.log(math.e**3 + math.e**2), abs=1e-6)


def test_logits_without_a_distribution_give_nan() -> None:
    logits = torch.tensor([[float("nan"), 1.0, 2.0], [float("-inf")] * 3, [float("inf"), 0.0, 1.0]])
    for changes in ({}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 0.0}):
        ids, logprobs = sample(logits, [params(**changes)] * 3, [0.5] * 3)
        assert logprobs.isnan().all()
        assert (ids < 3).all()


@pytest.mark.parametrize(
    "changes",
    [{"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": 1.1}, {"top_k": -1}],
)
def test_parameters_without_a_distribution_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        check_sampling(params(**changes))
