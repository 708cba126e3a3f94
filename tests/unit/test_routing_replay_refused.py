"""Settings and models that routing replay cannot work with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run
from test_routing_replay import trainer_of

from lightrl.config.load import load_config
from lightrl.config.problems import ConfigError
from lightrl.distributed.mesh import close_world
from lightrl.errors import UserError
from lightrl.models import registry
from lightrl.training.trainer import Trainer


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"correction": {"routing_replay": "R3"}}, "correction.routing_replay"),
        ({"correction": {"routing_replay": "trainer"}}, "minibatches_per_step = 1 nothing is"),
        (
            {
                "correction": {"routing_replay": "trainer", "use_rollout_logprobs": True},
                "algorithm": {"minibatches_per_step": 2},
            },
            "in the pass that correction.use_rollout_logprobs saves",
        ),
        (
            {
                "correction": {"routing_replay": "rollout"},
                "engine": {"kind": "sglang", "args": {"enable_hierarchical_cache": True}},
            },
            "enable_hierarchical_cache: with correction.routing_replay = 'rollout'",
        ),
        (
            {"correction": {"routing_replay": "rollout"}, "engine": {"kind": "sglang"}, "run": {"device": "cpu"}},
            "GPUs only",
        ),
    ],
)
def test_settings_that_cannot_work(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(model={"path": "m"}, data={"path": "d"}, reward={"type": "math"}, **sections)


def test_a_dense_model_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run.make_run(tmp_path, correction={"routing_replay": "rollout"})
    monkeypatch.setattr(Trainer, "_load_model", None)
    with pytest.raises(UserError, match=r"^correction.routing_replay: model.path = .*model \(llama\) has no experts"):
        Trainer(config)
    close_world()


def test_a_model_that_runs_by_its_own_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_own_code", lambda model: False)
    with pytest.raises(UserError, match=r"^correction.routing_replay: Qwen3MoeForCausalLM runs by its own code"):
        trainer_of(tmp_path, "rollout")
    close_world()
