"""Reinforcement-learning post-training of language models in plain PyTorch.

Names load on first use: `import lightrl` imports no torch.

>>> from lightrl import Config, load_config, Trainer  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.config.dump import dump_toml
    from lightrl.config.load import load_config
    from lightrl.config.problems import ConfigError
    from lightrl.config.schema import Config
    from lightrl.errors import UserError
    from lightrl.rollout.hooked import GenerateTask
    from lightrl.training.dpo import DPOTrainer
    from lightrl.training.hooks import Hooks, StepInfo
    from lightrl.training.reward_model import RewardModelTrainer
    from lightrl.training.rollout_ranks import serve_rollouts
    from lightrl.training.sft import SFTTrainer
    from lightrl.training.trainer import Trainer
    from lightrl.types import Microbatch, Prompt, Sample, SampleGroup, Status

__version__ = "0.1.0"

_HOMES = {
    "Config": "lightrl.config.schema",
    "ConfigError": "lightrl.config.problems",
    "DPOTrainer": "lightrl.training.dpo",
    "GenerateTask": "lightrl.rollout.hooked",
    "Hooks": "lightrl.training.hooks",
    "Microbatch": "lightrl.types",
    "Prompt": "lightrl.types",
    "RewardModelTrainer": "lightrl.training.reward_model",
    "SFTTrainer": "lightrl.training.sft",
    "Sample": "lightrl.types",
    "SampleGroup": "lightrl.types",
    "Status": "lightrl.types",
    "StepInfo": "lightrl.training.hooks",
    "Trainer": "lightrl.training.trainer",
    "UserError": "lightrl.errors",
    "dump_toml": "lightrl.config.dump",
    "load_config": "lightrl.config.load",
    "serve_rollouts": "lightrl.training.rollout_ranks",
}

__all__ = [
    "Config",
    "ConfigError",
    "DPOTrainer",
    "GenerateTask",
    "Hooks",
    "Microbatch",
    "Prompt",
    "RewardModelTrainer",
    "SFTTrainer",
    "Sample",
    "SampleGroup",
    "Status",
    "StepInfo",
    "Trainer",
    "UserError",
    "__version__",
    "dump_toml",
    "load_config",
    "serve_rollouts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
