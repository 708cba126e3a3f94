"""`config.toml` in the run's folder: the settings in force, and those that a resumed run replaced."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightrl.config.dump import dump_toml
from lightrl.config.schema import Config
from lightrl.config.sources import short
from lightrl.observe.jsonl import write_whole

_SHOWN = 8  # changed keys that are told with their values


def write_config(run_dir: Path, config: Config, step: int) -> str:
    """Write `config.toml`. Where a run goes on after `step` with other settings, says which, and keeps the earlier.

    They go to `config_until_step_N.toml`. One that is there stays: what was tried from N on, and then tried anew, is no
    part of this run. Returns one line, empty if nothing changed.
    """
    path, text = run_dir / "config.toml", dump_toml(config)
    changed = changes(path, text) if step else []
    notice = ""
    if changed:
        kept = run_dir / f"config_until_step_{step:06d}.toml"
        if not kept.exists():
            write_whole(kept, path.read_bytes())
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        notice = f"settings changed after step {step}: {', '.join(changed[:_SHOWN])}{more}; the earlier are in {kept}"
    write_whole(path, text.encode())
    return notice


def changes(old: Path, new: str) -> list[str]:
    """`optim.lr 1e-06 -> 2e-06` for each key that differs from the file `old`; nothing if that cannot be read.

    Not told: the folder's own name, and keys of a newer version of LightRL that are at their default.
    """
    try:
        before = dict(_flat(tomllib.loads(old.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return []
    after, default = dict(_flat(tomllib.loads(new))), dict(_flat(tomllib.loads(dump_toml(Config()))))
    found = []
    for key in dict.fromkeys([*after, *before]):
        is_new_default = key not in before and after[key] == default.get(key)
        if key != "run.dir" and before.get(key) != after.get(key) and not is_new_default:
            was, now = (short(values[key]) if key in values else "unset" for values in (before, after))
            found.append(f"{key} {was} -> {now}")
    return found


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, section in sections.items():
        for key, value in section.items():
            yield f"{name}.{key}", value
