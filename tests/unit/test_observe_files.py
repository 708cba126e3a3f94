"""What is written to the run's folder: metrics, TensorBoard, W&B, samples, environment."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.config.schema import LogConfig
from lightrl.errors import UserError
from lightrl.observe.dumps import SampleWriter, list_dumps, read_samples
from lightrl.observe.environment import environment, git_commit, read_environment, write_environment
from lightrl.observe.jsonl import json_safe, read_records, write_records
from lightrl.observe.trackers import JsonlTracker, TensorBoardTracker, Trackers, make_trackers, read_metrics
from lightrl.types import Prompt, Sample, Status


def test_jsonl_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    metrics = {"reward/mean": 0.5, "n": 3, "bad": math.nan, "big": math.inf, "t": torch.tensor(0.25)}
    tracker.log(3, metrics)  # type: ignore[arg-type]
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record.pop("time") > 0
    assert record == {"step": 3, "reward/mean": 0.5, "n": 3, "bad": None, "big": None, "t": 0.25}
    assert next(iter(record)) == "step"
    tracker.close()


def test_resume_drops_what_is_repeated_and_the_torn_line(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in range(6):
        tracker.log(step, {"x": float(step)})
    tracker.close()
    file = tmp_path / "metrics.jsonl"
    with file.open("ab") as torn:
        torn.write(b'{"step":6,"x":6')  # killed here
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]

    resumed = JsonlTracker(tmp_path, resume_step=3)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 2, 3]
    resumed.log(4, {"x": 40.0})
    resumed.log(4, {"eval/dev/avg@1": 1.0})
    resumed.close()
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    assert (rows[4]["x"], rows[4]["eval/dev/avg@1"]) == (40.0, 1.0)

    JsonlTracker(tmp_path).close()  # a fresh start
    assert file.read_text() == ""
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_loses_nothing_when_killed_while_it_rewrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"x": 1.0})
    tracker.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonlTracker(tmp_path, resume_step=0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, range(1, 6)), (3, range(4, 6))):
        tracker = TensorBoardTracker(tmp_path, resume_step)
        for step in steps:
            tracker.log(step, {"reward/mean": step + (0.5 if resume_step else 0.0), "reward/parts/\ud83d": 1.0})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5)]
    assert "reward/parts/?" in events.Tags()["scalars"]  # half a character, which no event file takes


class FakeWandb(SimpleNamespace):
    """Records what is asked of wandb."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(Error=type("Error", (Exception,), {}), calls=[], fails=fails)

    def init(self, **arguments: Any) -> Any:
        if self.fails:
            raise self.Error("api_key not configured\n(no-tty). call wandb.login")
        self.calls.append(("init", arguments))
        record = self.calls.append
        return SimpleNamespace(
            define_metric=lambda name, **kw: record(("define", name, kw)),
            log=lambda metrics: record(("log", metrics)),
            finish=lambda: record(("finish",)),
        )


def test_wandb_continues_its_run_on_an_axis_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = LogConfig(trackers=["wandb"], wandb_project="lab")
    run_dir = tmp_path / "my-run"
    for resume_step in (None, 2, None):
        with make_trackers(config, run_dir, resume_step, {"optim": {"lr": 1e-6}}) as trackers:
            trackers.log(3, {"reward/mean": 0.5})
    first, resumed, fresh = [call[1] for call in fake.calls if call[0] == "init"]
    assert (first["project"], first["name"], first["config"]) == ("lab", "my-run", {"optim": {"lr": 1e-6}})
    assert first["id"] == resumed["id"] != fresh["id"]
    assert ("define", "*", {"step_metric": "step"}) in fake.calls
    assert ("log", {"step": 3, "reward/mean": 0.5}) in fake.calls
    assert fake.calls[-1] == ("finish",)


def test_wandb_missing_or_refusing_is_the_users_to_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LogConfig(trackers=["jsonl", "wandb"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log\.trackers: wandb cannot be imported \(.*\): pip install wandb"):
        make_trackers(config, tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails=True))
    with pytest.raises(
        UserError, match=r"did not start \(api_key not configured \(no-tty\).*WANDB_MODE=offline"
    ) as got:
        make_trackers(config, tmp_path)
    assert "\n" not in str(got.value)


def test_trackers_all_close_though_one_fails(tmp_path: Path) -> None:
    broken = SimpleNamespace(log=lambda step, metrics: None, close=lambda: 1 / 0)
    jsonl = JsonlTracker(tmp_path)
    trackers = Trackers([broken, jsonl])
    assert len(trackers) == 2
    with pytest.raises(ZeroDivisionError):
        trackers.close()
    trackers.close()
    with pytest.raises(ValueError, match="closed file"):
        jsonl.log(1, {})


def make_sample(index: int, response: str = "4", group: int = 5, **changes: Any) -> Sample:
    prompt = Prompt(index=7, tokens=[1, 2], text="2 + 2 =", label="4")
    values = {"reward": 1.0, "advantage": 0.5, "rollout_logprobs": [-0.123456789, -2.0]} | changes
    return Sample(
        prompt=prompt,
        group_index=group,
        index=index,
        tokens=[1, 2, 3, 4],
        response_length=2,
        response=response,
        policy_versions=[11, 12],
        **values,
    )


def test_samples_of_all_ranks_come_back_in_order(tmp_path: Path) -> None:
    SampleWriter(tmp_path, rank=1, world_size=2).write(12, [make_sample(1), make_sample(0, group=4)])
    path = SampleWriter(tmp_path, rank=0, world_size=2).write(12, [make_sample(0)])
    assert path == tmp_path / "samples" / "step_000012.rank0.jsonl.gz"
    SampleWriter(tmp_path).write(12, [make_sample(0)], eval_name="dev/hard set")
    records = read_samples(tmp_path, step=12)
    assert [(r["group"], r["index"]) for r in records] == [(4, 0), (5, 0), (5, 1)]
    assert records[1] == {
        "step": 12,
        "group": 5,
        "index": 0,
        "prompt_index": 7,
        "status": "completed",
        "reward": 1.0,
        "advantage": 0.5,
        "prompt": "2 + 2 =",
        "response": "4",
        "label": "4",
        "response_length": 2,
        "tokens": [1, 2, 3, 4],
        "logprobs": [-0.12346, -2.0],
        "policy_versions": [11, 12],
        "metadata": {},
    }
    assert [r["eval"] for r in read_samples(tmp_path, eval_name="dev/hard set")] == ["dev/hard set"]
    assert read_samples(tmp_path, step=13) == []


def test_odd_texts_and_metadata_are_written_and_come_back(tmp_path: Path) -> None:
    class Color(Enum):
        RED = "red"

    loop: list[Any] = []
    loop.append(loop)
    odd = 'quote " \\ tab\t line\n \u2028 </script> 漢字 😀 half \ud83d'
    metadata = {"t": torch.tensor([1.5, math.nan]), 3: {2, 1}, "c": Color.RED, "b": b"x", "loop": loop, "inf": math.inf}
    sample = make_sample(0, odd, metadata=metadata, reward=None, status=Status.FAILED, loss_mask=[1, 0])
    SampleWriter(tmp_path).write(1, [sample])
    record = read_samples(tmp_path)[0]
    assert record["response"] == odd
    assert (record["reward"], record["status"], record["loss_mask"]) == (None, "failed", [1, 0])
    kept = record["metadata"]
    assert (kept["t"], kept["3"], kept["c"], kept["b"], kept["inf"]) == ([1.5, None], [1, 2], "red", "b'x'", None)


def test_a_step_written_again_replaces_the_old_one_with_fewer_ranks_too(tmp_path: Path) -> None:
    for rank in range(3):
        for step in (1, 2, 3):
            SampleWriter(tmp_path, rank, 3).write(step, [make_sample(rank)])
    writer = SampleWriter(tmp_path, 0, 1)
    writer.drop_after(2)
    assert [d.step for d in list_dumps(tmp_path)] == [1, 2]
    first = writer.write(2, [make_sample(9, "new")])
    assert [r["response"] for r in read_samples(tmp_path, step=2)] == ["new"]
    assert len(read_samples(tmp_path, step=1)) == 3
    content = first.read_bytes()
    assert writer.write(2, [make_sample(9, "new")]).read_bytes() == content
    assert not list((tmp_path / "samples").glob("*.partial"))


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_sample_file_is_named(tmp_path: Path, damage: str) -> None:
    path = SampleWriter(tmp_path).write(1, [make_sample(i) for i in range(50)])
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    with pytest.raises(UserError, match=r"step_000001\.rank0\.jsonl\.gz: damaged or unreadable"):
        read_samples(tmp_path)


def test_records_are_plain_gzip_and_json(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl.gz", [{"x": 1}, {"x": "é"}])
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()).decode() == '{"x":1}\n{"x":"é"}\n'
    (tmp_path / "b.jsonl").write_bytes(b'{"x":1}\n[1]\n\xff\xfe\n{"x":2}\n{"x":')
    assert list(read_records(tmp_path / "b.jsonl")) == [{"x": 1}, {"x": 2}]
    assert json_safe((1, True, None, 2.5, float("nan"))) == [1, True, None, 2.5, None]


def test_environment_says_what_it_ran_on(tmp_path: Path) -> None:
    env = environment(tmp_path)
    assert env["versions"]["torch"] == torch.__version__
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["world_size"] == 1
    assert env["hardware"]
    write_environment(tmp_path)
    assert read_environment(tmp_path)["versions"] == env["versions"]
    (tmp_path / "environment.json").write_text("{torn")
    assert read_environment(tmp_path) == {}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_of_a_work_tree_and_none_outside(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    assert git_commit(tree) is None
    (tree / "a").write_text("1")
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "a"], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True).stdout
    assert git_commit(tree) == head.strip()
    (tree / "a").write_text("2")
    assert git_commit(tree) == head.strip() + "+changes"
