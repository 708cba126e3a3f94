"""Policy losses: worked by hand, against plain implementations on ragged samples with holes, and by their names."""

from __future__ import annotations

import importlib
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import Answer, answers, gradients, packed, plain_mean, same_gradients
from torch import Tensor

from lightrl.algorithms.losses import (
    LossTokens,
    PolicyLoss,
    cispo_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    gspo_loss,
    ppo_loss,
    reinforce_loss,
    sapo_loss,
)  # fmt: skip
from lightrl.algorithms.samples import Samples
from lightrl.config.load import load_config
from lightrl.config.losses import LOSSES
from lightrl.config.problems import ConfigError
from lightrl.config.schema import AlgorithmConfig, CorrectionConfig
from lightrl.errors import UserError
from lightrl.observe.metrics import Tally
from lightrl.training.objective import Objective
from lightrl.training.packing import pack
from lightrl.training.update import microbatch_loss

# ---- by hand


def by_hand(loss: Any, now: list[float], old: list[float], advantages: list[float], **keys: Any) -> tuple[Any, ...]:
    """Loss and gradient of each token, both of one sample, from probabilities; and what was clipped."""
    logprobs = torch.tensor(now, dtype=torch.float64).log().requires_grad_()
    samples = Samples(mask=torch.ones(len(now)).bool(), ids=torch.zeros(len(now), dtype=torch.int64), count=1)
    tokens = LossTokens(
        logprobs=logprobs,
        old_logprobs=torch.tensor(old, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        samples=samples,
    )
    out = loss(tokens, **keys)
    out.loss.sum().backward()
    return out.loss.tolist(), logprobs.grad.tolist(), out.clipped.tolist(), out.ratio.tolist()


def test_dual_clip():
    """Ratio 4 with A = -1: PPO says 4, and 3 at most with c = 3, without a gradient. A > 0 is as ever."""
    loss, gradient, clipped, _ = by_hand(ppo_loss, [0.8, 0.4, 0.8], [0.2, 0.2, 0.2], [-1, -1, 1], dual_clip=3.0)
    assert loss == pytest.approx([3.0, 2.0, -1.2])
    assert gradient == pytest.approx([0.0, 2.0, 0.0])
    assert clipped == [True, False, True]


def test_gspo():
    """Ratios 2 and 1/2 are together sqrt(2 · 1/2) = 1; ratios 2 and 2 are 2, beyond 1 + 0.5."""
    loss, gradient, clipped, ratio = by_hand(gspo_loss, [0.4, 0.1], [0.2, 0.2], [3, 3], clip_low=0.5, clip_high=0.5)
    assert (loss, gradient, clipped, ratio) == (
        pytest.approx([-3, -3]), pytest.approx([-3, -3]), [False, False], pytest.approx([1, 1]),
    )  # fmt: skip
    loss, gradient, clipped, ratio = by_hand(gspo_loss, [0.4, 0.4], [0.2, 0.2], [3, 3], clip_low=0.5, clip_high=0.5)
    assert (loss, gradient, clipped, ratio) == (
        pytest.approx([-4.5, -4.5]), pytest.approx([0, 0]), [True, True], pytest.approx([2, 2]),
    )  # fmt: skip
    loss, gradient, _, _ = by_hand(gspo_loss, [0.4, 0.4], [0.2, 0.2], [-3, -3], clip_low=0.5, clip_high=0.5)
    assert (loss, gradient) == (pytest.approx([6, 6]), pytest.approx([6, 6]))


def test_cispo():
    """Ratio 8 counts as 1 + 4 = 5, and its token keeps its gradient; a ratio of 1/8 has no lower bound by default."""
    loss, gradient, clipped, _ = by_hand(cispo_loss, [0.8, 0.1], [0.1, 0.8], [2, 2])
    assert loss == pytest.approx([-5 * 2 * math.log(0.8), -0.125 * 2 * math.log(0.1)])
    assert gradient == pytest.approx([-10, -0.25])
    assert clipped == [True, False]
    _, gradient, clipped, _ = by_hand(cispo_loss, [0.1], [0.8], [2], clip_low=0.5)
    assert (gradient, clipped) == (pytest.approx([-1.0]), [True])


def test_sapo():
    """At ratio 1 the gate is 4/tau · 1/2 and its gradient that of the plain surrogate, whatever tau. At ratio 2, tau 1:
    sigmoid(1) = 0.731059, and the gradient shrinks by 4 · 0.731059 · 0.268941 = 0.786448."""
    loss, gradient, _, _ = by_hand(sapo_loss, [0.2, 0.2, 0.4], [0.2, 0.2, 0.2], [1, -1, 1], tau_neg=2.0)
    assert loss == pytest.approx([-2.0, 1.0, -4 * 0.7310585786])
    assert gradient == pytest.approx([-1.0, 1.0, -2 * 0.7864477330])


def test_reinforce():
    loss, gradient, clipped, ratio = by_hand(reinforce_loss, [0.5, 0.5], [0.25, 0.5], [2, -1])
    assert loss == pytest.approx([2 * math.log(2), -math.log(2)])
    assert (gradient, clipped) == (pytest.approx([-2, 1]), [False, False])
    assert ratio == pytest.approx([2, 1])


def test_dppo_tv():
    """Probabilities that moved by 0.3 > 0.2: masked where the update leads away, kept on the way back. A ratio of 10 on
    a rare token is a move of 0.09 only, and is kept, capped where it is above the cap."""
    now, old, a = [0.6, 0.3, 0.3, 0.6, 0.1, 0.1], [0.3, 0.6, 0.6, 0.3, 0.01, 0.01], [1, 1, -1, -1, 1, -1]
    _, gradient, clipped, _ = by_hand(dppo_tv_loss, now, old, a, clip_low=0.2, ratio_cap=5.0)
    assert gradient == pytest.approx([0, -0.5, 0, 2, -5, 5])
    assert clipped == [True, False, True, False, True, True]
    _, gradient, _, _ = by_hand(dppo_tv_loss, now, old, a, clip_low=0.2, clip_high=0.4)
    assert gradient == pytest.approx([-2, -0.5, 0, 2, -10, 10])


def test_dppo_kl():
    """From 0.5 to 0.6: 0.5 log(0.5/0.6) + 0.5 log(0.5/0.4) = 0.020411."""
    for limit, expected in ((0.0204, 0.0), (0.0205, -1.2)):
        _, gradient, _, _ = by_hand(dppo_kl_loss, [0.6], [0.5], [1], clip_low=limit)
        assert gradient == pytest.approx([expected])
    _, gradient, _, _ = by_hand(dppo_kl_loss, [0.6, 0.4], [0.5, 0.5], [-1, -1], clip_low=0.01, clip_high=0.9)
    assert gradient == pytest.approx([1.2, 0.0])  # on the way back | away
    _, gradient, _, _ = by_hand(dppo_kl_loss, [1.0], [1.0], [1])
    assert gradient == [-1.0]  # a certain token is finite


# ---- against plain implementations, sample by sample


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(x, torch.full_like(x, low)), torch.full_like(x, high))


def plain_ppo(a: Answer, low: float, high: float, dual: float | None = None) -> Tensor:
    r, adv = torch.exp(a.now - a.old), a.sample.advantage
    objective = torch.minimum(r * adv, clip(r, 1 - low, 1 + high) * adv)
    if dual is not None and adv < 0:
        objective = torch.maximum(objective, torch.full_like(objective, dual * adv))
    return -objective


def plain_gspo(a: Answer, low: float, high: float) -> Tensor:
    """The sequence form: one surrogate a sample, the same at each of its tokens."""
    adv = a.sample.advantage
    if not bool(a.mask.any()):
        return torch.zeros_like(a.now)
    s = torch.exp((a.now - a.old)[a.mask].mean())
    return -torch.minimum(s * adv, clip(s, 1 - low, 1 + high) * adv).expand_as(a.now)


def plain_cispo(a: Answer, low: float, high: float) -> Tensor:
    return -clip(torch.exp(a.now - a.old), 1 - low, 1 + high).detach() * a.sample.advantage * a.now


def plain_sapo(a: Answer, pos: float, neg: float) -> Tensor:
    tau = pos if a.sample.advantage > 0 else neg
    return -4 / tau / (1 + torch.exp(-tau * (torch.exp(a.now - a.old) - 1))) * a.sample.advantage


def plain_dppo(a: Answer, divergence: str, low: float, high: float, cap: float) -> Tensor:
    adv, losses = a.sample.advantage, []
    for now, old in zip(a.now, a.old.tolist(), strict=True):
        p, q = math.exp(now.item()), math.exp(old)
        moved = abs(p - q)
        if divergence == "kl":
            moved = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        away = (adv > 0 and p > q and moved > high) or (adv < 0 and p < q and moved > low)
        losses.append(now * (0.0 if away else -adv * min(p / q, cap)))
    return torch.stack(losses)


PLAIN = {
    "ppo": ({}, lambda a: plain_ppo(a, 0.2, 0.2)),
    "clip_higher": ({"clip_low": 0.1, "clip_high": 0.3}, lambda a: plain_ppo(a, 0.1, 0.3)),
    "dual_clip": ({"clip_high": 0.25, "dual_clip": 1.5}, lambda a: plain_ppo(a, 0.2, 0.25, 1.5)),
    "gspo": ({"loss": "gspo"}, lambda a: plain_gspo(a, 3e-4, 4e-4)),
    "gspo_wide": ({"loss": "gspo", "clip_low": 0.2, "clip_high": 0.1}, lambda a: plain_gspo(a, 0.2, 0.1)),
    "cispo": ({"loss": "cispo"}, lambda a: plain_cispo(a, 1.0, 4.0)),
    "cispo_tight": ({"loss": "cispo", "clip_low": 0.1, "clip_high": 0.2}, lambda a: plain_cispo(a, 0.1, 0.2)),
    "sapo": ({"loss": "sapo"}, lambda a: plain_sapo(a, 1.0, 1.05)),
    "sapo_steep": ({"loss": "sapo", "tau_pos": 2.0, "tau_neg": 5.0}, lambda a: plain_sapo(a, 2.0, 5.0)),
    "reinforce": ({"loss": "reinforce"}, lambda a: -a.sample.advantage * a.now),
    "dppo_tv": ({"loss": "dppo_tv", "clip_low": 0.05}, lambda a: plain_dppo(a, "tv", 0.05, 0.05, 20.0)),
    "dppo_tv_cap": ({"loss": "dppo_tv", "ratio_cap": 1.1}, lambda a: plain_dppo(a, "tv", 0.15, 0.15, 1.1)),
    "dppo_kl": (
        {"loss": "dppo_kl", "clip_low": 0.01, "clip_high": 0.02},
        lambda a: plain_dppo(a, "kl", 0.01, 0.02, 20.0),
    ),
}
NEVER_CLIPPED = ("reinforce", "sapo", "sapo_steep", "cispo")
"""Those of `PLAIN` that clip none of its tokens: without a bound, or with one that they do not reach."""
AGGREGATIONS = [
    {"aggregation": "token_mean"},
    {"aggregation": "sequence_mean"},
    {"aggregation": "constant", "constant_length": 300},
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["aggregation"])
@pytest.mark.parametrize("name", PLAIN)
def test_equals_the_plain_implementation(name: str, aggregation: dict[str, Any]):
    """Values and gradients, with KL and entropy terms, and the same from three microbatches as from one (A2, A6)."""
    keys, plain = PLAIN[name]
    objective = Objective.of(AlgorithmConfig(**keys, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.02))
    for parts in (1, 3):
        found, reference = answers(seed=5), answers(seed=5)
        total, tally = torch.zeros((), dtype=torch.float64), Tally()
        for packing in packed(found, parts=parts, **aggregation):
            batch = packing.batch
            ids = [next(a for a in found if (a.sample.group_index, a.sample.index) == key) for key in batch.sample_keys]
            batch.old_logprobs = torch.cat([a.old for a in ids])
            batch.ref_logprobs = torch.cat([a.reference for a in ids])
            loss = microbatch_loss(packing.now, packing.entropy, batch, objective, tally)
            loss.backward()
            total = total + loss.detach()
        tokens = []
        for a in reference:
            d = a.reference - a.now
            tokens.append((a, plain(a) + 0.1 * (torch.exp(d) - 1 - d) - 0.02 * a.entropy))
        expected = plain_mean(tokens, **aggregation)
        expected.backward()
        assert float(total) == pytest.approx(float(expected.detach()), rel=1e-12)
        same_gradients(found, reference)
        if name not in NEVER_CLIPPED:
            assert 0 < tally.result()["policy/clip_fraction"] < 1  # the case tests both branches


@pytest.mark.parametrize("name", PLAIN)
def test_float32_is_as_good_as_float32_can_be(name: str):
    keys, _ = PLAIN[name]
    objective = Objective.of(AlgorithmConfig(**keys))
    results = []
    for dtype in (torch.float64, torch.float32):
        found = answers(seed=6)
        (packing,) = packed(found, aggregation="sequence_mean")
        for field, value in vars(packing.batch).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(packing.batch, field, value.to(dtype))
        packing.batch.old_logprobs = torch.cat([a.old for a in found]).to(dtype)
        loss = microbatch_loss(packing.now.to(dtype), packing.entropy.to(dtype), packing.batch, objective, Tally())
        loss.backward()
        results.append((loss.detach().double(), torch.cat(gradients(found))))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_all_losses_are_reinforce(name: str):
    """The first update: ratio 1 to the last bit, nothing clipped, gradient -A ∇log p; advantage 0 has none."""
    now = torch.tensor([-1.0, -0.3, -2.0, -1e-9], requires_grad=True)
    samples = Samples(mask=torch.tensor([1, 0, 1, 1]).bool(), ids=torch.tensor([0, 0, 0, 1]), count=2)
    advantages = torch.tensor([1.5, 1.5, -0.5, 0.0])
    out = loss_of(name)(LossTokens(logprobs=now, old_logprobs=now.detach(), advantages=advantages, samples=samples))
    out.loss.sum().backward()
    assert out.ratio.tolist() == [1.0] * 4
    assert not out.clipped.any()
    assert now.grad.tolist() == pytest.approx((-advantages).tolist(), rel=1e-6)


def test_huge_differences_stay_finite():
    now = torch.tensor([0.0, -1e4, -60.0, 0.0], requires_grad=True)
    samples = Samples(mask=torch.ones(4).bool(), ids=torch.tensor([0, 1, 2, 3]), count=4)
    for loss in map(loss_of, LOSSES):
        now.grad = None
        out = loss(
            LossTokens(
                logprobs=now,
                old_logprobs=torch.tensor([-1e4, 0.0, -60.0, 0.0]),
                advantages=torch.tensor([-1.0, 1.0, 1.0, -1.0]),
                samples=samples,
            )
        )
        out.loss.sum().backward()
        assert out.loss.isfinite().all(), loss
        assert now.grad.isfinite().all(), loss


def test_an_unbiased_kl_has_the_gradient_of_the_kl():
    """Of k3 as it stands: (1 - p_ref / p) ∇log p. Times the ratio: r log(p / p_ref) ∇log p, also where r is 1."""
    found = answers(seed=7)
    for unbiased in (False, True):
        for a in found:
            a.now.grad = None
        (packing,) = packed(found)
        packing.batch.advantages = torch.zeros_like(packing.batch.advantages)
        packing.batch.old_logprobs = torch.cat([a.old for a in found])
        packing.batch.ref_logprobs = torch.cat([a.reference for a in found])
        objective = Objective.of(AlgorithmConfig(kl_coef=0.5, kl_unbiased=unbiased))
        microbatch_loss(packing.now, packing.entropy, packing.batch, objective, Tally()).backward()
        count = sum(int(a.mask.sum()) for a in found)
        for a in found:
            now = a.now.detach()
            log_p = torch.exp(now - a.old) * (now - a.reference) if unbiased else 1 - torch.exp(a.reference - now)
            expected = (0.5 / count * log_p).masked_fill(~a.mask, 0.0)
            torch.testing.assert_close(a.now.grad, expected)


# ---- by name


def test_the_table_of_keys_is_that_of_the_functions():
    """The config, which knows no torch, has keys by name."""
    for name, loss in LOSSES.items():
        assert tuple(list(inspect.signature(loss_of(name)).parameters)[1:]) == loss.keys
    assert {keys.get("loss", "ppo") for keys, _ in PLAIN.values()} == LOSSES.keys()  # each is tested


def loss_of(name: str) -> Any:
    module, _, function = LOSSES[name].function.partition(":")
    return getattr(importlib.import_module(module), function)


def custom(tokens: LossTokens) -> Tensor:
    return -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages


def custom_like_ppo(tokens: LossTokens) -> PolicyLoss:
    return ppo_loss(tokens)


def custom_wrong(tokens: LossTokens) -> Any:
    return tokens.logprobs.sum()


def custom_nothing(tokens: LossTokens) -> Any:
    return None


def custom_detached(tokens: LossTokens) -> Any:
    return -tokens.logprobs.detach() * tokens.advantages


def custom_broken(tokens: LossTokens) -> Any:
    return tokens.log_probs


def custom_misshapen(tokens: LossTokens) -> Any:
    out = ppo_loss(tokens)
    return PolicyLoss(loss=out.loss, ratio=out.ratio[:1], clipped=out.clipped)


def custom_of_some(tokens: LossTokens) -> Any:
    return -tokens.advantages * tokens.logprobs / tokens.log_ratio.abs().max()  # of no tokens there is no largest


@pytest.mark.parametrize(("name", "like"), [("custom", {"clip_low": 1.0, "clip_high": 1e9}), ("custom_like_ppo", {})])
def test_a_loss_of_ones_own(monkeypatch: pytest.MonkeyPatch, name: str, like: dict[str, Any]):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    results = []
    for config in (AlgorithmConfig(loss=f"test_losses:{name}"), AlgorithmConfig(**like)):
        found = answers(seed=2, spread=0.05)
        (packing,) = packed(found)
        packing.batch.old_logprobs = torch.cat([a.old for a in found])
        loss = microbatch_loss(packing.now, packing.entropy, packing.batch, Objective.of(config), Tally())
        loss.backward()
        results.append((float(loss.detach()), torch.cat(gradients(found))))
    assert results[0][0] == pytest.approx(results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_a_loss_of_ones_own_that_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    (packing,) = packed(answers())
    n = len(packing.now)
    wanted = rf"return a tensor of shape \[{n}\], a loss a token"
    for name, what in (("custom_wrong", r"a tensor of shape \[\]"), ("custom_nothing", "a NoneType")):
        objective = Objective.of(AlgorithmConfig(loss=f"test_losses:{name}"))
        with pytest.raises(UserError, match=f"algorithm.loss = 'test_losses:{name}': it returned {what}: {wanted}"):
            microbatch_loss(packing.now, packing.entropy, packing.batch, objective, Tally())
    for name, says in (
        ("custom_detached", "it returned a loss without a gradient: compute it from tokens.logprobs"),
        ("custom_misshapen", r"`ratio` of the PolicyLoss it returned has shape \[1\], not"),
        ("custom_broken", "it raised AttributeError: 'LossTokens' object has no attribute 'log_probs'"),
    ):
        objective = Objective.of(AlgorithmConfig(loss=f"test_losses:{name}"))
        with pytest.raises(UserError, match=f"algorithm.loss = 'test_losses:{name}': {says}"):
            microbatch_loss(packing.now, packing.entropy, packing.batch, objective, Tally())
    with pytest.raises(UserError, match=r"test_losses:missing.: test_losses has no .missing."):
        Objective.of(AlgorithmConfig(loss="test_losses:missing"))


def test_a_loss_of_ones_own_is_not_asked_about_no_tokens(monkeypatch: pytest.MonkeyPatch):
    """A rank without work takes part in the update all the same."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    nothing = pack([], [])
    nothing.old_logprobs = torch.zeros(0)
    logprobs = torch.zeros(0, requires_grad=True)
    objective = Objective.of(AlgorithmConfig(loss="test_losses:custom_of_some"))
    loss = microbatch_loss(logprobs, torch.zeros(0), nothing, objective, Tally())
    assert loss.item() == 0
    assert loss.requires_grad


def test_zero_advantage_is_skipped_only_where_it_changes_nothing():
    def skips(correction: dict[str, Any] | None = None, **algorithm: Any) -> bool:
        return Objective.of(
            AlgorithmConfig(**algorithm), CorrectionConfig(**(correction or {}))
        ).may_skip_zero_advantage

    for name in LOSSES:
        assert skips(loss=name)
        assert skips({"use_tis": True, "use_rs": True, "opsm_delta": 0.1}, loss=name)
    assert not skips({"use_tis": True, "tis_batch_normalize": True})  # their weights are in the mean
    assert not skips(loss="test_losses:custom")  # who knows
    for others in ({"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"whiten": "batch"}, {"skip_zero_advantage": False}):
        assert not skips(**others)


@pytest.mark.parametrize("name", PLAIN)
def test_a_skipped_sample_had_no_gradient(name: str):
    """Left out of the microbatch, but counted in its weights: the same gradients, whatever is corrected."""
    keys, _ = PLAIN[name]
    correction = CorrectionConfig(use_tis=True, tis_level="sequence", use_rs=True, rs_upper_bound=4.0, opsm_delta=0.05)
    objective, results = Objective.of(AlgorithmConfig(**keys), correction), []
    for leave_out in (False, True):
        found = answers(seed=4)
        assert any(a.sample.advantage == 0 and bool(a.mask.any()) for a in found)
        (packing,) = packed(found)
        batch, keep = packing.batch, torch.ones_like(packing.batch.loss_mask, dtype=torch.bool)
        batch.old_logprobs = torch.cat([a.old for a in found])
        if leave_out:
            keep = batch.advantages != 0
            for field in ("sample_ids", "loss_mask", "loss_weights", "advantages", "rollout_logprobs", "old_logprobs"):
                setattr(batch, field, getattr(batch, field)[keep])
        microbatch_loss(packing.now[keep], packing.entropy[keep], batch, objective, Tally()).backward()
        results.append(torch.cat(gradients(found)))
    torch.testing.assert_close(results[0], results[1])
    assert results[0].abs().max() > 0


# ---- in the config

BAD = {
    "a misspelt loss": ({"loss": "gpso"}, "algorithm.loss: no loss 'gpso': did you mean 'gspo'?"),
    "no loss at all": (
        {"loss": "x"},
        f"algorithm.loss: no loss 'x': choose {', '.join(LOSSES)} or package.module:function",
    ),
    "a key of another loss": (
        {"loss": "sapo", "clip_low": 0.1},
        "algorithm.clip_low: not used by algorithm.loss = 'sapo', but by 'ppo' or 'gspo' or 'cispo' or 'dppo_tv' or "
        "'dppo_kl': drop it, or change the loss",
    ),
    "a key that a custom loss cannot see": (
        {"loss": "m:f", "tau_pos": 1.0},
        "algorithm.tau_pos: not used by algorithm.loss = 'm:f', but by 'sapo': drop it, or change the loss",
    ),
    "an unbiased KL without one": (
        {"kl_unbiased": True},
        "algorithm.kl_unbiased: only used with algorithm.kl_coef > 0 and algorithm.kl_in = 'loss': set them, or drop "
        "this",
    ),
    "a limit below 1": ({"dual_clip": 1.0}, "algorithm.dual_clip: must be > 1, got 1.0"),
}


@pytest.mark.parametrize(("section", "line"), BAD.values(), ids=BAD)
def test_what_does_not_go_together_is_named(section: dict[str, Any], line: str):
    with pytest.raises(ConfigError) as caught:
        load_config(algorithm=section)
    assert caught.value.problems == [line]


def test_the_line_of_a_file_is_named(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[algorithm]\nloss = "gspo"\ndual_clip = 3.0\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (line,) = caught.value.problems
    assert line.startswith(f"{path}:3: algorithm.dual_clip: not used by algorithm.loss = 'gspo'")
