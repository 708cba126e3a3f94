"""The critic: its loss by hand, its values against the stock model's, and runs with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from lightrl.algorithms.values import value_loss
from lightrl.config.load import load_config, load_for_run
from lightrl.config.schema import CriticConfig
from lightrl.distributed.fsdp import reshard_all
from lightrl.distributed.mesh import close_world, init_world
from lightrl.distributed.offload import Offloader, TrainingState
from lightrl.errors import UserError
from lightrl.observe.metrics import Tally
from lightrl.training.critic import Critic, explained_variance, value_microbatch_loss
from lightrl.training.export_cli import export_run
from lightrl.training.packing import TrainSample, pack
from lightrl.training.trainer import Trainer

ALONE = SimpleNamespace(gather=lambda record: [record])
GAE = {"algorithm": {"advantage": "gae"}}


@pytest.fixture(autouse=True)
def _world():
    yield
    close_world()


def test_value_loss_hand_worked_with_gradients():
    """Old values 0, returns 1, clip 0.2: values 0.5 and 2 are held at 0.2, and -0.5 at -0.2; 0.1 is not."""
    values = torch.tensor([0.5, 2.0, -0.5, 0.1], requires_grad=True)
    found = value_loss(values, torch.zeros(4), torch.ones(4), clip=0.2)
    # (V - 1)²/2: 0.125, 0.5, 1.125, 0.405; of the held: 0.32, 0.32, 0.72, 0.405
    assert found.loss.tolist() == pytest.approx([0.32, 0.5, 1.125, 0.405])
    assert found.clipped.tolist() == [True, False, False, False]
    found.loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 1.0, -1.5, -0.9])
    plain = value_loss(values, torch.zeros(4), torch.ones(4), clip=None)
    assert plain.loss.tolist() == pytest.approx([0.125, 0.5, 1.125, 0.405])
    assert not plain.clipped.any()


def samples(mask=((1, 0, 1), (1,), (1, 1, 1, 0))):
    prompts = [[3, 4], [3, 4], [5, 6, 7]]
    return [
        TrainSample(
            group_index=len(prompts[i]), index=i, prompt=prompts[i], response=list(range(8, 8 + len(m))),
            loss_mask=list(m), rollout_logprobs=None, advantage=1.0,
        )
        for i, m in enumerate(mask)
    ]  # fmt: skip


def test_value_loss_of_a_microbatch_leaves_holes_out():
    """Weights of 1/2 a token; a return and a value that are not finite on a token without loss change nothing."""
    batch = pack([[samples()[0]]], [[0.5]])
    batch.values, batch.returns = torch.zeros(3), torch.tensor([1.0, float("nan"), 3.0])
    values = torch.tensor([0.5, float("inf"), 1.0], requires_grad=True)
    tally = Tally()
    loss = value_microbatch_loss(values, batch, CriticConfig(), tally)
    assert float(loss.detach()) == pytest.approx((0.125 + 2.0) / 2)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([-0.25, 0.0, -1.0])
    assert tally.result() == pytest.approx(
        {"critic/loss": 1.0625, "critic/clip_fraction": 0.0, "critic/value_mean": 0.75, "critic/return_mean": 2.0}
    )
    empty = pack([], [])
    nothing = torch.zeros(0, requires_grad=True)
    assert float(value_microbatch_loss(nothing, empty, CriticConfig(), Tally())) == 0.0


def test_explained_variance_hand_worked():
    """Returns 0, 2, 4 (variance 8/3); values 0, 2, 1 leave 0, 0, 3 (variance 2): 1 - 2 / (8/3)."""
    batch = pack([[samples(((1, 0, 1), (1,), (1,)))[0]], [samples()[1]]], [[1.0], [1.0]])
    batch.returns, batch.values = torch.tensor([0.0, 99.0, 2.0, 4.0]), torch.tensor([0.0, -99.0, 2.0, 1.0])
    assert explained_variance([[batch], [pack([], [])]], ALONE) == pytest.approx(0.25)
    batch.values = torch.full((4,), 7.0)
    assert explained_variance([[batch]], ALONE) == pytest.approx(0.0, abs=1e-9)  # a constant explains nothing
    batch.returns = torch.full((4,), 0.1)
    assert explained_variance([[batch]], ALONE) is None
    assert explained_variance([[pack([], [])]], ALONE) is None


def classifier(folder: Path, family: str = "llama", labels: int = 1) -> Path:
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, num_labels=labels, pad_token_id=0,
    )  # fmt: skip
    if family == "gemma":
        config.head_dim = 8
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "packed"), [("llama", True), ("gemma", False)])
def test_values_and_gradients_equal_the_stock_model(tmp_path, family, packed):
    """Packed, with a shared prompt, and padded: the score of the token before each response token."""
    folder = classifier(tmp_path / "critic", family)
    config = load_config(**GAE, critic={"path": str(folder)}, model={"compute_dtype": "float32"})
    critic = Critic.build(config, init_world("cpu"))
    assert critic.module.packed == packed
    first, second, third = samples()
    units = [[first, second], [third]] if packed else [[first], [second], [third]]
    batch = pack(units, [[1.0] * len(u) for u in units])
    values = critic(batch)
    weights = torch.arange(1.0, 1.0 + len(values))
    (values * weights).sum().backward()
    stock = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    expected = []
    for s in (first, second, third):
        hidden = stock.model(torch.tensor([s.prompt + s.response])).last_hidden_state[0, len(s.prompt) - 1 : -1]
        expected.append(stock.score(hidden)[:, 0])
    expected = torch.cat(expected)
    torch.testing.assert_close(values.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
    (expected * weights).sum().backward()
    found = {n: p.grad.full_tensor() for n, p in critic.module.model.named_parameters()}
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def weights_of(module) -> dict[str, torch.Tensor]:
    reshard_all(module)
    return {n: p.full_tensor().detach().clone() for n, p in module.named_parameters()}


def differ(a, b) -> bool:
    return any(not torch.equal(a[n], b[n]) for n in a)


def test_explained_variance_rises_and_the_policy_learns(tmp_path):
    """Half of the reward's variance is known from the prompt. Nothing is explained at first, and most of that later."""
    config = tiny_run.make_run(
        tmp_path,
        **GAE,
        run={"steps": 30},
        rollout={"prompts_per_step": 8, "group_size": 8},
        optim={"lr": 1e-2},
        critic={"value_clip": 0.5},
        critic_optim={"lr": 3e-3},
        log={"save_samples": False},
    )
    trainer = Trainer(config, reward=lambda s: tiny_run.count_letter(s) + 0.5 * (s.prompt.label in "ab"))
    metrics = [trainer.step(trainer.source.next(8)) for _ in range(30)]
    trainer.close()
    explained = [m["critic/explained_variance"] for m in metrics]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # a new head says 0 of everything
    assert sum(explained[-5:]) / 5 > 0.4, explained
    rewards = [m["reward/mean"] for m in metrics]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5 * 0.2, rewards
    assert metrics[-1]["critic/loss"] < 0.7 * metrics[0]["critic/loss"]
    assert metrics[0]["policy/ratio_max"] == metrics[0]["policy/ratio_min"] == 1.0


def test_policy_waits_for_its_critic(tmp_path):
    """`pretrain_steps` = 2: two steps without a bit of the policy changing, then both learn; schedules go on."""
    trainer = Trainer(
        tiny_run.make_run(
            tmp_path, algorithm={"advantage": "gae", "minibatches_per_step": 2}, critic={"pretrain_steps": 2}
        )
    )
    policy, critic = weights_of(trainer.policy.module), weights_of(trainer.critic.module)
    for step in range(3):
        metrics = trainer.step(trainer.source.next(4))
        assert differ(policy, weights_of(trainer.policy.module)) == (step == 2)
        assert differ(critic, weights_of(trainer.critic.module))
        assert ("loss/policy" in metrics) == (step == 2)
        assert metrics["critic/lr"] == 1e-5
    assert (trainer.schedule.last_epoch, trainer.critic.schedule.last_epoch) == (6, 6)
    trainer.close()


def test_resumed_run_is_the_undisturbed_one_and_exports_load(tmp_path):
    """Four steps, and two and two: policy, critic and its moments are equal to the last bit. Then what is written."""
    sections = GAE | {"critic": {"pretrain_steps": 1}, "critic_optim": {"schedule": "linear", "lr": 1e-3}}
    whole = Trainer(tiny_run.make_run(tmp_path, **sections, run={"dir": str(tmp_path / "whole")}))
    whole.train()
    half = Trainer(tiny_run.make_run(tmp_path, **sections, run={"steps": 4, "dir": str(tmp_path / "parts")}))
    step = half.step

    def stopped(prompts, source):
        if half.steps_done == 2:
            raise KeyboardInterrupt
        return step(prompts, source)

    half.step = stopped
    with pytest.raises(KeyboardInterrupt):
        half.train()
    half.close()
    parts = Trainer(tiny_run.make_run(tmp_path, **sections, run={"dir": str(tmp_path / "parts")}))
    parts.train()
    assert parts.steps_done == 4
    for name in ("policy", "critic"):
        expected, found = weights_of(getattr(whole, name).module), weights_of(getattr(parts, name).module)
        assert not differ(expected, found), name
    for a, b in zip(whole.critic.optimizer.state.values(), parts.critic.optimizer.state.values(), strict=True):
        assert torch.equal(a["exp_avg_sq"].to_local(), b["exp_avg_sq"].to_local())
    parts.critic.export(tmp_path / "critic")
    export_run(tmp_path / "parts", tmp_path / "by_command", critic=True)
    export_run(tmp_path / "parts", tmp_path / "policy")
    trained = weights_of(parts.critic.module.model)
    for folder in ("critic", "by_command"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["architectures"] == [
            "LlamaForSequenceClassification"
        ]
        stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / folder)
        assert not differ(dict(stock.named_parameters()), trained)
    again = Critic.build(load_config(**GAE, critic={"path": str(tmp_path / "critic")}), parts.world)
    assert not differ(weights_of(again.module.model), trained)
    assert "score.weight" not in load_file(tmp_path / "policy" / "model.safetensors")
    whole.close()
    parts.close()
    grpo = Trainer(tiny_run.make_run(tmp_path, run={"steps": 1, "dir": str(tmp_path / "grpo")}))
    grpo.train()
    grpo.close()
    with pytest.raises(UserError, match=r"grpo.*holds no critic: its run had algorithm.advantage = 'grpo'"):
        export_run(tmp_path / "grpo", tmp_path / "none", critic=True)
    later = Trainer(tiny_run.make_run(tmp_path, **GAE, run={"dir": str(tmp_path / "grpo")}))
    with pytest.raises(UserError, match=r"step_000001 holds no critic: .*another run.dir"):
        later.train()
    later.close()


def test_a_critic_is_not_lost_on_resume(tmp_path, monkeypatch):
    """Nor begun anew; both are told before the model loads. To evaluate, it is left where it is."""
    run = GAE | {"run": {"steps": 1}}
    Trainer(tiny_run.make_run(tmp_path, **run)).train()
    Trainer(tiny_run.make_run(tmp_path, run={"steps": 1, "dir": str(tmp_path / "grpo")})).train()
    other = Trainer(tiny_run.make_run(tmp_path, run={"steps": 2}))
    lost = r"step_000001 holds a critic, which this run would lose: go on with algorithm\.advantage = 'gae'; to go on w"
    with pytest.raises(UserError, match=lost):
        other.train()
    other.load_checkpoint(tmp_path / "run" / "checkpoints" / "step_000001", weights_only=True)
    assert other.steps_done == 1
    other.close()
    monkeypatch.setattr("lightrl.training.policy.Policy.load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match=lost):
        Trainer(tiny_run.make_run(tmp_path, run={"steps": 2}), claim=True)
    with pytest.raises(UserError, match=r"step_000001 holds no critic: it cannot be gone on from with one; export it"):
        Trainer(tiny_run.make_run(tmp_path, **GAE | {"run": {"steps": 2, "dir": str(tmp_path / "grpo")}}), claim=True)


def test_critic_leaves_the_gpu_with_the_policy(tmp_path):
    """Its parameters and moments go and come back, bit for bit, and the next step is that of a run where they stay."""
    outcomes = []
    for away in (False, True):
        trainer = Trainer(tiny_run.make_run(tmp_path, **GAE, run={"dir": str(tmp_path / f"run{away}")}))
        trainer.step(trainer.source.next(4))
        if away:
            modules = torch.nn.ModuleList([trainer.policy.module, trainer.critic.module])
            offloader = Offloader(modules, trainer.optimizer, trainer.critic.optimizer, on_cpu=True)
            state = TrainingState(offloader, "always")
            bytes_of_critic = sum(p.to_local().nbytes for p in trainer.critic.module.parameters())
            assert offloader.state_bytes() > 5.9 * bytes_of_critic  # weights and two moments, of two models
            state.make_room(0)
            assert all(p.to_local().untyped_storage().nbytes() == 0 for p in trainer.critic.module.parameters())
            state.come_back()
        trainer.step(trainer.source.next(4))
        outcomes.append(weights_of(trainer.critic.module) | weights_of(trainer.policy.module))
        trainer.close()
    assert not differ(*outcomes)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"critic": {"value_clip": 0.2}}, "critic.value_clip: only used with algorithm.advantage = 'gae'"),
        ({"critic_optim": {"lr": 0.1}}, "critic_optim.lr: only used with algorithm.advantage = 'gae'"),
        (GAE | {"critic_optim": {"schedule": "wsd"}}, "critic_optim.decay_steps: critic_optim.schedule = 'wsd' needs"),
        (GAE | {"critic_optim": {"warmup_steps": 101}}, "critic_optim.warmup_steps: .* exceed the run's 100 updates"),
    ],
)
def test_bad_combinations_are_told(sections, says):
    with pytest.raises(UserError, match=says):
        load_config(**sections)


def test_critics_that_cannot_be_are_told_before_a_model_is_loaded(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\npath = "org/name"\n[data]\npath = "org/data"\n[algorithm]\nadvantage = "gae"\n'
        '[critic]\npath = "./gone"\n'
    )
    with pytest.raises(UserError, match=r"run.toml:8: critic.path: no such folder: ./gone"):
        load_for_run([run], [])
    for folder, says in (
        (classifier(tmp_path / "two", labels=2), "critic.path: .* has 2 labels; a value head has one"),
        (tiny_run.make_model(tmp_path / "granite", family="granite"), "no sequence classifier of granite"),
        (tiny_run.make_model(tmp_path / "small", vocab_size=7), "critic.path: .* has 7 tokens, the policy 30"),
    ):
        with pytest.raises(UserError, match=says):
            Trainer(tiny_run.make_run(tmp_path, **GAE, critic={"path": str(folder)}))


def test_runs_that_teach_nothing_are_told(tmp_path, capsys):
    """A critic alone until the end; and an answer whose advantages are whitened by themselves."""
    alone = tiny_run.make_run(tmp_path, **GAE | {"critic": {"pretrain_steps": 4}, "run": {"steps": 4}})
    single = tiny_run.make_run(
        tmp_path, algorithm={"advantage": "reinforce_plus_plus", "whiten": "group"}, rollout={"group_size": 1}
    )
    for config, says in (
        (alone, "warning  critic.pretrain_steps = 4: all 4 steps of the run (run.steps) train the critic alone"),
        (single, "warning  rollout.group_size = 1 with algorithm.whiten = 'group': the advantages of an answer are"),
    ):
        Trainer(config).close()
        assert says in capsys.readouterr().out


def test_families_without_a_critic_are_named_in_the_docs():
    """The packed families of which transformers has no sequence classifier."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    from lightrl.models.registry import FAMILIES

    missing = {
        name.removesuffix("_text")
        for name in FAMILIES
        if CONFIG_MAPPING[name] not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    }
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    named = page.split("of the [packed ones](models.md#packed-families)")[1].split("have none")[0]
    assert set(named.replace(",", " ").split()) - {"and"} == missing
