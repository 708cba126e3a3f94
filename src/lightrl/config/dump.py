"""A configuration as TOML."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightrl.config.schema import Config


def dump_toml(config: Config) -> str:
    """Every setting, defaults included; `load_config` of it gives an equal Config. Unset keys (None) are left out."""
    import tomlkit  # only needed to write

    return tomlkit.dumps(_plain(config))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {key: _plain(item) for key, item in pairs.items() if item is not None}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
