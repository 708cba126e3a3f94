"""Dumps of rollouts: exact, whole or not there, and clear about what is damaged."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from lightrl.errors import UserError
from lightrl.observe.rollouts import RolloutDump, RolloutWriter
from lightrl.types import Prompt, Sample, SampleGroup, Status


def group(number: int, size: int = 3) -> SampleGroup:
    """Everything a sample can hold, awkward values among it."""
    prompt = Prompt(
        index=number,
        tokens=[5, 6, 7],
        text="half \ud800 ü",
        messages=[{"role": "user", "content": "ü"}],
        label={"answer": [1, 2.5, None]},
        metadata={"level": 3, "far": float("inf")},
        tools=[{"name": "f"}],
        source="data.jsonl:8",
    )
    other = Prompt(index=number, tokens=[9], text="rewritten")
    plain = Sample(
        prompt=prompt,
        group_index=number,
        index=0,
        tokens=[5, 6, 7, 1, 2],
        response_length=2,
        response="1\n2",
        rollout_logprobs=[-0.1 - 1e-17, float(np.float32(-1.2345678))],
        policy_versions=[3, 4],
        reward=1 / 3,
        metadata={"reward": {"acc": 1, "odd": float("nan")}, "keys": {"a": [True, None]}},
    )
    masked = Sample(
        prompt=other,
        group_index=number,
        index=1,
        tokens=[9, 1, 2, 3],
        response_length=3,
        loss_mask=[1, 0, 1],
        rollout_logprobs=[float("-inf"), 0.0, -5e-324],
        rollout_top_ids=[[1, 2], [3, 4], [5, 6]],
        rollout_top_logprobs=[[-1.0, float("-inf")], [-0.5, -0.25], [-1e-30, -2.0]],
        status=Status.TRUNCATED,
        reward=0.0,
        advantage=[0.1, -0.0, float("nan")],
    )
    failed = Sample(
        prompt=prompt,
        group_index=number,
        index=2,
        tokens=[8, 8, 8, 8],
        response_length=0,
        status=Status.FAILED,
        metadata={"failure": "reward: ValueError: x"},
    )
    return SampleGroup(prompt=prompt, group_index=number, samples=[plain, masked, failed][:size])


def written(folder: Path, steps: int = 1, ranks: int = 1) -> Path:
    for rank in range(ranks):
        writer = RolloutWriter(folder / "rollouts", rank=rank, world_size=ranks, about={"model": "m"})
        for step in range(1, steps + 1):
            writer.write(step, [group(10 * step + 2 * i + rank) for i in range(2)], {"start": 0})
    return folder


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    dump = RolloutDump(written(tmp_path, steps=2, ranks=2))
    assert list(dump.headers) == [1, 2]
    assert dump.headers[2]["model"] == "m"
    assert dump.headers[2]["selection"] == {"start": 0}
    expected = [group(n) for n in (20, 21, 22, 23)]
    assert repr(list(dump.groups(2))) == repr(expected)  # as text: NaN is not equal to itself
    assert [g.group_index for g in dump.groups(2, {21, 23}.__contains__)] == [21, 23]
    assert dump.numbers(1) == [10, 11, 12, 13]
    one = tmp_path / "rollouts" / "step_000001.rank1.jsonl.gz"
    assert [g.group_index for g in RolloutDump(one).groups(1)] == [11, 13]
    plain = tmp_path / "step_000001.rank1.jsonl"  # unpacked by hand
    plain.write_bytes(gzip.decompress(one.read_bytes()))
    assert repr(list(RolloutDump(plain).groups(1))) == repr(list(RolloutDump(one).groups(1)))


def test_files_are_json_lines_and_repeat(tmp_path: Path) -> None:
    first, second = (written(tmp_path / name) / "rollouts" / "step_000001.rank0.jsonl.gz" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    for line in gzip.decompress(first.read_bytes()).splitlines():
        json.loads(line, parse_constant=refuse)


def test_foreign_values_in_metadata_become_plain_ones(tmp_path: Path) -> None:
    given = group(1, size=1)
    given.samples[0].metadata = {"a": np.array([1.5]), "n": np.int64(3), 4: {5}, "o": Path("x")}
    RolloutWriter(tmp_path).write(1, [given])
    (read,) = RolloutDump(tmp_path).groups(1)
    assert read.samples[0].metadata == {"a": [1.5], "n": 3, "4": [5], "o": "x"}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.bfloat16, torch.float64])
def test_tensors_come_back_as_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    given = group(1, size=1)
    tensors = {"some": torch.arange(12).reshape(2, 3, 2).to(dtype), "none": torch.empty(0, 4, dtype=dtype)}
    given.samples[0].metadata = tensors | {"one": torch.tensor(1).to(dtype), "turned": tensors["some"].mT}
    RolloutWriter(tmp_path).write(1, [given])
    (read,) = RolloutDump(tmp_path).groups(1)
    for name, tensor in given.samples[0].metadata.items():
        found = read.samples[0].metadata[name]
        assert found.dtype == dtype
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_file_is_told_with_its_line(tmp_path: Path, share: float) -> None:
    path = written(tmp_path) / "rollouts" / "step_000001.rank0.jsonl.gz"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=r"step_000001\.rank0\.jsonl\.gz:[1-4]: the file ends in the middle; copy"):
        list(RolloutDump(tmp_path).groups(1))


def lines_of(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines(keepends=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[:2], ":3: cut: 1 of 2 groups are there"),
        (lambda lines: [lines[0], b"{broken\n", lines[2]], ":2: not valid JSON"),
        (lambda lines: [lines[0], b"[1]\n", lines[2]], ":2: not a JSON object"),
        (lambda lines: [b'{"step": 1}\n', *lines[1:]], ":1: not a dump of rollouts in format 1"),
        (lambda lines: [lines[0], b'{"group":10,"prompt":{}}\n', lines[2]], ":2: not a group of this version"),
        (lambda lines: [lines[0], lines[1].replace(b"[1,0,1]", b"[1,0]"), lines[2]], "loss_mask has 2 entries for 3"),
        (lambda lines: [lines[0], b'{"a":{"$tensor":["os",[1],""]}}\n', lines[2]], ":2: not valid JSON (a tensor of"),
        (lambda lines: [lines[0], b'{"a":{"$tensor":["uint8",[3],"AA=="]}}\n', lines[2]], ":2: not valid JSON (shape"),
    ],
)
def test_damage_is_told_with_its_line(tmp_path: Path, damage, message: str) -> None:
    path = written(tmp_path) / "rollouts" / "step_000001.rank0.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(damage(lines_of(path)))))
    with pytest.raises(UserError) as caught:
        list(RolloutDump(tmp_path).groups(1))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_without_all_its_ranks_is_not_whole(tmp_path: Path) -> None:
    written(tmp_path, steps=2, ranks=2)
    (tmp_path / "rollouts" / "step_000002.rank1.jsonl.gz").unlink()
    dump = RolloutDump(tmp_path)
    assert list(dump.headers) == [1]
    assert "no file of rank 1 beside it" in dump.faults[2]
    (tmp_path / "empty").mkdir()
    for name, fault in (("empty", "no rollouts in it"), ("missing", "no such file or folder")):
        with pytest.raises(UserError, match=fault):
            _ = RolloutDump(tmp_path / name).headers


def test_fewer_ranks_and_a_resume_leave_nothing_old(tmp_path: Path) -> None:
    written(tmp_path, steps=3, ranks=2)
    writer = RolloutWriter(tmp_path / "rollouts")
    writer.drop_after(2)
    assert list(RolloutDump(tmp_path).headers) == [1, 2]
    writer.write(2, [group(7)])
    assert [g.group_index for g in RolloutDump(tmp_path).groups(2)] == [7]


def write_until_killed(folder: Path) -> None:
    """The third step is written, and not yet in its place, when the process is killed."""
    fsync, calls = os.fsync, []

    def count(number: int) -> None:
        calls.append(number)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(number)

    os.fsync = count
    writer = RolloutWriter(folder)
    for step in range(1, 9):
        writer.write(step, [group(step)])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_run_loses_the_step_that_was_being_written(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    child = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(folder,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert len(list(folder.iterdir())) == 3  # two steps, and what was left of the third
    dump = RolloutDump(folder)
    assert list(dump.headers) == [1, 2]
    assert [g.group_index for step in (1, 2) for g in dump.groups(step)] == [1, 2]
    RolloutWriter(folder).drop_after(2)
    assert len(list(folder.iterdir())) == 2
