"""Losses against those of TRL's GRPOTrainer: the same model, the same answers, loss and gradients within 1e-5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

from lightrl.config.schema import AlgorithmConfig, CorrectionConfig, ModelConfig
from lightrl.distributed.mesh import World, close_world, init_world
from lightrl.kernels.divergence import Head, linear_divergence
from lightrl.observe.metrics import Tally
from lightrl.training.balance import CostModel
from lightrl.training.batch import build_minibatches
from lightrl.training.objective import Objective
from lightrl.training.packing import TrainSample
from lightrl.training.policy import Policy
from lightrl.training.update import microbatch_loss
from lightrl.wrappers import clean_name

trl = pytest.importorskip("trl", reason="TRL is in no extra that tests need: pip install -e '.[bench]'")
pytestmark = pytest.mark.skipif(
    not trl.__version__.startswith("1.16."), reason=f"reads GRPOTrainer's inside as of 1.16, found {trl.__version__}"
)

TEMPERATURE, LIMIT = 0.9, 40


@dataclass
class Answers:
    """What both get: samples with holes, and log-probs of the old policy, the engine and a reference."""

    samples: list[TrainSample]
    old: list[Tensor]
    engine: list[Tensor]
    reference: list[Tensor]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Policy, World, Answers]]:
    from datasets import Dataset
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("trl")
    path = tiny_run.make_model(folder / "model")
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=8,
        num_generations=8, max_completion_length=LIMIT, beta=0.1, temperature=TEMPERATURE, steps_per_generation=1,
        sapo_temperature_pos=1.5, sapo_temperature_neg=2.5,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=str(path),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "abc"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    world = init_world("cpu")
    policy = Policy.load(ModelConfig(path=str(path), compute_dtype="float32"), world)
    yield trainer, policy, world, make_answers(policy, world)
    close_world()


def make_answers(policy: Policy, world: World) -> Answers:
    g = torch.Generator().manual_seed(0)
    samples = []
    for group, lengths in enumerate([[1, 7, 40], [3, 23], [40]]):
        prompt = torch.randint(3, 29, (2 * group + 1,), generator=g).tolist()
        for index, n in enumerate(lengths):
            mask = torch.randint(0, 4, (n,), generator=g).clamp_max(1)
            mask[0] = 1
            samples.append(
                TrainSample(
                    group_index=group, index=index, prompt=prompt, loss_mask=mask.tolist(), rollout_logprobs=[0.0] * n,
                    response=torch.randint(3, 29, (n,), generator=g).tolist(),
                    advantage=float(torch.randn(1, generator=g)),
                )
            )  # fmt: skip
    now: dict[tuple[int, int], Tensor] = {}
    for batch in packed(samples, policy, world, "token_mean"):
        logprobs = policy.logprobs(batch, TEMPERATURE)
        now |= {key: logprobs[batch.sample_ids == i] for i, key in enumerate(batch.sample_keys)}

    def apart(spread: float, of: list[Tensor]) -> list[Tensor]:
        return [t + spread * torch.randn(t.shape, generator=g) for t in of]

    old = apart(0.2, [now[s.group_index, s.index] for s in samples])
    return Answers(samples=samples, old=old, engine=apart(0.1, old), reference=apart(0.3, old))


def packed(samples: list[TrainSample], policy: Policy, world: World, aggregation: str) -> list[Any]:
    (minibatch,) = build_minibatches(
        samples, world, minibatches=1, max_tokens=60, share_prompts=True, skip_zero_advantage=False,
        aggregation=aggregation, constant_length=LIMIT, cost=CostModel.from_config(policy.hf_config),
    )  # fmt: skip
    return minibatch


def ours(both: Any, algorithm: dict[str, Any], correction: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    _, policy, world, answers = both
    objective = Objective.of(AlgorithmConfig(kl_coef=0.1, **algorithm), CorrectionConfig(**correction))
    place = {(s.group_index, s.index): i for i, s in enumerate(answers.samples)}
    minibatch = packed(answers.samples, policy, world, objective.algorithm.aggregation)
    assert len(minibatch) > 1
    for parameter in policy.parameters():
        parameter.grad = None
    loss = 0.0
    for batch in minibatch:
        mine = [place[key] for key in batch.sample_keys]
        batch.old_logprobs = torch.cat([answers.old[i] for i in mine])
        batch.ref_logprobs = torch.cat([answers.reference[i] for i in mine])
        batch.rollout_logprobs = torch.cat([answers.engine[i] for i in mine])
        share = microbatch_loss(*policy(batch, TEMPERATURE), batch, objective, Tally())
        share.backward()
        loss += float(share.detach())
    whole = {clean_name(n): p.grad.full_tensor().clone() for n, p in policy.module.named_parameters()}
    return loss, {name.removeprefix("model."): g for name, g in whole.items()}


def theirs(both: Any, settings: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    trainer, _, _, answers = both
    samples = answers.samples

    def padded(rows: list[Any], left: bool = False, dtype: torch.dtype = torch.int64) -> Tensor:
        width = max(len(r) for r in rows)
        out = torch.zeros(len(rows), width, dtype=dtype)
        for i, row in enumerate(rows):
            out[i, width - len(row) if left else 0 :][: len(row)] = torch.as_tensor(row, dtype=dtype)
        return out

    defaults = {
        "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2,
        "off_policy_mask_threshold": None, "use_vllm": False, "delta": None, "unbiased": False,
    }  # fmt: skip
    found = defaults | {k: v for k, v in settings.items() if k != "ratio"}
    trainer.args.delta, trainer.args.use_bias_correction_kl = found.pop("delta"), found.pop("unbiased")
    for name, value in found.items():
        assert hasattr(trainer, name)
        setattr(trainer, name, value)
    masks = [s.loss_mask for s in samples]
    inputs = {
        "prompt_ids": padded([s.prompt for s in samples], left=True),
        "prompt_mask": padded([[1] * len(s.prompt) for s in samples], left=True),
        "completion_ids": padded([s.response for s in samples]),
        "completion_mask": padded([[1] * len(s.response) for s in samples]),
        "tool_mask": padded(masks),
        "advantages": torch.tensor([s.advantage for s in samples]),
        "old_per_token_logps": padded(answers.old, dtype=torch.float32),
        "ref_per_token_logps": padded(answers.reference, dtype=torch.float32),
        "sampling_per_token_logps": padded(answers.engine, dtype=torch.float32),
        "num_items_in_batch": torch.tensor(sum(map(sum, masks))),
    }
    if "ratio" in settings:
        difference = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * inputs["tool_mask"]
        inputs["importance_sampling_ratio"] = settings["ratio"](difference)
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in trainer.model.named_parameters()}


def token_truncate(difference: Tensor) -> Tensor:
    return difference.exp().clamp(max=1.05)


def sequence_mask(difference: Tensor) -> Tensor:
    ratio = difference.sum(-1, keepdim=True).exp()
    return ratio.masked_fill((ratio < 0.8) | (ratio > 1.6), 0.0)


VLLM = {"use_vllm": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"epsilon_high": 0.28}, {"aggregation": "sequence_mean", "clip_high": 0.28}, {}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}, {}),
    "unbiased_kl": ({"unbiased": True}, {"aggregation": "sequence_mean", "kl_unbiased": True}, {}),  # TRL's default
    "bnpo": ({"loss_type": "bnpo"}, {}, {}),  # in one batch
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "constant"}, {}),
    "two_sided": ({"delta": 1.3}, {"aggregation": "sequence_mean", "dual_clip": 1.3}, {}),
    # its bound is the ratio itself
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, {"loss": "cispo", "clip_high": 0.1}, {}),
    "sapo": (
        {"loss_type": "sapo"},
        {"loss": "sapo", "aggregation": "sequence_mean", "tau_pos": 1.5, "tau_neg": 2.5},
        {},
    ),
    "sequence": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
        {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.02, "clip_high": 0.03},
        {},
    ),
    "sequence_of_tokens": (
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.02},
        {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.02},
        {},
    ),
    "off_policy_mask": ({"off_policy_mask_threshold": 0.02}, {"aggregation": "sequence_mean"}, {"opsm_delta": 0.02}),
    "token_truncate": (
        {**VLLM, "loss_type": "dapo", "ratio": token_truncate},
        {},
        {"use_tis": True, "tis_upper_bound": 1.05},
    ),
    "sequence_mask": (
        {**VLLM, "loss_type": "dapo", "ratio": sequence_mask},
        {},
        {
            "use_tis": True, "tis_level": "sequence", "tis_mode": "icepop", "tis_lower_bound": 0.8,
            "tis_upper_bound": 1.6,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_same_loss_and_gradients(both: Any, name: str) -> None:
    settings, algorithm, correction = CASES[name]
    their_loss, expected = theirs(both, settings)
    loss, found = ours(both, algorithm, correction)
    assert loss == pytest.approx(their_loss, abs=1e-5)
    norms = [torch.cat([g.flatten() for g in part.values()]).norm() for part in (found, expected)]
    assert float(norms[0]) == pytest.approx(float(norms[1]), abs=1e-5)
    assert float(norms[1]) > 1e-2
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-5, rtol=1e-4, msg=parameter)


def test_the_cases_differ(both: Any) -> None:
    """Each setting has a say: no two cases have the same loss, but for those that differ in other batches only."""
    losses = {name: round(theirs(both, settings)[0], 5) for name, (settings, _, _) in CASES.items()}
    assert len(set(losses.values())) == len(losses), losses


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3), ("jsd", 0.5)])
def test_divergences_are_those_of_gkd(kind: str, beta: float) -> None:
    """TRL's `beta` names the two KLs too. Values and gradients of the logits, at temperature 0.9."""
    from trl.experimental.gkd import GKDTrainer

    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(1, 13, 37, generator=g).requires_grad_(), torch.randn(1, 13, 37, generator=g)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=TEMPERATURE, reduction="sum")
    (expected,) = torch.autograd.grad(theirs, student)
    one = torch.eye(37)  # hidden states that are the logits
    heads = [Head(weight=one, temperature=TEMPERATURE)] * 2
    mine = linear_divergence(student[0], heads[0], teacher[0], heads[1], size=37, kind=kind, beta=beta or 0.5).sum()
    (found,) = torch.autograd.grad(mine, student)
    assert mine.item() == pytest.approx(theirs.item(), abs=1e-5)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
