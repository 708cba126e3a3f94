"""A teacher in the trainer: what is refused before a model loads, and runs with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrl.config.load import load_config, load_for_run
from lightrl.config.problems import ConfigError
from lightrl.distributed.mesh import close_world
from lightrl.distributed.offload import Offloader, TrainingState
from lightrl.errors import UserError
from lightrl.observe.rollouts import RolloutDump
from lightrl.training.generating import generate
from lightrl.training.trainer import Trainer


@pytest.fixture(autouse=True)
def _world():
    yield
    close_world()


def near(student: Path, folder: Path, noise: float = 0.1) -> Path:
    """A teacher whose weights are the student's and some noise."""
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    tiny_run.make_model(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def make_run(folder: Path, teacher: dict[str, Any], noise: float = 0.1, **sections: dict[str, Any]) -> Any:
    if not (folder / "model").exists():
        tiny_run.make_model(folder / "model")
        tiny_run.make_data(folder / "data.jsonl")
        near(folder / "model", folder / "teacher", noise)
    teacher = {"path": str(folder / "teacher")} | teacher
    return tiny_run.make_run(folder, teacher=teacher, **sections)


ALONE: dict[str, dict[str, Any]] = {"algorithm": {"advantage": "none"}, "reward": {"type": ""}}


# ---- in the config

T, U = {"path": "teacher"}, {"url": "http://node7:30000"}
BAD: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "no teacher": (
        {"teacher": {"coef": 0.5}},
        "teacher.coef: only used with teacher.path or teacher.url: set one of them, or drop this",
    ),
    "two teachers": ({"teacher": T | U}, "teacher.url: teacher.path names a teacher too: drop one of the two"),
    "a server's revision": (
        {"teacher": U | {"revision": "main"}},
        "teacher.revision: it is of teacher.path; the server at teacher.url has its own: drop it",
    ),
    "a key for nobody": (
        {"teacher": T | {"api_key_env": "KEY"}},
        "teacher.api_key_env: only used with teacher.url: set that, or drop this",
    ),
    "no url": (
        {"teacher": {"url": "node7:30000"}},
        "teacher.url: 'node7:30000' is not of the form http://HOST:PORT (keys: api_key_env)",
    ),
    "the policy's own server": (
        {"teacher": U, "engine": {"kind": "sglang_server", "urls": ["http://node7:30000/"]}},
        "teacher.url: it is one of engine.urls, which get the policy's weights: name another",
    ),
    "all of a server's distribution": (
        {"teacher": U | {"form": "full"}},
        "teacher.form: 'full' wants all of the teacher's distribution, which teacher.url does not send: choose "
        "'top_k', or name teacher.path",
    ),
    "a server and the student's tokens": (
        {"teacher": U | {"form": "top_k", "top_k_from": "student"}},
        "teacher.top_k_from: a server at teacher.url names its own likeliest tokens alone: choose 'teacher', or name "
        "teacher.path",
    ),
    "a server at another temperature": (
        {"teacher": U, "rollout": {"temperature": 0.6}},
        "teacher.temperature: a server at teacher.url answers at temperature 1, and rollout.temperature is 0.6: set 1 "
        "here if the policy at its own is to be drawn to that, or there",
    ),
    "a temperature of its own": (
        {"teacher": U | {"temperature": 0.6}},
        "teacher.temperature: 0.6 is not what a server at teacher.url answers at: set 1, or name teacher.path",
    ),
    "a divergence of one token": (
        {"teacher": T | {"divergence": "jsd"}},
        "teacher.divergence: 'jsd' wants more than the sampled token, which is all of teacher.form = 'sampled': choose "
        "'top_k' or 'full' there",
    ),
    "beta of a KL": (
        {"teacher": T | {"form": "full", "jsd_beta": 0.1}},
        "teacher.jsd_beta: only used with teacher.divergence = 'jsd': set that, or drop this",
    ),
    "k of another form": (
        {"teacher": T | {"form": "full", "top_k": 8}},
        "teacher.top_k: only used with teacher.form = 'top_k': set that, or drop this",
    ),
    "a cut distribution": (
        {"teacher": T | {"form": "top_k", "top_k_from": "student"}, "rollout": {"top_k": 20}},
        "teacher.top_k_from: the engine names no likeliest tokens where rollout.top_k cuts its distribution: remove it",
    ),
    "nothing to learn from": (
        {"algorithm": {"advantage": "none"}},
        "algorithm.advantage: 'none' leaves nothing to learn from: set teacher.path or teacher.url, or choose another",
    ),
    "a KL in no reward": (
        {"teacher": T, "algorithm": {"advantage": "none", "kl_coef": 0.1, "kl_in": "reward"}},
        "algorithm.advantage: 'none' makes nothing of rewards, nor of algorithm.kl_in = 'reward': drop it",
    ),
    "a filter of no rewards": (
        {"teacher": T, "algorithm": {"advantage": "none"}, "rollout": {"filter": "nonzero_std"}},
        "algorithm.advantage: 'none' makes nothing of rewards, nor of rollout.filter = 'nonzero_std': drop it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sections", "line"), BAD.values(), ids=BAD)
def test_what_does_not_go_together_is_named(sections: dict[str, dict[str, Any]], line: str):
    with pytest.raises(ConfigError) as caught:
        load_config(**sections)
    assert caught.value.problems == [line]


def test_what_goes_together():
    for sections in (
        {"teacher": U | {"temperature": 1.0}, "rollout": {"temperature": 0.6}},
        {"teacher": T | {"form": "full", "divergence": "jsd", "jsd_beta": 0.1}, "parallel": {"context_parallel": 2}},
        {"algorithm": {"advantage": "none", "kl_coef": 0.1}},
    ):
        load_config(**sections)
    with pytest.raises(ConfigError, match=r"teacher\.jsd_beta: must be > 0 and < 1, got 1"):
        load_config(teacher=T | {"form": "full", "divergence": "jsd", "jsd_beta": 1.0})


# ---- before a model loads


def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: dict[str, Any], **sections: Any) -> str:
    """The error of a run whose models may not be loaded."""
    config = make_run(tmp_path, teacher, **sections)
    monkeypatch.setattr("lightrl.models.load.load_weights", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UserError) as caught:
        Trainer(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rename(tokenizer: Path, old: str, new: str) -> None:
    file = tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"][new] = content["model"]["vocab"].pop(old)
    file.write_text(json.dumps(content))


def test_another_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = tiny_run.make_model(tmp_path / "other")
    rename(other, "c", "X")
    rename(other, "d", "Y")
    assert refused(tmp_path, monkeypatch, {"path": str(other)}) == (
        f"teacher.path: {other} has another tokenizer than the policy (model.path): token 5 is 'X' there and 'c' here, "
        "as are 1 of 30 others; name a teacher with the policy's tokenizer"
    )


def test_what_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    short = tiny_run.make_model(tmp_path / "short", vocab_size=20)
    assert refused(tmp_path, monkeypatch, {"path": str(short)}) == (
        f"teacher.path: {short} has 20 tokens, the policy (model.path) 30: a teacher has the policy's vocabulary; name "
        "a model of its family"
    )
    narrow = tiny_run.make_model(tmp_path / "narrow", max_position_embeddings=10)
    said = refused(tmp_path, monkeypatch, {"path": str(narrow)})
    assert said.startswith(f"teacher.path: {narrow} reads 10 tokens, and prompts with answers of rollout.max_response")
    stock = tiny_run.make_model(tmp_path / "stock", family="granite")
    assert refused(tmp_path, monkeypatch, {"path": str(stock), "form": "full"}) == (
        f"teacher.form: 'full' wants logits that are its head's alone, and teacher.path = {stock} is of a family that "
        "LightRL does not pack: choose 'top_k'"
    )
    monkeypatch.setattr("lightrl.training.teacher.check_parallel", lambda *args, **_: seen.append(args[2]))
    seen: list[str] = []
    refused(tmp_path, monkeypatch, {"path": str(narrow)})
    assert seen == [f"teacher.path = {narrow}"]
    assert refused(tmp_path, monkeypatch, {"form": "top_k", "top_k": 31}) == (
        "teacher.top_k: 31 exceeds the 30 tokens there are"
    )
    nowhere = str(tmp_path / "nowhere")
    assert refused(tmp_path, monkeypatch, {"path": nowhere}) == f"teacher.path: no such folder: {nowhere}"
    (tmp_path / "run.toml").write_text(f'[teacher]\npath = "{nowhere}"\n')
    with pytest.raises(ConfigError, match=rf"run.toml:2: teacher.path: no such folder: {nowhere}"):
        load_for_run([tmp_path / "run.toml"], ["--model.path", str(tmp_path / "model")])
    assert refused(tmp_path, monkeypatch, {"path": None, "url": "http://127.0.0.1:9", "api_key_env": "NO_KEY"}) == (
        "teacher.api_key_env: the environment has no NO_KEY: export it on every rank, or drop this"
    )


def test_padded_vocabularies_and_fewer_names_will_do(tmp_path: Path):
    """151,936 and 152,064 rows over the same ids; a tokenizer that leaves names of the other's last ids open."""
    padded = tiny_run.make_model(tmp_path / "padded", vocab_size=41)
    file = padded / "tokenizer.json"
    content = json.loads(file.read_text())
    del content["model"]["vocab"]["9"]
    file.write_text(json.dumps(content))
    trainer = Trainer(make_run(tmp_path, {"path": str(padded), "form": "full"}))
    metrics = trainer.step(trainer.source.next(4))
    assert metrics["distill/divergence"] > 0
    trainer.close()


# ---- runs


def whole(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.full_tensor().clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize(("form", "factor"), [("full", 8), ("sampled", 3)])
def test_a_perturbed_student_comes_back(tmp_path: Path, form: str, factor: float):
    """The KL to its teacher, on what it samples, falls; no reward is needed, and none is given."""
    steps = 30
    config = make_run(
        tmp_path, {"form": form}, noise=0.05, **ALONE, run={"steps": steps},
        rollout={"prompts_per_step": 8, "group_size": 4 if form == "full" else 8, "max_response_tokens": 12},
        optim={"lr": 1e-2 if form == "full" else 5e-3, "schedule": "linear"}, log={"save_samples": False},
    )  # fmt: skip
    trainer = Trainer(config)
    name = "distill/divergence" if form == "full" else "distill/reverse_kl"
    found = [(metrics := trainer.step(trainer.source.next(8)))[name] for _ in range(steps)]
    trainer.close()
    first, last = sum(found[:2]) / 2, sum(found[-5:]) / 5
    assert first > 0.03
    assert metrics["reward/mean"] == 0
    assert "reward/zero_spread_share" not in metrics
    assert last < first / factor, found


@pytest.mark.parametrize("keys", [
    {}, {"form": "top_k", "top_k": 5}, {"form": "top_k", "top_k": 5, "top_k_from": "student"}, {"form": "full"},
], ids=lambda keys: "-".join(map(str, keys.values())) or "sampled")  # fmt: skip
def test_its_own_teacher_teaches_nothing(tmp_path: Path, keys: dict[str, Any]):
    """At `rollout.temperature` 0.6, which engine, policy and teacher share; at another of the teacher alone it does."""
    found = []
    for temperature in (None, 1.0):
        teacher = {"path": str(tmp_path / "model"), "temperature": temperature} | keys
        rollout = {"temperature": 0.6}
        trainer = Trainer(make_run(tmp_path, teacher, **ALONE, rollout=rollout, log={"save_samples": False}))
        found.append(trainer.step(trainer.source.next(4)))
        trainer.close()
        close_world()
    same, other = found
    assert same["distill/reverse_kl"] == pytest.approx(0.0, abs=1e-6)
    assert same.get("distill/divergence", 0.0) == pytest.approx(0.0, abs=1e-6)
    assert same["optim/grad_norm"] < 1e-5
    assert other["optim/grad_norm"] > 1e-3


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_sampled_tokens_pull_beside_any_estimator(tmp_path: Path, advantage: str):
    """The gradient of a step is that of its rewards, and `coef` times another one."""
    found = {}
    for coef in (0.0, 1.0, 3.0):
        trainer = Trainer(make_run(tmp_path, {"coef": coef}, algorithm={"advantage": advantage},
                                   log={"save_samples": False}, optim={"max_grad_norm": 0}))  # fmt: skip
        kept: dict[str, Tensor] = {}

        def keep(*_: Any, trainer: Trainer = trainer, kept: dict[str, Tensor] = kept) -> None:
            kept |= {n: p.grad.full_tensor().clone() for n, p in trainer.policy.module.named_parameters()}

        trainer.optimizer.register_step_pre_hook(keep)
        metrics = trainer.step(trainer.source.next(4))
        found[coef] = kept
        assert metrics["distill/reverse_kl"] != 0
        assert (metrics["distill/advantage_share"] > 0) == (coef > 0)
        trainer.close()
        close_world()
    for name, none in found[0.0].items():
        torch.testing.assert_close(found[3.0][name] - none, 3 * (found[1.0][name] - none), atol=1e-6, rtol=1e-4)
    assert max(float((found[1.0][n] - found[0.0][n]).abs().max()) for n in found[0.0]) > 1e-4


def test_a_run_resumes_and_leaves_its_teacher_alone(tmp_path: Path):
    """Bitwise, with several updates a step. The teacher is frozen, in no optimizer, checkpoint or export."""
    teacher = {"form": "top_k", "top_k": 6, "top_k_from": "student", "coef": 0.5}
    sections = {"algorithm": {"minibatches_per_step": 2}, "checkpoint": {"hf_every": 3}}
    made = {}
    for name, stops in (("straight", (3,)), ("resumed", (2, 3))):
        for steps in stops:
            run = {"dir": str(tmp_path / name), "steps": steps}
            trainer = Trainer(make_run(tmp_path, teacher, run=run, optim={"schedule": "constant"}, **sections))
            assert trainer.teacher is not None
            module = trainer.teacher.modules[0]
            before = whole(module)
            trainer.train()
            assert all(torch.equal(t, before[n]) for n, t in whole(module).items())
            assert not any(p.requires_grad for p in module.parameters())
            mine = {id(p) for p in module.parameters()}
            assert not mine & {id(p) for g in trainer.optimizer.param_groups for p in g["params"]}
            made[name] = whole(trainer.policy.module)
            trainer.close()
            close_world()
    assert all(torch.equal(t, made["resumed"][n]) for n, t in made["straight"].items())
    files = list((tmp_path / "straight" / "checkpoints").rglob("*.safetensors"))
    stored = {name for file in files for name in load_file(file)}
    assert stored
    assert not any("teacher" in name or name.startswith("others") for name in stored)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "hf" / "step_000003", dtype=torch.float32)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, made["straight"][f"model.{name}"])
    config = (tmp_path / "straight" / "config.toml").read_text()
    assert "[teacher]" in config


def test_evaluation_does_without(tmp_path: Path):
    """`lightrl eval` loads no teacher, and asks no server."""
    sets = {"eval": {"sets": [{"name": "a", "path": str(tmp_path / "data.jsonl"), "reward": "tiny_run:count_letter"}]}}
    for where in ({}, {"path": None, "url": "http://127.0.0.1:9", "api_key_env": "NO_KEY"}):
        trainer = Trainer(make_run(tmp_path, where, **ALONE, **sets), only_sample=True)
        assert trainer.teacher is None
        assert "eval/a/avg@1" in trainer.evaluate()
        trainer.close()
        close_world()


def test_generation_does_without(tmp_path: Path):
    """`lightrl generate` of a run whose only signal is a teacher, which is not there."""
    where = {"path": None, "url": "http://127.0.0.1:9", "api_key_env": "NO_KEY"}
    config = make_run(tmp_path, where, **ALONE)
    generate(config, tmp_path / "out", steps=1, checkpoint=None)
    groups = list(RolloutDump(tmp_path / "out").groups(1))
    assert len(groups) == config.rollout.prompts_per_step
    assert all(s.response_length and s.reward == 0 for g in groups for s in g.samples)


def test_it_leaves_the_gpu_with_the_policy(tmp_path: Path):
    """As a GPU would do it: away while the engine generates, back for the updates; the same weights as without."""
    made = []
    for offload in (False, True):
        trainer = Trainer(make_run(tmp_path, {"form": "full"}, log={"save_samples": False}))
        assert trainer.teacher is not None
        if offload:
            modules = torch.nn.ModuleList([trainer.policy.module, *trainer.teacher.modules])
            trainer.rollouts.state = TrainingState(Offloader(modules, trainer.optimizer, on_cpu=True), "always")
        for _ in range(2):
            prompts = trainer.source.next(4)
            if offload:
                size = trainer.teacher.modules[0].model.model.norm.weight.to_local().untyped_storage()
                trainer.rollouts.state.make_room(1)
                assert size.nbytes() == 0
                trainer.rollouts.state.come_back()
            trainer.step(prompts)
        made.append(whole(trainer.policy.module))
        trainer.close()
        close_world()
    assert all(torch.equal(t, made[1][n]) for n, t in made[0].items())


def test_adapters_learn_from_it(tmp_path: Path):
    """LoRA under a frozen head: the distance to the teacher falls, and weights below the adapters stay."""
    pytest.importorskip("peft", reason="adapters are peft's")
    config = make_run(
        tmp_path, {"form": "full"}, noise=0.05, **ALONE, lora={"rank": 8}, optim={"lr": 3e-3},
        log={"save_samples": False},
    )  # fmt: skip
    trainer = Trainer(config)
    frozen = {n: p.full_tensor().clone() for n, p in trainer.policy.module.named_parameters() if not p.requires_grad}
    found = [trainer.step(trainer.source.next(4))["distill/divergence"] for _ in range(16)]
    after = whole(trainer.policy.module)
    trainer.close()
    assert frozen
    assert all(torch.equal(after[n], t) for n, t in frozen.items())
    assert sum(found[-4:]) / 4 < 0.9 * sum(found[:2]) / 2, found  # half of it is in embeddings, which have none
