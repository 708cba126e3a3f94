"""What torchrun shows of a mistake that all ranks make."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightrl

LINE = "error: --optim.lrr: unknown key; did you mean --optim.lr?"


def test_a_mistake_is_the_end_of_torchruns_report(run_distributed):
    words = ["--model.path", "org/model", "--data.path", "org/data", "--optim.lrr", "1"]
    source = {"PYTHONPATH": str(Path(lightrl.__file__).parents[1])}
    with pytest.raises(pytest.fail.Exception) as failure:
        run_distributed("lightrl", 2, "train", *words, env=source)
    text = str(failure.value).strip()
    lines = text.splitlines()
    assert lines.count(LINE) <= 1  # by the first rank, if the other's end did not take it down before
    assert lines[-2] == f"  traceback : {LINE}"  # above a rule
    assert "lightrl/cli.py" not in text
