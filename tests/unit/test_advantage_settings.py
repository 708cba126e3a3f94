"""Names and keys of advantage estimators: what goes together, what is refused, what lets samples be skipped."""

from __future__ import annotations

import importlib
import inspect

import pytest

from lightrl.config.estimators import ESTIMATORS
from lightrl.config.load import load_config
from lightrl.config.schema import AlgorithmConfig
from lightrl.errors import UserError
from lightrl.training.advantage import Advantages
from lightrl.training.objective import Objective


def test_registry_and_config_agree():
    """Each name loads, and the keys it takes are keys of the config, with the function's own defaults."""
    for name, spec in ESTIMATORS.items():
        assert callable(Advantages.load(AlgorithmConfig(advantage=name), 100).function), name
        module, _, function = spec.function.partition(":")
        defaults = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        assert {key: defaults[key].default for key in spec.keys} == {
            key: getattr(AlgorithmConfig(), key) for key in spec.keys
        }, name
    assert AlgorithmConfig().whitening == "none"
    assert AlgorithmConfig(advantage="reinforce_plus_plus").whitening == "batch"
    assert AlgorithmConfig(advantage="reinforce_plus_plus", whiten="none").whitening == "none"


@pytest.mark.parametrize(
    ("keys", "skips"),
    [
        ({}, True),
        ({"advantage": "rloo"}, True),
        ({"advantage": "own:function"}, True),
        ({"advantage": "reinforce_plus_plus", "whiten": "none"}, False),
        ({"advantage": "reinforce_plus_plus_baseline"}, False),
        ({"whiten": "group"}, False),
        ({"kl_coef": 0.1, "kl_in": "reward"}, False),
        ({"skip_zero_advantage": False}, False),
    ],
)
def test_samples_are_skipped_only_where_their_advantage_is_final(keys, skips):
    assert Objective.of(AlgorithmConfig(**keys)).may_skip_zero_advantage == skips


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"advantage": "reinforce++"},
            "algorithm.advantage: no estimator 'reinforce.+': did you mean 'reinforce_plus_plus'",
        ),
        ({"advantage": "x"}, "algorithm.advantage: no estimator 'x': choose one of 'grpo', 'rloo'"),
        ({"advantage": "rloo", "normalize_std": False}, "algorithm.normalize_std: only used by .*'grpo': drop it"),
        ({"gamma": 0.9}, "algorithm.gamma: only used by algorithm.advantage = 'reinforce_plus_plus' or 'gae'"),
        ({"gae_lambda": 0.9}, "algorithm.gae_lambda: only used by algorithm.advantage = 'gae'"),
        ({"overlong_penalty": 0.5}, "algorithm.overlong_penalty: only used with algorithm.overlong_buffer"),
        ({"overlong_buffer": 2000}, "algorithm.overlong_buffer: 2000 exceeds rollout.max_response_tokens = 1024"),
        ({"whiten": True}, "algorithm.whiten: expected"),
    ],
)
def test_bad_combinations_are_told(keys, says):
    with pytest.raises(UserError, match=says):
        load_config(algorithm=keys)
