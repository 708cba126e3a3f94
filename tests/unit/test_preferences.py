"""`lightrl dpo` and `lightrl rm` in miniature: losses and gradients by hand, what they learn, what they write."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_pairs
import tiny_run
import tiny_sft
import torch
from safetensors.torch import load_file
from tiny_pairs import logprobs, rows_of
from tiny_sft import watched
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lightrl.algorithms.preferences import Logprobs, bradley_terry_loss, preference_loss
from lightrl.cli import main
from lightrl.distributed.mesh import close_world
from lightrl.errors import UserError
from lightrl.training.dpo import DPOTrainer
from lightrl.training.export_cli import export_run
from lightrl.training.reward_model import RewardModelTrainer
from lightrl.training.trainer import Trainer

KINDS = {"dpo": DPOTrainer, "rm": RewardModelTrainer}


@pytest.fixture
def trainer_for(tmp_path):
    """`trainer_for("dpo", **sections)`: a trainer on the miniature run; closed after the test."""
    made: list[Any] = []

    def build(command: str, **sections: Any) -> Any:
        made.append(KINDS[command](tiny_pairs.make_run(tmp_path, **sections)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


# ---- losses on numbers


def numbers(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_losses_by_hand() -> None:
    """One pair: answers of 4 and 2 tokens, log-probs -6 and -5, the reference's -8 and -4. So s = 2 and -1, d = 3; a
    token 0.5 and -0.5, d = 1."""
    chosen = Logprobs(policy=numbers(-6), reference=numbers(-8), lengths=numbers(4))
    rejected = Logprobs(policy=numbers(-5), reference=numbers(-4), lengths=numbers(2))

    def loss(kind: str, **options: float) -> float:
        return float(preference_loss(chosen, rejected, kind=kind, beta=0.5, **options).loss)

    win, lose = math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(1.5))  # -log sigmoid(±1.5)
    assert loss("sigmoid") == pytest.approx(win)
    assert loss("sigmoid", label_smoothing=0.1) == pytest.approx(0.9 * win + 0.1 * lose)
    assert loss("robust", label_smoothing=0.1) == pytest.approx((0.9 * win - 0.1 * lose) / 0.8)
    assert loss("sigmoid_norm") == pytest.approx(math.log(1 + math.exp(-0.5)))
    assert loss("ipo") == pytest.approx((1 - 1 / (2 * 0.5)) ** 2)
    assert float(preference_loss(chosen, rejected, kind="ipo", beta=0.25).loss) == pytest.approx((1 - 2) ** 2)
    alone = [Logprobs(policy=side.policy, reference=None, lengths=side.lengths) for side in (chosen, rejected)]
    found = preference_loss(*alone, kind="simpo", beta=2.0, margin=0.5)  # a token -1.5 and -2.5
    assert float(found.loss) == pytest.approx(math.log(1 + math.exp(-1.5)))
    assert (float(found.chosen), float(found.rejected)) == (-3.0, -5.0)
    found = preference_loss(chosen, rejected, kind="sigmoid", beta=0.5)
    assert (float(found.chosen), float(found.rejected)) == (1.0, -0.5)
    with pytest.raises(ValueError, match="simpo is without a reference"):
        preference_loss(chosen, rejected, kind="simpo", beta=1.0)


def test_gradients_by_hand() -> None:
    """DPO pushes the two log-probs apart by beta sigmoid(-beta d), a reward model its two rewards."""
    policy = numbers(-6, -5, grad=True)
    reference, lengths = numbers(-8, -4), numbers(4, 2)
    sides = [
        Logprobs(policy=policy[i : i + 1], reference=reference[i : i + 1], lengths=lengths[i : i + 1]) for i in (0, 1)
    ]
    preference_loss(*sides, kind="sigmoid", beta=0.5).loss.sum().backward()
    push = 0.5 / (1 + math.exp(1.5))
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, numbers(-push, push))
    rewards = numbers(1.0, 0.4, grad=True)
    loss = bradley_terry_loss(rewards[:1], rewards[1:], margin=0.1, center=0.01)
    assert float(loss.detach()) == pytest.approx(math.log(1 + math.exp(-0.5)) + 0.01 * 1.4**2)
    loss.sum().backward()
    push, pull = 1 / (1 + math.exp(0.5)), 0.01 * 2 * 1.4
    assert rewards.grad is not None
    torch.testing.assert_close(rewards.grad, numbers(pull - push, pull + push))


# ---- a step, against each conversation alone through the stock model


def dpo_by_hand(
    folder: Path, rows: list[dict[str, Any]], kind: str, options: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    """(loss, gradients), written out."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)
    beta, smooth = options.get("beta", 2.0 if kind == "simpo" else 0.1), options.get("label_smoothing", 0.0)
    losses, chosen_tokens = [], []
    for row in rows:
        mine = [logprobs(model, folder, row, side) for side in ("chosen", "rejected")]
        with torch.no_grad():
            theirs = [logprobs(reference, folder, row, side) for side in ("chosen", "rejected")]
        chosen_tokens.append(mine[0])
        if kind == "simpo":
            gap = beta * (mine[0].mean() - mine[1].mean()) - options["simpo_margin"]
        elif kind == "sigmoid_norm":
            gap = beta * ((mine[0] - theirs[0]).mean() - (mine[1] - theirs[1]).mean())
        elif kind == "ipo":
            gap = (mine[0] - theirs[0]).mean() - (mine[1] - theirs[1]).mean()
            losses.append((gap - 1 / (2 * beta)) ** 2)
            continue
        else:
            gap = beta * ((mine[0] - theirs[0]).sum() - (mine[1] - theirs[1]).sum())
        win, lose = -logsigmoid(gap), -logsigmoid(-gap)
        losses.append(
            ((1 - smooth) * win - smooth * lose) / (1 - 2 * smooth)
            if kind == "robust"
            else (1 - smooth) * win + smooth * lose
        )
    loss = torch.stack(losses).mean() - options.get("sft_coef", 0.0) * torch.cat(chosen_tokens).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("llama", "sigmoid", 16384, {}),
    ("llama", "sigmoid", 150, {"label_smoothing": 0.2, "sft_coef": 0.5, "precompute_reference": True}),
    ("llama", "ipo", 1, {"beta": 0.3}),
    ("qwen3", "simpo", 16384, {"simpo_margin": 0.7}),
    ("qwen3", "sigmoid_norm", 150, {"beta": 0.5, "precompute_reference": True}),
    ("gpt_neox", "robust", 150, {"label_smoothing": 0.1}),  # runs stock: no shared prompts
]


@pytest.mark.parametrize(("family", "kind", "max_tokens", "options"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_dpo_loss_and_gradients_are_those_by_hand(trainer_for, tmp_path, family, kind, max_tokens, options) -> None:
    """Packed, prompts shared, in one microbatch or many: as each conversation alone."""
    tiny_sft.make_model(tmp_path / "model", family=family)
    tiny_sft.make_model(tmp_path / "reference", family=family, seed=1)
    rows = rows_of(tiny_pairs.make_data(tmp_path / "data.jsonl", rows=7))
    path = {} if kind == "simpo" else {"reference_path": str(tmp_path / "reference")}
    trainer = trainer_for(
        "dpo",
        dpo={"batch_size": 7, "loss": kind, **path, **options},
        optim={"max_grad_norm": 0.0},
        parallel={"max_tokens_per_microbatch": max_tokens},
    )
    pairs = list(trainer.rows)
    batch = trainer.pack(pairs)
    assert len(batch) == {16384: 1, 1: 7}.get(max_tokens, len(batch))
    assert max_tokens != 150 or 1 < len(batch) < 7
    assert all((m.kv_index is not None) == (family != "gpt_neox") for m in batch)
    assert all([i for _, i in m.sample_keys] == [0, 1] * (len(m.sample_keys) // 2) for m in batch)
    seen = watched(trainer)
    metrics = trainer.step(pairs)
    loss, gradients = dpo_by_hand(tmp_path, rows, kind, options)
    assert metrics["loss/total"] == pytest.approx(loss, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(seen[0][name], gradient, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(("family", "max_tokens"), [("llama", 150), ("qwen3", 1), ("gemma", 16384)])
def test_reward_loss_and_gradients_are_those_by_hand(trainer_for, tmp_path, family: str, max_tokens: int) -> None:
    """With margins, centred; from a classifier, whose head is not 0. Gemma's classifier runs stock."""
    tiny_sft.make_model(tmp_path / "causal", family=family)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "causal")
    torch.manual_seed(3)
    start = AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(start.score.weight, std=0.1)
    start.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = rows_of(tiny_pairs.make_data(tmp_path / "data.jsonl", rows=7))
    margins = [0.1 * i for i in range(7)]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(r | {"margin": m}) + "\n" for r, m in zip(rows, margins, strict=True))
    )
    trainer = trainer_for(
        "rm",
        rm={"batch_size": 7, "margin_key": "margin", "center_coef": 0.1},
        optim={"max_grad_norm": 0.0},
        parallel={"max_tokens_per_microbatch": max_tokens},
    )
    trainer.policy = trainer.rewarder  # for `watched`
    seen = watched(trainer)
    metrics = trainer.step(list(trainer.rows))
    losses, right = [], []
    for row, margin in zip(rows, margins, strict=True):
        ids = [torch.tensor([tiny_pairs.encoded(tmp_path, row, side)[0]]) for side in ("chosen", "rejected")]
        chosen, rejected = (start(i).logits.squeeze() for i in ids)
        losses.append(-logsigmoid(chosen - rejected - margin) + 0.1 * (chosen + rejected) ** 2)
        right.append(float(chosen > rejected))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert metrics["loss/total"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["rewards/accuracies"] == pytest.approx(sum(right) / 7)
    for name, parameter in start.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(seen[0][name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


# ---- what they learn


def test_dpo_raises_the_margin(trainer_for, tmp_path) -> None:
    held_out = tiny_pairs.make_data(tmp_path / "held_out.jsonl", rows=4, seed=1)
    sets = [{"name": "again", "path": str(tmp_path / "data.jsonl")}, {"name": "held", "path": str(held_out)}]
    trainer = trainer_for(
        "dpo", run={"steps": 20}, dpo={"batch_size": 12}, optim={"lr": 3e-3}, eval={"every": 20, "sets": sets},
        checkpoint={"every": 0},
    )  # fmt: skip
    trainer.train()
    margins = [value for _, value in tiny_run.metrics_of(tmp_path, "rewards/margins")]
    losses = [value for _, value in tiny_run.metrics_of(tmp_path, "loss/total")]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # the policy is the reference
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[-1] > 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval/again/loss" in line]
    assert [line["step"] for line in evaluated] == [0, 20]
    assert [line["eval/held/pairs"] for line in evaluated] == [4, 4]
    assert evaluated[0]["eval/again/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert evaluated[1]["eval/again/accuracies"] == 1.0
    assert evaluated[1]["eval/again/loss"] < losses[-1]


def test_a_reward_model_learns_32_pairs_by_heart_and_is_used(trainer_for, tmp_path) -> None:
    """Then what is exported is loaded by transformers, as a critic, and as the reward of an RL run."""
    tiny_sft.make_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    rows = rows_of(tiny_pairs.make_data(tmp_path / "data.jsonl", rows=32))
    trainer = trainer_for(
        "rm",
        run={"steps": 50},
        rm={"batch_size": 32},
        optim={"lr": 5e-3, "schedule": "linear", "warmup_steps": 5},
        checkpoint={"every": 0},
    )
    trainer.train()
    right = [value for _, value in tiny_run.metrics_of(tmp_path, "rewards/accuracies")]
    assert right[0] == 0.0  # a new head gives every answer 0
    assert right[-1] == 1.0
    trainer.export(tmp_path / "exported")
    export_run(tmp_path / "run", tmp_path / "by_command")
    for name, tensor in load_file(tmp_path / "exported" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "by_command" / "model.safetensors")[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "by_command", dtype=torch.float32)
    assert stock.config.num_labels == 1
    batch = trainer.pack(list(trainer.rows))
    ours = torch.cat([trainer.rewarder(m).detach() for m in batch])
    keys = [key for m in batch for key in m.sample_keys]
    texts = [
        tokenizer.apply_chat_template(rows[n]["prompt"] + rows[n][("chosen", "rejected")[i]], tokenize=False)
        for n, i in keys
    ]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = stock(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.squeeze(-1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    used_as_critic_and_reward(tmp_path)


def used_as_critic_and_reward(folder: Path) -> None:
    from lightrl.rewards.model import RewardModel

    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": c}) + "\n" for c in "abcdef"))
    exported = str(folder / "exported")
    settings = tiny_run.settings(
        folder,
        run={"dir": str(folder / "rl"), "steps": 1},
        data={"path": str(folder / "prompts.jsonl"), "label_key": None, "apply_chat_template": True},
        reward={"type": "", "batched": True},
        algorithm={"advantage": "gae"},
        critic={"path": exported},
    )
    from lightrl.config.load import load_config

    del settings["data"]["label_key"]
    for wrong in ("nowhere", "model"):  # a causal LM has no head for it
        with pytest.raises(UserError, match=f"reward model .*{wrong}: not a sequence classifier of one label"):
            RewardModel(folder / wrong)
    reward = RewardModel(exported)
    rl = Trainer(load_config(**settings), reward=reward)
    metrics = rl.train()
    rl.close()
    assert metrics["rollout/samples"] == 16
    assert metrics.get("rollout/failed_share", 0.0) == 0.0
    assert metrics["reward/std"] > 0


# ---- the run


@pytest.mark.parametrize("command", ["dpo", "rm"])
def test_a_run_goes_on_where_it_was(trainer_for, tmp_path, command: str) -> None:
    """Two steps, then two more by another trainer: bit for bit the four of one; also with log-probs from beforehand."""
    more = {"dpo": {"epochs": 1.5, "precompute_reference": True}} if command == "dpo" else {"rm": {"center_coef": 0.1}}
    optim = {"schedule": "cosine", "warmup_steps": 1}
    whole, halves = (str(tmp_path / name) for name in ("whole", "halves"))
    trainer_for(command, run={"dir": whole}, optim=optim, checkpoint={"hf_every": 4}, **more).train()
    first = trainer_for(command, run={"dir": halves}, optim=optim, **more)
    step = first.step

    def limited(rows: Any) -> dict[str, float]:
        if first.steps_done == 2:
            raise KeyboardInterrupt
        return step(rows)

    first.step = limited
    with pytest.raises(KeyboardInterrupt):
        first.train()
    first.close()
    trainer_for(command, run={"dir": halves}, optim=optim, checkpoint={"hf_every": 4}, **more).train()
    a, b = (load_file(Path(d) / "hf" / "step_000004" / "model.safetensors") for d in (whole, halves))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def test_what_cannot_work_fails_before_the_model_loads(trainer_for, tmp_path, monkeypatch) -> None:
    tiny_pairs.make_run(tmp_path)
    monkeypatch.setattr("lightrl.training.policy.Policy.load", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setattr("lightrl.training.value_model.ValueModel.load", lambda *_, **__: pytest.fail("it was loaded"))
    tiny_sft.make_model(tmp_path / "small", vocab_size=9)
    tiny_sft.make_model(tmp_path / "short", max_position_embeddings=8)
    sets = [{"name": "x", "path": str(tmp_path / "data.jsonl"), "reward": "exact"}]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("dpo", {"dpo": {"loss": "ipo", "label_smoothing": 0.1}}, r"dpo\.label_smoothing: not used by dpo\.loss"),
        ("dpo", {"dpo": {"simpo_margin": 0.1}}, r"dpo\.simpo_margin: only used by dpo\.loss = 'simpo'"),
        ("dpo", {"dpo": {"loss": "simpo", "precompute_reference": True}}, r"dpo\.precompute_reference: .* has no ref"),
        ("dpo", {"dpo": {"reference_path": "./gone"}}, r"dpo\.reference_path: no such folder"),
        ("dpo", {"dpo": {"reference_path": str(tmp_path / "small")}}, r"dpo\.reference_path: .* has 9 tokens"),
        ("dpo", {"dpo": {"reference_path": str(tmp_path / "short")}}, r"short reads 8 tokens, .* lower dpo\.max"),
        ("dpo", {"data": {"input_key": "question"}}, r"data\.input_key: lightrl dpo reads pairs: set dpo\.prompt_key"),
        ("rm", {"rm": {"chosen_key": "rejected"}}, r"rm\.rejected_key: .* name three different fields"),
        ("rm", {"data": {"overlong": "truncate"}}, r"data\.overlong: lightrl rm compares whole answers"),
        ("rm", {"parallel": {"context_parallel": 2}}, r"parallel\.context_parallel: lightrl rm keeps"),
        ("rm", {"eval": {"sets": sets}}, r"eval\.sets\.0\.reward: lightrl rm measures the loss"),
        ("rm", {"checkpoint": {"keep_best": 1}}, r"checkpoint\.best_metric: .* name eval/SET/accuracies"),
        ("rm", {"rm": {"margin_key": "margin"}}, r"data\.jsonl:1: no field 'margin': set rm\.margin_key .* 11 more"),
    ]  # fmt: skip
    for command, sections, said in cases:
        with pytest.raises(UserError, match=said):
            trainer_for(command, **sections)


def test_a_config_error_is_told_by_file_and_line_without_torch(tmp_path, capsys) -> None:
    import subprocess
    import sys

    (tmp_path / "run.toml").write_text('[dpo]\nloss = "ipo"\nlabel_smoothing = 0.1\n')
    check = (
        "import sys\nfrom lightrl.cli import main\n"
        f"try:\n    main(['dpo', {str(tmp_path / 'run.toml')!r}, '--model.path', 'x/y', '--data.path', 'z'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "run.toml:3: dpo.label_smoothing: not used by dpo.loss = 'ipo'" in done.stderr


def run(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert not ended.value.code


def test_commands_run(tmp_path, capsys) -> None:
    tiny_pairs.make_run(tmp_path)
    flags = [
        "--run.dir", str(tmp_path / "run"), "--run.device", "cpu", "--model.path", str(tmp_path / "model"),
        "--data.path", str(tmp_path / "data.jsonl"), "--data.apply_chat_template", "true", "--log.trackers", "jsonl",
    ]  # fmt: skip
    run(["rm", *flags, "--rm.epochs", "1", "--rm.batch_size", "6"])
    said = capsys.readouterr().out
    assert "12 pairs from" in said
    assert "6 pairs; 2 steps, 1 epochs" in said
    run(["export", str(tmp_path / "out"), "--run", str(tmp_path / "run")])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
    run(["dpo", *flags, "--run.steps", "1", "--run.dir", str(tmp_path / "dpo"), "--sft.batch_size", "3"])
    said = capsys.readouterr().out
    assert "not used by lightrl dpo: [sft]" in said
    assert "sigmoid, beta 0.1; reference: the policy's start" in said
