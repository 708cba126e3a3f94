"""From files, keyword sections and command-line flags to a checked `Config`."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path as FilePath
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from lightrl.config.dump import dump_toml
from lightrl.config.fields import bare, code_in, hint_at, hints, range_text, sections, toml, type_prose
from lightrl.config.lines import Path, dotted
from lightrl.config.preferences import of_command
from lightrl.config.problems import ConfigError, Problems
from lightrl.config.rundir import holds_run, newest_state, order_fault, run_dir_fault, used_dir_fault
from lightrl.config.sampling_only import for_serving
from lightrl.config.schema import Config
from lightrl.config.sources import Sources, short

__all__ = ["ConfigError", "dump_toml", "load_config", "load_for_run", "model_fault", "placed"]

_UNKNOWN = "unexpected_keyword_argument"
_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_LOCAL = ("./", "../", "/", "~")
_SLICE = re.compile(r"@\[[^\[\]]*\]$")


def load_config(
    *paths: str | os.PathLike[str], overrides: Sequence[str] | None = None, **sections: Mapping[str, Any]
) -> Config:
    """Defaults < TOML files, left to right < keyword sections < overrides (`["--optim.lr", "2e-6"]`).

    Tables merge key by key; lists, `[[eval.sets]]` among them, replace. Raises ConfigError with every problem found.

    >>> load_config(optim={"lr": 2e-6}, overrides=["--rollout.group_size=4"]).rollout.group_size
    4
    """
    config, sources = _load(paths, overrides or (), sections)
    return _checked(config, sources)


def load_for_run(
    paths: Sequence[str | os.PathLike[str]],
    overrides: Sequence[str],
    *,
    command: str = "train",
    code_fault: Callable[[str, str], str | None] = lambda _key, _name: None,
) -> Config:
    """`load_config`, and what can be told before torch is imported: required keys are set, local files exist, and the
    run may have its folder. `code_fault(key, name)` says of each rule and function named why there is none, or None.

    The rules are those of `lightrl COMMAND`: eval has to have a set to evaluate, sft needs what is of `[sft]`; eval,
    generate and serve do not go on with the run.
    """
    goes_on = command not in ("eval", "generate", "serve")
    config, sources = _load(paths, overrides, {}, command)
    if config is not None and not sources.broken:
        config = for_serving(config) if command == "serve" else config
        for key, what in config.required(command):
            _add(sources, key, f"not set; {what}")
        for key, what in of_command(config, command):
            _add(sources, key, what)
        if command == "eval" and not config.eval.sets:
            _add(sources, "eval.sets", "nothing to evaluate; add an [[eval.sets]] table with a name and a path")
        _check_files(config, sources)
        for path, name in code_in(config):
            key = next(part for part in reversed(path) if isinstance(part, str))
            if (fault := code_fault(key, name)) is not None:
                _add(sources, path, fault)
        if goes_on and not config.run.resume and holds_run(config.run.dir):
            _add(sources, "run.dir", used_dir_fault(config.run.dir))
        if goes_on and config.run.resume and (newest := newest_state(config.run.dir)) is not None:
            other_order = order_fault(newest[1], seed=config.run.seed, shuffle=config.data.shuffle)
            if other_order is not None:
                _add(sources, *other_order)
        writes = config.log.save_samples or command != "eval"
        if writes and (fault := run_dir_fault(config.run.dir)) is not None:
            _add(sources, "run.dir", fault)
    return _checked(config, sources)


def placed(text: str, paths: Sequence[str | os.PathLike[str]], overrides: Sequence[str]) -> str:
    """`section.key: …`, an error found only while the run was made, with the file and line or the flag that set it."""
    match = re.match(r"\w+(?:\.\w+)+(?=: )", text)
    if match is None:
        return text
    sources = Sources(Problems())
    for path in paths:
        sources.add_file(path)
    sources.add_flags(overrides)
    key: Path = tuple(match[0].split("."))
    origin = sources.origin(key)
    return text if origin is None else origin.label(key) + text[match.end() :]


def _load(
    paths: Sequence[str | os.PathLike[str]], overrides: Sequence[str], given: Mapping[str, Any], command: str = "train"
) -> tuple[Config | None, Sources]:
    """The config, None when a section has problems, and the sources, with the problems found so far."""
    sources = Sources(Problems())
    for path in paths:
        sources.add_file(path)
    sources.add_sections(given)
    sources.add_flags(overrides)
    built = {name: _build(name, sources) for name in sections()}
    if any(section is None for section in built.values()):
        return None, sources
    config = Config(**built)
    if not sources.broken:
        for key, what in config.validate(command):
            _add(sources, key, what)
    return config, sources


def _checked(config: Config | None, sources: Sources) -> Config:
    sources.problems.raise_if_any()
    assert config is not None, "a section that fails leaves a problem"
    return config


@cache
def _adapter(section: str) -> TypeAdapter[Any]:
    return TypeAdapter(sections()[section])


def _build(name: str, sources: Sources) -> Any:
    """The section, or None after its problems were reported."""
    values = sources.tree.get(name, {})
    try:
        # Strict JSON has exactly TOML's idea of types: an int is a float, a list is a tuple, "3" and true are no int.
        return _adapter(name).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        by_path: dict[Path, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            by_path.setdefault(_place(detail, values), []).append(detail)
        # Alternatives of a union complain each about its own depth: the shallowest place says it all.
        for path, details in by_path.items():
            inside = any(path[:n] in by_path for n in range(1, len(path)))
            if not inside and not (details[0]["type"] == "missing" and _misspelt(path, by_path)):
                _add(sources, (name, *path), _explain(name, path, details[0], values))
        return None


def _place(detail: ErrorDetails, values: Any) -> Path:
    """The error's path in the values: pydantic adds names of union members, and points behind short tuples."""
    path: Path = ()
    for part in detail["loc"]:
        inside = part in values if isinstance(values, dict) else isinstance(values, list) and part in range(len(values))
        if inside:
            values = values[part]
        if inside or (detail["type"] == "missing" and isinstance(part, str)):
            path = (*path, part)
    return path


def _misspelt(missing: Path, errors: Mapping[Path, list[ErrorDetails]]) -> bool:
    """Whether an unknown key of the same table is reported that will be pointed at the missing one."""
    unknown = [str(p[-1]) for p, e in errors.items() if p[:-1] == missing[:-1] and e[0]["type"] == _UNKNOWN]
    return bool(difflib.get_close_matches(str(missing[-1]), unknown, n=1, cutoff=0.6))


def _explain(section: str, path: Path, detail: ErrorDetails, values: Any) -> str:
    kind = detail["type"]
    if kind == "missing" and not isinstance(detail["loc"][-1], int):
        return f"not set; every [[{dotted((section, *path[:-2]))}]] table needs one"
    if kind == _UNKNOWN:
        return _unknown_nested(section, path)
    value = values
    for part in path:
        value = value[part]
    hint = hint_at(section, path)
    if kind in _RANGES:
        return f"must be {range_text(hint)}, got {short(value)}"
    if kind == "finite_number":
        return f"must be finite, got {short(value)}"
    text = f"expected {type_prose(hint)}, got {short(value)}"
    choices = get_args(bare(hint)) if get_origin(bare(hint)) is Literal else ()
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return text + (f"; did you mean {toml(near[0])}?" if near else "")


def _unknown_nested(section: str, path: Path) -> str:
    """A key of a table in a list, such as `eval.sets[0].pth`."""
    if len(path) == 1:
        raise AssertionError("unknown keys of sections are found while merging")
    table = bare(hint_at(section, path[:-1]))
    near = difflib.get_close_matches(str(path[-1]), hints(table), n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {dotted((section, *path[:-1], near[0]))}?"
    return f"unknown key; [[{dotted((section, *path[:-2]))}]] has " + ", ".join(hints(table))


def _add(sources: Sources, key: str | Path, what: str) -> None:
    """A problem with `key`, at the place that set it, or that set a key named in `what`, or at no place."""
    path: Path = tuple(int(p) if p.isdigit() else p for p in key.split(".")) if isinstance(key, str) else key
    origin = sources.origin(path)
    if origin is not None:
        sources.problems.add(origin, path, what)
        return
    for section, name in re.findall(r"\b(\w+)\.(\w+)", what):
        origin = sources.origin((section, name))
        if origin is not None and origin.file is not None:
            sources.problems.add_line(f"{origin.label(path)}: {what}", origin)
            return
    sources.problems.add_line(f"{dotted(path)}: {what}")


def _check_files(config: Config, sources: Sources) -> None:
    files: list[tuple[Path, str]]
    if isinstance(config.data.path, list):
        files = [(("data", "path", i), path) for i, path in enumerate(config.data.path)]
    else:
        files = [(("data", "path"), config.data.path)]
    files += [(("eval", "sets", i, "path"), s.path) for i, s in enumerate(config.eval.sets)]
    for key, value in files:
        place = value if FilePath(value).expanduser().exists() else _SLICE.sub("", value)
        if _is_local(place) and not FilePath(place).expanduser().exists():
            _add(sources, key, f"no such file or folder: {place}")
    if config.debug.rollouts is not None and not FilePath(config.debug.rollouts).expanduser().exists():
        _add(sources, "debug.rollouts", f"no such file or folder: {config.debug.rollouts}")
    models = [(("model", name), getattr(config.model, name)) for name in ("path", "tokenizer", "reference_path")]
    models += [((name, "path"), getattr(config, name).path) for name in ("critic", "teacher")]
    models.append((("dpo", "reference_path"), config.dpo.reference_path))
    for key, value in models:
        if value and (fault := model_fault(value)) is not None:
            _add(sources, key, fault)


def model_fault(name: str) -> str | None:
    """Why a model or tokenizer cannot be there, as far as its name tells: it is a folder's, and there is none."""
    if FilePath(name).expanduser().exists():
        return None
    first, *others = name.rstrip("/").split("/")
    if name.startswith(_LOCAL) or len(others) > 1:
        return f"no such folder: {name}"
    if others and FilePath(first).is_dir():
        return f"no such folder: {name} ({first}/ is a folder here, so this is not looked for on the hub)"
    return None


def _is_local(place: str) -> bool:
    if any(sign in place for sign in "*?[") or "://" in place:
        return False
    return place.startswith(_LOCAL) or place.endswith((".jsonl", ".parquet"))
