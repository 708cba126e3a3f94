"""Advantage estimators against hand-worked numbers, and the whole way to each token against plain loops."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_run
import torch

from lightrl.algorithms.advantages import (
    GroupRewards,
    TokenRewards,
    gae,
    grpo,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from lightrl.algorithms.losses import kl_divergence
from lightrl.config.estimators import ESTIMATORS
from lightrl.config.schema import AlgorithmConfig
from lightrl.errors import UserError
from lightrl.observe.metrics import Tally
from lightrl.training.advantage import (
    Advantages,
    finish_advantages,
    overlong_metrics,
    set_advantages,
    whiten_advantages,
)
from lightrl.training.objective import Objective
from lightrl.training.packing import TrainSample, pack
from lightrl.training.update import microbatch_loss
from lightrl.types import Prompt, Sample, SampleGroup, Status

ALONE = SimpleNamespace(gather=lambda record: [record])
GROUP = {"grpo": grpo, "rloo": rloo, "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline}


def of(*rewards: float) -> GroupRewards:
    return GroupRewards(rewards=torch.tensor(rewards, dtype=torch.float64))


# ----- by hand


def test_grpo_hand_worked():
    # mean 0.5; unbiased variance (4 x 0.25) / 3 = 1/3
    std = math.sqrt(1 / 3) + 1e-6
    assert grpo(of(1, 0, 0, 1)).tolist() == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std])
    assert grpo(of(3, 0, 0), normalize_std=False).tolist() == [2, -1, -1]


def test_rloo_hand_worked():
    """Each less the mean of the others: 3 - 0, 0 - 3/2, 0 - 3/2; and 4 - (1 + 2 + 5) / 3."""
    assert rloo(of(3, 0, 0)).tolist() == [3, -1.5, -1.5]
    assert rloo(of(4, 1, 2, 5)).tolist() == pytest.approx([4 - 8 / 3, 1 - 11 / 3, 2 - 10 / 3, 5 - 7 / 3])


def test_reinforce_plus_plus_hand_worked():
    """Two answers, of rewards 1 and 2, with penalties a token: sums from each token to its answer's end."""
    tokens = TokenRewards(
        rewards=torch.tensor([-0.1, -0.2, 1 - 0.3, 2.0]), ends=torch.tensor([False, False, True, True])
    )
    assert reinforce_plus_plus(tokens).tolist() == pytest.approx([0.4, 0.5, 0.7, 2.0])
    assert reinforce_plus_plus(tokens, gamma=0.5).tolist() == pytest.approx([-0.1 + 0.5 * 0.15, 0.15, 0.7, 2.0])
    assert reinforce_plus_plus_baseline(of(3, 0, 0)).tolist() == [2, -1, -1]


def test_gae_hand_worked():
    """gamma 0.5, lambda 0.5; an answer of two tokens with reward 2, then one of a single token with reward -1.

    d_1 = 2 - 1 = 1, d_0 = 0 + 0.5 * 1 - 0.4 = 0.1; A_1 = 1, A_0 = 0.1 + 0.25 * 1. The other: -1 - 0.5.
    """
    tokens = TokenRewards(
        rewards=torch.tensor([0.0, 2.0, -1.0]),
        ends=torch.tensor([False, True, True]),
        values=torch.tensor([0.4, 1.0, 0.5]),
    )
    assert gae(tokens, gamma=0.5, gae_lambda=0.5).tolist() == pytest.approx([0.35, 1.0, -1.5])
    # lambda 1: rewards to come less the value; lambda 0: one step ahead
    assert gae(tokens).tolist() == pytest.approx([2 - 0.4, 1.0, -1.5])
    assert gae(tokens, gae_lambda=0.0).tolist() == pytest.approx([1.0 - 0.4, 1.0, -1.5])


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.999, 1.0), (1.0, 1.0)])
def test_gae_of_long_answers_in_float32(gamma, gae_lambda):
    """T = 131,072, a few rows of what `benchmarks/gae.py` measures at B = 256: within 1e-5 of plain float64 loops."""
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 131_072, generator=g), torch.randn(2, 131_072, generator=g)
    ends = torch.rand(2, 131_072, generator=g) < 1e-4
    ends[:, -1] = True
    found = gae(TokenRewards(rewards=rewards, ends=ends, values=values), gamma=gamma, gae_lambda=gae_lambda)
    for row in range(2):
        r, v, e = rewards[row].double().tolist(), values[row].double().tolist(), ends[row].tolist()
        running, expected = 0.0, [0.0] * len(r)
        for t in reversed(range(len(r))):
            if e[t]:
                running = r[t] - v[t]
            else:
                running = r[t] + gamma * v[t + 1] - v[t] + gamma * gae_lambda * running
            expected[t] = running
        wanted = torch.tensor(expected, dtype=torch.float64)
        assert float(((found[row].double() - wanted).abs() / wanted.abs().clamp(min=1.0)).max()) < 1e-5


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("rewards", [[0.7], [1.0, 1.0], [0.1] * 7, [1e8] * 3])
def test_no_spread_no_advantage(name, rewards):
    """A5: a group of one, or of equal rewards (0.1 does not sum to its mean exactly), gives 0 and no NaN."""
    assert GROUP[name](of(*rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", GROUP)
def test_huge_rewards_keep_their_difference(name):
    found = GROUP[name](of(1e8, 1e8 + 1)).tolist()
    assert found[1] == -found[0]
    assert found[1] == pytest.approx({"grpo": math.sqrt(0.5), "rloo": 1.0}.get(name, 0.5), rel=1e-5)


def test_overlong_penalty_hand_worked():
    """DAPO's: 0 up to 80, then a twentieth more with each token."""
    found = [overlong_penalty(n, limit=100, buffer=20, penalty=1.0) for n in (1, 80, 81, 99, 100, 101)]
    assert found == pytest.approx([0, 0, 0.05, 0.95, 1, 1])
    assert overlong_penalty(90, limit=100, buffer=20, penalty=0.5) == 0.25


# ----- on samples


def sample(group: int, index: int, reward: float | None, mask: tuple[int, ...] = (1,), status=Status.COMPLETED):
    return Sample(
        prompt=Prompt(index=0, tokens=[1], text=""), group_index=group, index=index, tokens=[1, *[2] * len(mask)],
        response_length=len(mask), loss_mask=list(mask), reward=reward, status=status,
    )  # fmt: skip


def groups_of(*members: list[Sample]) -> list[SampleGroup]:
    prompt = Prompt(index=0, tokens=[1], text="")
    return [SampleGroup(prompt=prompt, group_index=m[0].group_index, samples=m) for m in members]


def estimator(limit: int = 100, **keys) -> Advantages:
    return Advantages.load(AlgorithmConfig(**keys), limit)


def test_a5_unequal_groups_are_normalised_within_themselves():
    groups = groups_of(
        [sample(0, 0, 10.0), sample(0, 1, None, status=Status.FAILED), sample(0, 2, 14.0)],
        [sample(1, 0, 0.0), sample(1, 1, 1.0), sample(1, 2, 0.0), sample(1, 3, 1.0)],
        [sample(2, 0, 5.0)],
        [sample(3, 0, None, status=Status.FAILED)],
    )
    set_advantages(groups, estimator(normalize_std=False))
    expected = [[-2.0, None, 2.0], [-0.5, 0.5, -0.5, 0.5], [0.0], [None]]
    assert [[s.advantage for s in g.samples] for g in groups] == expected
    set_advantages(groups, estimator(advantage="rloo"))
    assert [s.advantage for s in groups[0].samples] == [-4.0, None, 4.0]


def test_overlong_answers_lose_before_advantages_and_keep_their_rewards():
    groups = groups_of([sample(0, 0, 1.0, (1,) * 4), sample(0, 1, 1.0, (1,) * 9), sample(0, 2, 0.0, (1,) * 10)])
    shaping = estimator(limit=10, normalize_std=False, overlong_buffer=4, overlong_penalty=2.0)
    set_advantages(groups, shaping)
    # rewards 1, 1 - 2 * 3/4, 0 - 2: mean -0.5
    assert [s.advantage for s in groups[0].samples] == pytest.approx([1.5, 0.0, -1.5])
    assert [s.reward for s in groups[0].samples] == [1.0, 1.0, 0.0]
    assert overlong_metrics(groups, shaping).result() == {"reward/overlong_penalty": pytest.approx(3.5 / 3)}
    assert overlong_metrics(groups, estimator()).result() == {}


def random_groups(seed: int) -> list[SampleGroup]:
    """Groups of 1 to 5 answers of 1 to 9 tokens, with holes and whole answers masked, and failed samples."""
    g = torch.Generator().manual_seed(seed)

    def number(high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=g))

    members = []
    for group in range(14):
        some = []
        for index in range(1 + number(5)):
            mask = tuple(int(m) for m in torch.randint(0, 2, (1 + number(9),), generator=g))
            failed = number(6) == 0
            reward = None if failed else float(torch.randn(1, generator=g)) * 10 ** number(3)
            status = Status.FAILED if failed else Status.COMPLETED
            some.append(sample(group, index, reward, (0,) * len(mask) if number(8) == 0 else mask, status=status))
        members.append(some)
    return groups_of(*members)


def packed(groups: list[SampleGroup], seed: int):
    """Three microbatches, one of them empty, with samples of a group apart; log-probs of their own for each token."""
    samples = [TrainSample.from_sample(s) for g in groups for s in g.scored]
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=g).tolist()
    batch = []
    for part in (order[::2], [], order[1::2]):
        units = [[samples[i]] for i in part]
        microbatch = pack(units, [[1.0]] * len(units))
        n = len(microbatch.targets)
        microbatch.old_logprobs = -2 * torch.rand(n, generator=g)
        microbatch.ref_logprobs = -2 * torch.rand(n, generator=g)
        microbatch.ref_logprobs[microbatch.loss_mask == 0] = float("nan")  # A6: holes give no KL
        microbatch.values = torch.randn(n, generator=g)
        batch.append(microbatch)
    return [batch[:2], batch[2:]]


def plain(groups: list[SampleGroup], batch, config: AlgorithmConfig) -> dict[tuple[int, int], list[float]]:
    """The same in loops over single answers, from formulas: advantages of the loss tokens of each."""
    tokens_kl: dict[tuple[int, int], list[float]] = {}
    tokens_value: dict[tuple[int, int], list[float]] = {}
    for m in (m for minibatch in batch for m in minibatch):
        for number, key in enumerate(m.sample_keys):
            rows = [i for i in range(len(m.targets)) if m.sample_ids[i] == number and m.loss_mask[i] == 1]
            tokens_value[key] = [float(m.values[i]) for i in rows]
            pairs = [(float(m.old_logprobs[i]), float(m.ref_logprobs[i])) for i in rows]
            kind = config.kl_estimator
            ds = [r - p for p, r in pairs]
            tokens_kl[key] = [-d if kind == "k1" else d * d / 2 if kind == "k2" else math.exp(d) - 1 - d for d in ds]
    in_reward = config.kl_coef if config.kl_in == "reward" else 0.0
    found: dict[tuple[int, int], list[float]] = {}
    for group in groups:
        samples = group.scored
        keys = [(s.group_index, s.index) for s in samples]
        if config.advantage in ("reinforce_plus_plus", "gae"):
            for key, s in zip(keys, samples, strict=True):
                rewards = [-in_reward * kl for kl in tokens_kl[key]]
                if rewards:
                    rewards[-1] += s.reward
                n = len(rewards)
                if config.advantage == "gae":
                    v = [*tokens_value[key], 0.0]
                    deltas = [rewards[t] + config.gamma * v[t + 1] - v[t] for t in range(n)]
                    rate = config.gamma * config.gae_lambda
                    found[key] = [sum(rate ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
                    continue
                found[key] = [sum(config.gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]
            continue
        rewards = [s.reward - in_reward * sum(tokens_kl[k]) for k, s in zip(keys, samples, strict=True)]
        for i, key in enumerate(keys):
            others = rewards[:i] + rewards[i + 1 :]
            if not others or config.advantage == "none":
                value = 0.0
            elif config.advantage == "rloo":
                value = rewards[i] - statistics.fmean(others)
            else:
                value = rewards[i] - statistics.fmean(rewards)
                if config.advantage == "grpo" and config.normalize_std:
                    value /= statistics.stdev(rewards) + 1e-6
            found[key] = [value] * len(tokens_kl[key])
    if config.whitening != "none":
        for group_index in {k[0] for k in found} if config.whitening == "group" else {None}:
            keys = [k for k in found if group_index in (None, k[0])]
            pool = [v for k in keys for v in found[k]]
            if pool:
                mean, variance = statistics.fmean(pool), statistics.pvariance(pool)
                for k in keys:
                    found[k] = [(v - mean) / math.sqrt(variance + 1e-8) for v in found[k]]
    return found


CASES = [
    {"advantage": name, "whiten": whiten, **kl}
    for name in ESTIMATORS
    for whiten in (None, "none", "batch", "group")
    for kl in ({}, {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k1"})
]
CASES += [
    {"normalize_std": False},
    {"advantage": "reinforce_plus_plus", "gamma": 0.7, "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3"},
    {"advantage": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k2"},
    {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8, "kl_coef": 0.1, "kl_in": "reward"},
    {"advantage": "gae", "gae_lambda": 0.0, "whiten": "none"},
]


@pytest.mark.parametrize("keys", CASES, ids=lambda keys: "-".join(map(str, keys.values())))
@pytest.mark.parametrize("seed", [0, 1])
def test_the_way_to_each_token_equals_plain_loops(keys, seed):
    """Values of every loss token, and with them the gradient on the policy's log-probs."""
    config = AlgorithmConfig(**keys)
    advantages = Advantages.load(config, 100)
    groups = random_groups(seed)
    set_advantages(groups, advantages)
    batch = packed(groups, seed)
    expected = plain(groups, batch, config)
    finish_advantages(groups, batch, advantages, ALONE)
    if advantages.of_tokens:  # the reward that stood there is nobody's advantage
        assert all(s.advantage is None for g in groups for s in g.samples)
    before = plain(groups, batch, replace(config, whiten="none"))
    seen = 0
    for m in (m for minibatch in batch for m in minibatch):
        counted = m.loss_mask > 0
        for number, key in enumerate(m.sample_keys):
            found = m.advantages[(m.sample_ids == number) & counted]
            assert found.tolist() == pytest.approx(expected[key], rel=1e-6, abs=1e-6), key
            if config.advantage == "gae":  # what the critic should have said: before whitening
                rows = (m.sample_ids == number) & counted
                wanted = [a + v for a, v in zip(before[key], m.values[rows].tolist(), strict=True)]
                assert m.returns[rows].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)
            seen += len(found)
        logprobs = torch.zeros(len(m.targets), requires_grad=True)
        m.old_logprobs = m.ref_logprobs = None
        microbatch_loss(logprobs, torch.zeros_like(logprobs), m, Objective.of(AlgorithmConfig()), Tally()).backward()
        assert torch.equal(logprobs.grad, (-m.advantages).masked_fill(~counted, 0.0))
    assert seen == sum(len(v) for v in expected.values()) >= 50


def test_whitening_leaves_groups_without_spread_at_0():
    microbatch = pack(
        [
            [TrainSample(group_index=g, index=i, prompt=[1], response=[2], loss_mask=[1], rollout_logprobs=None,
                         advantage=a)]
            for g, i, a in [(3, 0, 0.1), (3, 1, 0.1), (3, 2, 0.1), (5, 0, 7.0), (8, 0, 1.0), (8, 1, 3.0)]
        ],
        [[1.0]] * 6,
    )  # fmt: skip
    whiten_advantages([[microbatch]], ALONE, within_groups=True)
    assert microbatch.advantages.tolist() == pytest.approx([0, 0, 0, 0, -1, 1], abs=1e-6)


def test_k1_in_the_reward_has_the_gradient_of_the_kl_and_k3_has_not():
    """Mean over the policy of score times penalty: what docs/algorithms.md says of estimators in the reward."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits, retain_graph=True)
    weights = log_p.detach().exp()
    for kind, equal in (("k1", True), ("k3", False)):
        penalty = kl_divergence(log_p.detach(), reference, kind)
        (found,) = torch.autograd.grad((weights * penalty * log_p).sum(), logits, retain_graph=True)
        assert torch.allclose(found, wanted, atol=1e-12) == equal


# ----- a function of one's own

OWN = """
import torch

def best(group):
    return [float(r == max(group.rewards)) for r in group.rewards]

def array(group):
    import numpy
    return numpy.asarray([s.index for s in group.samples])

def each(group):
    return [torch.arange(s.response_length) * float(r) for s, r in zip(group.samples, group.rewards)]

def few(group):
    return [1.0]

def short(group):
    return [[1.0] for _ in group.samples]

def words(group):
    return ["high" for _ in group.samples]

def none(group):
    pass

def nan(group):
    return [0.0, float("nan")]

def huge(group):
    return [[0.0] * group.samples[0].response_length, [1e39] * group.samples[1].response_length]

def broken(group):
    return 1 / 0

def needs_two(group, more):
    return group
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_advantages.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_advantages"


def test_own_function_gives_numbers_of_samples_or_of_tokens(own):
    groups = groups_of([sample(0, 0, 1.0, (1, 1)), sample(0, 1, 3.0, (1, 0, 1)), sample(0, 2, None)])
    set_advantages(groups, estimator(advantage=f"{own}:best"))
    assert [s.advantage for s in groups[0].samples] == [0.0, 1.0, None]
    set_advantages(groups, estimator(advantage=f"{own}:array"))
    assert [s.advantage for s in groups[0].samples] == [0.0, 1.0, None]
    each = estimator(advantage=f"{own}:each", kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    set_advantages(groups, each)
    assert [s.advantage for s in groups[0].samples] == [[0.0, 1.0], [0.0, 3.0, 6.0], None]
    samples = [TrainSample.from_sample(s) for s in groups[0].scored]
    assert [s.has_advantage for s in samples] == [True, True]
    microbatch = pack([samples], [[1.0, 1.0]])
    assert microbatch.advantages.tolist() == [0.0, 1.0, 0.0, 3.0, 6.0]
    microbatch.old_logprobs, microbatch.ref_logprobs = torch.zeros(5), torch.full((5,), -1.0)
    finish_advantages(groups, [[microbatch]], each, ALONE)  # a KL of 1 a loss token: rewards 1 - 1, 3 - 1
    assert microbatch.advantages.tolist() == [0.0, 0.0, 0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("few", "1 of them: return an advantage for each of the 2 samples"),
        ("short", "1 numbers for a response of 2 tokens"),
        ("words", "'high' for a sample: return a number"),
        ("none", "None: return an advantage for each"),
        ("nan", "nan for a sample: return finite numbers"),
        ("huge", r"1e\+39 for a sample: return finite numbers"),
    ],
)
def test_own_function_that_returns_something_else(own, name, says):
    groups = groups_of([sample(0, 0, 1.0, (1, 1)), sample(0, 1, 3.0, (1, 0, 1))])
    with pytest.raises(UserError, match=rf"^algorithm.advantage = 'own_advantages:{name}': it returned {says}"):
        set_advantages(groups, estimator(advantage=f"{own}:{name}"))


def test_own_function_that_raises(own):
    with pytest.raises(UserError, match=r"^algorithm.advantage = 'own_advantages:broken': it raised ZeroDivisionError"):
        set_advantages(groups_of([sample(0, 0, 1.0)]), estimator(advantage=f"{own}:broken"))


def test_own_function_that_cannot_be_used(own):
    with pytest.raises(UserError, match=r"algorithm.advantage = 'own_advantages:bets': .*did you mean 'best'"):
        estimator(advantage=f"{own}:bets")
    with pytest.raises(UserError, match=r"needs_two\(group, more\) cannot be called with one argument"):
        estimator(advantage=f"{own}:needs_two")


# ----- learning

LEARN = {
    "grpo": {},
    "dr_grpo": {"normalize_std": False, "aggregation": "constant"},
    "rloo": {"advantage": "rloo"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline"},
    "kl_in_reward": {"advantage": "rloo", "kl_coef": 0.01, "kl_in": "reward", "kl_estimator": "k1"},
    "gae": {"advantage": "gae", "gae_lambda": 0.95},
    "own": {"advantage": "own_advantages:best"},
}


@pytest.mark.parametrize("name", LEARN)
def test_it_learns(name, own, tmp_path):
    """The miniature task: reward of the last three steps well above that of the first three."""
    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    config = tiny_run.make_run(
        tmp_path,
        run={"steps": 12},
        rollout={"group_size": 8},
        optim={"lr": 1e-2},
        algorithm=LEARN[name],
        critic_optim={"lr": 1e-2} if name == "gae" else {},
        log={"save_samples": False},
    )
    trainer = Trainer(config)
    rewards = [trainer.step(trainer.source.next(4))["reward/mean"] for _ in range(12)]
    trainer.close()
    close_world()
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), rewards
