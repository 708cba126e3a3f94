"""Filters and engines that die in a whole miniature run with the embedded engine, in one process."""

from __future__ import annotations

import json

import pytest
import tiny_run
import torch
from fake_engine import MortalEngine
from tiny_run import count_letter

from lightrl.distributed.mesh import close_world
from lightrl.engine.base import EngineLostError
from lightrl.errors import UserError
from lightrl.training.trainer import Trainer
from lightrl.types import Status

FILTER = {"filter": "nonzero_std", "prompts_per_step": 3, "oversample_prompts": 5, "max_draws": 3}


def every_third_is_even(sample) -> float:
    """No spread for every third prompt."""
    return 1.0 if sample.prompt.index % 3 == 0 else count_letter(sample) + sample.index


@pytest.fixture
def trainer_for(tmp_path):
    made = []

    def build(reward=every_third_is_even, folder="one", **sections) -> Trainer:
        (tmp_path / folder).mkdir(exist_ok=True)
        made.append(Trainer(tiny_run.make_run(tmp_path / folder, **sections), reward=reward))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in trainer.policy.parameters()]


def order_of(trainer: Trainer, n: int) -> list[int]:
    fresh = type(trainer.source)(trainer.prompts, seed=0, shuffle=True)
    return [p.index for p in fresh.next(n)]


def test_steps_use_up_prompts_in_their_order_and_number_groups_by_their_place_in_it(trainer_for):
    trainer = trainer_for(rollout=FILTER, run={"steps": 4})
    trained, collect = [], trainer.collect

    def noting(*given):
        groups = collect(*given)
        trained.append([(g.group_index, g.prompt.index) for g in groups])
        return groups

    trainer.collect = noting
    trainer.train()
    order = order_of(trainer, 60)
    passing = [(place, index) for place, index in enumerate(order) if index % 3]
    assert trained == [passing[i : i + 3] for i in range(0, 12, 3)]
    assert trainer.groups_done == passing[11][0] + 1
    assert [p.index for p in trainer.source.next(4)] == order[trainer.groups_done : trainer.groups_done + 4]
    names = ("filter/kept", "filter/drawn", "filter/dropped_zero_std", "reward/zero_spread_share")
    records = tiny_run.metrics_of(trainer.run_dir.parent, *names[:2], names[3])
    assert [r[1:] for r in records] == [
        (3, passing[i + 2][0] + 1 - (passing[i - 1][0] + 1 if i else 0), 0.0) for i in range(0, 12, 3)
    ]


def test_a_resumed_run_is_equal_to_the_last_bit(trainer_for):
    whole = trainer_for(rollout=FILTER, run={"steps": 4}, folder="whole")
    whole.train()
    trainer_for(rollout=FILTER, run={"steps": 2}, folder="cut").train()
    resumed = trainer_for(rollout=FILTER, run={"steps": 4}, folder="cut")
    resumed.train()
    assert resumed.groups_done == whole.groups_done
    assert resumed.source.state() == whole.source.state()
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))
    names = ("reward/mean", "loss/policy", "filter/drawn", "filter/reward_mean")
    assert tiny_run.metrics_of(resumed.run_dir.parent, *names) == tiny_run.metrics_of(whole.run_dir.parent, *names)


def test_too_few_that_pass_are_trained_on_with_a_warning_and_none_ends_the_run(trainer_for, capsys):
    def one_has_spread(sample) -> float:
        return float(sample.index) if sample.prompt.index == 4 else 0.5

    trainer = trainer_for(one_has_spread, rollout=FILTER | {"max_draws": 2}, run={"steps": 1})
    place = order_of(trainer, 12).index(4)
    if place >= 10:
        pytest.fail("choose another prompt")
    metrics = trainer.train()
    assert (metrics["filter/kept"], metrics["filter/drawn"], metrics["filter/draws"]) == (1, 10, 2)
    assert metrics["rollout/samples"] == 4
    assert "rollout.filter: 1 of 10 prompts in 2 draws passed, 3 are wanted" in capsys.readouterr().out
    nothing = trainer_for(lambda sample: 0.5, folder="nothing", rollout=FILTER, run={"steps": 1})
    with pytest.raises(UserError, match=r"rollout\.filter: 0 of 15 prompts in 3 draws passed, 3 are wanted"):
        nothing.train()
    assert nothing.source.state()["position"] == 0  # they come again


def test_a_step_on_given_prompts_filters_those_alone(trainer_for):
    trainer = trainer_for(rollout=FILTER)
    prompts = [trainer.prompts[i] for i in (0, 1, 3, 2)]
    metrics = trainer.step(prompts)
    assert (metrics["filter/kept"], metrics["filter/draws"], metrics["filter/dropped_zero_std"]) == (2, 1, 2)
    assert trainer.source.state()["position"] == 0


def test_cut_answers_are_judged_with_the_reward_that_they_are_trained_on(trainer_for):
    """`zero_reward` takes the spread away that the reward gave."""
    limits = {"max_response_tokens": 1, "truncated": "zero_reward", "group_size": 2}

    def reward(sample) -> float:
        return 1.0 + sample.index if sample.status is Status.TRUNCATED else 0.0

    trainer = trainer_for(reward, rollout=FILTER | limits | {"max_draws": 1}, run={"steps": 1})
    with pytest.raises(UserError, match=r"0 of 5 prompts in 1 draws passed"):
        trainer.train()


def mortal(trainer: Trainer, *deaths: int) -> MortalEngine:
    trainer.engine.__class__ = MortalEngine
    trainer.engine.deaths = deaths
    return trainer.engine


def test_an_engine_that_dies_costs_only_the_answers_that_were_lost(trainer_for, capsys, tmp_path):
    """Deaths in a rollout and in an evaluation: the same samples, rewards and metrics as without."""
    sections = {
        "run": {"steps": 2},
        "eval": {"every": 2, "at_start": False, "sets": [{"name": "few", "path": str(tmp_path / "one/data.jsonl")}]},
        "log": {"trackers": ["jsonl"], "progress": False, "print_samples": 0, "save_samples": False},
        "engine": {"max_batch": 6},
    }
    trainer_for(**sections).train()
    broken = trainer_for(folder="two", **sections)
    dying, evaluate = mortal(broken, 9, 14), broken.evaluate

    def dies_in_the_evaluation() -> dict[str, float]:
        dying.deaths = (dying.num_steps + 4,)
        return evaluate()

    broken.evaluate = dies_in_the_evaluation
    broken.train()
    assert dying.num_restarts == 3
    assert dying.num_kept > 0
    said = " ".join(capsys.readouterr().out.split())
    assert "an engine died and is started anew; answers that were lost are sampled again: the engine died" in said
    names = ("reward/mean", "rollout/response_tokens", "loss/policy")
    ours, theirs = (tiny_run.metrics_of(tmp_path / folder, *names) for folder in ("two", "one"))
    assert len(ours) == 2
    assert ours == [pytest.approx(row, abs=1e-5) for row in theirs]
    evaluated = [json.loads((tmp_path / f / "run/metrics.jsonl").read_text().splitlines()[-1]) for f in ("two", "one")]
    for name in ("eval/few/avg@1", "eval/few/length_mean", "eval/few/prompts"):
        assert evaluated[0][name] == pytest.approx(evaluated[1][name], abs=1e-6)


class Idling(MortalEngine):
    """Says that it is lost when it gets weights, as one in another process does."""

    def load_weights(self, *args, **kwargs):
        super().load_weights(*args, **kwargs)
        if self.lost:
            raise EngineLostError("the engine died")


def test_an_engine_that_died_while_it_idled_finds_room_when_it_is_restarted(trainer_for, monkeypatch):
    """It is lost before the training state leaves the GPU: the new one must not start beside it."""
    trainer, events = trainer_for(parallel={"offload": "always"}), []
    engine = mortal(trainer)
    engine.__class__ = Idling
    restart = engine.restart
    monkeypatch.setattr(engine, "restart", lambda: events.append("start") or restart(), raising=False)
    monkeypatch.setattr(trainer.rollouts.state, "make_room", lambda nbytes: events.append("room"))
    engine.lost = True
    trainer.step(trainer.source.next(3))
    assert events == ["room", "start"]


def test_an_engine_that_died_while_it_idled_is_restarted_too(trainer_for):
    reference, broken = trainer_for(), trainer_for(folder="two")
    engine = mortal(broken)
    engine.__class__ = Idling
    for trainer in (reference, broken):
        trainer.step(trainer.source.next(3))
    engine.lost = True
    for trainer in (reference, broken):
        trainer.step(trainer.source.next(3))
    engine.lost = True
    assert broken.evaluate().keys() == reference.evaluate().keys()
    assert engine.num_restarts == 1  # nothing is evaluated here, and nobody asked it for an answer
    assert engine.lost
    broken.step(broken.source.next(3))
    reference.step(reference.source.next(3))
    assert engine.num_restarts == 2
    assert all(torch.equal(a, b) for a, b in zip(weights(broken), weights(reference), strict=True))


def test_gate_of_the_last_evaluation_is_the_exit_status(tmp_path, capsys):
    from lightrl import cli
    from lightrl.config import dump_toml

    for gate, status in ((2.0, 1), (0.0, 0)):
        sets = [{"name": "few", "path": str(tmp_path / "data.jsonl@[:3]"), "gate": gate}]
        evaluation = {"every": 1, "at_start": False, "sets": sets}
        config = tiny_run.make_run(tmp_path, run={"steps": 1, "dir": str(tmp_path / f"{gate}")}, eval=evaluation)
        (tmp_path / "run.toml").write_text(dump_toml(config))
        for command in ("train", "eval"):
            with pytest.raises(SystemExit) as caught:
                cli.main([command, str(tmp_path / "run.toml")])
            assert (command, caught.value.code) == (command, status)
            assert ("gate missed: eval/few/avg@1 = " in capsys.readouterr().err) == bool(status)
