"""Episodes in a whole run, in miniature: repeats, resumes, dumps, a dead engine; the gradient of what was sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from fake_engine import MortalEngine

from lightrl.config.load import load_config
from lightrl.errors import UserError
from lightrl.observe.dumps import read_samples
from lightrl.observe.metrics import Tally
from lightrl.rollout.environment import Step, Turn
from lightrl.rollout.episode import Episode
from lightrl.training.trainer import Trainer
from lightrl.training.update import microbatch_loss
from lightrl.types import Prompt, Sample, SampleGroup
from lightrl.wrappers import clean_name


class Hints:
    """A few turns of other lengths; the answers take their time, another each time."""

    gives_reward = True
    calls = 0

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def reset(self, prompt: Prompt) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt.text[: 3 + self._seed % 3]}]

    def step(self, turn: Turn) -> Step:
        type(self).calls += 1
        torch.rand(1)  # the run's random state is not the environment's to disturb: seeds are explicit
        reward = turn.text.count("a") / 4 - 0.1 * turn.number
        return Step(messages=[{"role": "user", "content": "no "[: 1 + turn.tokens[0] % 3]}], reward=reward)


class Pair:
    """Two agents and a branch."""

    gives_reward = True

    async def run(self, episode: Episode) -> None:
        first = episode.start(agent="first")
        turn = await first.generate(max_tokens=5)
        first.reward = turn.text.count("a") / 5
        for number in range(2):
            second = episode.start([{"role": "user", "content": f"ab{number}"}], agent="second")
            turn = await second.generate(max_tokens=5)
            second.reward = float(len(set(turn.text)))


def run_config(folder: Path, name: str = "run", environment: str = "Hints", **sections: dict[str, Any]) -> Any:
    if not (folder / "model").exists():
        tiny_run.make_model(folder / "model", max_position_embeddings=256)
        tokenizer = folder / "model" / "generation_config.json"
        tokenizer.write_text(json.dumps({"eos_token_id": [2, 3, 4, 5, 6, 7]}))  # random models end turns quickly
        tiny_run.make_data(folder / "data.jsonl")
    base = {
        "run": {"dir": str(folder / name), "steps": 2},
        "data": {"apply_chat_template": True},
        "reward": {"type": ""},
        "rollout": {"max_response_tokens": 60},
        "agent": {"environment": f"test_agent_run:{environment}", "max_turns": 3},
    }
    for section, keys in sections.items():
        base[section] = base.get(section, {}) | keys
    return load_config(**tiny_run.settings(folder, **base))


def train(config: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    trainer = Trainer(config)
    metrics = trainer.train()
    weights = {name: tensor.clone() for name, tensor in trainer.policy.lend()}
    trainer.close()
    return weights, metrics


def test_runs_repeat_and_resume_bit_for_bit(tmp_path: Path) -> None:
    weights, metrics = train(run_config(tmp_path))
    again, _ = train(run_config(tmp_path, "again"))
    train(run_config(tmp_path, "parts", run={"steps": 1}))
    resumed, _ = train(run_config(tmp_path, "parts"))
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, resumed[name]), name
    dumps = [[r for step in (1, 2) for r in read_samples(tmp_path / n, step)] for n in ("run", "again", "parts")]
    assert dumps[0] == dumps[1] == dumps[2]
    assert metrics["agent/turns"] > 1.2
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-4  # of several turns too: the engine was given these tokens
    record = max(dumps[0], key=lambda r: r["metadata"]["turns"])
    assert record["metadata"]["turns"] > 1
    assert [p is None for p in record["logprobs"]] == [m == 0 for m in record["loss_mask"]]
    assert 0 in record["loss_mask"]
    assert record["metadata"]["messages"][1]["role"] == "user"


def test_episodes_of_a_dead_engine_are_played_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples and weights are those of a run in which nothing died, but for what rounding another batch does."""
    config = run_config(tmp_path, log={"save_samples": True})
    train(config)
    monkeypatch.setattr("lightrl.engine.transformers.TransformersEngine", MortalEngine)
    monkeypatch.setattr(MortalEngine, "deaths", (5, 30))
    trainer = Trainer(run_config(tmp_path, "mortal"))
    trainer.train()
    engine = trainer.engine
    trainer.close()
    assert isinstance(engine, MortalEngine)
    assert engine.num_restarts == 2
    first, second = (read_samples(tmp_path / n, 1) for n in ("run", "mortal"))
    assert [r["tokens"] for r in first] == [r["tokens"] for r in second]


def test_one_turn_is_a_run_without_an_agent(tmp_path: Path) -> None:
    """Bit for bit: the same requests, samples and weights."""
    reward = {"type": "tiny_run:count_letter"}
    plain, _ = train(run_config(tmp_path, "plain", agent={"environment": "", "max_turns": 8}, reward=reward))
    agent, _ = train(run_config(tmp_path, "agent", environment="Once", reward=reward))
    for name, tensor in plain.items():
        assert torch.equal(tensor, agent[name]), name
    keys = ("tokens", "reward", "logprobs", "advantage", "status")
    found = [[{k: r[k] for k in keys} for r in read_samples(tmp_path / n, 2)] for n in ("plain", "agent")]
    assert found[0] == found[1]


class Once:
    def reset(self, prompt: Prompt) -> None:
        return None

    def step(self, turn: Turn) -> Step:
        return Step(done=True)


def test_only_sampled_tokens_have_a_gradient(tmp_path: Path) -> None:
    """Against a loss written out by hand: -advantage x log-prob of each sampled token, none of the given ones."""
    config = run_config(tmp_path, parallel={"max_tokens_per_microbatch": 64}, optim={"max_grad_norm": 0.0})
    trainer = Trainer(config)
    prompt = Prompt(index=0, tokens=[5, 6, 7], text="abc")
    other = Prompt(index=0, tokens=[8, 9, 10], text="abc")  # as long: prompts of a group must not be taken for one
    turns = [
        (prompt, [11, 12, 20, 21, 13], [1, 1, 0, 0, 1], 1.0),
        (other, [14, 22, 15], [1, 0, 1], -0.5),
        (other, [22, 16, 17], [0, 1, 1], 2.0),
        (prompt, [18, 19], [1, 1], 0.25),
    ]
    samples = [
        Sample(
            prompt=p, group_index=0, index=i, tokens=p.tokens + r, response_length=len(r), loss_mask=m, reward=0.0,
            rollout_logprobs=[-1.0 if x else None for x in m], advantage=a,
        )
        for i, (p, r, m, a) in enumerate(turns)
    ]  # fmt: skip
    batch = trainer.pack([SampleGroup(prompt=prompt, group_index=0, samples=samples)])
    assert sum(float(m.loss_mask.sum()) for part in batch for m in part) == 9
    total = torch.zeros(())
    grads = _gradients(trainer, batch)
    model = _stock(tmp_path)
    for p, r, m, a in turns:
        ids = torch.tensor([p.tokens + r])
        logprobs = model(ids).logits.float().log_softmax(-1)[0]
        for place, (token, sampled) in enumerate(zip(r, m, strict=True)):
            if sampled:
                total = total - a * logprobs[len(p.tokens) + place - 1, token] / 9
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            grads[name], parameter.grad, atol=2e-6, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
    trainer.close()


def _stock(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model").float()


def _gradients(trainer: Trainer, batch: Any) -> dict[str, torch.Tensor]:
    """Of one update, by the names of the stock model."""
    for micro in batch[0]:
        logprobs, entropy, *top = trainer.policy(micro, 1.0)
        microbatch_loss(logprobs, entropy, micro, trainer.objective, Tally(), *top).backward()
    found = {}
    for name, parameter in trainer.policy.module.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        found[clean_name(name).removeprefix("model.")] = grad
    return found


def test_several_agents_train(tmp_path: Path) -> None:
    """Each agent's samples sum to no advantage in each group; packing keeps prompts of equal length apart."""
    _, metrics = train(run_config(tmp_path, environment="Pair", parallel={"max_tokens_per_microbatch": 128}))
    records = read_samples(tmp_path / "run", 2)
    assert len(records) == 4 * 4 * 3
    for group in {r["group"] for r in records}:
        for name in ("first", "second"):
            part = [r["advantage"] for r in records if r["group"] == group and r["metadata"]["agent"] == name]
            assert len(part) in (4, 8)
            assert abs(sum(part)) < 1e-4
    assert metrics["agent/conversations"] == 3
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-4


@pytest.mark.parametrize("environment", ["Hints", "Pair"])
def test_a_dump_trains_to_the_same_weights(tmp_path: Path, environment: str) -> None:
    """What was given, several agents' prompts and all, is in the dump: replayed, weights are equal bit for bit."""
    live, _ = train(run_config(tmp_path, "live", environment, dump={"rollouts": True}))
    replayed, metrics = train(run_config(tmp_path, "replayed", environment, debug={"rollouts": str(tmp_path / "live")}))
    for name, tensor in live.items():
        assert torch.equal(tensor, replayed[name]), name
    assert metrics["agent/episodes"] == 16


def test_evaluation_plays_episodes(tmp_path: Path) -> None:
    data = str(tmp_path / "data.jsonl")
    sets = [{"name": "held", "path": data, "samples_per_prompt": 2, "temperature": 1.0}]
    config = run_config(tmp_path, environment="Pair", eval={"every": 1, "sets": sets}, run={"steps": 1})
    _, metrics = train(config)
    assert metrics["eval/held/prompts"] == 12
    records = read_samples(tmp_path / "run", 1, "held")
    assert len(records) == 24
    assert {r["metadata"]["agent"] for r in records} == {"second"}


def test_environments_that_break_stop_the_run(tmp_path: Path) -> None:
    trainer = Trainer(run_config(tmp_path, environment="Broken"))
    with pytest.raises(UserError, match=r"16 of 16 samples could not be scored.*KeyError: 'no such page'"):
        trainer.train()
    trainer.close()


class Broken(Hints):
    def step(self, turn: Turn) -> Step:
        raise KeyError("no such page")


def test_mistakes_are_told_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Trainer, "_load_model", never)
    with pytest.raises(UserError, match=r"agent\.environment = 'test_agent_run:Hint'"):
        Trainer(run_config(tmp_path, environment="Hint"))
    agent = {"environment": "", "tools": ["search"], "search_corpus": str(tmp_path / "none.jsonl")}
    with pytest.raises(UserError, match=r"agent\.search_corpus: .*cannot be read"):
        Trainer(run_config(tmp_path, agent=agent))
    with pytest.raises(UserError, match="no reward: set reward"):
        Trainer(run_config(tmp_path, environment="Once"))
