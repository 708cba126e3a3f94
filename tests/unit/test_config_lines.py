"""The scanner tells the line of every key, checked against documents whose lines are known."""

from __future__ import annotations

import random
import tomllib
from typing import Any

import pytest

from lightrl.config.lines import clash, dotted, scan


def lines_of(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for occurrence in scan(text):
        found.setdefault(dotted(occurrence.path), occurrence.line)
    return found


NASTY = '''\
# a = 1
top = """
a = 2
[not.a.table]
\\""" still = "inside" """   # comment = 1
raw = \'\'\'
b = 'x'\'\'\'\'
"quoted \\"key\\"" = 1
'single.dot' = 2   # one key
a . b."c.d" = 3

[optim] # [comment]
lr=1e-6
betas = [ # = [
  0.9, # ]
  0.95,
]
s = "a # b = c ] } \\\\"
t = '\\'
[ data . "chat template" ]
inline = {x = 1, y = {z = "}"}, "w" = [1, {v = ']'}]}
day = 1979-05-27 07:32:00
empty = ""
[[eval.sets]]
name = "a"

[[eval.sets]]
name = "b"
[eval.sets.extra]
k = [[1], ["""
"""]]
[eval.last]
x = 1
'''


def test_nasty_document() -> None:
    assert set(tomllib.loads(NASTY)) == {"top", "raw", 'quoted "key"', "single.dot", "a", "optim", "data", "eval"}
    assert lines_of(NASTY) == {
        "top": 2,
        "raw": 6,
        "'quoted \"key\"'": 8,
        "'single.dot'": 9,
        "a": 10,
        "a.b": 10,
        "a.b.'c.d'": 10,
        "optim": 12,
        "optim.lr": 13,
        "optim.betas": 14,
        "optim.betas[0]": 15,
        "optim.betas[1]": 16,
        "optim.s": 18,
        "optim.t": 19,
        "data": 20,
        "data.'chat template'": 20,
        "data.'chat template'.inline": 21,
        "data.'chat template'.inline.x": 21,
        "data.'chat template'.inline.y": 21,
        "data.'chat template'.inline.y.z": 21,
        "data.'chat template'.inline.w": 21,
        "data.'chat template'.inline.w[0]": 21,
        "data.'chat template'.inline.w[1]": 21,
        "data.'chat template'.inline.w[1].v": 21,
        "data.'chat template'.day": 22,
        "data.'chat template'.empty": 23,
        "eval": 24,
        "eval.sets": 24,
        "eval.sets[0]": 24,
        "eval.sets[0].name": 25,
        "eval.sets[1]": 27,
        "eval.sets[1].name": 28,
        "eval.sets[1].extra": 29,
        "eval.sets[1].extra.k": 30,
        "eval.sets[1].extra.k[0]": 30,
        "eval.sets[1].extra.k[0][0]": 30,
        "eval.sets[1].extra.k[1]": 30,
        "eval.sets[1].extra.k[1][0]": 30,
        "eval.last": 32,
        "eval.last.x": 33,
    }


class Writer:
    """Writes random TOML and notes the line of every key that it writes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.text = ""
        self.lines: dict[str, int] = {}
        self.count = 0

    def write(self, text: str) -> None:
        self.text += text

    def note(self, path: tuple[str | int, ...]) -> None:
        self.lines.setdefault(dotted(path), self.text.count("\n") + 1)

    def name(self) -> tuple[str, str]:
        """(the key, its spelling)."""
        self.count += 1
        key = self.random.choice(["k{}", "k-{}", "k.{}", "k {}", "k#{}", "k={}", "[k{}]", "é{}"]).format(self.count)
        bare = key.replace("-", "_").isidentifier() and key.isascii()
        return key, key if bare and self.random.random() < 0.6 else self.random.choice(['"{}"', "'{}'"]).format(key)

    def gap(self, newlines: bool) -> None:
        self.write(self.random.choice(["", " ", "\t"]))
        if newlines and self.random.random() < 0.3:
            self.write(self.random.choice(["\n", " # a = [1, {\n", "\n\n  "]))

    def scalar(self) -> None:
        texts = ["1", "-2.5e-3", "true", "1979-05-27T07:32:00Z", "1979-05-27 07:32:00", '"# = ] } \\" \\\\"', "'\\'"]
        multi = ['"""\nx = 1\n[y]\n"""', "'''\n\"\"\"\nz = 2'''", '"""a\\\n  b"""', "''''quoted''''", '"""""x"""""']
        self.write(self.random.choice(texts + multi))

    def value(self, path: tuple[str | int, ...], depth: int = 0) -> None:
        kind = self.random.random()
        if depth < 3 and kind < 0.2:
            self.write("[")
            for index in range(self.random.randrange(4)):
                self.gap(newlines=True)
                self.note((*path, index))
                self.value((*path, index), depth + 1)
                self.gap(newlines=True)
                self.write(",")
            self.gap(newlines=True)
            self.write("]")
        elif depth < 3 and kind < 0.4:
            self.write("{")
            for index in range(self.random.randrange(3)):
                self.write(", " if index else "")
                self.pair(path, depth + 1)
            self.write("}")
        else:
            self.scalar()

    def pair(self, table: tuple[str | int, ...], depth: int = 0) -> None:
        self.gap(newlines=False)
        for _ in range(self.random.choice([0, 0, 0, 1, 2])):
            key, spelling = self.name()
            table = (*table, key)
            self.note(table)
            self.write(spelling + self.random.choice([".", " . "]))
        key, spelling = self.name()
        self.note((*table, key))
        self.write(spelling)
        self.gap(newlines=False)
        self.write("=")
        self.gap(newlines=False)
        self.value((*table, key), depth)
        self.gap(newlines=False)

    def document(self) -> str:
        table: tuple[str | int, ...] = ()
        arrays: list[tuple[tuple[str | int, ...], str, int]] = []
        for _ in range(self.random.randrange(1, 12)):
            kind = self.random.random()
            if kind < 0.15:
                key, spelling = self.name()
                table = (key,)
                self.note(table)
                self.write(f"[{spelling}]")
            elif kind < 0.25:
                key, spelling = self.name()
                self.note((key,))
                self.note((key, 0))
                self.write(f"[[ {spelling} ]]")
                table, arrays = (key, 0), [*arrays, ((key,), spelling, 1)]
            elif kind < 0.35 and arrays:
                path, spelling, length = arrays.pop(self.random.randrange(len(arrays)))
                self.note((*path, length))
                self.write(f"[[{spelling}]]")
                table, arrays = (*path, length), [*arrays, (path, spelling, length + 1)]
            else:
                self.pair(table)
            self.write(self.random.choice(["\n", " # x = 1\n", "\n\n", "\n# [c]\n"]))
        return self.text


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> set[str]:
    if isinstance(value, dict):
        inner = [leaves(v, (*path, k)) for k, v in value.items()]
    elif isinstance(value, list):
        inner = [leaves(v, (*path, i)) for i, v in enumerate(value)]
    else:
        inner = []
    return set().union({dotted(path)} if path else set(), *inner)


def test_random_documents() -> None:
    for seed in range(400):
        writer = Writer(seed)
        text = writer.document()
        assert leaves(tomllib.loads(text)) == set(writer.lines), text
        assert lines_of(text) == writer.lines, text


def test_text_that_is_no_toml_ends_the_scan() -> None:
    rng = random.Random(0)
    for _ in range(300):
        broken = list(NASTY)
        for _ in range(rng.randrange(1, 6)):
            broken[rng.randrange(len(broken))] = rng.choice("\"'[]{}=.#\n,\\x ")
        scan("".join(broken))  # ends, and raises nothing
        scan(NASTY[: rng.randrange(len(NASTY))])


@pytest.mark.parametrize(
    ("text", "last", "first"),
    [
        ("[optim]\nlr = 1\n\nlr = 2", ("optim.lr", 4), ("optim.lr", 2)),
        ("[a]\nx = 1\n[b]\n[a]", ("a", 4), ("a", 1)),
        ("a = 1\na.b = 2", ("a.b", 2), ("a", 1)),
        ("a = {b = 1,\n c = 2, b = 3}", ("a.b", 2), ("a.b", 1)),
    ],
)
def test_clash(text: str, last: tuple[str, int], first: tuple[str, int]) -> None:
    pair = clash(scan(text))
    assert pair is not None
    assert [(dotted(o.path), o.line) for o in pair] == [last, first]
