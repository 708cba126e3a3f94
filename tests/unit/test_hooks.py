"""Functions named in the config: found by reading their modules, which are not run."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

import pytest

from lightrl import hooks
from lightrl.errors import UserError

SOURCE = """
raise RuntimeError("this module was run")
import os.path as paths, json.decoder
from math import floor as down
def plain(sample): inner = 1
async def waits(sample): ...
class Grader: method = 1
assigned: object = None
left, (right, *rest) = 1, (2, 3)
if True:
    try:
        nested = 1
    except ValueError:
        def otherwise(): ...
with open("x") as file: pass
(walrus := 1)
def sets():
    global made
    made = 1
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`module(source)`: the name of a new module of this source in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = []

    def write(source: str) -> str:
        made.append(f"hooked_{len(made)}")
        Path(f"{made[-1]}.py").write_text(source)
        return made[-1]

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_names_at_top_level_are_found(module) -> None:
    name = module(SOURCE)
    there = ("paths", "json", "down", "plain", "waits", "Grader", "assigned", "left", "right", "rest")
    there += ("nested", "otherwise", "file", "walrus", "made")
    assert {n: hooks.fault(f"{name}:{n}") for n in there} == dict.fromkeys(there)
    for missing in ("inner", "method", "floor", "decoder", "os", "ValueError"):
        assert f"{name} has no '{missing}'" in (hooks.fault(f"{name}:{missing}") or ""), missing
    assert hooks.fault(f"{name}:plane") == f"{name} has no 'plane' (did you mean 'plain'?)"
    assert name not in sys.modules


def test_values_written_out_are_no_functions(module) -> None:
    source = "LIMIT = 3\nPARTS = ['a', {'b': -1}]\ntwice = None\ndef twice(): ...\nmade = PARTS\ntaken = other = 2\n"
    name = module(source)
    assert hooks.fault(f"{name}:LIMIT") == "'LIMIT' is of type int, not a function"
    assert hooks.fault(f"{name}:PARTS") == "'PARTS' is of type list, not a function"
    for unsure in ("twice", "made", "other"):
        assert hooks.fault(f"{name}:{unsure}") is None, unsure
    assert hooks.fault("sys:maxsize") == "'maxsize' is of type int, not a function"


@pytest.mark.parametrize(
    "source",
    [
        "from os.path import *",
        "def __getattr__(name): return len",
        "globals()['f'] = len",
        "exec('f = len')",
        "import sys\nsetattr(sys.modules[__name__], 'f', len)",
    ],
)
def test_what_only_running_tells_is_let_pass(module, source: str) -> None:
    assert hooks.fault(f"{module(source)}:f") is None


def test_a_module_without_source_is_let_pass(module) -> None:
    name = module("f = len")
    py_compile.compile(f"{name}.py", cfile=f"{name}.pyc")
    assert hooks.fault(f"{name}:g") == f"{name} has no 'g' (it has f)"
    Path(f"{name}.py").unlink()
    assert hooks.fault(f"{name}:g") is None


def test_packages_are_walked_and_not_imported(module) -> None:
    module("")
    Path("pack/plain/deep").mkdir(parents=True)
    Path("pack/plain/deep/grade.py").write_text("f = len\n")
    assert hooks.fault("pack.plain.deep.grade:f") is None  # folders without __init__.py
    assert hooks.fault("pack.plain.deep:f") == "pack.plain.deep has no 'f' (it has no names)"
    Path("pack/__init__.py").write_text("raise RuntimeError('this package was run')\n")
    assert hooks.fault("pack.plain.deep.grade:f") is None
    end = f"in {Path.cwd()} or among the installed packages: "
    assert hooks.fault("pack.plan.deep.grade:f") == f"no module 'pack.plan' {end}run from its folder, or install it"
    assert hooks.fault("pack.plain.deep.grad:f") == (
        f"no module 'pack.plain.deep.grad' {end}did you mean 'pack.plain.deep.grade'?"
    )
    Path("pack/__init__.py").write_text("__path__.append('/elsewhere')\n")
    assert hooks.fault("pack.elsewhere:f") is None  # its modules may be anywhere
    assert "pack" not in sys.modules


def test_what_is_malformed(module) -> None:
    for path in ("f", "a.b", "a b:f", "a:", ":f", "a:f:g", ".a:f", "a:b.c"):
        assert hooks.fault(path) == f"{path!r}: write a function as package.module:function"
    name = module("def f(:\n")
    assert (
        hooks.fault(f"{name}:f") == f"{name} cannot be imported: {Path.cwd()}/{name}.py:1: invalid syntax; correct it"
    )


def test_loading_says_the_same(module) -> None:
    name = module("def f(sample): ...\nnumber = 3\n")
    assert hooks.load(f"{name}:f", "reward.type").__name__ == "f"
    for path in (f"{name}:ff", "no.such.module:f", f"{name}.inner:f", "a b:f"):
        with pytest.raises(UserError) as caught:
            hooks.load(path, "reward.type")
        assert str(caught.value).startswith(f"reward.type = {path!r}: ")
        assert (hooks.fault(path) or "").removeprefix(f"{path!r}: ") in str(caught.value)
    with pytest.raises(UserError, match="'number' is of type int, not a function"):
        hooks.load(f"{name}:number", "reward.type")


CALLS = """
def none(): ...
def two(a, b): ...
def keyword(a, *, b): ...
async def waits(): ...
def one(a): ...
def defaults(a, b=1, *, c=2): ...
def any_number(*all): ...
@made_elsewhere
def decorated(): ...
def again(): ...
again = made_elsewhere(again)
if True:
    def perhaps(): ...
class Grader: ...
"""


def test_functions_that_cannot_take_one_argument_are_told_unrun(module) -> None:
    name = module("raise RuntimeError\n" + CALLS)
    told = "cannot be called with one argument, as it will be"
    assert {n: hooks.fault(f"{name}:{n}") for n in ("none", "two", "keyword", "waits")} == {
        "none": f"none() {told}",
        "two": f"two(a, b) {told}",
        "keyword": f"keyword(a, *, b) {told}",
        "waits": f"waits() {told}",
    }
    for good in ("one", "defaults", "any_number", "decorated", "again", "perhaps", "Grader"):
        assert hooks.fault(f"{name}:{good}") is None, good
    loaded = module("made_elsewhere = lambda f: lambda x: f()\n" + CALLS)
    with pytest.raises(UserError, match=rf"reward.type = '{loaded}:perhaps': perhaps\(\) {told}"):
        hooks.load(f"{loaded}:perhaps", "reward.type")
    for good in ("one", "defaults", "any_number", "decorated", "again"):
        assert callable(hooks.load(f"{loaded}:{good}", "reward.type"))


def test_what_a_function_raises_is_told_with_its_own_frames() -> None:
    def divides(number: int) -> float:
        return helper(number)

    def helper(number: int) -> float:
        return 1 / number

    def refuses(number: int) -> float:
        raise UserError("as it is")

    assert hooks.call(divides, 2, "mine:divides", "algorithm.loss") == 0.5
    with pytest.raises(
        UserError, match=r"^algorithm\.loss = 'mine:divides': it raised ZeroDivisionError: .*zero"
    ) as told:
        hooks.call(divides, 0, "mine:divides", "algorithm.loss")
    (note,) = told.value.__notes__
    assert "in divides" in note
    assert "in helper" in note
    assert "in call" not in note
    assert note.endswith("by zero")
    with pytest.raises(UserError, match="as it is"):
        hooks.call(refuses, 0, "mine:refuses", "algorithm.loss")
