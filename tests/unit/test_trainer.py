"""A whole step and a whole run in miniature, in one process (cases L1, L3, L4, M3, R4)."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tiny_run
import torch
from tiny_run import count_letter
from transformers import AutoModelForCausalLM

from lightrl.distributed.mesh import close_world, init_world
from lightrl.errors import UserError
from lightrl.observe.metrics import Tally
from lightrl.rewards import RewardFailure
from lightrl.rollout.collect import run_async
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training.advantage import set_advantages
from lightrl.training.policy import Policy
from lightrl.training.setup import claim
from lightrl.training.trainer import Trainer
from lightrl.training.update import update
from lightrl.types import Status


@pytest.fixture
def trainer_for(tmp_path):
    """`trainer_for(reward=…, **sections)`: a trainer on the miniature run; closed after the test."""
    made = []

    def build(reward=None, **sections) -> Trainer:
        made.append(Trainer(tiny_run.make_run(tmp_path, **sections), reward=reward))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


def collected(trainer: Trainer):
    sync_weights(trainer.policy, trainer.engine, trainer.policy_version)
    groups = trainer.collect(trainer.source.next(trainer.config.rollout.prompts_per_step))
    release_engine(trainer.policy, trainer.engine)
    set_advantages(groups, trainer.advantages)
    return groups


def test_l1_first_update_is_exactly_on_policy(trainer_for):
    """Old log-probs come from a pass without gradients; the first update's ratio is 1 to the last bit."""
    trainer = trainer_for(
        algorithm={"minibatches_per_step": 2, "skip_zero_advantage": False}, parallel={"max_tokens_per_microbatch": 30}
    )
    batch = trainer.pack(collected(trainer))
    assert len(batch) == 2
    assert len(batch[0]) > 1  # several microbatches
    trainer.add_logprobs(batch, Tally())
    for microbatch in (m for minibatch in batch for m in minibatch):
        assert torch.equal(trainer.policy(microbatch, 1.0)[0].detach(), microbatch.old_logprobs)
    tally = Tally()
    update(
        trainer.policy, trainer.optimizer, trainer.schedule, batch[0], trainer.objective,
        temperature=1.0, max_grad_norm=1.0, tally=tally,
    )  # fmt: skip
    metrics = tally.result()
    assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0
    assert metrics["policy/clip_fraction"] == 0.0
    tally = Tally()
    update(
        trainer.policy, trainer.optimizer, trainer.schedule, batch[1], trainer.objective,
        temperature=1.0, max_grad_norm=1.0, tally=tally,
    )  # fmt: skip
    assert tally.result()["policy/ratio_max"] != 1.0  # the second is off-policy: the test can fail


def test_a_reference_that_runs_stock_sees_whole_samples(trainer_for, tmp_path):
    """Beside a policy that could share prompts: the reference would take an answer for a sample without a prompt."""
    other = tiny_run.make_model(tmp_path / "other", family="granite", seed=1)
    trainer = trainer_for(
        model={"reference_path": str(other)}, algorithm={"kl_coef": 0.1, "skip_zero_advantage": False}
    )
    assert (trainer.policy.module.packed, trainer.reference.module.packed) == (True, False)
    groups = collected(trainer)
    batch = trainer.pack(groups)
    trainer.add_logprobs(batch, Tally())
    samples = {(s.group_index, s.index): s for g in groups for s in g.samples}
    stock = AutoModelForCausalLM.from_pretrained(other).eval()
    for microbatch in (m for minibatch in batch for m in minibatch):
        for number, key in enumerate(microbatch.sample_keys):
            tokens, length = torch.tensor(samples[key].tokens), samples[key].prompt_length
            with torch.no_grad():
                logprobs = stock(tokens[None]).logits[0, length - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(-1, tokens[length:, None])[:, 0]
            torch.testing.assert_close(microbatch.ref_logprobs[microbatch.sample_ids == number], expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_l3_trainer_and_engine_agree(trainer_for, temperature):
    trainer = trainer_for(rollout={"temperature": temperature, "group_size": 6}, algorithm={"minibatches_per_step": 2})
    metrics = trainer.step(trainer.source.next(4))
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-4
    assert metrics["mismatch/logprob_abs_diff"] > 0  # really two computations


def test_l4_nothing_drifts_without_learning(trainer_for):
    trainer = trainer_for(optim={"lr": 0.0}, run={"steps": 20}, log={"save_samples": False})
    start = {n: t.clone() for n, t in trainer.policy.lend()}
    trainer.policy.reclaim()
    differences = []
    for _ in range(20):
        differences.append(trainer.step(trainer.source.next(4))["mismatch/logprob_abs_diff"])
        for name, tensor in trainer.policy.lend():
            assert torch.equal(tensor, start[name]), name
        trainer.policy.reclaim()
    assert max(differences) < 1e-6


def test_engine_borrows_the_policy_weights(trainer_for):
    """In one process the engine holds no copy: its parameters are the policy's whole tensors, freed afterwards."""
    trainer = trainer_for()
    sync_weights(trainer.policy, trainer.engine, 0)
    lent = {n: t.data_ptr() for n, t in trainer.policy.lend()}
    hosted = {n: t.data_ptr() for n, t in trainer.engine._model.module.named_parameters()}
    assert hosted
    assert all(lent[name] == pointer for name, pointer in hosted.items())
    release_engine(trainer.policy, trainer.engine)
    assert all(p.is_meta for p in trainer.engine._model.module.parameters())


def test_trainer_state_is_16_bytes_a_parameter(trainer_for):
    """float32 master, gradient and two moments: 16 bytes; nothing else of the model's size stays."""
    trainer = trainer_for()
    trainer.step(trainer.source.next(4))
    parameters = trainer.policy.parameters()
    count = sum(p.numel() for p in parameters)
    masters = sum(p.to_local().nbytes for p in parameters)
    moments = sum(
        t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes
        for state in trainer.optimizer.state.values()
        for t in state.values()
        if t.numel() > 1
    )
    assert masters == 4 * count
    assert moments == 8 * count
    assert all(p.grad is None for p in parameters)  # the fourth 4 bytes are free while the engine borrows weights


def test_reward_rises(trainer_for):
    trainer = trainer_for(
        run={"steps": 25}, optim={"lr": 3e-3}, rollout={"group_size": 8}, checkpoint={"every": 0, "async_save": False}
    )
    trainer.train()
    rewards = [r for _, r in tiny_run.metrics_of(trainer.run_dir.parent, "reward/mean")]
    assert len(rewards) == 25
    assert sum(rewards[-5:]) > 3 * sum(rewards[:5])


def test_kl_keeps_the_policy_near_its_reference(trainer_for):
    """With a large weight on the KL the policy stays; without, it moves. Both ends measured against the same start."""
    sections = {"optim": {"lr": 3e-3}, "rollout": {"group_size": 8}}
    trainer = trainer_for(algorithm={"kl_coef": 5.0}, **sections)
    assert trainer.reference is not None
    held = [trainer.step(trainer.source.next(4)) for _ in range(8)]
    assert held[0]["loss/kl"] == 0.0
    free = trainer_for(algorithm={"kl_coef": 1e-9}, **sections)
    moved = [free.step(free.source.next(4)) for _ in range(8)]
    assert 0 < held[-1]["loss/kl"] < moved[-1]["loss/kl"] / 2


def test_kl_in_reward_is_taken_off_before_advantages(trainer_for):
    from lightrl.algorithms.advantages import GroupRewards, grpo
    from lightrl.training.advantage import penalize_with_kl

    trainer = trainer_for(algorithm={"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"})
    groups = collected(trainer)
    batch = trainer.pack(groups)
    trainer.add_logprobs(batch, Tally())
    for microbatch in batch[0]:  # a reference that is 0.1 nats surer of every token
        microbatch.ref_logprobs = microbatch.old_logprobs + 0.1
    penalize_with_kl(groups, batch, trainer.advantages, trainer.world)
    for group in groups:
        shaped = torch.tensor([s.reward - 0.5 * (-0.1 * s.response_length) for s in group.samples])
        expected = grpo(GroupRewards(rewards=shaped)).tolist()
        assert [s.advantage for s in group.samples] == pytest.approx(expected, abs=2e-3)
    for microbatch in batch[0]:
        by_key = {(s.group_index, s.index): s.advantage for g in groups for s in g.samples}
        expected = [by_key[microbatch.sample_keys[i]] for i in microbatch.sample_ids.tolist()]
        assert microbatch.advantages.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("policy", ["keep", "mask", "zero_reward"])
def test_m3_truncated_answers(trainer_for, policy):
    """Cut by length: TRUNCATED, no EOS invented; kept, masked, or given no reward, as configured."""
    trainer = trainer_for(
        reward=lambda sample: 1.0 + sample.index,
        rollout={"truncated": policy, "max_response_tokens": 3, "group_size": 8},
        algorithm={"skip_zero_advantage": False},
    )
    groups = collected(trainer)
    cut = [s for g in groups for s in g.samples if s.status is Status.TRUNCATED]
    ended = [s for g in groups for s in g.samples if s.status is Status.COMPLETED]
    assert cut
    assert ended
    assert all(s.response_length == 3 and s.tokens[-1] != 2 for s in cut)
    assert all(s.tokens[-1] == 2 for s in ended)  # M2: the EOS the model sampled is part of the response
    weights = {
        m.sample_keys[i]: w
        for minibatch in trainer.pack(groups)
        for m in minibatch
        for i, w in zip(m.sample_ids.tolist(), m.loss_weights.tolist(), strict=True)
    }
    for sample in cut:
        weight = weights.get((sample.group_index, sample.index))  # none: without a loss token it is not computed
        assert weight is None if policy == "mask" else weight > 0
        assert sample.reward == (0.0 if policy == "zero_reward" else 1.0 + sample.index)
    assert all(weights[s.group_index, s.index] > 0 for s in ended)


def test_m2_pad_equal_to_eos_keeps_the_eos_in_the_loss(trainer_for, tmp_path):
    tiny_run.make_run(tmp_path)
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<eos>"}))
    trainer = trainer_for(rollout={"max_response_tokens": 30}, algorithm={"skip_zero_advantage": False})
    assert trainer.tokenizer.pad_token_id == trainer.tokenizer.eos_token_id == 2
    groups = collected(trainer)
    ended = {(s.group_index, s.index) for g in groups for s in g.samples if s.status is Status.COMPLETED}
    assert ended
    for microbatch in (m for minibatch in trainer.pack(groups) for m in minibatch):
        last = [(microbatch.sample_keys[i], t, w) for i, t, w in zip(
            microbatch.sample_ids.tolist(), microbatch.targets.tolist(), microbatch.loss_weights.tolist(), strict=True
        ) if t == 2]  # fmt: skip
        assert all(weight > 0 for _, _, weight in last)
        ended -= {key for key, _, _ in last}
    assert not ended


def test_r4_failing_rewards_stop_the_run_with_the_first_reason(trainer_for):
    def reward(sample):
        if sample.index == 0:
            raise ZeroDivisionError("the grader broke")
        return float(sample.index)

    trainer = trainer_for(reward=reward)
    with pytest.raises(RewardFailure, match=r"(?m)4 of 16 samples.*ZeroDivisionError: the grader broke$") as caught:
        trainer.step(trainer.source.next(4))
    (note,) = caught.value.__notes__
    assert "event loop" not in note  # told as it was raised, not as the consequence of something of ours


def test_r4_within_the_rate_the_rest_of_the_group_goes_on(tmp_path):
    def reward(sample):
        return float("nan") if sample.index == 0 and sample.group_index == 1 else float(sample.index)

    trainer = Trainer(tiny_run.make_run(tmp_path, algorithm={"skip_zero_advantage": False}), reward=reward)
    try:
        groups = collected(trainer)
        failed = groups[1].samples[0]
        assert failed.status is Status.FAILED
        assert failed.advantage is None
        assert sum(s.advantage for s in groups[1].scored) == pytest.approx(0.0, abs=1e-6)
        trained = {k for minibatch in trainer.pack(groups) for m in minibatch for k in m.sample_keys}
        assert (1, 0) not in trained
        assert len(trained) == 15
    finally:
        trainer.close()
        close_world()


def test_a_run_that_cannot_learn_says_so_once(tmp_path, capsys):
    def reward(sample):
        return 1 / sample.index - 1 / sample.index  # fails for the first of each group

    config = tiny_run.make_run(tmp_path, run={"steps": 2}, reward={"max_failure_rate": 0.25})
    trainer = Trainer(config, reward=reward)
    trainer.train()
    trainer.close()
    close_world()
    said = capsys.readouterr().out
    assert said.count("step 1: every answer got reward 0, so nothing is learned from rewards") == 1
    assert said.count("step 1: 4 of 16 samples failed and were left out") == 1
    assert said.count("warning") == 2


def test_works_inside_a_running_event_loop(trainer_for):
    """As in a notebook."""
    trainer = trainer_for()

    async def cell() -> dict[str, float]:
        return trainer.step(trainer.source.next(4))

    assert asyncio.run(cell())["rollout/samples"] == 16


def test_evaluation_is_repeatable_and_counts_all_prompts(trainer_for, tmp_path):
    sets = [{"name": "few", "path": str(tmp_path / "data.jsonl@[0:5]"), "samples_per_prompt": 2, "temperature": 1.0}]
    trainer = trainer_for(eval={"sets": sets})
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first["eval/few/prompts"] == 5
    assert 0 <= first["eval/few/avg@2"] <= 1
    assert {k: v for k, v in first.items() if k != "time/evaluate"} == {
        k: v for k, v in again.items() if k != "time/evaluate"
    }


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


def test_updates_that_are_left_out_count_in_the_schedule(trainer_for):
    """Every answer masked out: nothing to learn from, but the decay ends where it should."""
    trainer = trainer_for(
        run={"steps": 2},
        optim={"schedule": "linear", "lr": 1.0},
        algorithm={"minibatches_per_step": 2},
        rollout={"truncated": "mask"},
    )
    collect = trainer.collect

    def cut(*given):
        groups = collect(*given)
        for sample in (s for g in groups for s in g.samples):
            sample.loss_mask = [0] * sample.response_length
        return groups

    trainer.collect = cut
    trainer.step(trainer.source.next(4))
    assert trainer.schedule.get_last_lr() == [0.5, 0.5]
    assert not trainer.optimizer.state


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


def test_what_was_made_is_ended_where_a_later_part_cannot_be_made(tmp_path, monkeypatch):
    from lightrl.training import setup

    ended = []

    def build(*args, **kwargs):
        engine = built(*args, **kwargs)
        monkeypatch.setattr(engine, "close", lambda: ended.append("engine"), raising=False)
        return engine

    def fail(*_):
        raise RuntimeError("no")

    built = setup.build_engine
    monkeypatch.setattr(setup, "build_engine", build)
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


def test_an_evaluation_set_has_a_rule_of_its_own(tmp_path):
    """`reward.batched` and `reward.key` belong to the training reward; workers are shared."""

    def reward(samples):
        return [{"mine": 1.0} for _ in samples]

    sets = [{"name": name, "path": str(tmp_path / "data.jsonl@[:2]"), **more} for name, more in (
        ("same", {}), ("exact", {"reward": "exact"}), ("random", {"reward": "random"}),
    )]  # fmt: skip
    config = tiny_run.make_run(tmp_path, reward={"batched": True, "key": "mine"}, eval={"sets": sets})
    trainer = Trainer(config, reward=reward)
    metrics = trainer.evaluate()
    assert [metrics[f"eval/{name}/failed_share"] for name in ("same", "exact", "random")] == [0, 0, 0]
    assert [metrics[f"eval/{name}/avg@1"] for name in ("same", "exact")] == [1, 0]
    assert all(s.scorer._pool is trainer.scorer._pool for s in trainer.eval_sets)
    trainer.close()
    close_world()


def test_what_cannot_work_fails_before_the_model_loads(trainer_for, tmp_path, monkeypatch):
    trainer_for()
    monkeypatch.setattr("lightrl.training.policy.Policy.load", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.dir: .*/file is not a folder"):
        trainer_for(run={"dir": str(tmp_path / "file" / "run")})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log\.trackers: wandb is not installed"):
        trainer_for(log={"trackers": ["wandb"]})
    tiny_run.make_model(tmp_path / "small", vocab_size=8)
    with pytest.raises(UserError, match=r"data\.jsonl:\d+: token \d+ \('.'\) is none of the model's 8: .*tokenizer"):
        trainer_for(model={"path": str(tmp_path / "small")})


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


def test_an_interrupted_cell_stops_the_work():
    """Ctrl-C while a notebook waits: the work ends with it, and the next cell can start."""
    ended = []

    async def work() -> None:
        try:
            threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def cell() -> None:
        run_async(work())

    loop = asyncio.new_event_loop()  # as ipykernel's, not asyncio.run: SIGINT raises in the main thread
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    assert ended == [True]


def test_a_reference_without_the_policys_tokens_is_refused(tmp_path):
    other = tiny_run.make_model(tmp_path / "other", vocab_size=20)
    run = tiny_run.make_run(tmp_path, model={"reference_path": str(other)}, algorithm={"kl_coef": 0.1})
    with pytest.raises(UserError, match=r"model\.reference_path: .*other has 20 tokens, the policy 30"):
        Trainer(run)
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
    with pytest.raises(UserError, match=r"^engine\.api_key_env: the environment variable FAKE_SGLANG_KEY is not set"):
        Trainer(tiny_run.make_run(tmp_path, engine=engine))
