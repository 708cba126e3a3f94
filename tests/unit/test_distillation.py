"""On-policy distillation in the loss: by hand, against plain loops on ragged groups, and on models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_run
import torch
from ragged import answers, gradients, packed, plain_mean, same_gradients
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrl.algorithms.distillation import reverse_kl, top_k_divergence, with_rest
from lightrl.config.schema import AlgorithmConfig, Config, CorrectionConfig, ModelConfig, RolloutConfig, TeacherConfig
from lightrl.distributed.mesh import close_world, init_world
from lightrl.kernels.divergence import KINDS, divergence
from lightrl.observe.metrics import Tally
from lightrl.training.objective import Objective
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import Policy
from lightrl.training.teacher import UNKNOWN, Teacher
from lightrl.training.update import microbatch_loss
from lightrl.types import Microbatch

K = 4


def objective(teacher: dict[str, Any], algorithm: dict[str, Any] | None = None, **correction: Any) -> Objective:
    config = TeacherConfig(path="teacher", **teacher)
    return Objective.of(AlgorithmConfig(**(algorithm or {})), CorrectionConfig(**correction), config)


# ---- by hand


def batch_of(advantages: list[float], teacher: list[float], mask: list[int]) -> Microbatch:
    """One sample, each token's loss weighing 1."""
    sample = TrainSample(
        group_index=0, index=0, prompt=[1], response=[5] * len(mask), loss_mask=mask, rollout_logprobs=None,
        advantage=advantages, teacher_logprobs=teacher,
    )  # fmt: skip
    return pack([[sample]], [[1.0]])


def test_sampled_by_hand():
    """log policy -1, -2, -3 and log teacher -1.5, -1, -3: reverse KL 0.5, -1, 0; with coefficient 2 the advantages
    1, 0 and 3 become 0, 2 and 3. The third token is a hole. On-policy, the gradient of PPO's loss is minus those."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tally = Tally()
    batch = batch_of([1.0, 0.0, 3.0], [-1.5, -1.0, float("nan")], [1, 1, 0])
    loss = microbatch_loss(logprobs, torch.zeros(3), batch, objective({"coef": 2.0}), tally)
    loss.backward()
    assert loss.item() == pytest.approx(-2.0)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -2.0, 0.0])
    metrics = tally.result()
    assert metrics["distill/reverse_kl"] == pytest.approx((0.5 - 1.0) / 2)
    # |-1| of |-1| + |1|, and |2| of |2| + |0|
    assert metrics["distill/advantage_share"] == pytest.approx((0.5 + 1.0) / 2)
    assert batch.advantages.tolist() == [1.0, 0.0, 3.0]  # the batch keeps its own


def test_sampled_goes_by_the_old_log_probs():
    """Off-policy: old -1, now -0.5, teacher -2: advantage -(−1 + 2) = -1 whatever the policy is now, clipped at 1.2."""
    logprobs = torch.tensor([-0.5], requires_grad=True)
    batch = batch_of([0.0], [-2.0], [1])
    batch.old_logprobs = torch.tensor([-1.0])
    loss = microbatch_loss(logprobs, torch.zeros(1), batch, objective({}), Tally())
    assert loss.item() == pytest.approx(torch.tensor(0.5).exp().item())


def test_far_tokens_are_held_within_20():
    assert reverse_kl(torch.tensor([-1.0, -60.0]), torch.tensor([-99.0, -1.0])).tolist() == [20.0, -20.0]


def test_top_k_by_hand():
    """q = 0.5, 0.3 and a rest of 0.2; p = 0.4, 0.4 and 0.2."""
    q, p = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.4, 0.4]]).log()
    assert with_rest(q).exp().tolist()[0] == pytest.approx([0.5, 0.3, 0.2])
    # 0.5 ln(5/4) + 0.3 ln(3/4) and 0.4 ln(4/5) + 0.4 ln(4/3); the rests are equal
    assert top_k_divergence(q, p, "reverse_kl").item() == pytest.approx(0.0252672, abs=1e-6)
    assert top_k_divergence(q, p, "forward_kl").item() == pytest.approx(0.0258154, abs=1e-6)
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().requires_grad_()
    top_k_divergence(logits.log_softmax(-1)[:, :2], p, "reverse_kl").backward()
    # q (ln(q / p) - D)
    assert logits.grad.tolist()[0] == pytest.approx([0.0989382, -0.0938848, -0.0050534], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_rises_with_k_to_the_whole(kind: str):
    g = torch.Generator().manual_seed(3)
    q, p = (torch.randn(5, 20, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    order = p.argsort(-1, descending=True)
    found = torch.stack([
        top_k_divergence(q.gather(-1, order[:, :k]), p.gather(-1, order[:, :k]), kind) for k in range(1, 21)
    ])  # fmt: skip
    assert bool((found.diff(dim=0) >= -1e-12).all())
    assert bool((found >= 0).all())
    torch.testing.assert_close(found[-1], divergence(q, p, kind), atol=1e-5, rtol=0)


# ---- ragged groups with holes, against plain loops

FORMS: dict[str, dict[str, Any]] = {
    "sampled": {"coef": 0.7},
    "top_k": {"form": "top_k", "coef": 0.7},
    "top_k_forward": {"form": "top_k", "divergence": "forward_kl"},
    "top_k_jsd": {"form": "top_k", "divergence": "jsd", "jsd_beta": 0.2},
    "full": {"form": "full", "coef": 0.7, "divergence": "jsd"},
}


def plain_kl(q: Tensor, p: Tensor) -> Tensor:
    return (q * (q / p).log()).sum(-1)


def plain_divergence(top: Tensor, teacher: Tensor, config: TeacherConfig) -> Tensor:
    """[T, k] log-probs of one answer's likely tokens, and the definitions."""
    q, p = (torch.cat([x.exp(), 1.0 - x.exp().sum(-1, keepdim=True)], -1) for x in (top, teacher))
    if config.kind == "reverse_kl":
        return plain_kl(q, p)
    if config.kind == "forward_kl":
        return plain_kl(p, q)
    m = config.beta * p + (1 - config.beta) * q
    return config.beta * plain_kl(p, m) + (1 - config.beta) * plain_kl(q, m)


def extras(found: list[Any], seed: int) -> dict[int, SimpleNamespace]:
    """What a teacher and the policy say of each answer's tokens, float64."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for answer in found:
        n = len(answer.now)
        top, teacher = (torch.rand(n, K, generator=g, dtype=torch.float64).mul(0.2).add(0.01).log() for _ in range(2))
        distance = torch.rand(n, generator=g, dtype=torch.float64)
        sampled = (answer.old + 0.5 * torch.randn(n, generator=g, dtype=torch.float64)).clamp_max(-0.01)
        made[id(answer)] = SimpleNamespace(
            top=top.requires_grad_(), teacher=teacher, distance=distance.requires_grad_(), sampled=sampled
        )
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", [
    {}, {"loss": "reinforce", "aggregation": "sequence_mean"}, {"loss": "gspo", "clip_low": 0.1},
    {"advantage": "none", "aggregation": "constant"},
], ids=lambda keys: "-".join(map(str, keys.values())) or "ppo")  # fmt: skip
@pytest.mark.parametrize("parts", [1, 3])
def test_terms_equal_plain_loops(form: str, keys: dict[str, Any], parts: int):
    """Values and gradients in the log-probs, those of likely tokens, and the divergence; holes hold NaN."""
    mine, theirs = answers(seed=5), answers(seed=5)
    goal = objective(FORMS[form], keys)
    config, aggregation = goal.teacher, goal.algorithm.aggregation
    said, plain = extras(mine, seed=2), extras(theirs, seed=2)
    total = torch.zeros((), dtype=torch.float64)
    for number, packing in enumerate(packed(mine, parts=parts, aggregation=aggregation, constant_length=7)):
        batch, of = packing.batch, [said[id(a)] for a in mine[number::parts]]
        hole = batch.loss_mask == 0
        batch.old_logprobs = torch.cat([a.old for a in mine[number::parts]])
        batch.teacher_logprobs = torch.cat([x.sampled for x in of]).masked_fill(hole, float("nan"))
        top, distance = torch.cat([x.top for x in of]), torch.cat([x.distance for x in of])
        if config.form == "top_k":
            batch.teacher_top_ids = torch.zeros(len(hole), K, dtype=torch.int64)
            batch.teacher_top_logprobs = torch.cat([x.teacher for x in of]).masked_fill(hole[:, None], float("nan"))
        total = total + microbatch_loss(packing.now, packing.entropy, batch, goal, Tally(), top, distance)
    token_losses = []
    for a in theirs:
        x, advantage = plain[id(a)], torch.full_like(a.old, a.sample.advantage)
        if config.form == "sampled":
            advantage = advantage - config.coef * (a.old - x.sampled)
        ratio = (a.now - a.old).exp()
        if goal.algorithm.loss == "gspo":
            s = ((a.now - a.old)[a.mask].mean() if bool(a.mask.any()) else torch.zeros(())).detach()
            ratio = (a.now - a.now.detach() + s).exp()
        low, high = (0.9, 1 + 4e-4) if goal.algorithm.loss == "gspo" else (0.8, 1.2)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if goal.algorithm.loss == "reinforce":
            loss = -advantage * a.now
        if config.form == "top_k":
            loss = loss + config.coef * plain_divergence(x.top, x.teacher, config)
        if config.form == "full":
            loss = loss + config.coef * x.distance
        token_losses.append((a, loss))
    expected = plain_mean(token_losses, aggregation, 7)
    assert total.item() == pytest.approx(expected.item(), rel=1e-9)
    total.backward()
    expected.backward()
    same_gradients(mine, theirs)
    for a, b in zip(mine, theirs, strict=True):
        for name in ("top", "distance"):
            one, other = getattr(said[id(a)], name).grad, getattr(plain[id(b)], name).grad
            zero = torch.zeros_like(getattr(said[id(a)], name))
            one, other = zero if one is None else one, zero if other is None else other
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)
    assert any(bool(x.abs().max() > 0) for x in gradients(mine))


def test_nothing_is_skipped_beside_a_teacher():
    assert Objective.of(AlgorithmConfig()).may_skip_zero_advantage
    assert not objective({}).may_skip_zero_advantage


def test_engine_and_teacher_share_the_row_of_likely_tokens():
    """Score centering of 2 tokens of the engine, and a teacher's 4 behind them: each gets its own."""
    (packing,) = packed(answers(seed=1))
    batch, n = packing.batch, len(packing.now)
    g = torch.Generator().manual_seed(0)
    top = torch.rand(n, 2 + K, generator=g, dtype=torch.float64).mul(0.15).log().requires_grad_()
    batch.rollout_top_ids = torch.zeros(n, 2, dtype=torch.int64)
    batch.rollout_top_logprobs = torch.rand(n, 2, generator=g, dtype=torch.float64).mul(0.2).log()
    batch.teacher_logprobs = batch.rollout_logprobs
    centred = microbatch_loss(
        packing.now, packing.entropy, batch, Objective.of(AlgorithmConfig(), CorrectionConfig(score_centering_top_k=2)),
        Tally(), top[:, :2],
    )  # fmt: skip
    batch.teacher_top_ids = torch.zeros(n, K, dtype=torch.int64)
    batch.teacher_top_logprobs = torch.rand(n, K, generator=g, dtype=torch.float64).mul(0.2).log()
    goal = objective({"form": "top_k"}, score_centering_top_k=2)
    both = microbatch_loss(packing.now, packing.entropy, batch, goal, Tally(), top)
    term = top_k_divergence(top[:, 2:], batch.teacher_top_logprobs, "reverse_kl")
    assert (both - centred).item() == pytest.approx((term * batch.loss_weights).sum().item(), rel=1e-9)


# ---- models: what teacher and policy say, and the gradients, against stock ones


def samples(seed: int, k: int = 0) -> list[TrainSample]:
    g = torch.Generator().manual_seed(seed)
    return [
        TrainSample(
            group_index=0, index=i, prompt=[5, 6, 7], response=torch.randint(3, 29, (n,), generator=g).tolist(),
            loss_mask=[1, 0, *[1] * (n - 2)][:n], rollout_logprobs=[-1.0] * n, advantage=0.0,
            rollout_top_ids=torch.randint(3, 29, (n, k), generator=g).tolist() if k else None,
            rollout_top_logprobs=torch.rand(n, k, generator=g).log().tolist() if k else None,
        )
        for i, n in enumerate((1, 6, 3))
    ]  # fmt: skip


MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "sampled": ({}, "llama", "qwen3"),
    "sampled_stock": ({}, "granite", "granite"),
    "teacher_top_k": ({"form": "top_k", "top_k": 5, "temperature": 1.4}, "llama", "qwen3"),
    "teacher_top_k_stock": ({"form": "top_k", "top_k": 5, "divergence": "forward_kl"}, "granite", "granite"),
    "student_top_k": ({"form": "top_k", "top_k": 5, "top_k_from": "student"}, "llama", "granite"),
    "full": ({"form": "full", "temperature": 1.4}, "llama", "qwen3"),
    "full_forward": ({"form": "full", "divergence": "forward_kl"}, "llama", "qwen3"),
    "full_jsd_stock": ({"form": "full", "divergence": "jsd", "jsd_beta": 0.3}, "granite", "llama"),
}


def stock_losses(student: Any, teacher: Any, config: TeacherConfig, found: list[TrainSample], size: int) -> Tensor:
    """Token mean of the teacher's term alone, straight from both models' logits, temperature 0.7."""
    losses: list[Tensor] = []
    for s in found:
        tokens = torch.tensor([s.prompt + s.response])
        z, t = (m(tokens).logits[0, len(s.prompt) - 1 : -1] for m in (student, teacher))
        z, t = z / 0.7, t.detach() / (config.temperature or 0.7)
        log_q, log_p = z.log_softmax(-1), t.log_softmax(-1)
        if config.form == "full":
            q, p = z[:, :size].softmax(-1), t[:, :size].softmax(-1)
            m = config.beta * p + (1 - config.beta) * q
            jsd = config.beta * plain_kl(p, m) + (1 - config.beta) * plain_kl(q, m)
            loss = {"reverse_kl": plain_kl(q, p), "forward_kl": plain_kl(p, q), "jsd": jsd}[config.kind]
        elif config.form == "top_k":
            likely = log_p[:, :size].topk(5, -1).indices
            ids = torch.tensor(s.rollout_top_ids) if config.student_k else likely
            loss = plain_divergence(log_q.gather(-1, ids), log_p.gather(-1, ids), config)
        else:
            mine, theirs = (x.gather(-1, torch.tensor(s.response)[:, None])[:, 0] for x in (log_q, log_p))
            loss = (mine - theirs).detach() * mine
        losses.append(loss[torch.tensor(s.loss_mask).bool()])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("case", MODELS)
def test_models_equal_stock(tmp_path: Path, case: str):
    """A teacher of another family and size, whose vocabulary is padded: loss and gradients of the policy."""
    keys, family, teacher_family = MODELS[case]
    paths = {
        "student": tiny_run.make_model(tmp_path / "student", family=family),
        "teacher": tiny_run.make_model(
            tmp_path / "teacher", family=teacher_family, seed=3, hidden_size=48, vocab_size=37, initializer_range=0.2
        ),
    }
    config = Config(
        model=ModelConfig(path=str(paths["student"]), compute_dtype="float32"),
        rollout=RolloutConfig(temperature=0.7),
        teacher=TeacherConfig(path=str(paths["teacher"]), **keys),
    )
    found = samples(0, config.teacher.student_k)
    try:
        world = init_world("cpu")
        policy = Policy.load(config.model, world)
        teacher = Teacher.build(config, world, 30)
        shares = policy.module.packed and teacher.modules[0].packed
        units = [found] if shares else [[s] for s in found]
        count = sum(map(sum, (s.loss_mask for s in found)))
        batch = pack(units, [[1 / count] * len(unit) for unit in units])
        teacher.add_targets([[batch]])
        head = teacher.head()
        assert (head is None) == (config.teacher.form != "full")
        goal = Objective.of(AlgorithmConfig(loss="reinforce"), None, config.teacher)
        loss = microbatch_loss(
            *policy(batch, 0.7, teacher=head)[:2], batch, goal, Tally(), *policy(batch, 0.7, teacher=head)[2:]
        )
        loss.backward()
        teacher.reclaim()
        mine = {n: p.grad.full_tensor() for n, p in policy.module.named_parameters()}
    finally:
        close_world()
    student, other = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in paths.values())
    expected = stock_losses(student, other, config.teacher, found, 30)
    expected.backward()
    if config.teacher.form != "sampled":
        assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(mine[f"model.{name}"], parameter.grad, atol=1e-6, rtol=1e-5, msg=name)
    assert max(float(g.abs().max()) for g in mine.values()) > 1e-3


def test_tokens_that_a_teacher_does_not_have(tmp_path: Path):
    """Padding of the policy's vocabulary, which a random policy samples: probability 0 there, and no crash."""
    make: Callable[..., Path] = tiny_run.make_model
    config = Config(
        model=ModelConfig(path=str(make(tmp_path / "student", vocab_size=40)), compute_dtype="float32"),
        teacher=TeacherConfig(path=str(make(tmp_path / "teacher")), form="top_k", top_k=2, top_k_from="student"),
    )
    sample = replace(samples(0)[2], response=[35, 4, 39], rollout_top_ids=[[4, 38], [35, 36], [1, 2]],
                     rollout_top_logprobs=[[-1.0, -2.0]] * 3)  # fmt: skip
    try:
        teacher = Teacher.build(config, init_world("cpu"), 40)
        batch = pack([[sample]], [[1.0]])
        teacher.add_targets([[batch]])
    finally:
        close_world()
    assert (batch.teacher_logprobs == UNKNOWN).tolist() == [True, False, True]
    assert (batch.teacher_top_logprobs == UNKNOWN).tolist() == [[False, True], [True, True], [False, False]]
    assert batch.rollout_top_ids is None
