"""What a trainer looks at before it trains, refuses and warns of; and what it ends when it cannot be made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny_run

from lightrl.distributed.mesh import close_world
from lightrl.errors import UserError
from lightrl.training.policy import Policy
from lightrl.training.trainer import Trainer


def test_what_was_made_is_ended_where_a_later_part_cannot_be_made(tmp_path, monkeypatch):
    from lightrl.training import engines, setup

    ended = []

    def build(*args, **kwargs):
        engine = built(*args, **kwargs)
        monkeypatch.setattr(engine, "close", lambda: ended.append("engine"), raising=False)
        return engine

    def fail(*_):
        raise RuntimeError("no")

    built = engines.build_engine
    monkeypatch.setattr(engines, "build_engine", build)
    monkeypatch.setattr(setup, "warnings", fail)
    monkeypatch.setattr("lightrl.rewards.Scorer.close", lambda _: ended.append("scorer"))
    with pytest.raises(RuntimeError, match="no"):
        Trainer(tiny_run.make_run(tmp_path))
    assert ended == ["engine", "scorer"]


def test_the_first_reason_is_told_not_what_fails_in_ending(tmp_path, monkeypatch):
    """On a rank that shares an engine with others, state that was away finds its GPU full."""
    from lightrl.distributed.offload import TrainingState
    from lightrl.training import setup

    def full(_):
        raise UserError("cuda:1: 9 GiB of training state do not fit back")

    monkeypatch.setattr(TrainingState, "close", full)
    trainer = Trainer(tiny_run.make_run(tmp_path))

    def run():
        try:
            raise KeyError("the reason")
        finally:
            trainer.close()

    with pytest.raises(KeyError, match="the reason") as error:
        run()
    assert error.value.__notes__ == ["(while that ended: UserError: cuda:1: 9 GiB of training state do not fit back)"]

    def fail(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(setup, "warnings", fail)
        with pytest.raises(RuntimeError, match=r"^no\n\(while that ended: "):
            Trainer(tiny_run.make_run(tmp_path))
    with pytest.raises(UserError, match="do not fit back"):  # there is no other
        Trainer(tiny_run.make_run(tmp_path)).close()


def test_what_cannot_work_fails_before_the_model_loads(trainer_for, tmp_path, monkeypatch):
    trainer_for()
    monkeypatch.setattr("lightrl.training.policy.Policy.load", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.dir: .*/file is not a folder"):
        trainer_for(run={"dir": str(tmp_path / "file" / "run")})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log\.trackers: wandb is not installed"):
        trainer_for(log={"trackers": ["wandb"]})
    with pytest.raises(UserError, match=r"rollout\.stop_token_ids: 99 is none of the model's \d+ tokens: correct"):
        trainer_for(rollout={"stop_token_ids": [3, 99]})
    tiny_run.make_model(tmp_path / "small", vocab_size=8)
    with pytest.raises(UserError, match=r"data\.jsonl:\d+: token \d+ \('.'\) is none of the model's 8: .*tokenizer"):
        trainer_for(model={"path": str(tmp_path / "small")})


def test_what_is_worth_a_look_is_said(trainer_for, tmp_path, capsys):
    trainer_for(rollout={"group_size": 1})
    assert "rollout.group_size = 1" in (said := capsys.readouterr().out)
    assert "drawn more than once" not in said
    trainer_for(rollout={"prompts_per_step": 13})
    assert "rollout.prompts_per_step = 13, but there are 12 prompts: they are drawn" in capsys.readouterr().out
    trainer_for(rollout={"filter": "nonzero_std", "oversample_prompts": 16})
    assert "rollout.oversample_prompts = 16, but there are 12 prompts" in capsys.readouterr().out
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = tmp_path / "model" / name
        content = json.loads(file.read_text())
        file.write_text(json.dumps({k: None if k.startswith("eos_token") else v for k, v in content.items()}))
    trainer_for(run={"dir": str(tmp_path / "other")})
    assert "neither model nor tokenizer names an end-of-sequence token" in capsys.readouterr().out
    trainer_for(run={"dir": str(tmp_path / "other")}, rollout={"stop": ["x"]})
    assert "end-of-sequence" not in capsys.readouterr().out


def test_settings_of_another_engine_are_told(trainer_for, capsys):
    trainer_for(run={"steps": 1}, engine={"memory_fraction": 0.7}, sync={"verify_every": 3}).train()
    said = " ".join(capsys.readouterr().out.split())
    assert "note not used by engine.kind = 'transformers': engine.memory_fraction, sync.verify_every " in said
    trainer_for(run={"steps": 2}).train()
    assert "not used" not in capsys.readouterr().out


def test_a_reference_without_the_policys_tokens_is_refused(tmp_path):
    other = tiny_run.make_model(tmp_path / "other", vocab_size=20)
    run = tiny_run.make_run(tmp_path, model={"reference_path": str(other)}, algorithm={"kl_coef": 0.1})
    with pytest.raises(UserError, match=r"model\.reference_path: .*other has 20 tokens, the policy 30"):
        Trainer(run)
    short = tiny_run.make_model(tmp_path / "short", max_position_embeddings=8)
    for changes in (
        {"model": {"reference_path": str(short)}, "algorithm": {"kl_coef": 0.1}},
        {"critic": {"path": str(short)}, "algorithm": {"advantage": "gae"}},
    ):
        with pytest.raises(
            UserError, match=r"short reads 8 tokens, and samples have up to \d+: lower rollout\.max_resp"
        ):
            Trainer(tiny_run.make_run(tmp_path, **changes))
    close_world()


def test_missing_keys_fail_before_anything_loads():
    from lightrl.config.schema import Config

    with pytest.raises(UserError, match=r"model\.path: .*; data\.path: "):
        Trainer(Config())
    with pytest.raises(UserError, match=r"takes a Config, not a str: Trainer\(load_config\('run.toml'\)\)"):
        Trainer("run.toml")
    with pytest.raises(UserError, match=r"not a dict: Trainer\(load_config\(\*\*\{…\}\)\)"):
        Trainer({"run": {"steps": 3}})


def test_a_missing_key_of_servers_is_told_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAKE_SGLANG_KEY", raising=False)
    monkeypatch.setattr(Policy, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    engine = {"kind": "sglang_server", "urls": ["http://127.0.0.1:9"], "api_key_env": "FAKE_SGLANG_KEY"}
    with pytest.raises(UserError, match=r"^engine\.api_key_env: the environment has no FAKE_SGLANG_KEY"):
        Trainer(tiny_run.make_run(tmp_path, engine=engine))
