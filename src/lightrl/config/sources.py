"""Where settings come from: TOML files, keyword sections and `--section.key value`, merged into one tree."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin

from lightrl.config.fields import bare, hint_at, hints, sections, toml, type_prose, union_members
from lightrl.config.lines import Path, clash, dotted, scan
from lightrl.config.problems import Origin, Problems, unknown_key, unknown_section

Tree = dict[str, Any]

_FLAG = re.compile(r"--[A-Za-z_]")
_WHERE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_CLASHES = ("Cannot", "Duplicate inline table key")


class Sources:
    """Merges sources in the order they are added: tables key by key, anything else replaces.

    `tree` holds known sections and keys only; what is unknown has become a problem. `broken` tells that a whole source
    could not be read, so that what follows from the tree as a whole says nothing.
    """

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.tree: Tree = {}
        self.broken = False
        self._origins: dict[Path, Origin] = {}
        self._layers = 0

    def origin(self, path: Path) -> Origin | None:
        """What set `path`, or else the table around it (but no whole section); None for a default."""
        for length in range(len(path), 1, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return None

    def add_file(self, file: str | os.PathLike[str]) -> None:
        """A TOML file."""
        name, layer = os.fspath(file), self._next_layer()
        text = self._read(name, Origin(layer=layer, file=name))
        data = None if text is None else self._parse(name, layer, text)
        if text is None or data is None:
            self.broken = True
            return
        places: dict[Path, Origin] = {}
        for found in scan(text):
            places.setdefault(found.path, Origin(layer=layer, file=name, line=found.line))
        whole = Origin(layer=layer, file=name, line=1)
        self._merge(_plain_dates(data, places, whole, self.problems), places, whole)

    def add_sections(self, given: Mapping[str, Any]) -> None:
        """Keyword sections: `optim={"lr": 2e-6}`."""
        origin = Origin(layer=self._next_layer())
        data: Tree = {}
        for section, values in given.items():
            try:
                data[section] = _plain(values, (section,))
            except TypeError as error:
                self.problems.add_line(str(error), origin)
                self.broken = True
        self._merge(data, {}, origin)

    def add_flags(self, tokens: Sequence[str]) -> None:
        """Command-line words: `--section.key value` or `--section.key=value`."""
        waiting = list(tokens)
        while waiting:
            origin = Origin(layer=self._next_layer(), flag=True)
            word = waiting.pop(0)
            if not is_flag(word):
                self.problems.add_line(f"{word}: expected --section.key value", origin)
                continue
            name, equals, text = word[2:].partition("=")
            path: Path = tuple(name.split("."))
            if not equals:
                if not waiting or is_flag(waiting[0]):
                    self.problems.add(origin, path, _value_missing(path, origin))
                    continue
                text = waiting.pop(0)
            self._add_flag(path, text, origin)

    def _add_flag(self, path: Path, text: str, origin: Origin) -> None:
        section = str(path[0])
        if section not in sections():
            self.problems.add(origin, path, unknown_section(str(path[-1] if len(path) > 1 else section), origin))
        elif len(path) == 1:
            self.problems.add(origin, path, f"a section; give its keys as --{section}.KEY value")
        elif path[1] not in hints(sections()[section]):
            self.problems.add(origin, path, unknown_key(section, str(path[1]), origin))
        elif "" in path:
            self.problems.add(origin, path, "an empty name")
        else:
            try:
                value: Any = parse_flag(text, hint_at(section, path[1:]))
            except ValueError as error:
                self.problems.add(origin, path, str(error))
                return
            for part in reversed(path):
                value = {part: value}
            self._merge(value, {path: origin}, origin)

    def _next_layer(self) -> int:
        self._layers += 1
        return self._layers

    def _read(self, name: str, origin: Origin) -> str | None:
        try:
            with open(name, "rb") as file:
                # Line ends as tomllib wants them; editors on Windows also like to put a byte-order mark first.
                return file.read().decode("utf-8-sig").replace("\r\n", "\n") + "\n"
        except FileNotFoundError:
            self.problems.add_line(f"{name}: no such file", origin)
        except IsADirectoryError:
            self.problems.add_line(f"{name}: a folder; expected a TOML file", origin)
        except UnicodeDecodeError as error:
            self.problems.add_line(f"{name}: not UTF-8 text (byte {error.start}); expected a TOML file", origin)
        except OSError as error:
            self.problems.add_line(f"{name}: cannot be read: {error.strerror or error}", origin)
        return None

    def _parse(self, name: str, layer: int, text: str) -> Tree | None:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            message = str(error)
        except RecursionError:
            self.problems.add_line(f"{name}: nested too deeply", Origin(layer=layer, file=name))
            return None
        where = _WHERE.search(message)
        reason = message[: where.start()] if where else message
        lines = text.split("\n")
        line, column = len(lines) - 1, 1
        if where and where.group(1):
            line, column = int(where.group(1)), int(where.group(2))
        if reason.startswith(_CLASHES):
            upto = sum(len(each) + 1 for each in lines[: line - 1]) + column
            pair = clash(scan(text[:upto]))
            if pair:
                last, first = pair
                same = last.path == first.path
                what = (
                    f"duplicate key, first set on line {first.line}; keep one"
                    if same
                    else f"clashes with {dotted(first.path)} on line {first.line}"
                )
                self.problems.add(Origin(layer=layer, file=name, line=last.line), last.path, what)
                return None
        hint = " (strings need quotes; booleans are true and false)" if reason == "Invalid value" else ""
        self.problems.add_line(
            f"{name}:{line}:{column}: TOML syntax: {reason}{hint}", Origin(layer=layer, file=name, line=line)
        )
        return None

    def _merge(self, data: Tree, places: Mapping[Path, Origin], whole: Origin) -> None:
        for section, values in data.items():
            origin = places.get((section,), whole)
            if section not in sections():
                self.problems.add(origin, (section,), unknown_section(section, origin))
            elif not isinstance(values, dict):
                self.problems.add(origin, (section,), f"a section: expected a table, got {short(values)}")
            else:
                known = {}
                for key, value in values.items():
                    if key in hints(sections()[section]):
                        known[key] = value
                        continue
                    here = places.get((section, key), origin)
                    self.problems.add(here, (section, key), unknown_key(section, key, here))
                self._merge_table(self.tree.setdefault(section, {}), known, (section,), places, whole)

    def _merge_table(self, table: Tree, new: Tree, path: Path, places: Mapping[Path, Origin], whole: Origin) -> None:
        for key, value in new.items():
            here = (*path, key)
            self._origins.setdefault(here, places.get(here, whole))
            if isinstance(value, dict) and isinstance(table.get(key), dict):
                self._merge_table(table[key], value, here, places, whole)
                continue
            table[key] = value
            for old in [p for p in self._origins if p[: len(here)] == here]:
                del self._origins[old]
            self._origins[here] = places.get(here, whole)
            self._origins |= {p: origin for p, origin in places.items() if p[: len(here)] == here}


def is_flag(word: str) -> bool:
    """`--optim.lr` but not `-1`, `--` or `run.toml`."""
    return _FLAG.match(word) is not None


def parse_flag(text: str, hint: Any) -> Any:
    """Command-line text as a value for a field of this annotation; what does not parse stays text.

    Raises ValueError for a list or table that is not TOML.
    """
    hint = bare(hint)
    members = union_members(hint)
    if len(members) > 1:
        lists = [m for m in members if get_origin(m) is list]
        return parse_flag(text, lists[0]) if lists and text.startswith("[") else parse_flag(text, members[0])
    if hint is str or get_origin(hint) is Literal:
        return text
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if get_origin(hint) in (list, tuple):
        return _parse_list(text, hint)
    value = _toml_value(text)
    if value is None and (hint is dict or get_origin(hint) is dict or text[:1] in ("[", "{")):
        raise ValueError(f"expected {type_prose(hint)} in TOML, such as '{{key = \"text\"}}', got {short(text)}")
    if value is None and hint in (int, float):
        return _number(text)
    return text if value is None else value


def _parse_list(text: str, hint: Any) -> Any:
    value = _toml_value(text)
    if isinstance(value, list):
        return value
    if text.startswith("["):
        raise ValueError(f'expected {type_prose(hint)} in TOML, such as \'["a", "b"]\', got {short(text)}')
    item = bare(get_args(hint)[0])
    if item is str and isinstance(value, str):
        return [value]
    return [value if isinstance(value, dict) else parse_flag(text, item)]


def _toml_value(text: str) -> Any:
    """The value if `text` is one in TOML, else None."""
    try:
        data = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    value = data["value"] if len(data) == 1 else None
    return None if isinstance(value, dict | list) and _has_date(value) else value


def _number(text: str) -> Any:
    """Spellings that Python knows and TOML does not, such as `.5` and `1.`."""
    try:
        return float(text)
    except ValueError:
        return text


def _value_missing(path: Path, origin: Origin) -> str:
    section = str(path[0])
    if section not in sections():
        return unknown_section(str(path[-1]), origin)
    if len(path) == 1:
        return f"a section; give its keys as --{section}.KEY value"
    if path[1] not in hints(sections()[section]):
        return unknown_key(section, str(path[1]), origin)
    return f"needs a value: {type_prose(hint_at(section, path[1:]))}"


def short(value: Any) -> str:
    """A value for a message: one line, cut."""
    text = "a table" if isinstance(value, dict) else toml(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _has_date(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_date(v) for v in value.values())
    if isinstance(value, list):
        return any(_has_date(v) for v in value)
    return not isinstance(value, str | bool | int | float)


def _plain_dates(data: Any, places: Mapping[Path, Origin], whole: Origin, problems: Problems, path: Path = ()) -> Any:
    """TOML dates: no setting is one, and a chat template is given text. Reported, and kept as text."""
    if isinstance(data, dict):
        return {k: _plain_dates(v, places, whole, problems, (*path, k)) for k, v in data.items()}
    if isinstance(data, list):
        return [_plain_dates(v, places, whole, problems, (*path, i)) for i, v in enumerate(data)]
    if _has_date(data):
        problems.add(places.get(path, whole), path, "a date; put it in quotes to make it a string")
        return str(data)
    return data


def _plain(value: Any, path: Path) -> Any:
    """A Python value as TOML knows values. Raises TypeError, naming the key, for one that it does not know."""
    if isinstance(value, bool | int | float | str):
        return value
    if value is None and len(path) == 2:
        return value  # an optional key, reset
    if isinstance(value, PurePath):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {k: _plain(v, (*path, k)) for k, v in pairs.items() if v is not None}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{dotted(path)}: expected strings as keys, got {key!r}")
        return {k: _plain(v, (*path, k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, (*path, i)) for i, v in enumerate(value)]
    kind = "None" if value is None else f"a value of type {type(value).__name__}"
    raise TypeError(f"{dotted(path)}: {kind} has no place in TOML")
