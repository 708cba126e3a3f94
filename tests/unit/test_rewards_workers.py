"""Rules in worker processes: they can be killed, they leave nothing behind, and labels are checked in them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightrl.config.schema import RewardConfig
from lightrl.errors import UserError
from lightrl.rewards import RewardStats, Scorer, check_labels
from lightrl.rewards.answer import Answer
from lightrl.rewards.pool import WorkerError, WorkerPool
from lightrl.types import Prompt, Sample, Status


def workers(of: int | None = None) -> list[psutil.Process]:
    return [p for p in psutil.Process(of).children() if "lightrl.rewards.worker" in " ".join(p.cmdline())]


def prompt(label: Any, line: int = 1, **metadata: Any) -> Prompt:
    return Prompt(index=line - 1, tokens=[1], text="q", label=label, metadata=metadata, source=f"train.jsonl:{line}")


def test_an_answer_that_is_too_much_for_its_rule_gets_the_worst_and_the_others_are_graded() -> None:
    # x**x**x… of big numbers hangs inside one C call: no Python code of the worker could end it
    responses = [r"\boxed{5}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{4}", r"\boxed{\frac{10}{2}}"]
    samples = [
        Sample(prompt=prompt("5"), group_index=0, index=i, tokens=[1, 2], response_length=1, response=r)
        for i, r in enumerate(responses)
    ]
    scorer = Scorer(RewardConfig(type="math", timeout=2.0, concurrency=2))
    assert not workers()  # none before the first call
    asyncio.run(scorer.score(samples))
    assert [s.reward for s in samples] == [1.0, 0.0, 0.0, 1.0]
    assert {s.status for s in samples} == {Status.COMPLETED}
    assert [s.metadata for s in samples] == [{}, {"grading_limit": "took longer than 2 s"}, {}, {}]
    assert scorer.take_stats() == RewardStats(total=4)
    scorer.close()
    scorer.close()
    assert not workers()


def test_what_a_rule_raises_comes_with_its_traceback_and_the_worker_lives_on() -> None:
    pool = WorkerPool(1)
    try:
        with pytest.raises(WorkerError, match="ValueError: the label is missing") as caught:
            pool.call("math:check_gold", Answer(response=""), 10)
        assert "in check_gold" in caught.value.remote_traceback
        (before,) = workers()
        assert pool.call("math:grade_math", Answer(response="\ud800 é \\boxed{\n5}", label="5"), 10) == 1.0
        assert workers() == [before]
        before.kill()  # as the system does when memory is short
        with pytest.raises(WorkerError, match=r"the worker process died \(exit code -9\)"):
            pool.call("math:grade_math", Answer(response=r"\boxed{5}", label="5"), 10)
        assert pool.call("math:grade_math", Answer(response=r"\boxed{5}", label="5"), 10) == 1.0
    finally:
        pool.close()
    with pytest.raises(WorkerError, match="are closed"):
        pool.call("math:grade_math", Answer(response=""), 10)


def test_only_what_a_worker_does_to_itself_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Big numbers abort in C when the memory that they are allowed is used up; a kill says nothing of the text."""
    pool = WorkerPool(1)
    answers = [Sample(prompt=prompt("5"), group_index=0, index=i, tokens=[1], response_length=0) for i in range(2)]
    scorer = Scorer(RewardConfig(type="boxed_math"))
    monkeypatch.setattr(scorer, "_pool", pool)
    for number, sample in ((signal.SIGABRT, answers[0]), (signal.SIGKILL, answers[1])):
        sample.response = r"\boxed{5}"
        pool.call("math:grade_math", Answer(response="5", label="5"), 10)
        (worker,) = workers()
        worker.send_signal(number)
        asyncio.run(scorer.score([sample]))
    scorer.close()
    assert (answers[0].reward, answers[1].reward) == (0.0, None)
    assert answers[0].metadata == {"grading_limit": "ended itself, out of memory or stack (exit code -6)"}
    assert answers[1].metadata == {"failure": "reward: WorkerError: the worker process died (exit code -9)"}


PARENT = """
import sys, threading, time
from lightrl.rewards.answer import Answer
from lightrl.rewards.pool import WorkerPool
assert "torch" not in sys.modules, "workers would import torch"
pool = WorkerPool(1)
pool.call("math:grade_math", Answer(response="5", label="5"), 60)
hang = Answer(response=r"\\boxed{9^{9^{9^{9}}}}", label="5")
threading.Thread(target=pool.call, args=("math:grade_math", hang, float(sys.argv[1])), daemon=True).start()
time.sleep(0.5)
print("busy", flush=True)
time.sleep(600)
"""


def test_a_killed_parent_leaves_no_worker_behind(tmp_path: Path) -> None:
    """Also when the worker is deep inside a computation: the kernel's alarm ends it soon after its time."""
    (tmp_path / "math.py").write_text("raise RuntimeError('a module of the working directory was imported')")
    command = [sys.executable, "-P", "-c", PARENT, "2"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "busy\n"
        (worker,) = workers(parent.pid)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        worker.wait(timeout=30)
    finally:
        parent.kill()
        parent.stdout.close()
        parent.wait()
    assert not worker.is_running()


def test_labels_are_checked_before_the_model_loads() -> None:
    config = RewardConfig(type="math")
    check_labels([prompt("5", 1), prompt(r"\frac{1}{2}", 2), prompt("(1, 2)", 3)], config)
    rows = [prompt("5", 1), prompt("x+", 2), prompt("6", 3), prompt(None, 4), prompt("x+", 5, rm_type="dapo")]
    with pytest.raises(UserError) as caught:
        check_labels(rows, config)
    assert str(caught.value) == (
        "train.jsonl:2: the label 'x+' cannot be parsed as mathematics (reward rule 'math'): correct or remove the row "
        "(and 2 more such rows)"
    )
    assert not workers()


@pytest.mark.parametrize(
    ("rows", "type_", "message"),
    [
        (
            [prompt(None, 3)],
            "exact",
            r"^train.jsonl:3: the label is missing.*: set data.label_key \(reward rule 'exact'\)",
        ),
        ([prompt("1", 2, rm_type="maht")], "math", r"^train.jsonl:2: no reward rule 'maht': did you mean 'math'"),
        ([prompt("1", 2, rm_type="os:system")], "math", r"^train.jsonl:2: no reward rule 'os:system'"),
        (
            [prompt("1", 1, rm_type="dapo"), prompt("1", 2)],
            "",
            r"^train.jsonl:2: no reward: set reward.type, or metadata",
        ),
        ([prompt("x", 1)], "number", r"^train.jsonl:1: the label 'x' is not a number"),
        ([prompt(float("nan"), 1)], "gpqa", r"^train.jsonl:1: .*NaN"),
        ([prompt("A", 1, choices=5)], "gpqa", r"^train.jsonl:1: the row cannot be graded \(TypeError: "),
    ],
)
def test_rows_that_cannot_be_scored(rows: list[Prompt], type_: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_labels(rows, RewardConfig(type=type_))


def test_rows_of_a_custom_function_need_no_label() -> None:
    check_labels([prompt(None), prompt("1", 2, rm_type="number")], RewardConfig(type="some.module:function"))


def test_a_function_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "my_rewards.py").write_text("def length(sample):\n    return len(sample.response)\n")
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    (tmp_path / "my_needs.py").write_text("import no_such_package_here\n")
    (tmp_path / "my_script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n")
    scorer = Scorer(RewardConfig(type="my_rewards:length"))
    sample = Sample(prompt=prompt(None), group_index=0, index=0, tokens=[1], response_length=0, response="four")
    asyncio.run(scorer.score([sample]))
    assert sample.reward == 4.0
    scorer.close()
    with pytest.raises(UserError, match=r"importing my_broken raised ZeroDivisionError: division by zero"):
        Scorer(RewardConfig(type="my_broken:f"))
    with pytest.raises(UserError, match=r"importing my_script raised SystemExit: 2"):
        Scorer(RewardConfig(type="my_script:f"))
    with pytest.raises(UserError, match=r"my_needs imports 'no_such_package_here', which is not installed"):
        Scorer(RewardConfig(type="my_needs:f"))
