"""Settings of a run: typed sections, TOML files, command-line overrides. Nothing here imports torch."""

from lightrl.config.dump import dump_toml
from lightrl.config.load import load_config
from lightrl.config.problems import ConfigError
from lightrl.config.schema import Config

__all__ = ["Config", "ConfigError", "dump_toml", "load_config"]
