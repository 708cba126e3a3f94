"""A whole step and a whole run in miniature, in one process (cases L1, L3, L4, M3, R4)."""

from __future__ import annotations

import asyncio
import json
import signal
import threading

import pytest
import tiny_run
import torch
from transformers import AutoModelForCausalLM

from lightrl.distributed.mesh import close_world
from lightrl.observe.metrics import Tally
from lightrl.rewards import RewardFailure
from lightrl.rollout.collect import run_async
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training.advantage import set_advantages
from lightrl.training.trainer import Trainer
from lightrl.training.update import update
from lightrl.types import Status


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
