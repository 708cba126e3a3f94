"""Keys of `[engine.args]`, checked by the source of an SGLang that is not imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.engine import sglang_arguments

SOURCE = """
raise AssertionError("imported")
@dataclasses.dataclass
class Other:
    hidden: int = 0
class ServerArgs:
    tp_size: int = 1
    page_size: A[Optional[int], "help"] = None
    ratio: A[float | None, Arg(help="x")] = None
    quick: A[bool, "help"] = False
    names: A[Optional[List[str]], "help"] = None
    incremental_streaming_output: bool = False
    def method(self): number: int = 0
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "srt" / "server_args.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(package.parent))
    return package / "srt" / "server_args.py"


def test_what_the_source_declares(source: Path) -> None:
    assert sglang_arguments.declared() == {
        "tp_size": "int", "page_size": "int", "ratio": "float", "quick": "bool", "names": None,
        "incremental_streaming_output": "bool",
    }  # fmt: skip
    source.write_text("class ServerArgs(Base):\n    x: int = 0")  # of which it is not the whole
    assert sglang_arguments.declared() == {}
    source.unlink()
    assert sglang_arguments.declared() == {}
    sglang_arguments.check({"anything": 1})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pages_size = 2", "SGLang has no such argument; did you mean page_size"),
        ("hidden = 2", "SGLang has no such argument; SGLang has incremental_streaming_output, names, page_size, quick"),
        ("tp_size = 2", "set by LightRL (engine.tensor_parallel); remove it"),
        ("incremental_streaming_output = true", "set by LightRL (off: answers are looked at whole); remove it"),
        ("page_size = '2'", "SGLang wants an integer, got '2'"),
        ("page_size = true", "SGLang wants an integer, got True"),
        ("page_size = 2.0", "SGLang wants an integer, got 2.0"),
        ("quick = 1", "SGLang wants true or false, got 1"),
        ("ratio = 1", None),
        ("names = ['a']", None),
    ],
)
def test_a_wrong_key_is_told_with_its_line(
    line: str, message: str | None, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started, and torch imported."""
    (tmp_path / "model").mkdir()
    (tmp_path / "data.jsonl").touch()
    config = tmp_path / "run.toml"
    config.write_text(
        f"[model]\npath = '{tmp_path}/model'\n[data]\npath = '{tmp_path}/data.jsonl'\nlabel_key = 'label'\n"
        f"[reward]\ntype = 'math'\n[engine]\nkind = 'sglang'\n[engine.args]\n{line}\n"
    )
    if message is None:
        with pytest.raises(SystemExit, match="0"):
            main(["config", "check", str(config)])
        return
    with pytest.raises(SystemExit, match="2"):
        main(["config", "check", str(config)])
    name = line.split()[0]
    assert capsys.readouterr().err.startswith(f"error: {config}:11: engine.args.{name}: {message}")
