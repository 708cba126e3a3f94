"""`lightrl sft` in miniature: its loss and gradients by hand, what it learns, its run folder, its mistakes."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import tiny_sft
import torch
from safetensors.torch import load_file, save_file
from tiny_sft import by_hand, rows_of, watched
from transformers import AutoModelForCausalLM

from lightrl.cli import main
from lightrl.config import load_config
from lightrl.distributed.mesh import close_world
from lightrl.errors import UserError
from lightrl.observe.report import write_report
from lightrl.training.export_cli import export_run
from lightrl.training.hooks import StepInfo
from lightrl.training.loop import Fruitless
from lightrl.training.sft import SFTTrainer
from lightrl.training.trainer import Trainer
from lightrl.wrappers import clean_name


@pytest.fixture
def trainer_for(tmp_path):
    """`trainer_for(**sections)`: a trainer on the miniature run; closed after the test."""
    made = []

    def build(**sections) -> SFTTrainer:
        made.append(SFTTrainer(tiny_sft.make_run(tmp_path, **sections)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


@pytest.mark.parametrize("max_tokens", [16384, 150, 1], ids=["packed", "several", "one_by_one"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_loss_and_gradients_are_those_by_hand(trainer_for, tmp_path, family: str, max_tokens: int) -> None:
    """Ragged conversations of one to three turns; a family of packed rows, one with norms, one that runs stock."""
    tiny_sft.make_model(tmp_path / "model", family=family)
    rows = rows_of(tiny_sft.make_data(tmp_path / "data.jsonl", rows=7))
    rows[1][1]["train"] = False  # a turn that is only context
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": r}) + "\n" for r in rows))
    trainer = trainer_for(
        sft={"batch_size": 7}, optim={"max_grad_norm": 0.0}, parallel={"max_tokens_per_microbatch": max_tokens}
    )
    batch = trainer.pack(list(trainer.conversations))
    assert len(batch) == {16384: 1, 1: 7}.get(max_tokens, len(batch))
    assert max_tokens != 150 or 1 < len(batch) < 7
    seen = watched(trainer)
    metrics = trainer.step(list(trainer.conversations))
    loss, gradients, trained = by_hand(tmp_path, rows)
    assert metrics["loss/total"] == pytest.approx(loss, abs=1e-6)
    assert metrics["sft/trained_tokens"] == trained
    assert seen[0].keys() >= gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(seen[0][name], gradient, atol=1e-6, rtol=0, msg=name)


def test_evaluation_is_the_mean_over_all_trained_tokens(trainer_for, tmp_path, capsys) -> None:
    held_out = tiny_sft.make_data(tmp_path / "held_out.jsonl", rows=5, seed=1)
    sets = [{"name": "a", "path": str(held_out)}, {"name": "b", "path": f"{held_out}@[:1]"}]
    trainer = trainer_for(eval={"sets": sets, "every": 2}, parallel={"max_tokens_per_microbatch": 90})
    rows = rows_of(held_out)
    before = {"a": by_hand(tmp_path, rows), "b": by_hand(tmp_path, rows[:1])}
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval/a/loss" in line]
    assert [line["step"] for line in evaluated] == [0, 2, 4]
    for name, (loss, _, trained) in before.items():
        assert evaluated[0][f"eval/{name}/loss"] == pytest.approx(loss, abs=1e-6)
        assert evaluated[0][f"eval/{name}/logprob"] == pytest.approx(-loss, abs=1e-6)
        assert evaluated[0][f"eval/{name}/trained_tokens"] == trained
    trainer.export(tmp_path / "exported")
    (tmp_path / "model").rename(tmp_path / "start")
    (tmp_path / "exported").rename(tmp_path / "model")
    assert evaluated[-1]["eval/a/loss"] == pytest.approx(by_hand(tmp_path, rows)[0], abs=1e-6)
    assert "eval  a  step 4  loss" in capsys.readouterr().out


def test_32_conversations_are_learnt_by_heart(trainer_for, tmp_path) -> None:
    """Each begins with two letters of its own, so that nothing in an answer is left to chance."""
    rng = random.Random(0)
    with (tmp_path / "data.jsonl").open("w") as file:
        for i in range(32):
            messages = tiny_sft.conversation(rng, 1 + i % 2)
            messages[0]["content"] = tiny_run.CHARACTERS[i % 8] + tiny_run.CHARACTERS[i // 8]
            file.write(json.dumps({"messages": messages}) + "\n")
    tiny_sft.make_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    trainer = trainer_for(
        run={"steps": 150}, sft={"batch_size": 32}, optim={"lr": 0.01, "schedule": "linear", "warmup_steps": 10},
        checkpoint={"every": 0},
    )  # fmt: skip
    trainer.train()
    losses = [loss for _, loss in tiny_run.metrics_of(tmp_path, "loss/total")]
    assert losses[0] > 3
    assert losses[-1] < 0.05


@pytest.mark.parametrize(("steps", "ends"), [(3, 3), (30, 10), (1, None)])
def test_a_run_that_learns_nothing_does_not_end_well(trainer_for, tmp_path, steps: int, ends: int | None) -> None:
    """Weights that hold NaN: every update is skipped, and no checkpoint is left. A single step is only warned of."""
    tiny_sft.make_model(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    trainer = trainer_for(run={"steps": steps}, checkpoint={"every": 0})
    if ends is None:
        trainer.train()
        return
    with pytest.raises(UserError, match=rf"^step {ends}: loss and gradients were not finite in {ends} steps in a row"):
        trainer.train()
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_fruitless_steps_are_counted_in_a_row() -> None:
    bad = {"loss/total": float("nan"), "optim/skipped_updates": 1.0}
    found = Fruitless(7)
    for step in range(8, 17):
        found.check(step, 100, bad)
    found.check(17, 100, {"loss/total": 0.5, "optim/skipped_updates": 0.0})
    found.check(18, 100, {"loss/total": 0.5, "optim/skipped_updates": 2.0})  # some of a step's updates
    found.check(19, 100, {})  # nothing was trained
    for step in range(20, 29):
        found.check(step, 28, bad)  # the end of a run that has learned before
    with pytest.raises(UserError, match=r"^step 29: .* in 10 steps"):
        found.check(29, 100, bad)


def test_epochs_deal_every_conversation_as_often(trainer_for, tmp_path, capsys) -> None:
    """12 conversations twice, by fives: four steps of 5 and one of 4."""
    trainer = trainer_for(sft={"epochs": 2.0, "batch_size": 5}, run={"steps": 1})
    assert trainer.total_steps == 5
    dealt: list[int] = []
    step = trainer.step

    def remembering(conversations):
        dealt.extend(c.index for c in conversations)
        return step(conversations)

    trainer.step = remembering
    trainer.train()
    assert sorted(dealt) == sorted(list(range(12)) * 2)
    sizes = [size for _, size in tiny_run.metrics_of(tmp_path, "sft/conversations")]
    assert sizes == [5, 5, 5, 5, 4]
    told = " ".join(capsys.readouterr().out.split())
    assert "note run.steps = 1 is not used: sft.epochs = 2 says how long the run is" in told
    assert tiny_run.metrics_of(tmp_path, "sft/epoch")[-1] == (5, 2.0)


def test_a_run_goes_on_where_it_was(trainer_for, tmp_path) -> None:
    """Two steps, then two more by another trainer: bit for bit the four of one; and by epochs, where 12 / 5 is no
    whole number of steps."""
    for name, more in (("steps", {}), ("epochs", {"epochs": 1.5, "batch_size": 5})):
        whole, parts = (str(tmp_path / f"{name}_{kind}") for kind in ("whole", "parts"))
        optim = {"schedule": "cosine", "warmup_steps": 1}
        trainer_for(run={"dir": whole}, sft=more, optim=optim, checkpoint={"hf_every": 4}).train()
        first = trainer_for(run={"dir": parts}, sft=more, optim=optim)
        total = first.total_steps
        assert total == 4
        with pytest.raises(KeyboardInterrupt):
            stop_after(first, 2).train()
        first.close()
        second = trainer_for(run={"dir": parts}, sft=more, optim=optim, checkpoint={"hf_every": 4})
        second.train()
        assert second.steps_done == second.total_steps == 4
        for a, b in zip(exported(whole).items(), exported(parts).items(), strict=True):
            assert a[0] == b[0]
            assert torch.equal(a[1], b[1]), a[0]


def stop_after(trainer: SFTTrainer, steps: int) -> SFTTrainer:
    step = trainer.step

    def limited(conversations):
        if trainer.steps_done == steps:
            raise KeyboardInterrupt
        return step(conversations)

    trainer.step = limited
    return trainer


def exported(run_dir: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(run_dir) / "hf" / "step_000004" / "model.safetensors")


def test_an_interrupted_update_is_not_gone_on_from(trainer_for, monkeypatch) -> None:
    trainer = trainer_for()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightrl.training.offline.optimizer_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.source.num_dealt == 0
    monkeypatch.undo()
    with pytest.raises(UserError, match="a step was interrupted in its update: make a new SFTTrainer"):
        trainer.train()


def test_its_checkpoints_are_exported_and_evaluated_like_others(trainer_for, tmp_path) -> None:
    """`lightrl export`, and `lightrl eval --checkpoint` by the config of an RL run of the same model."""
    trainer = trainer_for(run={"steps": 2})
    trainer.train()
    checkpoint = export_run(tmp_path / "run", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, parameter in trainer.policy.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), model.get_parameter(clean_name(name))), name
    tiny_run.make_data(tmp_path / "prompts.jsonl")
    sections = {"run": {"dir": str(tmp_path / "rl")}, "data": {"path": str(tmp_path / "prompts.jsonl")}}
    other = Trainer(tiny_run.make_run(tmp_path, **sections))
    other.load_checkpoint(checkpoint, weights_only=True)
    for a, b in zip(trainer.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    other.close()


def test_what_cannot_work_fails_before_the_model_loads(trainer_for, tmp_path, monkeypatch) -> None:
    trainer_for()
    monkeypatch.setattr("lightrl.training.policy.Policy.load", lambda *_, **__: pytest.fail("the model was loaded"))
    sets = [{"name": "x", "path": str(tmp_path / "data.jsonl"), "gate": 0.5}]
    for sections, said in (
        ({"data": {"max_prompt_tokens": 9}}, r"data\.max_prompt_tokens: .* set sft\.max_tokens"),
        ({"data": {"chat_template_kwargs": {"add_generation_prompt": True}}}, r"data\.chat_template_kwargs: .*remove"),
        ({"eval": {"sets": sets}}, r"eval\.sets\.0\.gate: lightrl sft measures the loss .* remove gate"),
        ({"checkpoint": {"keep_best": 1}}, r"checkpoint\.best_metric: .* name eval/SET/logprob"),
        (
            {"sft": {"epochs": 1.0, "batch_size": 12}, "optim": {"warmup_steps": 2}},
            r"optim\.warmup_steps: .* 1 updates",
        ),
        ({"data": {"input_key": "input"}}, r"data\.jsonl:1: no field 'input'.*11 more bad rows"),
    ):
        with pytest.raises(UserError, match=said):
            trainer_for(**sections)
    tiny_run.make_model(tmp_path / "small", vocab_size=8)
    (tmp_path / "small" / "tokenizer.json").write_bytes((tmp_path / "model" / "tokenizer.json").read_bytes())
    (tmp_path / "small" / "chat_template.jinja").write_text(tiny_sft.CHATML)
    with pytest.raises(UserError, match=r"data\.jsonl:\d+: token \d+ \('.*'\) is none of the model's 8: "):
        trainer_for(model={"path": str(tmp_path / "small")})


def test_a_checkpoint_of_other_data_is_not_gone_on_from(trainer_for, tmp_path) -> None:
    trainer_for(run={"steps": 1}).train()
    with pytest.raises(UserError, match=r"data\.path: the checkpoint was made with other rows \(12, now 9;"):
        trainer_for(data={"path": str(tmp_path / "data.jsonl@[:9]")}).train()
    with pytest.raises(UserError, match=r"run\.dir: .* already holds a run"):
        trainer_for(run={"resume": False}).train()


def test_its_report_shows_the_loss(trainer_for, tmp_path) -> None:
    sets = [{"name": "held", "path": str(tmp_path / "data.jsonl")}]
    trainer_for(run={"steps": 2}, eval={"every": 1, "sets": sets}).train()
    page, curve = write_report(tmp_path / "run")
    assert curve.name == "loss.png"
    shown = page.read_text()
    assert "<h3>Loss of held-out sets" in shown
    assert "held/loss" in shown
    assert "<h3>Reward" not in shown


def test_sections_of_rl_are_told(trainer_for, capsys) -> None:
    """One file may serve both."""
    of_rl: dict[str, Any] = {"rollout": {"group_size": 4}, "reward": {"type": "math"}, "dump": {"rollouts": True}}
    keys: dict[str, Any] = {"log": {"timeline_steps": [1, 1]}, "parallel": {"offload": "never"}}
    trainer_for(**of_rl, **keys, run={"steps": 1}).train()
    said = " ".join(capsys.readouterr().out.split())
    unused = "[reward], [rollout], [dump], parallel.offload, log.timeline_steps"
    assert f"note not used by lightrl sft: {unused} " in said


def noted(info: StepInfo) -> dict[str, float]:
    """An `on_step` hook."""
    assert not info.groups
    return {"mine/loss": info.metrics["loss/total"], "mine/step": info.step}


def test_hooks_and_the_profiler_look_at_its_steps(trainer_for, tmp_path) -> None:
    trainer = trainer_for(run={"on_step": "test_sft:noted", "steps": 3}, log={"profile_steps": [2, 9]})
    trainer.train()
    found = tiny_run.metrics_of(tmp_path, "mine/loss", "loss/total", "mine/step")
    assert [(step, mine == loss, told) for step, mine, loss, told in found] == [(n, True, n) for n in (1, 2, 3)]
    trainer.close()  # the window is not over
    (file,) = (tmp_path / "run" / "profile").iterdir()
    assert file.name == "steps_000002-end.rank0.json.gz"
    assert "aten::mm" in {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    given = SFTTrainer(tiny_sft.make_run(tmp_path, run={"steps": 4}), on_step=lambda info: {"mine/given": 7.0})
    assert given.train()["mine/given"] == 7.0
    given.close()
    with pytest.raises(UserError, match=r"run\.on_step: .*async def"):
        trainer_for(run={"on_step": "test_sft:awaited"})


async def awaited(info: StepInfo) -> None:
    """Which nobody would await."""


def test_an_update_larger_than_the_data_is_told(trainer_for, tmp_path, capsys) -> None:
    trainer_for(sft={"batch_size": 13}, run={"steps": 1}).train()
    assert "warning  sft.batch_size = 13 in this run, but there are 12 conversations" in capsys.readouterr().out
    trainer_for(sft={"batch_size": 13, "epochs": 1}, run={"dir": str(tmp_path / "other")}).train()
    assert "sft.batch_size" not in capsys.readouterr().out


def test_the_shipped_recipe_runs(tmp_path, monkeypatch) -> None:
    """In a folder that has a miniature model and sums in the places that `lightrl fetch` fills."""
    from lightrl.data.tasks import write_arithmetic

    recipe = Path(__file__).parents[2] / "configs" / "sft_arithmetic.toml"
    monkeypatch.chdir(tmp_path)
    tiny_sft.make_model(tmp_path / "models" / "SmolLM2-135M-Instruct")
    write_arithmetic(tmp_path / "data" / "arithmetic")
    changes = {"run": {"device": "cpu"}, "model": {"compute_dtype": "float32"}, "optim": {"lr": 1e-2}}
    trainer = SFTTrainer(load_config(recipe, **changes))
    assert (trainer.total_steps, len(trainer.eval_sets["held_out"])) == (30, 40)
    metrics = trainer.train()
    assert metrics["eval/held_out/loss"] < 1.5  # 3.5 at first: ten digits, a sign and the end are left
    assert trainer.conversations[0].loss_mask[-2:] == [1, 1]
    trainer.close()
    close_world()


# ---- the command


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A folder with model, data and `run.toml`."""
    from lightrl.config import dump_toml

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(dump_toml(tiny_sft.make_run(tmp_path)))
    yield tmp_path
    close_world()


def test_the_command_trains_resumes_and_says_when_it_is_done(files, capsys) -> None:
    assert run("sft", "run.toml", "--run.steps", "2") == 0
    assert "Next: lightrl export OUT --run" in capsys.readouterr().out
    assert run("sft", "run.toml", "--run.steps", "3") == 0
    assert "resumed at step 2 from" in capsys.readouterr().out
    assert run("sft", "run.toml", "--run.steps", "3") == 0
    assert "nothing to train: step 3 is done and run.steps = 3" in capsys.readouterr().out
    assert run("sft", "run.toml", "--sft.epochs", "1") == 0  # 3 of 3 steps
    assert "nothing to train: step 3 is done; raise sft.epochs" in capsys.readouterr().out
    assert [step for step, _ in tiny_run.metrics_of(files, "loss/total")] == [1, 2, 3]


def test_mistakes_have_file_and_line_and_need_no_torch(files) -> None:
    (files / "bad.toml").write_text(
        '[model]\npath = "model"\n[data]\npath = "data.jsonl"\nmax_prompt_tokens = 5\n[sft]\nbatchsize = 3\n'
        'epochs = 0.0\n[[eval.sets]]\nname = "x"\npath = "data.jsonl"\ngate = 0.1\n'
    )
    (files / "worse.toml").write_text((files / "bad.toml").read_text().replace("size", "_size").replace("0.0", "1.0"))
    script = (
        "import sys; from lightrl.cli import main\n"
        "for name in ('bad.toml', 'worse.toml'):\n"
        "    try: main(['sft', name])\n"
        "    except SystemExit as end: print(end.code)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "2", "False"]
    assert done.stderr.splitlines() == [
        "error: bad.toml:7: sft.batchsize: unknown key; did you mean sft.batch_size?",
        "error: bad.toml:8: sft.epochs: must be > 0, got 0.0",
        "error: worse.toml:5: data.max_prompt_tokens: lightrl sft limits whole conversations: set sft.max_tokens",
        "error: worse.toml:12: eval.sets[0].gate: lightrl sft measures the loss on a set and samples nothing: remove "
        "gate",
    ]


def test_a_late_mistake_names_the_line_of_its_key(files, capsys) -> None:
    (files / "late.toml").write_text('[sft]\nend_of_turn = "ab"\n')
    assert run("sft", "run.toml", "late.toml") == 2
    assert "error: late.toml:2: sft.end_of_turn: 'ab' is 2 tokens" in capsys.readouterr().err
