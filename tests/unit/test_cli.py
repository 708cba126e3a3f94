"""The command line: what reaches the library, what a mistake prints, and that help and mistakes import no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import lightrl
from lightrl.cli import main
from lightrl.config import Config, dump_toml, load_config
from lightrl.config.fields import sections
from lightrl.errors import UserError

SRC = Path(lightrl.__file__).parents[1]
READY = ["--model.path=org/model", "--data.path=org/data"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str) -> int:
    """Exit status of the command."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


class FakeTrainer:
    """Stands in for the trainer, so that a test sees what it is given."""

    made: list[FakeTrainer] = []  # noqa: RUF012 - emptied by the fixture
    error: Exception | None = None

    def __init__(self, config: Config, *, claim: bool = False, only_sample: bool = False) -> None:
        self.config = config
        self.claim, self.only_sample = claim, only_sample
        self.steps_done = 0
        self.calls: list[str] = []
        self.console = types.SimpleNamespace(notice=lambda text: self.calls.append(f"notice {text}"))
        self.made.append(self)

    def train(self) -> None:
        self.calls.append("train")
        if self.error:
            raise self.error

    def evaluate(self) -> None:
        self.calls.append("evaluate")

    def load_checkpoint(self, folder: Path, *, weights_only: bool) -> None:
        assert weights_only  # other training data than the checkpoint's do not matter
        self.calls.append(f"load {folder.name}")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrainer]:
    def module(name: str, **names: Any) -> None:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(names)

    def find_fault(folder: Path, verify: bool = True) -> str | None:
        return None if (folder / "COMMITTED").is_file() else "no COMMITTED, so it was never completed"

    def latest(folder: Path) -> Path | None:
        return max(folder.glob("step_*"), default=None)

    fake = type("Fake", (FakeTrainer,), {"made": []})
    module("lightrl.training.trainer", Trainer=fake)
    module("lightrl.training.checkpoint", find_fault=find_fault, latest=latest)
    module("lightrl.distributed.mesh", close_world=lambda: fake.made[-1].calls.append("leave"))
    return fake


def test_train_gets_the_merged_config(trainer: type[FakeTrainer]) -> None:
    Path("a.toml").write_text('[model]\npath = "org/m"\n[optim]\nlr = 1.0\n')
    Path("b.toml").write_text('[data]\npath = "org/d"\n[run]\nseed = 3\n')
    # Flags before, between and after the files, values that look like flags or files.
    words = ["train", "--optim.lr", "2e-6", "a.toml", "--run.resume", "false", "b.toml", "--rollout.stop=--x"]
    assert run(*words, "--data.system_prompt", "-1") == 0
    assert trainer.made[0].config == load_config(
        model={"path": "org/m"},
        data={"path": "org/d", "system_prompt": "-1"},
        optim={"lr": 2e-6},
        run={"seed": 3, "resume": False},
        rollout={"stop": ["--x"]},
    )
    *calls, said, left = trainer.made[0].calls
    assert (calls, left) == (["train", "close"], "leave")
    assert said == (
        "notice done; checkpoints are in runs/lightrl/checkpoints. Next: lightrl report runs/lightrl, or "
        "lightrl export OUT --run runs/lightrl"
    )
    assert trainer.made[0].claim  # before the model loads


def checkpoint(step: int, **source: Any) -> Path:
    """A completed checkpoint of the run in runs/lightrl, as far as the command line looks at it."""
    folder = Path(f"runs/lightrl/checkpoints/step_{step:06d}")
    folder.mkdir(parents=True)
    state = {"step": step, "extra": {"source": {"seed": 0, "shuffle": True, **source}}}
    (folder / "state.json").write_text(json.dumps(state))
    for marker in ("COMMITTED", "COMMITTED.json"):  # that of the stand-in above, and the real one
        (folder / marker).touch()
    return folder


def test_what_stops_a_resume_is_told_before_anything_loads(
    trainer: type[FakeTrainer], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(6)
    Path("run.toml").write_text("[run]\nseed = 4\nsteps = 9\n")
    was = "the checkpoint in run.dir was made with"
    assert run("train", "run.toml", *READY, "--data.shuffle", "false") == 2
    assert capsys.readouterr().err == f"error: run.toml:2: run.seed: {was} 0: set it back, or start a new run.dir\n"
    assert run("train", *READY, "--data.shuffle", "false") == 2
    assert f"error: --data.shuffle: {was} true: set it back" in capsys.readouterr().err
    assert run("train", *READY, "--run.steps", "6") == 0
    assert capsys.readouterr().out == (
        f"nothing to train: step 6 is done and run.steps = 6; raise it to go on. The newest checkpoint is {folder}\n"
    )
    assert not trainer.made
    (folder / "COMMITTED").unlink()  # damaged, as a whole look at it finds
    assert run("train", *READY, "--run.steps", "6") == 0
    assert trainer.made[0].calls[0] == "train"


def test_a_stopped_run_says_where_it_stands(trainer: type[FakeTrainer], capsys: pytest.CaptureFixture[str]) -> None:
    def stop(self: FakeTrainer) -> None:
        self.steps_done = 12
        raise KeyboardInterrupt

    trainer.train = stop  # type: ignore[method-assign]
    words = ["train", *READY, "--run.steps", "50"]
    assert run(*words) == 130
    assert capsys.readouterr().err.strip() == (
        "stopped in step 13; there is no checkpoint yet: the same command starts anew"
    )
    assert trainer.made[0].calls == ["close"]
    checkpoint(10)
    assert run(*words) == 130
    assert capsys.readouterr().err.strip() == (
        "stopped in step 13; the newest checkpoint is of step 10: the same command goes on from there"
    )


def test_eval_picks_the_checkpoint(trainer: type[FakeTrainer], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", *READY, "--eval.sets=[{name='a',path='org/x'}]"]

    def calls(*more: str) -> list[str]:
        assert run(*words, *more) == 0
        return trainer.made[-1].calls

    def where() -> str:
        return trainer.made[-1].config.run.dir

    end = ["evaluate", "close", "leave"]
    assert calls() == ["notice evaluating org/model, the starting model: runs/lightrl does not exist", *end]
    Path("runs/lightrl").mkdir(parents=True)
    assert calls()[0] == "notice evaluating org/model, the starting model: runs/lightrl has no checkpoint"
    assert where() == "runs/lightrl"
    for step in ("step_000001", "step_000002"):
        folder = Path("runs/lightrl/checkpoints", step)
        folder.mkdir(parents=True)
        (folder / "COMMITTED").touch()
    assert calls() == ["load step_000002", "notice evaluating runs/lightrl/checkpoints/step_000002", *end]
    assert calls("--checkpoint", "runs/lightrl")[0] == "load step_000002"
    assert where() == "runs/lightrl"
    assert calls("--checkpoint", str(folder.parent / "step_000001"), "--checkpoint.every", "5")[0] == "load step_000001"
    assert trainer.made[-1].config.checkpoint.every == 5
    assert where() == "runs/lightrl"
    Path("hf").mkdir()
    Path("hf/config.json").touch()
    name = f"{Path.cwd().name}-hf"
    said = f"notice evaluating {Path('hf').absolute()}; samples go to "
    assert calls("--checkpoint", "hf") == [f"{said}runs/lightrl/eval/{name}", *end]
    assert trainer.made[-1].config.model.path == str(Path("hf").absolute())
    assert where() == f"runs/lightrl/eval/{name}"
    # Nor is a model a step of a run that is still to come, or another run's checkpoint, or the start of a run that
    # has a step 0 of its own.
    assert calls("--checkpoint", "hf", "--run.dir", "new")[0] == f"{said}new/eval/{name}"
    assert calls("--checkpoint", "runs/lightrl", "--run.dir", "new")[0] == "load step_000002"
    assert where() == "new/eval/lightrl-step_000002"
    assert calls("--run.resume=false") == [
        "notice evaluating org/model; samples go to runs/lightrl/eval/org-model",
        *end,
    ]
    assert calls("--run.resume=false", "--log.save_samples=false")[0] == "notice evaluating org/model"

    Path("empty/checkpoints").mkdir(parents=True)
    assert run(*words, "--checkpoint", "empty") == 2
    assert capsys.readouterr().err == "error: eval: --checkpoint: empty has no checkpoint yet; name another\n"
    Path("empty/checkpoints").rmdir()
    capsys.readouterr()
    assert run(*words, "--checkpoint", "empty") == 2
    assert run(*words, "--checkpoint", "gone") == 2
    assert run("eval", *READY) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: eval: --checkpoint: empty is neither a model nor a whole checkpoint: "
        "no COMMITTED, so it was never completed",
        "error: eval: --checkpoint: gone: no such folder",
        "error: eval.sets: nothing to evaluate; add an [[eval.sets]] table with a name and a path",
    ]


def test_other_commands_reach_their_functions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Any, ...]] = []

    def fake(name: str, attribute: str, result: Any = None) -> None:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name])[attribute] = lambda *args, **kwargs: calls.append((attribute, *args, kwargs)) or result

    fake("lightrl.training.export_cli", "export_run")
    fake("lightrl.models.fetch", "fetch", Path("models/x"))
    fake("lightrl.observe.report", "write_report", (Path("r.html"), Path("r.png")))
    Path("run").mkdir()
    assert run("export", "--run", "run", "out", "--dtype", "float32") == 0
    assert run("export", "out", "--checkpoint", "run") == 0
    assert run("fetch", "smollm2-135m", "--out", "here") == 0
    assert run("report", "run", "--out", "r.html") == 0
    assert calls == [
        ("export_run", Path("run"), Path("out"), "float32", {"critic": False, "adapter": False}),
        ("export_run", Path("run"), Path("out"), "auto", {"critic": False, "adapter": False}),
        ("fetch", "smollm2-135m", Path("here"), {"from_wheel": None}),
        ("write_report", Path("run"), Path("r.html"), {}),
    ]
    assert capsys.readouterr().out.splitlines() == ["wrote out", "wrote out", "models/x", "r.html", "r.png"]

    assert run("export", "out") == 2
    assert run("export", "out", "--run", "run", "--checkpoint", "run") == 2
    assert run("export", "out", "--run", "gone") == 2
    assert run("report", "gone") == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: export: name what to export by one of --run DIR and --checkpoint DIR",
        "error: export: name what to export by one of --run DIR and --checkpoint DIR",
        "error: export: gone: no such folder",
        "error: report: gone: no such folder",
    ]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"lightrl {lightrl.__version__}\n"


def test_config_show_check_list(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text('[model]\npath = "m"\n')
    assert run("config", "show", "a.toml", "--optim.lr", "1e-8") == 0
    assert capsys.readouterr().out == dump_toml(load_config("a.toml", optim={"lr": 1e-8}))
    assert run("config", "check", "a.toml", "--data.path", "org/d") == 0
    assert capsys.readouterr().out.splitlines() == [
        "OK: a.toml is a valid configuration",
        "not looked at: rows of the data, files of the model, what the reward function does with a sample",
    ]
    assert run("config", "check", "a.toml") == 2
    assert capsys.readouterr().err == (
        "error: data.path: not set; name a prompt set (jsonl, parquet, folder or hub dataset)\n"
    )
    assert run("config", "list", "optim.lr") == 0
    assert capsys.readouterr().out == (
        "optim.lr = 1e-06  (float >= 0)\n    Peak learning rate.\n"
        "critic_optim.lr = 1e-05  (float >= 0)\n    Peak learning rate.\n"
    )
    assert run("config", "list") == 0
    assert "\neval.sets.path = required  (string)\n" in capsys.readouterr().out
    assert run("config", "list", "zzz") == 2


def test_mistakes_exit_with_2_and_one_process_prints(
    trainer: type[FakeTrainer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text("[optim]\nlrr = 1\neps = 0\n")
    lines = [
        "error: run.toml:2: optim.lrr: unknown key; did you mean optim.lr?",
        "error: run.toml:3: optim.eps: must be > 0, got 0",
        "error: --lr: unknown key; did you mean --optim.lr?",
    ]
    for environment, expected in (
        ({}, lines),
        ({"RANK": "0"}, lines),
        ({"RANK": "1"}, []),
        ({"RANK": "1", "LOCAL_RANK": "1"}, []),
        ({"RANK": "2", "LOCAL_RANK": "0"}, lines),  # the first process of a second machine
    ):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert run("train", "run.toml", "--lr", "3") == 2
        assert capsys.readouterr().err.splitlines() == expected
    assert not trainer.made
    trainer.error = UserError("data.jsonl:3: no field 'input'")
    assert run("train", *READY) == 2
    assert capsys.readouterr().err == "error: data.jsonl:3: no field 'input'\n"
    assert trainer.made[0].calls == ["train", "close"]


def test_late_errors_name_the_place_of_their_key(
    trainer: type[FakeTrainer], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text('[run]\ndevice = "cuda"\n')
    for said, told in (
        ("run.device: 'cuda' asked for", "run.toml:2: run.device: 'cuda' asked for"),
        ("model.path: 'org/model' is gated", "--model.path: 'org/model' is gated"),
        ("run.seed: a default's", "run.seed: a default's"),
        ("data.jsonl:3: no field", "data.jsonl:3: no field"),
    ):
        trainer.error = UserError(said)
        assert run("train", "run.toml", *READY) == 2
        assert capsys.readouterr().err == f"error: {told}\n"


def test_an_unexpected_error_keeps_its_traceback(trainer: type[FakeTrainer]) -> None:
    trainer.error = RuntimeError("out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        main(["train", *READY])


def test_torchrun_learns_the_reason(
    trainer: type[FakeTrainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    trainer.error = RuntimeError("rank 1 is out of luck")
    with pytest.raises(RuntimeError):
        main(["train", *READY])
    assert "rank 1 is out of luck" in json.dumps(json.loads((tmp_path / "error.json").read_text()))
    trainer.error = UserError("data.jsonl:3: no field 'input'")
    for words in (["train", *READY], ["train", *READY, "--optim.lr", "x"]):
        assert run(*words) == 2
        told = json.loads((tmp_path / "error.json").read_text())["message"]
        assert told["message"] == told["extraInfo"]["py_callstack"]  # in place of a traceback
        assert "error: --optim.lr: " in told["message"] or told["message"] == "error: data.jsonl:3: no field 'input'"


QUICK = """
import json, sys
from lightrl.cli import main
status = []
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        status.append(end.code or 0)
heavy = {"torch", "transformers", "datasets", "numpy", "matplotlib", "tomlkit"} & set(sys.modules)
print(json.dumps([status, sorted(heavy)]), file=sys.stderr)
"""


def test_help_and_mistakes_import_nothing_heavy() -> None:
    Path("bad.toml").write_text("[optim]\nlrr = 1\n")
    Path("good.toml").write_text('[model]\npath = "org/m"\n[data]\npath = "gone.jsonl@[:5]"\n')
    commands = {
        ("--help",): 0,
        ("train", "--help"): 0,
        ("train", "-h"): 0,
        ("eval", "--help"): 0,
        ("config", "list"): 0,
        ("config", "check", "bad.toml"): 2,
        ("train", "bad.toml", "--optim.lr", "x"): 2,
        ("train", "good.toml"): 2,
        ("train",): 2,
        ("eval", "good.toml"): 2,
        ("export", "out"): 2,
        ("fetch", "nothing"): 2,
        ("report", "gone"): 2,
        ("nonsense",): 2,
    }
    done = subprocess.run(
        [sys.executable, "-c", QUICK, json.dumps(list(commands))],
        env={**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    *errors, last = done.stderr.splitlines()
    assert json.loads(last) == [list(commands.values()), []]
    assert "error: good.toml:4: data.path: no such file or folder: gone.jsonl" in errors
    assert "lightrl config list" in done.stdout
    for section in sections():  # `train --help` names every section
        assert f"{section}," in done.stdout or f"{section}." in done.stdout


MISTAKES = """
[model]
path = "org/m"
[data]
path = "org/d"
[reward]
type = "mth"
[[eval.sets]]
name = "a"
path = "org/x"
reward = "mine:reward"
[[eval.sets]]
name = "b"
path = "org/x"
reward = "lib.sub.grade:exact"
[run]
dir = "used"
resume = false
"""


def quick(*commands: str) -> tuple[list[int], list[str]]:
    """Exit statuses of commands run in one new process, and what they print on stderr; none may import torch."""
    done = subprocess.run(
        [sys.executable, "-c", QUICK, json.dumps([command.split() for command in commands])],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    *errors, last = done.stderr.splitlines()
    statuses, heavy = json.loads(last)
    assert heavy == []
    return statuses, errors


def test_code_that_is_not_there_is_told_without_torch() -> None:
    """Rules, functions and a folder in use, with file and line; modules that import torch are read, not run."""
    Path("mine.py").write_text("import torch\ndef rewards(sample):\n    return 0.0\n")
    Path("lib/sub").mkdir(parents=True)
    Path("lib/__init__.py").write_text("import torch\n")
    Path("lib/sub/grades.py").write_text("import torch\nexact = len\n")
    Path("used/checkpoints/step_000001").mkdir(parents=True)
    Path("run.toml").write_text(MISTAKES)
    rules = "math, deepscaler, dapo, f1, gpqa, exact, number, random, none"
    found = [
        f"error: run.toml:7: reward.type: no reward rule 'mth': did you mean 'math'? the rules are {rules} "
        "(boxed_NAME grades the last box); a function of your own is written package.module:function",
        "error: run.toml:11: eval.sets[0].reward: mine has no 'reward' (did you mean 'rewards'?)",
        f"error: run.toml:15: eval.sets[1].reward: no module 'lib.sub.grade' in {Path.cwd()} or among the installed "
        "packages: did you mean 'lib.sub.grades'?",
    ]
    used = (
        "error: run.toml:17: run.dir: used already holds a run; name another folder, or continue with run.resume = true"
    )
    assert quick("train run.toml") == ([2], [*found, used])
    assert quick("config check run.toml") == ([2], [*found, used])
    assert quick("eval run.toml") == ([2], found)  # which may look into a folder that is used
    assert quick("train run.toml --reward.type mine.py:rewards --eval.sets [] --run.resume true") == (
        [2],
        ["error: --reward.type: no module 'mine.py' in " + str(Path.cwd()) + " or among the installed packages: run "
         "from its folder, or install it"],
    )  # fmt: skip
    good = "config check run.toml --reward.type mine:rewards --eval.sets [] --run.resume true"
    assert quick(good, f"{good} --rollout.filter mine:rewards", f"{good} --rollout.filter nonzero_std") == ([0] * 3, [])
    assert quick(f"{good} --rollout.filter mine:filter") == (
        [2],
        ["error: --rollout.filter: mine has no 'filter' (it has rewards, torch)"],
    )


def test_module_runs_as_a_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightrl", "train", "--optim.lrr", "1"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error: --optim.lrr: unknown key; did you mean --optim.lr?"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("chosen", "policy"), [(None, "passive"), ("active", "active")])
def test_threads_of_a_run_sleep_while_they_wait(chosen: str | None, policy: str) -> None:
    """From before torch is imported, which is when OpenMP looks."""
    script = (
        "import os, sys, types; from lightrl.cli import main\n"
        "class Trainer:\n"
        "    def __init__(self, config, **more): print(os.environ.get('OMP_WAIT_POLICY')); sys.exit(7)\n"
        "for name, part in (('distributed.mesh', 'close_world'), ('training.rollout_ranks', 'serve_rollouts'),\n"
        "                   ('training.trainer', 'Trainer')):\n"
        "    sys.modules['lightrl.' + name] = types.SimpleNamespace(**{part: Trainer})\n"
        f"main(['train', *{READY}])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | {"PYTHONPATH": str(SRC)}
    environment |= {"OMP_WAIT_POLICY": chosen} if chosen else {}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, f"{policy}\n"), done.stderr
