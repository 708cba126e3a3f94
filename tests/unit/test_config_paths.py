"""Paths in a configuration, checked before torch is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrl.config import ConfigError
from lightrl.config.load import load_for_run


def test_paths_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is the home folder, as where the file is read; a slice is none where a file has that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("mine.jsonl").touch()
    Path("odd.jsonl@[:3]").touch()

    def check(*words: str) -> list[str]:
        try:
            load_for_run([], ["--data.path", "mine.jsonl", "--model.path", "org/hub", *words])
        except ConfigError as error:
            return error.problems
        return []

    assert check("--data.path", "~/mine.jsonl@[1:]") == []
    assert check("--data.path", "odd.jsonl@[:3]") == []
    assert check("--data.path", "~/gone") == ["--data.path: no such file or folder: ~/gone"]
    assert check("--model.path", "models/tiny/nope") == ["--model.path: no such folder: models/tiny/nope"]
    assert check("--model.path", "mine/nope") == []  # a name of the hub
    Path("mine").mkdir()
    (problem,) = check("--model.path", "mine/nope")
    assert problem.startswith("--model.path: no such folder: mine/nope (mine/ is a folder here")
    assert check("--model.path", "~/gone") == ["--model.path: no such folder: ~/gone"]
    assert check("--run.dir", "~/new/folder") == []
    assert check("--run.dir", "") == ["--run.dir: empty; name a folder for the run"]
    assert check("--run.dir", "a\0b") == ["--run.dir: has a NUL character, which no file name can have; name a folder"]
    file = f"--run.dir: {tmp_path}/mine.jsonl is not a folder; name another place"
    assert check("--run.dir", "mine.jsonl") == check("--run.dir", "mine.jsonl/below") == [file]
    monkeypatch.setattr("os.access", lambda *_: False)
    assert check("--run.dir", "new") == [f"--run.dir: no permission to write in {tmp_path}; name another place"]
