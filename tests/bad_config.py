"""What `load_config` says of settings that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config.load import ConfigError, load_config


def problems(*args: Any, **kwargs: Any) -> list[str]:
    """Its lines; fails where there is none."""
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    return caught.value.problems
