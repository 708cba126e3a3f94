"""Advantages, losses and KL against hand-worked numbers and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from lightrl.algorithms.losses import LossTokens, kl_divergence, ppo_loss
from lightrl.algorithms.samples import Samples
from lightrl.config.schema import AlgorithmConfig
from lightrl.observe.metrics import Tally
from lightrl.training.objective import Objective
from lightrl.training.packing import TrainSample, pack
from lightrl.training.update import microbatch_loss


def tokens(logprobs, old, advantages) -> LossTokens:
    """All of one sample."""
    samples = Samples(mask=torch.ones(len(old)).bool(), ids=torch.zeros(len(old), dtype=torch.int64), count=1)
    return LossTokens(logprobs=logprobs, old_logprobs=old, advantages=advantages, samples=samples)


def test_clipped_loss_hand_worked_with_gradients():
    """Ratio 2 and 1/2 with both signs of the advantage, bounds [0.8, 1.3]."""
    ratios = torch.tensor([2.0, 0.5, 2.0, 0.5, 1.1])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    logprobs = ratios.log().requires_grad_()
    out = ppo_loss(tokens(logprobs, torch.zeros(5), advantages), clip_low=0.2, clip_high=0.3)
    # min(r A, clip(r) A): 1.3 | 0.5 | -2 | -0.8 | 2.2
    assert out.loss.tolist() == pytest.approx([-1.3, -0.5, 2.0, 0.8, -2.2])
    assert out.clipped.tolist() == [True, False, False, True, False]
    out.loss.sum().backward()
    # d/d logp of -A r is -A r where not clipped, 0 where clipped
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.5, 2.0, 0.0, -2.2])


def test_on_policy_gradient_is_reinforce():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ppo_loss(tokens(logprobs, logprobs.detach(), torch.tensor([0.5, -1.5]))).loss.sum().backward()
    assert logprobs.grad.tolist() == [-0.5, 1.5]


def test_kl_estimators_hand_worked():
    policy, reference = torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25]))
    assert kl_divergence(policy, reference, "k1").item() == pytest.approx(math.log(2))
    assert kl_divergence(policy, reference, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_divergence(policy, reference, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_divergence(policy, reference, "k4")


def test_kl_estimators_are_unbiased_and_k2_has_the_kl_gradient():
    """Over the whole distribution: E[k1] = E[k3] = KL, and the mean gradient of k2 is the KL's gradient."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - reference)).sum()
    (gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    weights = log_p.exp().detach()
    for estimator in ("k1", "k3"):
        assert float((weights * kl_divergence(log_p, reference, estimator)).sum()) == pytest.approx(float(kl))
    mean_k2 = (weights * kl_divergence(log_p, reference, "k2")).sum()
    assert torch.autograd.grad(mean_k2, logits)[0].tolist() == pytest.approx(gradient.tolist())


def test_huge_log_ratios_stay_finite():
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    out = ppo_loss(tokens(logprobs, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0])))
    out.loss.sum().backward()
    assert out.loss.isfinite().all()
    assert logprobs.grad.isfinite().all()


def _batch(mask: list[int], old: list[float] | None = None, ref: list[float] | None = None):
    n = len(mask)
    sample = TrainSample(
        group_index=0, index=0, prompt=[1], response=[2] * n, loss_mask=mask, rollout_logprobs=[-1.0] * n, advantage=2.0
    )  # fmt: skip
    batch = pack([[sample]], [[1.0 / max(sum(mask), 1)]])
    batch.old_logprobs = None if old is None else torch.tensor(old)
    batch.ref_logprobs = None if ref is None else torch.tensor(ref)
    return batch


def test_loss_terms_add_up_and_holes_give_nothing():
    """A6: tool tokens give no policy, KL or entropy term and no gradient, even when their numbers are not finite."""
    config = AlgorithmConfig(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    logprobs = torch.tensor([-1.0, -50.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 9.0, 0.7], requires_grad=True)
    batch = _batch([1, 0, 1], old=[-1.0, -1.0, -2.0], ref=[-1.5, 40.0, -2.0])
    tally = Tally()
    loss = microbatch_loss(logprobs, entropy, batch, Objective.of(config), tally)
    expected = ((-2.0 + 0.1 * 0.125 - 0.01 * 0.5) + (-2.0 + 0.0 - 0.01 * 0.7)) / 2
    assert float(loss) == pytest.approx(expected)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([(-2.0 + 0.1 * 0.5) / 2, 0.0, -2.0 / 2])
    assert entropy.grad.tolist() == pytest.approx([-0.005, 0.0, -0.005])
    metrics = tally.result()
    assert metrics["loss/kl"] == pytest.approx(0.0625)
    assert metrics["loss/entropy"] == pytest.approx(0.6)
    assert metrics["loss/policy"] == pytest.approx(-2.0)
    assert metrics["policy/clip_fraction"] == 0.0


def test_a3_all_masked_microbatch_has_loss_zero_and_finite_gradients():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 0.6], requires_grad=True)
    tally = Tally()
    loss = microbatch_loss(logprobs, entropy, _batch([0, 0]), Objective.of(AlgorithmConfig(entropy_coef=0.1)), tally)
    loss.backward()
    assert float(loss) == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]
    assert tally.result() == {}


def test_without_old_logprobs_ratio_is_one_and_mismatch_is_measured():
    logprobs = torch.tensor([-1.0, -1.5], requires_grad=True)
    tally = Tally()
    microbatch_loss(logprobs, torch.zeros(2), _batch([1, 1]), Objective.of(AlgorithmConfig()), tally).backward()
    metrics = tally.result()
    assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(0.25)
    assert logprobs.grad.tolist() == [-1.0, -1.0]
