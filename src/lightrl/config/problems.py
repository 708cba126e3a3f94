"""What is wrong with a configuration, one line a problem, and where each setting came from."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightrl.config.fields import hints, sections
from lightrl.config.lines import Path, dotted
from lightrl.errors import UserError


class ConfigError(UserError):
    """Everything that is wrong with a configuration: `problems` has a line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The place that set a key: a line of a file, a command-line flag, or a keyword argument."""

    layer: int
    """Position among the sources; later ones win."""
    file: str | None = None
    line: int = 0
    flag: bool = False

    def label(self, path: Path) -> str:
        """How a message about `path` begins."""
        if self.file is not None:
            return f"{self.file}:{self.line}: {dotted(path)}"
        return self.name(path)

    def name(self, path: Path) -> str:
        """How the user writes `path` in this kind of source."""
        if not self.flag:
            return dotted(path)
        # `--log.trackers x` stands for a list of one: its user wrote no [0].
        return f"--{dotted(path[:-1] if isinstance(path[-1], int) else path)}"


@dataclass
class Problems:
    """Collects lines, and gives them back in the order of the sources."""

    found: list[tuple[tuple[int, int], str]] = field(default_factory=list)

    def add(self, origin: Origin, path: Path, what: str) -> None:
        self.add_line(f"{origin.label(path)}: {what}", origin)

    def add_line(self, text: str, origin: Origin | None = None) -> None:
        order = (origin.layer, origin.line) if origin else (len(self.found) + 10**6, 0)
        if all(text != other for _, other in self.found):
            self.found.append((order, text))

    def raise_if_any(self) -> None:
        if self.found:
            raise ConfigError([text for _, text in sorted(self.found, key=lambda item: item[0])])


def unknown_section(name: str, origin: Origin) -> str:
    """`lr` at the top level, or a table that is no section."""
    homes = _homes(name)
    if homes:
        return f"unknown key; did you mean {_either(homes, origin)}?"
    near = difflib.get_close_matches(name, sections(), n=1, cutoff=0.6)
    if near:
        return f"unknown section; did you mean {origin.name((near[0],))}?"
    homes = _near_homes(name)
    if homes:
        return f"unknown key; did you mean {_either(homes, origin)}?"
    return "unknown section; sections are " + ", ".join(sections())


def unknown_key(section: str, name: str, origin: Origin) -> str:
    """A key that its section does not have."""
    homes = _homes(name, section)
    if homes:
        return f"unknown key; did you mean {_either(homes, origin)}?"
    near = difflib.get_close_matches(name, hints(sections()[section]), n=1, cutoff=0.6)
    homes = [(section, near[0])] if near else _near_homes(name)
    if homes:
        return f"unknown key; did you mean {_either(homes, origin)}?"
    return f"unknown key; [{section}] has " + ", ".join(hints(sections()[section]))


def _homes(name: str, section: str = "") -> list[Path]:
    """Sections that have a key of just this name, hyphens aside: `section` alone, if it does.

    A section made after another one (`critic_optim`) is not guessed at.
    """
    name = name.replace("-", "_")
    classes = sections()
    if section in classes and name in hints(classes[section]):
        return [(section, name)]
    first = {key: cls for key, cls in classes.items() if not any(base in classes.values() for base in cls.__mro__[1:])}
    return [(key, name) for key, cls in first.items() if name in hints(cls)]


def _near_homes(name: str) -> list[Path]:
    every = {key for cls in sections().values() for key in hints(cls)}
    near = difflib.get_close_matches(name, sorted(every), n=1, cutoff=0.7)
    return _homes(near[0]) if near else []


def _either(paths: list[Path], origin: Origin) -> str:
    *first, last = (origin.name(path) for path in paths)
    return f"{', '.join(first)} or {last}" if first else last
