"""Rollouts beside training, killed with answers and episodes under way: none is lost or trained on twice (D1, D2)."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny_run
import torch
from test_resume import Clock, run_child

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # environments are there

STEPS = 12
TICKS = {"answers": 1600, "episodes": 6000, "quick": 2400}  # of a run's clock: some three steps
EPISODES = {"environment": "test_agent_schedules:Slow", "max_turns": 3}
RUNS: dict[str, dict[str, Any]] = {
    "answers": {"agent": {"environment": "", "max_turns": 8}, "reward": {"type": "tiny_run:count_letter"}},
    "quick": {"agent": EPISODES | {"environment": "test_agent_run:Hints"}},
    "episodes": {"agent": EPISODES, "rollout": {"filter": "test_agent_schedules:no_third", "max_draws": 3}},
}


@pytest.fixture(scope="module")
def forks() -> Any:
    return ranks.preloaded()


def settings(kind: str, **rollout: Any) -> str:
    """Sections of an asynchronous run, as JSON."""
    sections = json.loads(json.dumps(RUNS[kind]))
    given = {"schedule": "async", "prompts_per_step": 3, "group_size": 2, "max_response_tokens": 40}
    sections["rollout"] = given | sections.get("rollout", {}) | rollout
    return json.dumps(
        sections
        | {"run": {"steps": STEPS}, "correction": {"use_tis": True}, "log": {"save_samples": True}}
        | {"checkpoint": {"every": 1, "async_save": True, "hf_every": STEPS}}
    )


class Killer(Clock):
    """Writes down what is under way when it kills."""

    def __init__(self, last: int | None, trainer: Any, found: Path) -> None:
        self.trainer, self.found = trainer, found
        super().__init__(last)

    def _kill(self) -> None:
        self._over.wait()
        under_way = list(self.trainer.rollouts._carry.tasks.values())
        self.found.write_text(json.dumps([self.trainer.steps_done, len(under_way)]))
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, sections: str, tick: int, found: str) -> None:
    """Entry of the processes. From a number of ticks on it is killed, if there is one."""
    from test_agent_run import run_config

    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    trainer = Trainer(run_config(Path(folder), **json.loads(sections)))
    if tick:
        Killer(tick, trainer, Path(found))
    trainer.train()
    trainer.close()
    close_world()


def killed_often(forks: Any, folder: Path, kind: str, sections: str, kills: int) -> None:
    """Ends a run so often, most times with something under way, and then lets it end.

    Moments are new in every run: KILL_SEED=… repeats them as far as threads do.
    """
    seed = int(os.environ.get("KILL_SEED", random.SystemRandom().getrandbits(32)))
    print(f"repeat with KILL_SEED={seed}")  # shown when the test fails
    rng, found, places, busy = random.Random(seed), folder / "found.json", [], 0
    for kill in range(kills):
        tick = rng.randint(TICKS[kind] // 4, TICKS[kind]) if kill else TICKS[kind]
        code = run_child(forks, train, str(folder), sections, tick, str(found))
        assert code == -signal.SIGKILL
        done, under_way = json.loads(found.read_text())
        print(f"killed in step {done + 1} with {under_way} groups under way")
        places.append(done)
        busy += under_way > 0
    assert max(places) > 0, "beyond the first step"
    assert busy > kills // 2
    assert run_child(forks, train, str(folder), sections, 0, str(found)) == 0


@pytest.mark.parametrize("kind", ["answers", "episodes"])
def test_every_prompt_is_trained_on_once_whenever_it_is_killed(tmp_path: Path, forks: Any, kind: str) -> None:
    from test_agent_run import run_config

    sections = settings(kind, max_staleness=2)
    run_config(tmp_path, **json.loads(sections))  # writes the model
    killed_often(forks, tmp_path, kind, sections, kills=4)
    check_samples(tmp_path, kind, sections)


def train_as_one_of_two(folder: str, sections: str, tick: str, rank: str, found: str) -> None:
    """Entry of ranks: one of them is killed, and with it the job."""
    train(folder, sections, int(tick) if os.environ["RANK"] == rank else 0, found)


def test_two_ranks_of_which_one_is_killed(tmp_path: Path, run_distributed: Any) -> None:
    from test_agent_run import run_config

    sections, found = settings("episodes", max_staleness=2), tmp_path / "found.json"
    run_config(tmp_path, **json.loads(sections))
    for rank, tick in ((1, 3000), (0, 2000)):
        with pytest.raises(pytest.fail.Exception):
            run_distributed(train_as_one_of_two, 2, tmp_path, sections, str(tick), str(rank), found, timeout=120)
        assert json.loads(found.read_text())[1] > 0, "with groups under way"
        found.unlink()
    run_distributed(train_as_one_of_two, 2, tmp_path, sections, "0", "", found, timeout=120)
    assert not found.exists()
    check_samples(tmp_path, "episodes", sections)


def check_samples(folder: Path, kind: str, sections: str) -> None:
    """Each step has the groups of its numbers, each of them whole and once."""
    from lightrl.observe.dumps import read_samples

    order = order_of(folder, sections)
    numbers = [i for i, p in enumerate(order) if kind == "answers" or p % 3][: 3 * STEPS]
    for step in range(1, STEPS + 1):
        rows = read_samples(folder / "run", step)
        mine = numbers[3 * (step - 1) : 3 * step]
        assert Counter(r["group"] for r in rows) == dict.fromkeys(mine, 2)
        assert all(r["prompt_index"] == order[r["group"]] for r in rows)
        assert all(0 <= step - 1 - min(r["policy_versions"]) <= 2 for r in rows)
    metrics = tiny_run.metrics_of(folder, "reward/mean")
    assert [step for step, _ in metrics] == list(range(1, STEPS + 1))


def order_of(folder: Path, sections: str) -> list[int]:
    """Indices of the prompts in the order in which the run uses them."""
    from test_agent_run import run_config

    from lightrl.data import PromptSource, load_prompts
    from lightrl.models import load

    config = run_config(folder, **json.loads(sections))
    _, tokenizer = load.load_config_and_tokenizer(config.model.path, None, None, False)
    prompts = load_prompts(config.data, tokenizer, context_length=256, max_response_tokens=40)
    return [p.index for p in PromptSource(prompts, seed=config.run.seed, shuffle=True).next(6 * STEPS)]


def test_without_staleness_weights_are_those_of_a_run_that_was_not_killed(tmp_path: Path, forks: Any) -> None:
    from test_agent_run import run_config

    sections = settings("quick", max_staleness=0)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        run_config(tmp_path / name, **json.loads(sections))
    assert run_child(forks, train, str(tmp_path / "whole"), sections, 0, "") == 0
    killed_often(forks, tmp_path / "killed", "quick", sections, kills=3)
    whole, killed = (tiny_run.exported(tmp_path / name, STEPS) for name in ("whole", "killed"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name
    rewards = [tiny_run.metrics_of(tmp_path / name, "reward/mean", "loss/policy") for name in ("whole", "killed")]
    assert rewards[0] == rewards[1]
