"""A run's folder: gone on from, interrupted, claimed, of other settings than before."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from tiny_run import count_letter

from lightrl.distributed.mesh import close_world, init_world
from lightrl.errors import UserError
from lightrl.rewards import RewardFailure
from lightrl.training.run_folder import claim
from lightrl.training.trainer import Trainer


def test_settings_changed_on_resume_are_told_and_the_earlier_kept(trainer_for, tmp_path, capsys):
    trainer_for(run={"steps": 1}).train()
    first = (tmp_path / "run" / "config.toml").read_bytes()
    trainer_for(run={"steps": 1}, optim={"lr": 7e-3}).train()  # has nothing to do with it, and is not lost either
    capsys.readouterr()
    changed = {"optim": {"lr": 5e-3}, "rollout": {"top_k": 3}, "data": {"label_key": "label", "max_prompt_tokens": 50}}
    trainer_for(run={"steps": 2}, **changed).train()
    kept = tmp_path / "run" / "config_until_step_000001.toml"
    assert kept.read_bytes() == first
    assert "settings changed after step 1: " in (said := capsys.readouterr().out)
    for change in ("run.steps 1 -> 2", "data.max_prompt_tokens unset -> 50", "optim.lr 0.007 -> 0.005"):
        assert change in said
    assert "reward" not in said.partition("settings changed")[2].partition("; the earlier")[0]
    trainer_for(run={"steps": 2}, **changed).train()
    assert "settings changed" not in capsys.readouterr().out


def test_optimizer_settings_follow_the_config_on_resume(trainer_for):
    """A changed learning rate takes effect; the moments and the place in the schedule are the checkpoint's."""
    trainer_for(run={"steps": 2}, optim={"lr": 1e-3, "warmup_steps": 2}).train()
    resumed = trainer_for(run={"steps": 4}, optim={"lr": 5e-4, "weight_decay": 0.1, "warmup_steps": 2})
    assert resumed.train()["optim/lr"] == 5e-4
    assert [g["weight_decay"] for g in resumed.optimizer.param_groups] == [0.1, 0.0]
    assert {int(s["step"]) for s in resumed.optimizer.state.values()} == {4}


@pytest.mark.parametrize("updates", [1, 2])
def test_another_number_of_updates_on_resume_keeps_the_place_in_the_schedule(trainer_for, tmp_path, updates):
    """Two steps of the other number, then two of this: each begins at the rate that its step has in a linear decay."""
    shared = {"optim": {"lr": 1.0, "schedule": "linear"}, "run": {"steps": 4}}
    first = trainer_for(**shared, algorithm={"minibatches_per_step": 3 - updates})
    began = _rates_at_begin(first)
    first.train()
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_00000{step}")
    resumed = trainer_for(**shared, algorithm={"minibatches_per_step": updates})
    began_again = _rates_at_begin(resumed)
    resumed.train()
    assert began == [1.0, 0.75, 0.5, 0.25]
    assert began_again == [0.5, 0.25]
    assert resumed.schedule.get_last_lr() == [0.0, 0.0]


def _rates_at_begin(trainer) -> list[float]:
    rates, collect = [], trainer.collect

    def noting(*given):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return collect(*given)

    trainer.collect = noting
    return rates


def test_checkpoints_share_one_process_group(trainer_for, tmp_path, monkeypatch):
    """Each would keep threads and sockets for good."""
    trainer_for(run={"steps": 1}).train()
    trainer, made = trainer_for(run={"steps": 2}, parallel={"timeout": 77}), []
    new_group = torch.distributed.new_group
    monkeypatch.setattr(torch.distributed, "new_group", lambda *a, **k: made.append(k) or new_group(*a, **k))
    for _ in range(2):
        trainer.load_checkpoint(tmp_path / "run" / "checkpoints" / "step_000001")
    trainer.train()
    assert [options["timeout"].total_seconds() for options in made] == [77]


def test_another_number_of_prompts_on_resume_repeats_no_draws(trainer_for):
    """Group numbers, and with them the seeds of samples, go on where the checkpoint left off."""
    trainer_for(run={"steps": 2}).train()
    resumed = trainer_for(run={"steps": 3}, rollout={"prompts_per_step": 2}, log={"save_samples": False})
    seen = []
    resumed.scorer.score = _noting(resumed.scorer.score, seen)
    resumed.train()
    assert sorted(seen) == [8, 9]  # two steps of four came before
    assert resumed.groups_done == 10


def _noting(score, seen):
    async def noted(samples):
        seen.append(samples[0].group_index)
        await score(samples)

    return noted


def test_resume_false_refuses_a_used_folder(trainer_for):
    trainer_for(run={"steps": 1}).train()
    with pytest.raises(UserError, match=r"run\.dir: .*already holds a run"):
        trainer_for(run={"steps": 2, "resume": False}).train()


HOLD = """
import sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""
IN_USE = r"run\.dir: another run is training in .*run; wait for its end, or name another folder"


@pytest.fixture
def other_run(tmp_path):
    """Another process that has the run's folder."""
    (tmp_path / "run").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run" / ".lock")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_two_runs_do_not_share_a_folder(trainer_for, other_run):
    trainer = trainer_for(run={"steps": 1})
    with pytest.raises(UserError, match=IN_USE):
        trainer.train()
    assert [path.name for path in trainer.run_dir.iterdir()] == [".lock"]  # nothing of the other run was touched
    other_run.kill()
    other_run.wait()
    assert trainer.train()["rollout/samples"] == 16


def test_a_claimed_folder_is_refused_before_the_model_loads(tmp_path, other_run, monkeypatch):
    config = tiny_run.make_run(tmp_path, run={"steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr("lightrl.models.load.load_config_and_tokenizer", lambda *_: pytest.fail("loaded"))
        with pytest.raises(UserError, match=IN_USE):
            Trainer(config, claim=True)
    other_run.kill()
    other_run.wait()
    trainer = Trainer(config, reward=count_letter, claim=True)
    try:
        with pytest.raises(UserError, match=IN_USE):
            Trainer(config, claim=True)
        assert trainer.train()["rollout/samples"] == 16
    finally:
        trainer.close()
    with claim(tmp_path / "run", init_world("cpu"), print):
        close_world()


def test_a_checkpoint_of_other_data_is_refused_before_the_model_loads(trainer_for, tmp_path, monkeypatch):
    trainer_for(run={"steps": 1}).train()
    tiny_run.make_data(tmp_path / "data.jsonl", rows=9)
    monkeypatch.setattr("lightrl.training.policy.Policy.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"data\.path: the checkpoint was made with other rows \(12, now 9;"):
        Trainer(tiny_run.make_run(tmp_path), claim=True)


def test_no_rank_goes_on_without_the_folder(run_distributed, other_run, tmp_path):
    assert run_distributed(_claim_in_vain, 2, tmp_path / "run").count("refused") == 2
    other_run.kill()
    other_run.wait()


def _claim_in_vain(folder):
    with pytest.raises(UserError, match=IN_USE), claim(Path(folder), init_world("cpu"), print):
        pytest.fail("two runs in one folder")
    print("refused")
    close_world()


def test_a_file_system_without_locks_is_no_obstacle(trainer_for, monkeypatch, capsys):
    def acquire(*_, **__):
        raise OSError(errno.ENOLCK, "No locks available")

    trainer = trainer_for(run={"steps": 1})
    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    assert trainer.train()["rollout/samples"] == 16
    assert "cannot be locked" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("filelock.FileLock.acquire", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(UserError, match=r"run\.dir: cannot write in .*run \(no\); name another folder"):
        trainer.train()


def test_no_marker_file_stands_in_for_a_lock(tmp_path, monkeypatch):
    """As on Lustre without `-o flock`: a run that was killed on another node would be waited for without end."""

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    told = []
    (tmp_path / ".lock").write_text("4711\nanother-node\n")  # such a marker
    with claim(tmp_path, init_world("cpu"), told.append):
        close_world()
    assert "cannot be locked" in " ".join(told)


@pytest.mark.parametrize("resume", [True, False])
def test_training_again_goes_on_after_an_interruption(trainer_for, resume):
    """As in a notebook: a cell is run again, with the same trainer or another."""
    calls = []

    def reward(sample):
        calls.append(1)
        if 16 < len(calls) <= 32:
            raise RuntimeError("not now")
        return count_letter(sample)

    trainer = trainer_for(reward, run={"steps": 2, "resume": resume})
    with pytest.raises(RewardFailure):
        trainer.train()
    assert trainer.steps_done == 1
    assert trainer.train()["rollout/samples"] == 16
    assert trainer.train() == {}
    assert [s for s, _ in tiny_run.metrics_of(trainer.run_dir.parent, "reward/mean")] == [1, 2]
    again = trainer_for(run={"steps": 3})
    assert again.train()["rollout/samples"] == 16
    assert again.steps_done == 3


def test_a_step_that_is_made_deals_its_prompts_no_more(trainer_for, monkeypatch):
    """Interrupted in its report: gone on from, it neither repeats prompts nor their numbers."""
    trainer = trainer_for(run={"steps": 2}, log={"save_samples": True})
    place = trainer.config.rollout.prompts_per_step
    assert trainer.writer is not None
    monkeypatch.setattr(trainer.writer, "write", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (trainer.steps_done, trainer.groups_done) == (1, place)
    assert trainer.source.epoch * len(trainer.prompts) == pytest.approx(place)


def test_export_replaces_nothing_unasked(trainer_for, tmp_path):
    trainer, folder = trainer_for(), tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"mine is not empty"):
        trainer.export(str(folder))
    assert (folder / "thesis.txt").is_file()
    trainer.export(folder, replace=True)
    assert (folder / "config.json").is_file()
    assert not (folder / "thesis.txt").exists()


def test_a_checkpoint_is_evaluated_whatever_the_training_data_are_now(trainer_for, tmp_path):
    trained = trainer_for(run={"steps": 1})
    trained.train()
    folder = tmp_path / "run" / "checkpoints" / "step_000001"
    other = trainer_for(run={"seed": 5, "dir": str(tmp_path / "other")})
    with pytest.raises(UserError, match=r"run\.seed = 5, but the checkpoint was made with 0"):
        other.load_checkpoint(folder)
    other.load_checkpoint(folder, weights_only=True)
    assert (other.steps_done, other.policy_version) == (1, 1)
    pairs = zip(trained.policy.parameters(), other.policy.parameters(), strict=True)
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)


def test_a_run_that_is_done_says_so(trainer_for, capsys):
    trainer_for(run={"steps": 2}).train()
    capsys.readouterr()
    assert trainer_for(run={"steps": 1}).train() == {}
    assert "nothing to train: step 2 is done and run.steps = 1; raise it to go on" in capsys.readouterr().out


def test_an_interrupted_update_is_not_gone_on_from(trainer_for, monkeypatch):
    """Half the gradients of a step, or half its updates, would leak into the next one. Before them nothing is lost."""
    calls = []

    def reward(sample):
        calls.append(1)
        if len(calls) <= 16:
            raise RuntimeError("not yet")
        return count_letter(sample)

    trainer = trainer_for(reward)
    with pytest.raises(RewardFailure):
        trainer.step(trainer.source.next(4))
    assert trainer.step(trainer.source.next(4))["rollout/samples"] == 16  # the failure was before any update

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightrl.training.trainer.update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(trainer.source.next(4))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"a step was interrupted in its updates: make a new Trainer"):
        trainer.step(trainer.source.next(4))
