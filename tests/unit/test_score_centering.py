"""Score centering: by hand, against the expected gradient itself, and in a run; and the logits that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from ragged import answers, packed
from torch import Tensor
from transformers import AutoModelForCausalLM

import lightrl.kernels.logits_at as kernel
from lightrl.algorithms.corrections import score_centering
from lightrl.config.load import load_config
from lightrl.config.problems import ConfigError
from lightrl.config.schema import AlgorithmConfig, CorrectionConfig, ModelConfig
from lightrl.distributed.mesh import close_world, init_world
from lightrl.errors import UserError
from lightrl.kernels.logits_at import logits_at, logits_at_reference
from lightrl.observe.metrics import Tally
from lightrl.training.objective import Objective
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import Policy
from lightrl.training.trainer import Trainer
from lightrl.training.update import microbatch_loss


def test_by_hand():
    """q 0.5, 0.3 and p 0.4, 0.4, tails 0.2 and 0.2: coefficients 0.1 and -0.1. With weights capped at 1, q w is
    min(p, q) = 0.4, 0.3 and the tail's weight 1: 0 and -0.1."""
    p = torch.tensor([[0.4, 0.4]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[0.5, 0.3]], dtype=torch.float64).log()
    term = score_centering(p, q)
    (gradient,) = torch.autograd.grad(term.sum(), p)
    assert gradient.tolist() == [pytest.approx([0.1, -0.1])]
    assert term.item() == pytest.approx(0.0)
    term = score_centering(p, q, mode="truncate", upper=1.0)
    (gradient,) = torch.autograd.grad(term.sum(), p)
    assert gradient.tolist() == [pytest.approx([0.0, -0.1])]
    with pytest.raises(ValueError, match="truncate, clip, icepop"):
        score_centering(p, q, mode="mask")


MODES: list[dict[str, Any]] = [
    {},
    {"mode": "truncate", "upper": 1.2},
    {"mode": "clip", "lower": 0.9, "upper": 1.3},
    {"mode": "icepop", "lower": 0.8, "upper": 1.3},
]


def weight(ratio: Tensor, mode: str | None = None, lower: float = 0.0, upper: float = 0.0) -> Tensor:
    if mode is None:
        return torch.ones_like(ratio)
    if mode == "truncate":
        return ratio.clamp(max=upper)
    return ratio.clamp(lower, upper) if mode == "clip" else ratio * ((ratio >= lower) & (ratio <= upper))


@pytest.mark.parametrize("k", [3, 8, 11])
@pytest.mark.parametrize("keys", MODES, ids=lambda k: k.get("mode", "none"))
def test_the_expected_gradient_is_gone(keys: dict[str, Any], k: int):
    """Over all that the engine could sample, with A = 1: sum_v q_v w_v ∇log p_v - ∇C = 0, where the engine's tail is
    the trainer's, rescaled, or nothing."""
    g = torch.Generator().manual_seed(k)
    logits = torch.randn(11, generator=g, dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    p = log_p.detach().exp()
    head = p[:k] * (0.5 * torch.randn(k, generator=g, dtype=torch.float64)).exp()
    q = torch.cat([head, p[k:] * 1.1]) if k < 11 else head
    q = q / q.sum()
    drift = (q * weight(p / q, **keys)) @ log_p
    term = score_centering(log_p[None, :k], q[None, :k].log(), **keys).sum()
    mine, theirs = (torch.autograd.grad(t, logits, retain_graph=True)[0] for t in (term, drift))
    torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)  # tails of at least 1e-6 cost a little
    assert theirs.abs().max() > 1e-3


@pytest.mark.parametrize("tis", [{}, {"use_tis": True, "tis_upper_bound": 1.1}])
def test_in_the_loss(tis: dict[str, Any]):
    """A times the term, in the policy's part alone, and nothing of what stands in holes."""
    (packing,) = packed(answers(seed=1))
    batch, n, k = packing.batch, len(packing.now), 4
    g = torch.Generator().manual_seed(0)
    top = torch.rand(n, k, generator=g, dtype=torch.float64).mul(0.2).log().requires_grad_()
    engine = torch.rand(n, k, generator=g, dtype=torch.float64).mul(0.2).log()
    hole = batch.loss_mask == 0
    batch.rollout_top_ids = torch.zeros(n, k, dtype=torch.int64)
    batch.rollout_top_logprobs = engine.masked_fill(hole[:, None], float("nan"))
    losses = []
    for count in (0, k):
        objective = Objective.of(AlgorithmConfig(), CorrectionConfig(score_centering_top_k=count, **tis))
        losses.append(microbatch_loss(packing.now, packing.entropy, batch, objective, Tally(), top))
    bounds = {"mode": "truncate", "upper": 1.1} if tis else {}
    term = (batch.advantages * score_centering(top, engine, **bounds) * batch.loss_weights)[~hole].sum()
    assert (losses[1] - losses[0]).item() == pytest.approx(term.item(), rel=1e-9)
    (mine,) = torch.autograd.grad(losses[1], top, retain_graph=True)
    (theirs,) = torch.autograd.grad(term, top)
    torch.testing.assert_close(mine, theirs)
    batch.rollout_top_logprobs = None
    with pytest.raises(UserError, match="score_centering_top_k: the engine did not say"):
        microbatch_loss(packing.now, packing.entropy, batch, objective, Tally(), top)


# ---- logits of chosen tokens


@pytest.mark.parametrize("num_rows", [0, 1, 63, 257])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_at_equal_autograd(monkeypatch: pytest.MonkeyPatch, num_rows: int, bias: bool, dtype: torch.dtype):
    monkeypatch.setattr(kernel, "_CHUNK_BYTES", 4 * 5 * 16 * 10)  # several chunks, an uneven last one
    g = torch.Generator().manual_seed(num_rows)
    hidden, head = torch.randn(num_rows, 16, generator=g), torch.randn(97, 16, generator=g)
    inputs = [t.to(dtype).requires_grad_() for t in (hidden, head, *([torch.randn(97, generator=g)] if bias else []))]
    ids, cotangent = torch.randint(97, (num_rows, 5), generator=g), torch.randn(num_rows, 5, generator=g)
    results = []
    for function, precision in ((logits_at, dtype), (logits_at_reference, torch.float64)):
        x, w, *b = (t.detach().to(precision).requires_grad_() for t in inputs)
        if precision == torch.float64:  # the reference is in float32
            out = (x @ w.T + (b[0] if b else 0.0)).gather(-1, ids)
            torch.testing.assert_close(function(x, w, ids, *b).double(), out, atol=1e-4, rtol=1e-4)
        else:
            out = function(x, w, ids, *b)
            assert out.dtype == torch.float32
        results.append((out, *torch.autograd.grad((out * cotangent).sum(), [x, w, *b])))
    tolerance = 1e-4 if dtype == torch.float32 else 0.1  # gradients are rounded to the inputs' precision
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("family", ["llama", "granite"])  # packed, and padded rows of the stock model
def test_log_probs_of_likeliest_tokens_equal_stock(tmp_path: Path, family: str):
    path = tiny_run.make_model(tmp_path / "model", family=family)
    g = torch.Generator().manual_seed(0)
    samples = [
        TrainSample(
            group_index=0, index=i, prompt=[5, 6, 7], response=torch.randint(3, 29, (n,), generator=g).tolist(),
            loss_mask=[1] * n, rollout_logprobs=[-1.0] * n, advantage=1.0,
            rollout_top_ids=torch.randint(3, 29, (n, 4), generator=g).tolist(),
            rollout_top_logprobs=torch.rand(n, 4, generator=g).log().tolist(),
        )
        for i, n in enumerate((1, 6, 3))
    ]  # fmt: skip
    try:
        policy = Policy.load(ModelConfig(path=str(path), compute_dtype="float32"), init_world("cpu"))
        assert policy.module.packed == (family == "llama")
        units = [samples] if policy.module.packed else [[s] for s in samples]
        batch = pack(units, [[1.0] * len(unit) for unit in units])
        weights = torch.randn(10, 4, generator=g)
        logprobs, _, top = policy(batch, 0.7)
        (top * weights).sum().backward()
        mine = {n: p.grad.full_tensor() for n, p in policy.module.named_parameters()}
        assert torch.equal(policy.logprobs(batch, 0.7), logprobs.detach())
    finally:
        close_world()
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = []
    for s in samples:
        logits = stock(torch.tensor([s.prompt + s.response])).logits[0, len(s.prompt) - 1 : -1] / 0.7
        rows.append(logits.log_softmax(-1).gather(-1, torch.tensor(s.rollout_top_ids)))
    expected = torch.cat(rows)
    torch.testing.assert_close(top, expected, atol=1e-5, rtol=1e-5)
    (expected * weights).sum().backward()
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(mine[f"model.{name}"], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_an_exact_engine_needs_none(tmp_path: Path):
    """The embedded engine: p = q, the term has no gradient, and a step is what it is without."""
    weights: list[dict[str, Tensor]] = []
    for count in (0, 6):
        trainer = Trainer(
            tiny_run.make_run(tmp_path, correction={"score_centering_top_k": count}, log={"save_samples": False})
        )
        metrics = trainer.step(trainer.source.next(4))
        assert metrics["optim/grad_norm"] > 0
        weights.append({n: t.clone() for n, t in trainer.policy.lend()})
        trainer.policy.reclaim()
        trainer.close()
        close_world()
    for name, theirs in weights[0].items():
        torch.testing.assert_close(weights[1][name], theirs, atol=2e-4, rtol=0, msg=name)


# ---- in the config

KEY = "correction.score_centering_top_k"
BAD: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "later updates": (
        {"algorithm": {"minibatches_per_step": 2}},
        f"{KEY}: the gradient of algorithm.loss = 'ppo' is only that of 'reinforce' in the first of "
        "algorithm.minibatches_per_step = 2 updates: choose 'reinforce', or set 1",
    ),
    "old weights": (
        {"algorithm": {"minibatches_per_step": 2, "loss": "reinforce"}, "correction": {"use_tis": True}},
        f"{KEY}: goes by present weights; with correction.use_tis and several updates set "
        "correction.use_rollout_logprobs",
    ),
    "weights of samples": (
        {"correction": {"use_tis": True, "tis_level": "sequence"}},
        f"{KEY}: weights are of whole samples with correction.tis_level = 'sequence': set 'token'",
    ),
    "masks": (
        {"correction": {"use_tis": True, "tis_mode": "mask"}},
        f"{KEY}: correction.tis_mode = 'mask' takes tokens out of it: choose 'icepop', which does not",
    ),
    "rejection": (
        {"correction": {"rs_veto_threshold": 0.1}},
        f"{KEY}: does not know what correction.rs_veto_threshold rejects: drop one of the two",
    ),
    "a cut distribution": (
        {"rollout": {"top_p": 0.9}},
        f"{KEY}: wants the engine's whole distribution, which rollout.top_p cuts: remove it",
    ),
}


@pytest.mark.parametrize(("sections", "line"), BAD.values(), ids=BAD)
def test_what_does_not_go_together_is_named(sections: dict[str, dict[str, Any]], line: str):
    correction = {"score_centering_top_k": 8} | sections.get("correction", {})
    with pytest.raises(ConfigError) as caught:
        load_config(**(sections | {"correction": correction}))
    assert caught.value.problems == [line]
