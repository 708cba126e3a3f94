"""What a run wrote down, trained on and scored again, and looked at; in one process."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_run
import torch

from lightrl import Hooks
from lightrl.cli import main
from lightrl.config import dump_toml, load_config
from lightrl.distributed.mesh import close_world
from lightrl.errors import UserError
from lightrl.observe.dumps import read_samples
from lightrl.observe.rollouts import RolloutDump
from lightrl.training.dumped import NoEngine
from lightrl.training.trainer import Trainer

MIXTURE = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SECTIONS = {
    "run": {"steps": 3},
    "rollout": {"filter": "nonzero_std", "prompts_per_step": 3, "oversample_prompts": 5, "truncated": "mask"},
    "algorithm": {"minibatches_per_step": 2, "kl_coef": 0.05, "kl_in": "reward", "loss": "gspo"},
    "correction": {"use_tis": True},
    "checkpoint": {"hf_every": 3, "every": 3},
    "eval": {"every": 3, "at_start": False},
}


def every_third_is_even(sample) -> float:
    return 1.0 if sample.prompt.index % 3 == 0 else tiny_run.count_letter(sample) + sample.index


def upper_half(row):
    """Leaves out two rows, and shortens the others."""
    return None if row["label"] == "a" else {**row, "input": row["input"][:3]}


async def two_turns(task):
    found = []
    for index in range(task.num_samples):
        first = await task.ask(task.prompt.tokens, index, max_new_tokens=4)
        second = await task.ask(task.prompt.tokens + first.tokens + [5], index, turn=1, max_new_tokens=3)
        found.append(task.sample(index, first, [5], second))
    return found


def on_step(info):
    return {"mine/groups": len(info.groups), "mine/mean": info.metrics["reward/mean"]}


HOOKS = Hooks(generate=two_turns, data_map=upper_half, on_step=on_step)


def merged(**sections):
    return {name: SECTIONS.get(name, {}) | sections.get(name, {}) for name in {**SECTIONS, **sections}}


def sets(folder: Path):
    return [{"name": "held", "path": str(folder / "data.jsonl"), "samples_per_prompt": 2, "temperature": 1.0}]


def run(folder: Path, hooks: Hooks | None = None, reward=every_third_is_even, **sections) -> Trainer:
    sections = merged(**sections, eval={"sets": sets(folder)})
    trainer = Trainer(tiny_run.make_run(folder, **sections), reward=reward, hooks=hooks)
    trainer.train()
    trainer.close()
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run with all that looks into it, whose folder is `live`."""
    folder = tmp_path_factory.mktemp("inside")
    run(
        folder,
        HOOKS,
        dump={"rollouts": True},
        log={"timeline_steps": [2, 2], "profile_steps": [2, 3], "save_samples": True},
    )
    close_world()
    (folder / "run").rename(folder / "live")
    return folder


def test_training_on_a_dump_gives_the_same_weights_to_the_last_bit(folder):
    """With a filter, further draws, a KL in the reward, masked answers and tool tokens; without engine and reward."""

    def never(sample):
        raise AssertionError("scored")

    live = exported(folder / "live")
    trainer = run(folder, Hooks(data_map=upper_half), reward=never, debug={"rollouts": str(folder / "live")})
    close_world()
    assert isinstance(trainer.engine, NoEngine)
    replayed = exported(folder / "run")
    assert live.keys() == replayed.keys()
    assert all(torch.equal(live[name], replayed[name]) for name in live)
    start = load_weights(folder / "model")
    assert any(not torch.equal(live[name], start[name]) for name in start)  # the test can fail
    names = ("loss/total", "optim/grad_norm", "reward/mean", "filter/drawn", "mismatch/logprob_abs_diff")
    assert lines(folder / "run", *names) == lines(folder / "live", *names)
    states = [json.loads((folder / d / "checkpoints/step_000003/state.json").read_text()) for d in ("live", "run")]
    assert states[0]["extra"] == states[1]["extra"]  # place in the data, number of groups
    assert lines(folder / "live", "eval/held/prompts")[-1] == [9]
    assert lines(folder / "run", "eval/held/prompts") == [[None]] * 3  # there is no engine to evaluate with


def test_a_run_that_was_resumed_is_replayed_as_one_and_a_replay_resumes(folder, tmp_path):
    """Steps 1 and 2, then 3; the replay stops after 2, and goes on from its checkpoint."""
    every = {"every": 1, "hf_every": 3}
    for number in (2, 3):
        where = {"run": {"steps": number, "dir": str(tmp_path / "two")}, "checkpoint": every}
        run(folder, HOOKS, dump={"rollouts": True}, **where)
    for number in (2, 3):
        where = {"run": {"steps": number, "dir": str(tmp_path / "replayed")}, "checkpoint": every}
        run(folder, Hooks(data_map=upper_half), debug={"rollouts": str(tmp_path / "two")}, **where)
    close_world()
    assert [step for (step,) in lines(tmp_path / "replayed", "step")] == [1, 2, 3]
    weights = [exported(place) for place in (folder / "live", tmp_path / "two", tmp_path / "replayed")]
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in weights[0])


def exported(run_dir: Path):
    return load_weights(run_dir / "hf" / "step_000003")


def load_weights(place: Path):
    from safetensors.torch import load_file

    return load_file(place / "model.safetensors")


def lines(run_dir: Path, *names: str):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [[r.get(name) for name in names] for r in records]


def test_routing_records_are_replayed(tmp_path):
    """A mixture whose experts the dump's records choose: tensors of samples come back."""
    tiny_run.make_model(tmp_path / "model", family="qwen3_moe", **MIXTURE)
    tiny_run.make_data(tmp_path / "data.jsonl")
    found = []
    for name, looking in (
        ("live", {"dump": {"rollouts": True}}),
        ("again", {"debug": {"rollouts": f"{tmp_path}/live"}}),
    ):
        sections = {"run": {"steps": 3, "dir": f"{tmp_path}/{name}"}, "checkpoint": {"hf_every": 3}, **looking}
        config = tiny_run.make_run(tmp_path, correction={"routing_replay": "rollout"}, **sections)
        trainer = Trainer(config, reward=tiny_run.count_letter)
        trainer.train()
        trainer.close()
        found.append(exported(tmp_path / name))
    close_world()
    (group, *_) = RolloutDump(tmp_path / "live").groups(1)
    assert group.samples[0].rollout_routing.dtype == torch.uint8
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    names = ("loss/total", "optim/grad_norm")
    assert lines(tmp_path / "live", *names) == lines(tmp_path / "again", *names)


def test_hooks_are_called(folder):
    evaluated = read_samples(folder / "live", eval_name="held")
    assert len(evaluated) == 18
    assert all(5 in s["tokens"] and len(s["prompt"]) <= 3 for s in evaluated)
    assert lines(folder / "live", "mine/groups", "step") == [[3, 1], [3, 2], [3, 3]]
    assert all(mine == mean for mine, mean in lines(folder / "live", "mine/mean", "reward/mean"))
    groups = [g for step in (1, 2, 3) for g in RolloutDump(folder / "live").groups(step)]
    assert all(len(g.prompt.text) <= 3 and g.prompt.label != "a" for g in groups)
    turned = [s for g in groups for s in g.samples if s.loss_mask and 0 < sum(s.loss_mask) < s.response_length]
    assert turned
    assert all(s.response_tokens[s.loss_mask.index(0)] == 5 for s in turned)


def test_a_timeline_of_each_sample(folder):
    (file,) = (folder / "live" / "timeline").iterdir()
    assert file.name == "step_000002.json"
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    groups = list(RolloutDump(folder / "live").groups(2))
    for group in groups:
        for sample in group.samples:
            name = f"group {sample.group_index} / {sample.index}, prompt {sample.prompt.index}"
            (row,) = [tid for tid, text in rows.items() if text == name]
            spans = [e for e in events if e["tid"] == row and e["ph"] == "X"]
            assert [e["name"] for e in spans] == ["generate", "turn 1", "turn 2", "reward", "train"]
            whole, first, second, reward, train = ((e["ts"], e["ts"] + e["dur"]) for e in spans)
            order = [whole[0], first[0], first[1], second[0], second[1], whole[1], reward[0], reward[1], train[0]]
            assert all(a <= b + 1.0 for a, b in pairwise(order))  # microseconds, rounded
            assert spans[0]["args"]["reward"] == sample.reward
    assert {e["name"] for e in events if e["tid"] == 0 and e["ph"] == "X"} == {"sync", "generate", "dump", "train"}


def test_the_profiler_records_its_window(folder):
    (file,) = (folder / "live" / "profile").iterdir()
    assert file.name == "steps_000002-000003.rank0.json.gz"
    assert "aten::mm" in {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"steps": 4}}, "has steps 1 to 3, and no step 4: set run.steps"),
        ({"rollout": {"oversample_prompts": 4}}, "step 1 was made of 5 prompts, [rollout] draws 4"),
        ({"debug": {"rollouts": "nowhere"}}, "nowhere: no such file or folder"),
    ],
)
def test_dumps_that_do_not_fit_are_told(folder, tmp_path, sections, message):
    where = {"run": {"dir": str(tmp_path / "other")}, "debug": {"rollouts": str(folder / "live")}}
    wanted = {name: where.get(name, {}) | sections.get(name, {}) for name in {**where, **sections}}
    with pytest.raises(UserError) as caught:
        run(folder, Hooks(data_map=upper_half), **wanted)
    close_world()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("response_tokens", [99], "token 99 is none of the model's 30: the samples are of another model"),
        ("response_tokens", [-1], "tokens are not all ids, whole numbers from 0 on"),
        ("response_tokens", ["3"], "tokens are not all ids, whole numbers from 0 on"),
        ("loss_mask", [2], "loss_mask holds other values than 0 and 1"),
        ("rollout_logprobs", ["-1"], "rollout_logprobs holds '-1'"),
        ("rollout_logprobs", [None], "rollout_logprobs holds None"),
        ("response_length", 10**9, "response_length is 1000000000 of "),
        ("reward", "1.0", "reward is '1.0', not a number"),
    ],
)
def test_changed_samples_are_told_before_the_model_loads(folder, tmp_path, monkeypatch, field, value, message):
    header, first, *rest = gzip.decompress(
        (folder / "live/rollouts/step_000001.rank0.jsonl.gz").read_bytes()
    ).splitlines()
    record = json.loads(first)
    sample = record["samples"][0]
    if isinstance(value, list):  # in the place of the first entry
        sample.setdefault(field, [1] * sample["response_length"])[0] = value[0]
    else:
        sample[field] = value
    for name in {"response_length": ("loss_mask", "rollout_logprobs"), "rollout_logprobs": ("loss_mask",)}.get(
        field, ()
    ):
        sample.pop(name, None)
    changed = [header, json.dumps(record, separators=(",", ":")).encode(), *rest, b""]
    (tmp_path / "step_000001.rank0.jsonl").write_bytes(b"\n".join(changed))
    monkeypatch.setattr(Trainer, "_load_model", lambda self: pytest.fail("the model loads"))
    where = {"run": {"dir": str(tmp_path / "r"), "steps": 1}, "debug": {"rollouts": str(tmp_path)}}
    with pytest.raises(UserError, match=r"debug\.rollouts: step 1: sample ") as caught:
        run(folder, Hooks(data_map=upper_half), **where)
    close_world()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("correction.score_centering_top_k", {"correction": {"score_centering_top_k": 4}}),
        ("teacher.top_k_from", {"teacher": {"form": "top_k", "top_k": 4, "top_k_from": "student"}}),
        ("correction.routing_replay", {"correction": {"routing_replay": "rollout"}}),
    ],
)
def test_what_the_dumped_engine_was_not_asked_is_told_before_the_model_loads(
    tmp_path, monkeypatch, key: str, sections
) -> None:
    tiny_run.make_model(tmp_path / "model", family="qwen3_moe", **MIXTURE)
    tiny_run.make_data(tmp_path / "data.jsonl")
    two = {"score_centering_top_k": 0 if key.endswith("replay") else 2}
    live = {"run": {"steps": 1, "dir": str(tmp_path / "live")}, "dump": {"rollouts": True}, "correction": two}
    trainer = Trainer(tiny_run.make_run(tmp_path, **live))
    trainer.train()
    trainer.close()
    close_world()
    if "teacher" in sections:
        sections = {"teacher": {"path": str(tmp_path / "model"), **sections["teacher"]}}
    monkeypatch.setattr(Trainer, "_load_model", lambda self: pytest.fail("the model loads"))
    again = {"run": {"steps": 1, "dir": str(tmp_path / "again")}, "debug": {"rollouts": str(tmp_path / "live")}}
    with pytest.raises(UserError) as caught:
        Trainer(tiny_run.make_run(tmp_path, **again, **sections))
    close_world()
    has = "and it has none" if key.endswith("replay") else "of 4, and it has 2 a token"
    assert key in str(caught.value)
    assert has in str(caught.value)


# ----- commands


def out_of(capsys, *words: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.parametrize("columns", ["80", "40"])
def test_a_narrow_terminal_shortens_responses_alone(folder, capsys, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    head, *rows = out_of(capsys, "inspect", folder / "live", "--limit", 5).splitlines()[:6]
    assert head.split() == ["step", "sample", "prompt", "status", "reward", "length", "logprob", "version", "response"]
    assert len(rows) == 5
    assert all("…" not in word for row in rows for word in row.split()[:8])
    assert all(len(row.rstrip()) <= max(int(columns), 72 + 12) for row in rows)


@pytest.mark.parametrize("columns", ["80", "40"])
def test_a_narrow_terminal_shows_both_rewards(folder, capsys, monkeypatch, columns) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setenv("COLUMNS", columns)
    head, *rows = out_of(
        capsys, "replay-reward", folder / "live", "--reward", "unit.test_replay:much", "--limit", 3
    ).splitlines()[:4]
    assert head.split() == ["step", "sample", "old", "new", "label", "response"]
    assert len(rows) == 3
    assert [row.split()[3] for row in rows] == ["1.235e+08"] * 3
    assert all(len(row.rstrip()) <= max(int(columns), 44 + 12) for row in rows)


def much(sample):
    return 123456789.0


def test_inspect_lists_and_filters(folder, capsys, wide):
    samples = [(step, s) for step in (1, 2, 3) for g in RolloutDump(folder / "live").groups(step) for s in g.samples]
    table = out_of(capsys, "inspect", folder / "live", "--limit", 100).splitlines()
    assert len(table) == 1 + 36 + 1
    assert table[1].split()[:4] == [
        "1",
        f"{samples[0][1].group_index}/0",
        str(samples[0][1].prompt.index),
        samples[0][1].status,
    ]
    assert table[-1].startswith("36 of 36 samples, reward ")
    highest = out_of(capsys, "inspect", folder / "live/rollouts", "--sort", "-reward", "--limit", 1, "--step", 2)
    best = max(s.reward for step, s in samples if step == 2)
    assert highest.splitlines()[1].split()[4] == f"{best:.4g}"
    some = [s for _, s in samples if s.reward >= 1 and s.response_length <= 7 and s.status == "completed"]
    text = out_of(capsys, "inspect", folder / "live", "--min-reward", 1, "--max-length", 7, "--status", "completed")
    assert f" of {len(some)} samples" in text
    assert 0 < len(some) < 36
    held = out_of(capsys, "inspect", folder / "live", "--eval", "held")
    assert held.splitlines()[-1].startswith("18 of 18 samples")
    plain = out_of(capsys, "inspect", folder / "live" / "samples", "--limit", 100)
    assert [row.split()[:6] for row in plain.splitlines()[1:-1]] == [row.split()[:6] for row in table[1:-1]]


def test_inspect_shows_one_in_colour(folder, capsys, wide, monkeypatch):
    groups = [g for step in (1, 2, 3) for g in RolloutDump(folder / "live").groups(step)]
    sample = next(s for g in groups for s in g.samples if s.loss_mask and any(s.loss_mask))
    name = f"{sample.group_index}/{sample.index}"
    text = out_of(capsys, "inspect", folder / "live", "--sample", name, "--tokens")
    rows = [line.split(maxsplit=4) for line in text.splitlines()[-sample.response_length :]]
    assert [int(row[1]) for row in rows] == sample.response_tokens
    assert [int(row[3]) for row in rows] == sample.loss_mask
    assert [float(row[2]) for row in rows] == [round(lp, 4) for lp in sample.rollout_logprobs]
    assert sample.prompt.text in text
    bare = out_of(capsys, "inspect", folder / "live", "--sample", name, "--tokenizer", folder / "none")
    assert f"no tokenizer at {folder / 'none'}: ids are shown" in bare.replace("\n", "")
    assert " ".join(map(str, sample.tokens)) in " ".join(bare.split())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in out_of(capsys, "inspect", folder / "live", "--sample", name)


def test_what_a_model_wrote_does_not_steer_the_terminal():
    from lightrl.inspect.pieces import visible

    assert visible("a\x1b[2J\u202eb\n") == "a\\u001b[2J\\u202eb⏎\n"


def test_characters_of_several_tokens_stay_together():
    from lightrl.inspect.pieces import pieces

    def decode(ids):
        return bytes(ids).decode("utf-8", errors="replace")

    text = "aé€b"
    found = pieces(list(text.encode()), decode)
    assert found == ["a", "", "é", "", "", "€", "b"]


def test_replay_reward_compares_and_writes(folder, tmp_path, capsys, wide, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    out = tmp_path / "scored"
    text = out_of(capsys, "replay-reward", folder / "live", "--reward", "tiny_run:count_letter", "--out", out)
    old = [s for step in (1, 2, 3) for g in RolloutDump(folder / "live").groups(step) for s in g.samples]
    new = [s for step in (1, 2, 3) for g in RolloutDump(out).groups(step) for s in g.samples]
    assert [s.reward for s in new] == [tiny_run.count_letter(s) for s in old]
    assert [s.tokens for s in new] == [s.tokens for s in old]
    changed = sum(a.reward != b.reward for a, b in zip(old, new, strict=True))
    assert text.splitlines()[-2] == f"{changed} of 36 rewards changed"
    assert 0 < changed < 36
    same = out_of(capsys, "replay-reward", folder / "live", "--reward", "unit.test_replay:every_third_is_even")
    assert same.splitlines()[-1] == "0 of 36 rewards changed"
    with pytest.raises(SystemExit) as ended:
        main(["replay-reward", str(folder / "live"), "--reward", "exac"])
    assert ended.value.code == 2
    assert "replay-reward: --reward: no reward rule 'exac': did you mean 'exact'?" in capsys.readouterr().err


def test_generate_makes_the_rollouts_of_the_first_step(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    names = {"rollout": {"generate": "unit.test_replay:two_turns"}, "data": {"map": "unit.test_replay:upper_half"}}
    names |= {"reward": {"type": "unit.test_replay:every_third_is_even"}, "eval": {"sets": sets(folder)}}
    sections = merged(**names, run={"dir": str(tmp_path / "run")})
    (tmp_path / "run.toml").write_text(dump_toml(load_config(**tiny_run.settings(folder, **sections))))
    text = out_of(capsys, "generate", tmp_path / "run.toml", "--steps", 2)
    assert f"wrote {tmp_path / 'run' / 'generated'}" in text
    made, live = RolloutDump(tmp_path / "run" / "generated"), RolloutDump(folder / "live")
    assert list(made.headers) == [1, 2]
    assert not (tmp_path / "run" / "checkpoints").exists()

    def essence(dump):
        return [(g.group_index, [(s.tokens, s.reward) for s in g.samples]) for g in dump.groups(1)]

    assert essence(made) == essence(live)
    with pytest.raises(SystemExit):
        main(["generate", str(tmp_path / "run.toml")])
    assert "holds something already; name a new folder" in capsys.readouterr().err
    text = out_of(capsys, "train", tmp_path / "run.toml", "--run.steps", 2, "--debug.rollouts", made.where)
    assert "no engine, no evaluation" in text
