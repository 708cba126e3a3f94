"""What the pages say exists, loads, compiles, and, where marked `<!-- runnable -->`, runs.

Runnable blocks are executed one after the other in a folder that looks like the repository after `make quickstart`,
with a miniature model in the place of SmolLM2.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import typer

from lightrl.cli import app
from lightrl.config import Config, load_config
from lightrl.config.estimators import ESTIMATORS
from lightrl.config.fields import describe
from lightrl.config.losses import LOSSES
from lightrl.rewards.registry import RULES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lightrl"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
RUNNABLE = "<!-- runnable -->"
LINK = re.compile(r"!?\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"(?P<before>[^\n]*)\n```(?P<language>\w+)\n(?P<text>.*?)\n```(?=\n|$)", re.DOTALL)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is that of its first line in the page."""

    page: Path
    line: int
    language: str
    text: str
    runnable: bool

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(*languages: str) -> list[Block]:
    return [
        Block(
            page=page,
            line=read(page)[: m.start("text")].count("\n") + 1,
            language=m["language"],
            text=m["text"],
            runnable=m["before"].strip() == RUNNABLE,
        )
        for page in PAGES
        for m in FENCE.finditer("\n" + read(page))
        if m["language"] in languages
    ]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)


# ----- links


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, no punctuation, spaces to hyphens."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-") for title in titles}


@cache
def definitions(path: Path) -> set[str]:
    """Functions, classes, methods and module-level names of a Python file."""
    tree = ast.parse(read(path))
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return names | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links exist, so do their anchors; a link from `name` to a Python file finds the name in it."""
    for match in LINK.finditer(prose(page)):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.is_relative_to(ROOT), f"{page.name}: {target} leads out of the repository"
        assert path.exists(), f"{page.name}: no {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target} has no #{anchor}; it has {sorted(anchors(path))}"
        name = re.fullmatch(r"`(?:\w+\.)*(\w+)`s?", match["text"])
        if path.suffix == ".py" and name and name[1] != "py" and name[1] != path.stem:
            assert name[1] in definitions(path), f"{page.name}: {target} does not define {name[1]}"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {m["target"] for m in LINK.finditer(read(ROOT / "README.md"))}
    assert {f"docs/{p.name}" for p in PAGES if p.parent.name == "docs"} <= linked


# ----- keys, metrics, files and messages named in the text


def our_words(page: Path) -> str:
    """The prose, without the columns of other projects' words in tables that have a column `LightRL`."""
    lines, column = [], None
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if not line.startswith("|"):
            column = None
        elif "LightRL" in cells:
            column = cells.index("LightRL")
        lines.append(line if column is None else cells[column])
    return "\n".join(lines)


def test_keys_in_the_text_exist() -> None:
    """`section.key`, in code type, is a key, unless it is a file or a module of the package."""
    keys = {key.full_name for key in describe()}
    sections = "|".join(sorted({name.split(".")[0] for name in keys}))
    for page in PAGES:
        for name in re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:`| =)", our_words(page)):
            is_module = (SOURCE / f"{name.replace('.', '/')}.py").exists()
            assert name in keys or is_module or name.endswith((".toml", ".py", ".png")), f"{page.name}: no key {name}"


def test_metrics_in_the_text_are_documented() -> None:
    known = read(ROOT / "docs" / "metrics.md")
    areas = "reward|rollout|loss|policy|optim|mismatch|perf"
    for page in PAGES:
        for name in re.findall(rf"`((?:{areas})/[a-z_0-9]+)`", prose(page)):
            exists = (SOURCE / f"{name}.py").exists() or (SOURCE / name).is_dir()
            assert f"`{name}`" in known or exists, f"{page.name}: metrics.md has no {name}"


def test_every_metric_is_documented() -> None:
    """What the package calls a metric stands in one of the tables; names that are put together are not looked for."""
    pages = read(ROOT / "docs" / "metrics.md") + read(ROOT / "docs" / "preferences.md")
    areas = sorted({name.split("/")[0] for name in re.findall(r"^\| `([a-z]+/\w+)`", pages, re.MULTILINE)} - {"eval"})
    name = re.compile(rf"(?:{'|'.join(areas)})/[a-z0-9_]*[a-z0-9]")
    found = {text for text in messages().splitlines() if name.fullmatch(text)}
    assert len(found) > 60
    assert sorted(text for text in found if f"`{text}`" not in pages) == []


def test_every_choice_has_a_row() -> None:
    """Reward rules, advantage estimators and policy losses: a new one comes with its row."""
    for names, page in ((RULES, "rewards"), (ESTIMATORS, "algorithms"), (LOSSES, "algorithms")):
        rows = re.findall(r"^\| `(\w+)`", read(ROOT / "docs" / f"{page}.md"), re.MULTILINE)
        assert sorted(names.keys() - rows) == []


def test_files_in_the_text_exist() -> None:
    rooms = "|".join(sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"))
    names = rf"`((?:src|tests|examples|configs|benchmarks|docs|{rooms})"
    for page in PAGES:
        for name in re.findall(names + r"/[\w/]+\.(?:py|toml|md|ipynb))`", prose(page)):
            assert (ROOT / name).exists() or (SOURCE / name).exists(), f"{page.name}: no {name}"


@cache
def messages() -> str:
    """All string literals of the package, one a line, with `…` for what is filled in."""
    texts = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                texts.append("".join(map(str, parts)))
    return "\n".join(re.sub(r"(%[sdr]|…)+", "…", text).replace("\n", " ") for text in texts)


def test_messages_in_troubleshooting_are_ours() -> None:
    """The first column of tables headed `LightRL says`."""
    found = 0
    for table in re.findall(r"^\| LightRL says .*?(?=\n\n)", read(ROOT / "docs/troubleshooting.md"), re.S | re.M):
        for row in table.splitlines()[2:]:
            (quoted,) = re.findall(r"^\| `([^`]+)`", row)
            assert quoted in messages(), f"no such message in the code: {quoted}"
            found += 1
    assert found > 25


# ----- TOML and configs


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_blocks_are_configs(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.toml"
    file.write_text(block.text)
    assert isinstance(load_config(file), Config)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_recipes_load_and_are_short(file: Path) -> None:
    config = load_config(file)
    assert config.model.path
    assert config.data.path
    assert read(file).startswith("# ")
    assert len(read(file).splitlines()) <= 40


def test_readme_is_short() -> None:
    assert len(read(ROOT / "README.md").splitlines()) <= 150


# ----- commands


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """(place, words) of each command in shell blocks, and of commands in the text in code type."""
    for block in blocks("bash", "sh", "console"):
        for number, line in enumerate(block.text.replace("\\\n", " ").splitlines()):
            if words := shlex.split(line, comments=True):
                yield f"{block.page.name}:{block.line + number}", words
    for page in PAGES:
        for code in re.findall(r"`((?:lightrl|make|torchrun|python) [^`]+)`", prose(page)):
            yield f"{page.name}: {code}", shlex.split(code.replace("\n", " "))


def lightrl_words(words: list[str]) -> list[str] | None:
    """What follows `lightrl`, however it is started; None for another command."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return None
    if Path(words[0]).name == "lightrl":
        return words[1:]
    if Path(words[0]).name in ("torchrun", "python") and "-m" in words:
        module = words.index("-m") + 1
        return words[module + 1 :] if words[module] == "lightrl" else None
    return None


def test_lightrl_commands_exist() -> None:
    """Commands, their options, and every --section.key with its value."""
    group: Any = typer.main.get_command(app)
    keys = {key.full_name for key in describe()}
    seen = 0
    for place, words in command_lines():
        rest = lightrl_words(words)
        if rest is None or rest in ([], ["…"], ["--help"]):
            continue
        command = group.commands.get(rest[0])
        assert command is not None, f"{place}: no command {rest[0]}"
        rest = rest[1:]
        if hasattr(command, "commands"):
            assert rest[0] in command.commands, f"{place}: no command {rest[0]}"
            command, rest = command.commands[rest[0]], rest[1:]
        options = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
        overrides: list[str] = []
        files = [ROOT / word for word in rest if word.endswith(".toml") and (ROOT / word).exists()]
        for i, word in enumerate(rest):
            flag, _, value = word.partition("=")
            if not flag.startswith("--"):
                continue
            if "." in flag:
                assert flag.removeprefix("--") in keys, f"{place}: no key {flag}"
                overrides += [flag, value or rest[i + 1]]
            else:
                assert flag in options, f"{place}: no option {flag}"
        assert isinstance(load_config(*files, overrides=overrides), Config), place
        seen += 1
    assert seen > 20


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    named = {words[1] for _, words in command_lines() if words[0] == "make" and len(words) > 1}
    assert {"quickstart", "test"} <= named <= targets


def test_benchmarks_exist() -> None:
    named = set(re.findall(r"benchmarks/run\.py --op (\w+)", "\n".join(map(read, PAGES))))
    assert named
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in named)


# ----- Python


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_blocks_compile(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.fixture(scope="module")
def finished_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as it is after `make quickstart`, in small: model, data, config, and a run of two steps."""
    from lightrl.config import dump_toml
    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    folder = tmp_path_factory.mktemp("repository")
    tiny_run.make_model(folder / "models" / "SmolLM2-135M-Instruct")
    for name, start in (("train", 0), ("test", 5)):
        path = folder / "data" / "arithmetic" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"input": f"add {i} 2", "label": str(i + 2)} for i in range(start, start + 8)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        ROOT / "configs" / "quickstart.toml",
        run={"steps": 2, "device": "cpu"},
        model={"compute_dtype": "float32"},
        checkpoint={"async_save": False},
        log={"trackers": ["jsonl"], "print_samples": 0},
    )
    (folder / "configs").mkdir()
    (folder / "configs" / "quickstart.toml").write_text(dump_toml(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer = Trainer(config)
        trainer.train()
        trainer.close()
        close_world()
    return folder


RUN = [block for block in blocks("python") if block.runnable]


def test_snippets_are_marked_runnable() -> None:
    assert {b.page.name for b in RUN} >= {"README.md", "data.md", "kernels.md", "metrics.md", "rewards.md"}


@pytest.mark.parametrize("block", RUN, ids=str)
def test_runnable_blocks_run(block: Block, finished_quickstart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightrl.distributed.mesh import close_world

    monkeypatch.chdir(finished_quickstart)
    for _ in range(2 if block.page.name == "README.md" else 1):  # what is tried first is tried again
        exec(compile(block.text, str(block), "exec"), {"__name__": "__snippet__"})
        close_world()
