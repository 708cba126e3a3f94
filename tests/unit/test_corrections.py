"""Corrections of the mismatch between engine and trainer: worked by hand, against a plain implementation, in a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny_run
import torch
from ragged import Answer, answers, gradients, packed, plain_mean, same_gradients
from torch import Tensor

from lightrl.algorithms.corrections import accepted, importance_weights, not_too_old, not_vetoed
from lightrl.algorithms.samples import Samples
from lightrl.config.load import load_config
from lightrl.config.problems import ConfigError
from lightrl.config.schema import AlgorithmConfig, CorrectionConfig
from lightrl.distributed.mesh import close_world
from lightrl.errors import UserError
from lightrl.observe.metrics import Tally, with_sample_size
from lightrl.training.objective import Objective, normalize_weights
from lightrl.training.trainer import Trainer
from lightrl.training.update import microbatch_loss, mismatch_metrics

# ---- by hand: two samples, ratios 4, 1/2 and (in a hole) 1000 | 1, 1/8

SAMPLES = Samples(mask=torch.tensor([1, 1, 0, 1, 1]).bool(), ids=torch.tensor([0, 0, 0, 1, 1]), count=2)
LOG_RATIO = torch.tensor([4, 0.5, 1000, 1, 0.125], dtype=torch.float64).log()
FACTORS = {  # product 2, mean log 0.5 log 2 | product 1/8, 1 / sqrt 8
    "token": [4, 0.5, None, 1, 0.125],
    "sequence": [2, 2, None, 0.125, 0.125],
    "geometric": [2**0.5, 2**0.5, None, 8**-0.5, 8**-0.5],
}


@pytest.mark.parametrize("level", FACTORS)
def test_weights_by_hand(level: str):
    def held(mode: str) -> tuple[list[float], list[bool], list[bool]]:
        found = importance_weights(LOG_RATIO, SAMPLES, level=level, mode=mode, lower=0.25, upper=1.5)
        return tuple(t[SAMPLES.mask].tolist() for t in (found.values, found.keep, found.bounded))  # type: ignore

    raw = [f for f in FACTORS[level] if f is not None]
    inside = [0.25 <= f <= 1.5 for f in raw]
    assert held("truncate") == (pytest.approx([min(f, 1.5) for f in raw]), [True] * 4, [f > 1.5 for f in raw])
    assert held("clip") == (
        pytest.approx([min(max(f, 0.25), 1.5) for f in raw]), [True] * 4, [not i for i in inside],
    )  # fmt: skip
    assert held("mask") == (pytest.approx(raw), inside, [not i for i in inside])
    assert held("icepop") == (
        pytest.approx([f * i for f, i in zip(raw, inside, strict=True)]), [True] * 4, [not i for i in inside],
    )  # fmt: skip
    kept = accepted(LOG_RATIO, SAMPLES, level=level, lower=0.25, upper=1.5)
    assert kept[SAMPLES.mask].tolist() == inside


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match="token, sequence, geometric"):
        importance_weights(LOG_RATIO, SAMPLES, level="x", mode="clip", lower=0.5, upper=2.0)
    with pytest.raises(ValueError, match="truncate, clip, mask, icepop"):
        importance_weights(LOG_RATIO, SAMPLES, level="token", mode="x", lower=0.5, upper=2.0)


def test_one_token_far_off_vetoes_its_sample_alone():
    assert not_vetoed(LOG_RATIO, SAMPLES, 0.2).tolist() == [True, True, True, False, False]
    assert not_vetoed(LOG_RATIO, SAMPLES, 0.1).tolist() == [True] * 5
    holes = Samples(mask=torch.tensor([1, 1, 0, 1, 0]).bool(), ids=SAMPLES.ids, count=2)
    assert not_vetoed(LOG_RATIO, holes, 0.2).tolist() == [True] * 5  # what is in a hole is nobody's fault


def test_off_policy_sequences_are_masked_where_the_advantage_is_negative():
    """mean log(engine / now): -0.5 log 2 in the first sample, 0.5 log 8 = 1.04 in the second."""
    zeros = torch.zeros(5, dtype=torch.float64)
    for advantage, delta, kept in ((-1.0, 1.0, False), (-1.0, 1.1, True), (0.0, 0.5, True), (1.0, 0.0, True)):
        advantages = torch.full((5,), advantage, dtype=torch.float64)
        assert not_too_old(LOG_RATIO, zeros, advantages, SAMPLES, delta).tolist() == [True] * 3 + [kept] * 2


# ---- against a plain implementation, sample by sample

CASES: dict[str, dict[str, Any]] = {
    "tis": {"use_tis": True, "tis_upper_bound": 1.2},
    "clip": {"use_tis": True, "tis_mode": "clip", "tis_upper_bound": 1.2},
    "clip_low": {"use_tis": True, "tis_mode": "clip", "tis_lower_bound": 0.9, "tis_upper_bound": 5.0},
    "mask": {"use_tis": True, "tis_mode": "mask", "tis_upper_bound": 1.3},
    "icepop": {"use_tis": True, "tis_mode": "icepop", "tis_lower_bound": 0.5, "tis_upper_bound": 1.3},
    "sequence": {"use_tis": True, "tis_level": "sequence", "tis_upper_bound": 2.0},
    "sequence_mask": {"use_tis": True, "tis_level": "sequence", "tis_mode": "mask", "tis_upper_bound": 4.0},
    "geometric": {"use_tis": True, "tis_level": "geometric", "tis_mode": "clip", "tis_upper_bound": 1.05},
    "normalized": {"use_tis": True, "tis_upper_bound": 1.2, "tis_batch_normalize": True},
    "normalized_sequence": {"use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True},
    "normalized_mask": {"use_tis": True, "tis_mode": "mask", "tis_upper_bound": 1.3, "tis_batch_normalize": True},
    "rs": {"use_rs": True, "rs_upper_bound": 1.5},
    "rs_geometric": {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.95, "rs_upper_bound": 1.2},
    "rs_of_tis": {"use_tis": True, "tis_lower_bound": 0.6, "tis_upper_bound": 1.4, "use_rs": True},
    "rs_sequence": {
        "use_tis": True, "tis_upper_bound": 1.4, "use_rs": True, "rs_level": "sequence", "rs_upper_bound": 20.0,
    },
    "veto": {"rs_veto_threshold": 0.6},
    "all": {
        "use_tis": True, "tis_mode": "clip", "tis_upper_bound": 1.5, "tis_batch_normalize": True, "use_rs": True,
        "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1, "rs_veto_threshold": 0.3,
        "opsm_delta": 0.01,
    },
    "opsm": {"opsm_delta": 0.01},
}  # fmt: skip


def ratios(a: Answer, level: str) -> list[float]:
    differences = (a.old - a.engine).tolist()
    counted = [d for d, m in zip(differences, a.sample.loss_mask, strict=True) if m] or [0.0]
    one = {"sequence": math.fsum(counted), "geometric": math.fsum(counted) / len(counted)}.get(level)
    return [math.exp(d if one is None else one) for d in differences]


def held(weight: float, mode: str, low: float, high: float) -> tuple[float, bool]:
    outside = not low <= weight <= high
    if mode == "truncate":
        return min(weight, high), True
    if mode == "clip":
        return min(max(weight, low), high), True
    return (weight, not outside) if mode == "mask" else (0.0 if outside else weight, True)


def plain_correction(found: list[Answer], case: dict[str, Any]) -> list[tuple[list[float], list[bool]]]:
    """Weights and keeps of every token of every answer, by the words of the docs."""
    level, mode = case.get("tis_level", "token"), case.get("tis_mode", "truncate")
    high = case.get("tis_upper_bound", 2.0)
    low = case.get("tis_lower_bound", 1 / high)
    rs_high = case.get("rs_upper_bound", high)
    rs_low = case.get("rs_lower_bound", low if case.get("use_tis") else 1 / rs_high)
    results, weights_of_samples, weights_of_tokens = [], [], []
    for a in found:
        keep = [True] * len(a.sample.response)
        weights = [1.0] * len(keep)
        if case.get("use_tis"):
            pairs = [held(r, mode, low, high) for r in ratios(a, level)]
            weights, keep = [w for w, _ in pairs], [k for _, k in pairs]
            counted = [w for w, m in zip(weights, a.sample.loss_mask, strict=True) if m]
            weights_of_tokens += counted
            weights_of_samples += counted[:1]
        if case.get("use_rs"):
            rs = ratios(a, case.get("rs_level", "token"))
            keep = [k and rs_low <= r <= rs_high for k, r in zip(keep, rs, strict=True)]
        veto = case.get("rs_veto_threshold", 0.0)
        if any(r < veto for r, m in zip(ratios(a, "token"), a.sample.loss_mask, strict=True) if m):
            keep = [False] * len(keep)
        results.append((weights, keep))
    if case.get("tis_batch_normalize"):
        values = weights_of_tokens if level == "token" else weights_of_samples
        mean = math.fsum(values) / len(values)
        results = [([w / mean for w in weights], keep) for weights, keep in results]
    for a, (weights, _) in zip(found, results, strict=True):
        left = (a.engine - a.now.detach())[a.mask].mean() if bool(a.mask.any()) else torch.zeros(())
        if "opsm_delta" in case and a.sample.advantage < 0 and float(left) > case["opsm_delta"]:
            weights[:] = [0.0] * len(weights)
    return results


class OneRank:
    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_implementation(name: str, aggregation: str):
    """Weights are for the policy's term; rejected tokens are in no term, but in what the loss is divided by."""
    case = CASES[name]
    objective = Objective.of(
        AlgorithmConfig(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.02), CorrectionConfig(**case)
    )
    for parts in (1, 3):
        found, reference = answers(seed=9, spread=0.2), answers(seed=9, spread=0.2)
        packings, tally = list(packed(found, parts=parts, aggregation=aggregation)), Tally()
        for packing in packings:
            batch = packing.batch
            mine = [next(a for a in found if (a.sample.group_index, a.sample.index) == k) for k in batch.sample_keys]
            batch.old_logprobs = torch.cat([a.old for a in mine])
            batch.ref_logprobs = torch.cat([a.reference for a in mine])
            hole = batch.loss_mask == 0
            batch.rollout_logprobs = batch.rollout_logprobs.masked_fill(hole, math.nan)  # given, not sampled (A6)
        if case.get("tis_batch_normalize"):
            normalize_weights([[p.batch for p in packings]], OneRank(), objective.correction)  # type: ignore[arg-type]
        total = 0.0
        for packing in packings:
            loss = microbatch_loss(packing.now, packing.entropy, packing.batch, objective, tally)
            loss.backward()
            total += float(loss.detach())
        tokens, kept = [], 0
        for a, (weights, keep) in zip(reference, plain_correction(reference, case), strict=True):
            r, adv = torch.exp(a.now - a.old), a.sample.advantage
            surrogate = -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv)
            value = surrogate * torch.tensor(weights, dtype=torch.float64)
            value = value + 0.1 * (a.reference - a.now) ** 2 / 2 - 0.02 * a.entropy
            tokens.append((a, value * torch.tensor(keep, dtype=torch.float64)))
            kept += sum(k for k, m in zip(keep, a.sample.loss_mask, strict=True) if m)
        expected = plain_mean(tokens, aggregation)
        expected.backward()
        assert total == pytest.approx(float(expected.detach()), rel=1e-12)
        same_gradients(found, reference)
        share = 1 - kept / sum(sum(a.sample.loss_mask) for a in found)
        metrics = tally.result()
        assert metrics.get("correction/rejected_share", 0.0) == pytest.approx(share)
        assert 0 < metrics.get("correction/bounded_share", 0.5) < 1  # the case tests both sides of its bounds
        assert share > 0 or not objective.correction.rejects


def test_without_corrections_the_engine_has_no_say():
    (packing,) = packed(answers())
    packing.batch.rollout_logprobs = None
    loss = microbatch_loss(packing.now, packing.entropy, packing.batch, Objective.of(AlgorithmConfig()), Tally())
    assert loss.isfinite()
    for case in ({"use_tis": True}, {"use_rs": True}, {"use_rollout_logprobs": True}, {"opsm_delta": 0.1},
                 {"rs_veto_threshold": 0.1}):  # fmt: skip
        objective = Objective.of(AlgorithmConfig(), CorrectionConfig(**case))
        with pytest.raises(UserError, match="without log-probs, which the loss needs"):
            microbatch_loss(packing.now, packing.entropy, packing.batch, objective, Tally())
    packing.batch.old_logprobs = packing.now.detach()
    with pytest.raises(UserError, match="without log-probs, which the loss needs"):
        normalize_weights(
            [[packing.batch]],
            OneRank(),  # type: ignore[arg-type]
            CorrectionConfig(use_tis=True, tis_batch_normalize=True),
        )


def test_a_single_update_weighs_by_the_present_log_probs():
    """No pass before the update: the present log-probs are the old ones, and weights have no gradient."""
    objective, results = Objective.of(AlgorithmConfig(), CorrectionConfig(use_tis=True, tis_upper_bound=1.1)), []
    for given in (False, True):
        found = answers(seed=1)
        (packing,) = packed(found)
        packing.batch.old_logprobs = packing.now.detach().clone() if given else None
        loss = microbatch_loss(packing.now, packing.entropy, packing.batch, objective, Tally())
        loss.backward()
        results.append((loss.detach(), torch.cat(gradients(found))))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_bypass_takes_the_engines_log_probs_as_the_old_ones():
    """Two policies: the surrogate's ratio is now / engine. Rejection goes by that ratio too."""
    correction = CorrectionConfig(use_rollout_logprobs=True, use_rs=True, rs_upper_bound=1.5)
    found, reference, tally = answers(seed=3), answers(seed=3), Tally()
    (packing,) = packed(found)
    hole = packing.batch.loss_mask == 0
    packing.batch.rollout_logprobs = packing.batch.rollout_logprobs.masked_fill(hole, math.nan)
    objective = Objective.of(AlgorithmConfig(), correction)
    loss = microbatch_loss(packing.now, packing.entropy, packing.batch, objective, tally)
    loss.backward()
    tokens = []
    for a in reference:
        r, adv = torch.exp(a.now - a.engine), a.sample.advantage
        keep = (r.detach() >= 1 / 1.5) & (r.detach() <= 1.5)
        tokens.append((a, -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv) * keep))
    expected = plain_mean(tokens, "token_mean")
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    same_gradients(found, reference)
    metrics = tally.result()
    assert metrics["policy/ratio_max"] == pytest.approx(metrics["mismatch/ratio_max"])


def test_off_policy_reinforce_is_bypass_with_weights():
    """-sg(min(now / engine, cap)) A log now: importance-weighted REINFORCE of two policies."""
    correction = CorrectionConfig(use_rollout_logprobs=True, use_tis=True, tis_upper_bound=1.3)
    found, reference = answers(seed=8), answers(seed=8)
    (packing,) = packed(found)
    objective = Objective.of(AlgorithmConfig(loss="reinforce"), correction)
    microbatch_loss(packing.now, packing.entropy, packing.batch, objective, Tally()).backward()
    tokens = [(a, -torch.exp(a.now - a.engine).clamp(max=1.3).detach() * a.sample.advantage * a.now) for a in reference]
    plain_mean(tokens, "token_mean").backward()
    same_gradients(found, reference)


def test_who_needs_a_pass_before_the_updates():
    def needs(updates: int, **correction: Any) -> bool:
        return Objective.of(AlgorithmConfig(), CorrectionConfig(**correction)).needs_old_logprobs(updates)

    assert [needs(1), needs(2)] == [False, True]
    assert [needs(1, use_tis=True), needs(2, use_tis=True)] == [False, True]
    assert [needs(1, use_rollout_logprobs=True), needs(2, use_rollout_logprobs=True)] == [False, False]
    assert needs(1, use_tis=True, tis_batch_normalize=True)


def test_mismatch_metrics_by_hand():
    """Ratios 2, 1/2 and 1: mean 7/6, mean square 7/4, effective sample size (49/36) / (7/4) = 7/9."""
    found = answers()
    (packing,) = packed(found)
    batch = packing.batch
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    batch.loss_mask[:3] = 1
    trainer = batch.rollout_logprobs.clone()
    trainer[:3] += torch.tensor([2, 0.5, 1], dtype=torch.float64).log()
    trainer[3:] += 5.0
    tally = Tally()
    mismatch_metrics(batch, trainer, tally)
    metrics = with_sample_size(tally.result())
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(2 * math.log(2) / 3)
    assert metrics["mismatch/kl_k3"] == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 3)
    assert metrics["mismatch/ratio_max"] == pytest.approx(2)
    assert metrics["mismatch/ratio_mean"] == pytest.approx(7 / 6)
    assert metrics["mismatch/chi2"] == pytest.approx(3 / 4)
    assert metrics["mismatch/ess"] == pytest.approx(7 / 9)


# ---- in a run


@pytest.fixture
def trainer_for(tmp_path: Any) -> Any:
    trainers: list[Trainer] = []

    def make(**sections: dict[str, Any]) -> Trainer:
        trainers.append(Trainer(tiny_run.make_run(tmp_path, **sections)))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()
    close_world()


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    weights = {n: t.clone() for n, t in trainer.policy.lend()}
    trainer.policy.reclaim()
    return weights


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl"])
def test_every_loss_steps_with_corrections(trainer_for: Any, loss: str):
    """The engine is exact here: weights are 1, nothing is rejected, and a step is as it is without corrections."""
    algorithm = {"loss": loss, "aggregation": "sequence_mean", "minibatches_per_step": 2}
    correction = {"use_tis": True, "tis_batch_normalize": True, "use_rs": True, "rs_veto_threshold": 1e-4}
    plain = trainer_for(algorithm=algorithm, log={"save_samples": False})
    plain.step(plain.source.next(4))
    corrected = trainer_for(algorithm=algorithm, correction=correction, log={"save_samples": False})
    metrics = corrected.step(corrected.source.next(4))
    assert metrics["correction/rejected_share"] == metrics["correction/bounded_share"] == 0
    assert metrics["correction/weight_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch/ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["optim/grad_norm"] > 0
    for (name, theirs), mine in zip(weights_of(plain).items(), weights_of(corrected).values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=0, msg=name)  # Adam turns rounding into steps of lr


def test_bypass_spends_no_pass(trainer_for: Any, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_for(
        algorithm={"minibatches_per_step": 2}, correction={"use_rollout_logprobs": True}, log={"save_samples": False}
    )
    monkeypatch.setattr(trainer.policy, "logprobs", None)
    metrics = trainer.step(trainer.source.next(4))
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=0.1)
    assert metrics["policy/ratio_max"] != 1


# ---- in the config

BAD: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "a bound without weights": (
        {"correction": {"tis_upper_bound": 3.0}},
        "correction.tis_upper_bound: only used with correction.use_tis = true: set it, or drop this",
    ),
    "a level without rejection": (
        {"correction": {"use_tis": True, "rs_level": "sequence"}},
        "correction.rs_level: only used with correction.use_rs = true: set it, or drop this",
    ),
    "a lower bound that only capping has": (
        {"correction": {"use_tis": True, "tis_lower_bound": 0.5}},
        "correction.tis_lower_bound: not used by correction.tis_mode = 'truncate', which only caps: drop it, or choose "
        "'clip'",
    ),
    "reversed bounds": (
        {"correction": {"use_tis": True, "tis_mode": "mask", "tis_lower_bound": 2.0, "tis_upper_bound": 0.5}},
        "correction.tis_lower_bound: 2 is not below correction.tis_upper_bound = 0.5: exchange them",
    ),
    "an upper bound below its default lower one": (
        {"correction": {"use_tis": True, "tis_mode": "icepop", "tis_upper_bound": 0.5}},
        "correction.tis_upper_bound: correction.tis_lower_bound is 2 by default, not below 0.5: set it, or raise this",
    ),
    "reversed bounds of rejection": (
        {"correction": {"use_rs": True, "rs_lower_bound": 1.2, "rs_upper_bound": 1.1}},
        "correction.rs_lower_bound: 1.2 is not below correction.rs_upper_bound = 1.1: exchange them",
    ),
    "a ratio twice": (
        {"correction": {"use_rollout_logprobs": True, "use_tis": True}},
        "correction.use_tis: the ratio of algorithm.loss = 'ppo' is to the engine's log-probs already with "
        "correction.use_rollout_logprobs: drop one of the two (loss = 'reinforce' has no ratio)",
    ),
    "a mean that is not known": (
        {
            "algorithm": {"loss": "reinforce"},
            "correction": {"use_rollout_logprobs": True, "use_tis": True, "tis_batch_normalize": True},
        },
        "correction.tis_batch_normalize: needs the trainer's log-probs of the whole step before its updates, which "
        "correction.use_rollout_logprobs saves: drop one of the two",
    ),
    "a veto of everything": (
        {"correction": {"rs_veto_threshold": 1.0}},
        "correction.rs_veto_threshold: must be > 0 and < 1, got 1.0",
    ),
    "a misspelt mode": (
        {"correction": {"use_tis": True, "tis_mode": "truncated"}},
        'correction.tis_mode: expected one of "truncate", "clip", "mask", "icepop", got "truncated"; did you mean '
        '"truncate"?',
    ),
}


@pytest.mark.parametrize(("sections", "line"), BAD.values(), ids=BAD)
def test_what_does_not_go_together_is_named(sections: dict[str, dict[str, Any]], line: str):
    with pytest.raises(ConfigError) as caught:
        load_config(**sections)
    assert caught.value.problems == [line]


def test_slimes_mis_yaml_is_a_section():
    """Its keys and values, `rs_…_bound` null left out."""
    config = load_config(
        correction={
            "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate",
            "tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_veto_threshold": 1.0e-4, "tis_batch_normalize": True,
        }
    ).correction  # fmt: skip
    assert (config.tis_bounds, config.rs_bounds) == ((0.5, 2.0), (0.5, 2.0))
