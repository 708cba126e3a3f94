"""Two ranks collect what one does: uneven filters, further draws, an engine that dies on one of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
import ranks
import tiny_run

CASES = {
    "plain": {},
    "all_passing_on_rank_0": {"filtered": True, "same": [1, 3, 5, 7, 9, 11, 13, 15]},
    "further_draws": {"filtered": True, "same": [0, 1, 2, 4, 5, 6, 8], "draw_early": True},
    "further_draws_when_idle": {"filtered": True, "same": [0, 1, 2, 4, 5, 6, 8]},
    "straggler_not_waited_for": {"filtered": True, "same": [], "slow": [4, 5]},
    "nothing_passes": {"filtered": True, "same": list(range(24))},
    "death_on_rank_1": {"deaths": {1: [5]}},
    "deaths_on_both_filtered": {"filtered": True, "same": [0, 1, 2, 4, 5, 6, 8], "deaths": {0: [2, 3], 1: [7]}},
    "death_of_a_shared_engine": {"deaths": {0: [5]}, "ranks_per_engine": 2, "restarts": [1, 1]},
}
SIZE = 3


def collected(case: dict, world) -> dict:
    """What a case gives on all ranks together, with the scripted engine. `slow` groups never end unless aborted."""
    from fake_engine import FakeEngine, FakeScorer

    from lightrl.engine.base import SamplingParams
    from lightrl.rollout.collect import Sampler
    from lightrl.rollout.filters import nonzero_std
    from lightrl.rollout.ranks import Collection
    from lightrl.rollout.seeds import sample_seed
    from lightrl.rollout.selection import Selection
    from lightrl.types import Prompt

    def more():
        return prompts[selection.num_drawn : selection.num_drawn + 6]

    prompts = [Prompt(index=i, tokens=[1], text="") for i in range(40)]
    filtered = case.get("filtered", False)
    slow = {sample_seed(5, "train", group, i) for group in case.get("slow", ()) for i in range(SIZE)}
    engine = FakeEngine(
        case.get("deaths", {}).get(world.rank, ()) if world.size > 1 else (),
        ticks=lambda seed: 10**9 if seed in slow else 1 + seed % 7,
    )
    selection = Selection(prompts[:6], start=0, wanted=4 if filtered else 6, more=more, max_draws=4)
    sampler = Sampler(
        engine=engine,
        sampling=SamplingParams(max_new_tokens=1),
        group_size=SIZE,
        scorer=FakeScorer(case.get("same", ())),
        decode=str,
        seed=5,
    )

    def renew() -> None:
        world.barrier()  # as the weights' way into the engines, it needs all ranks
        engine.policy_version = 0

    groups = Collection(
        sampler=sampler,
        selection=selection,
        world=world,
        ranks_per_engine=min(case.get("ranks_per_engine", 1), world.size),
        judge=nonzero_std if filtered else None,
        draw_early=case.get("draw_early", False),
    ).run(renew)
    assert not engine.running
    lives = world.gather(engine.life)
    if world.size > 1:
        deaths = [len(case.get("deaths", {}).get(rank, ())) for rank in range(world.size)]
        assert lives == case.get("restarts", deaths), lives
    found = [g for part in world.gather(groups) for g in part]
    return {
        "groups": {g.group_index: [(s.tokens, s.reward) for s in g.samples] for g in found},
        "end": selection.end,
        "draws": selection.num_draws,
    }


def collect_all(out: str) -> None:
    """Under torchrun: all cases, by rank 0 into a file."""
    from lightrl.distributed.mesh import close_world, init_world

    world = init_world("cpu")
    found = {}
    for name, case in CASES.items():
        found[name] = collected(case, world)
    if world.is_main:
        Path(out).write_text(json.dumps(found))
    close_world()


def test_two_ranks_collect_what_one_does(tmp_path, run_distributed):
    from lightrl.distributed.mesh import World

    alone = World(rank=0, size=1, local_rank=0, device=None, mesh=None, cpu_group=None)
    run_distributed(collect_all, 2, tmp_path / "two.json")
    two = json.loads((tmp_path / "two.json").read_text())
    for name, case in CASES.items():
        one = json.loads(json.dumps(collected(case, alone)))
        found = two[name]
        assert {int(g): v for g, v in found["groups"].items()} == {int(g): v for g, v in one["groups"].items()}, name
        assert (found["end"], found["draws"]) == (one["end"], one["draws"]), name
    assert [len(two[n]["groups"]) for n in ("plain", "all_passing_on_rank_0", "nothing_passes")] == [6, 4, 0]
    assert two["nothing_passes"]["end"] == 24


def spread(sample) -> float:
    return 1.0 if sample.prompt.index % 3 == 0 else tiny_run.count_letter(sample) + sample.index


RUN = {
    "run": {"steps": 3},
    "rollout": {"filter": "nonzero_std", "prompts_per_step": 3, "oversample_prompts": 5},
    "log": {"trackers": ["jsonl"], "print_samples": 0, "save_samples": False},
}


def train_with_a_death(folder: str) -> None:
    """The engine of rank 1 dies in its ninth step."""
    from fake_engine import MortalEngine

    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(Path(folder), **RUN), reward=spread)
    trainer.engine.__class__ = MortalEngine
    trainer.engine.deaths = (9,) if os.environ.get("RANK") == "1" else ()
    trainer.train()
    assert trainer.engine.num_restarts == len(trainer.engine.deaths)
    trainer.close()
    close_world()


def test_two_ranks_train_as_one_through_filter_and_death(tmp_path, run_distributed):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tiny_run.make_run(tmp_path / name, **RUN)
    run_distributed(train_with_a_death, 2, tmp_path / "two")
    train_with_a_death(str(tmp_path / "one"))
    names = ("reward/mean", "filter/drawn", "filter/returned", "filter/reward_mean", "rollout/samples", "loss/policy")
    one, two = (tiny_run.metrics_of(tmp_path / name, *names) for name in ("one", "two"))
    assert len(one) == 3
    assert two == [pytest.approx(row, abs=1e-5) for row in one]


def fail_while_others_generate(folder: str) -> None:
    """Rank 1's reward function cannot be gone on from, while rank 0 exchanges verdicts with it."""
    from lightrl.training.trainer import Trainer

    trainer = Trainer(tiny_run.make_run(Path(folder), **RUN), reward=spread)

    async def score(samples) -> None:
        raise ZeroDivisionError("this rank gives up")

    if os.environ["RANK"] == "1":
        trainer.scorer.score = score
    trainer.train()


def test_a_rank_that_fails_in_a_filtered_rollout_takes_the_run_down(tmp_path, run_distributed):
    tiny_run.make_run(tmp_path)
    with pytest.raises(pytest.fail.Exception, match="this rank gives up") as failure:
        run_distributed(fail_while_others_generate, 2, tmp_path)
    assert "not over after" not in str(failure.value)


def train_beside_a_busy_rank(folder: str, overrides: str) -> None:
    """As `lightrl train`; rank 1's rewards take until somebody ends it."""
    from lightrl.ending import told_when_stopped
    from lightrl.training.trainer import Trainer

    async def score(samples) -> None:
        Path(folder, "busy").touch()
        await asyncio.sleep(600)

    with told_when_stopped(lambda: "stopped"):
        trainer = Trainer(tiny_run.make_run(Path(folder), **json.loads(overrides)))
        if trainer.world.rank == 1:
            trainer.scorer.score = score
        try:
            trainer.train()
        finally:
            trainer.close()


@pytest.mark.parametrize("overrides", [RUN, {}])
def test_ctrl_c_does_not_wait_for_ranks_that_are_busy(tmp_path, overrides):
    """Without torchrun, which would end them all. Rank 0 is idle and waits for rank 1."""
    tiny_run.make_run(tmp_path)
    told = tmp_path / "told.log"
    with ranks.started_ranks(train_beside_a_busy_rank, 2, [str(tmp_path), json.dumps(overrides)], told, {}) as two:
        while not (tmp_path / "busy").exists():
            assert [rank.exitcode for rank in two] == [None, None], told.read_text()
            time.sleep(0.1)
        time.sleep(2)  # by now rank 0 is idle
        for rank, codes in zip(two, ({130}, {1, 130}), strict=True):  # with a filter the second has found out by itself
            if rank.is_alive():
                os.kill(rank.pid, signal.SIGINT)
            rank.join(60)
            assert rank.exitcode in codes, told.read_text()
