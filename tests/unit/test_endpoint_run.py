"""Agents outside in a whole run, in miniature: what is trained is what an environment's turns are, bit for bit."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from test_agent_run import run_config, train

from lightrl.errors import UserError
from lightrl.observe.dumps import read_samples
from lightrl.rollout.endpoint import OutsideSession
from lightrl.rollout.environment import Step, Turn
from lightrl.training.trainer import Trainer
from lightrl.types import Prompt, Status

TOLD = {"role": "user", "content": "no "}

# An agent in a file of its own: nothing but the standard library.
PROGRAM = """
import json, os, sys, urllib.request

def post(action, body):
    url = os.environ["OPENAI_BASE_URL"] + "/" + action
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)

messages, reward = json.load(sys.stdin)["prompt"]["messages"], 0.0
for turn in range(2):
    choice = post("chat/completions", {"model": "policy", "messages": messages})["choices"][0]
    reward += choice["message"]["content"].count("a") / 4
    if choice["finish_reason"] == "length":
        break
    messages += [choice["message"], {"role": "user", "content": "no "}]
post("reward", {"reward": reward})
"""


class Told:
    """The same as an environment."""

    gives_reward = True

    def reset(self, prompt: Prompt) -> None:
        return None

    def step(self, turn: Turn) -> Step:
        done = turn.number == 1 or turn.status is not Status.COMPLETED
        return Step(messages=[TOLD], done=done, reward=turn.text.count("a") / 4)


def outside(session: OutsideSession, seconds: float = 0.0) -> float:
    """The same as a function; `seconds` pass before each turn."""
    messages, reward = list(session.prompt.messages or []), 0.0
    for _ in range(2):
        time.sleep(seconds)
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        request = urllib.request.Request(f"{session.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as reply:
            (choice,) = json.load(reply)["choices"]
        reward += choice["message"]["content"].count("a") / 4
        if choice["finish_reason"] == "length":
            break
        messages += [choice["message"], TOLD]
    return reward


def outside_config(folder: Path, name: str, **sections: dict[str, Any]) -> Any:
    base = {"agent": {"environment": "outside"}, "endpoint": {"function": "test_endpoint_run:outside"}}
    for section, keys in sections.items():
        base[section] = base.get(section, {}) | keys
    return run_config(folder, name, **base)


def test_sessions_train_as_an_environment_does(tmp_path: Path) -> None:
    """Tokens, masks, log-probs, rewards and, after two steps, weights are equal to the last bit; so is a replay."""
    inside, _ = train(run_config(tmp_path, "inside", agent={"environment": "test_endpoint_run:Told"}))
    weights, metrics = train(outside_config(tmp_path, "outside", dump={"rollouts": True}))
    replayed, _ = train(outside_config(tmp_path, "replayed", debug={"rollouts": str(tmp_path / "outside")}))
    for name, tensor in inside.items():
        assert torch.equal(tensor, weights[name]), name
        assert torch.equal(tensor, replayed[name]), name
    keys = ("tokens", "loss_mask", "logprobs", "reward", "advantage", "status", "prompt")
    for step in (1, 2):
        one, two = ([{k: r[k] for k in keys} for r in read_samples(tmp_path / n, step)] for n in ("inside", "outside"))
        assert one == two
    assert any(0 in (r["loss_mask"] or []) for r in two)
    assert metrics["agent/turns"] > 1.2
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-4
    saved = "".join(p.read_text() for p in (tmp_path / "outside").rglob("*.toml"))
    assert "endpoint" in saved


def test_a_program_is_trained(tmp_path: Path) -> None:
    """A process of its own for each episode, and an evaluation with another temperature."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = [sys.executable, "-I", "-S", str(tmp_path / "agent.py")]
    sets = [{"name": "held", "path": str(tmp_path / "data.jsonl"), "samples_per_prompt": 1, "temperature": 0.5}]
    sections: dict[str, dict[str, Any]] = {
        "endpoint": {"function": "", "command": command, "concurrency": 4},
        "rollout": {"prompts_per_step": 2, "group_size": 2},
        "run": {"steps": 1},
        "eval": {"every": 1, "sets": sets},
    }
    _, metrics = train(outside_config(tmp_path, "run", **sections))
    records = read_samples(tmp_path / "run", 1)
    assert len(records) == 4
    assert all(r["reward"] == r["response"].replace("no ", "").count("a") / 4 for r in records)
    assert metrics["agent/failed"] == 0
    assert metrics["eval/held/prompts"] == 12


def test_failing_agents_stop_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such file'); raise SystemExit(7)"]
    trainer = Trainer(outside_config(tmp_path, "run", endpoint={"function": "", "command": command}))
    with pytest.raises(UserError, match=r"16 of 16 samples could not be scored.*ended with status 7: no such file"):
        trainer.train()
    trainer.close()


def test_mistakes_are_told_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Trainer, "_load_model", never)
    with pytest.raises(UserError, match=r"endpoint\.function = 'test_endpoint_run:outsid'"):
        Trainer(outside_config(tmp_path, "run", endpoint={"function": "test_endpoint_run:outsid"}))
    with pytest.raises(UserError, match=r"endpoint\.key_env: the environment has no NO_SUCH_KEY"):
        Trainer(outside_config(tmp_path, "run", endpoint={"key_env": "NO_SUCH_KEY"}))
