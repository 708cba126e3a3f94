"""Which line of a TOML file sets which key: `tomllib` parses values but does not tell where they stood.

`scan` expects text that `tomllib` accepts and follows its keys only; of other text it returns what it can follow.
"""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""A key such as `eval.sets[0].path`: ("eval", "sets", 0, "path")."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[^\s=.\[\]{},#\"']+")
_STRINGS = {
    '"""': re.compile(r'"""(?:\\.|[^\\])*?"{3,5}', re.DOTALL),
    "'''": re.compile(r"'''.*?'{3,5}", re.DOTALL),
    '"': re.compile(r'"(?:\\.|[^"\\\n])*"'),
    "'": re.compile(r"'[^'\n]*'"),
}
_SCALAR = re.compile(r"[^,\]}#\n]+")


@dataclass(frozen=True)
class Occurrence:
    """A place that names a key; `implicit` for `a` in `a.b = 1` or in `[a.b]`."""

    path: Path
    line: int
    implicit: bool = False


def dotted(path: Path) -> str:
    """
    >>> dotted(("eval", "sets", 0, "path"))
    'eval.sets[0].path'
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if re.fullmatch(r"[\w-]+", part) else repr(part))
    return text


def scan(text: str) -> list[Occurrence]:
    """Every key of a TOML text with its line (from 1), in the order of the file."""
    scanner = _Scanner(text)
    with suppress(_Stop):  # not TOML from there on; tomllib says why
        scanner.document()
    return scanner.found


def clash(occurrences: list[Occurrence]) -> tuple[Occurrence, Occurrence] | None:
    """The last key and the earlier one that it may not follow: the same key, or one that is no open table."""
    explicit = [o for o in occurrences if not o.implicit]
    if not explicit:
        return None
    last = explicit[-1]
    above = [o for o in explicit[:-1] if o.path == last.path[: len(o.path)]]
    return (last, max(above, key=lambda o: len(o.path))) if above else None  # the nearest; of those, the first


class _Stop(Exception):
    """The text ended, or is not TOML."""


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.found: list[Occurrence] = []
        self._line_pos = 0
        self._line = 1
        self._array_length: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        while True:
            self._skip(_BLANK)
            if self.pos >= len(self.text):
                return
            if self._peek("["):
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Path:
        line = self._line_here()
        array = self._peek("[[")
        self.pos += 2 if array else 1
        parts = self._key()
        path: Path = ()
        for part in parts[:-1]:
            path = self._open((*path, part))
            self._record(path, line, implicit=True)
        path = (*path, parts[-1])
        if array:
            self._record(path, line, implicit=True)
            index = self._array_length.get(path, 0)
            self._array_length[path] = index + 1
            path = (*path, index)
        else:
            path = self._open(path)
        self._record(path, line)
        self._expect("]]" if array else "]")
        return path

    def _open(self, path: Path) -> Path:
        """An array of tables stands for its newest table."""
        return (*path, self._array_length[path] - 1) if path in self._array_length else path

    def _pair(self, table: Path) -> None:
        self._skip(_SPACE)
        line = self._line_here()
        parts = self._key()
        path = table
        for part in parts[:-1]:
            path = (*path, part)
            self._record(path, line, implicit=True)
        path = (*path, parts[-1])
        self._record(path, line)
        self._expect("=")
        self._value(path)

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._skip(_SPACE)
            parts.append(self._key_part())
            self._skip(_SPACE)
            if not self._peek("."):
                return parts
            self.pos += 1

    def _key_part(self) -> str:
        if self._peek('"') or self._peek("'"):
            raw = self._match(_STRINGS[self.text[self.pos]])
            try:
                return next(iter(tomllib.loads(f"{raw} = 0")))
            except tomllib.TOMLDecodeError:
                raise _Stop from None
        return self._match(_BARE)

    def _value(self, path: Path) -> None:
        self._skip(_SPACE)
        for quote, pattern in _STRINGS.items():
            if self._peek(quote):
                self._match(pattern)
                return
        if self._peek("["):
            self._array(path)
        elif self._peek("{"):
            self._inline_table(path)
        else:
            self._match(_SCALAR)

    def _array(self, path: Path) -> None:
        self.pos += 1
        index = 0
        while True:
            self._skip(_BLANK)
            if self._peek("]"):
                self.pos += 1
                return
            self._record((*path, index), self._line_here())
            self._value((*path, index))
            index += 1
            self._skip(_BLANK)
            if not self._peek("]"):
                self._expect(",")

    def _inline_table(self, path: Path) -> None:
        self.pos += 1
        while True:
            self._skip(_BLANK)
            if self._peek("}"):
                self.pos += 1
                return
            self._pair(path)
            self._skip(_BLANK)
            if not self._peek("}"):
                self._expect(",")

    def _record(self, path: Path, line: int, *, implicit: bool = False) -> None:
        self.found.append(Occurrence(path, line, implicit))

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._line_pos, self.pos)
        self._line_pos = self.pos
        return self._line

    def _peek(self, literal: str) -> bool:
        return self.text.startswith(literal, self.pos)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.pos)
        if match:
            self.pos = match.end()

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.pos)
        if not match:
            raise _Stop
        self.pos = match.end()
        return match.group()

    def _expect(self, literal: str) -> None:
        self._skip(_SPACE)
        if not self._peek(literal):
            raise _Stop
        self.pos += len(literal)
