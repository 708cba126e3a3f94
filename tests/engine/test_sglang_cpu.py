"""The real SGLang on a CPU: the contract of all engines, weights through shared memory, a run that learns."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import contract
import pytest
import tiny_run
import torch
from conftest import SMOLLM2
from real_moe import make_real_moe, train_with_sglang
from serving import ask, check_logprobs, serve_while
from tiny_models import CONTEXT, EOS, SMALL, VOCAB, stock
from transformers import LlamaConfig

from lightrl.config.load import load_for_run
from lightrl.config.schema import EngineConfig, SyncConfig
from lightrl.distributed.mesh import close_world
from lightrl.engine.base import Engine, EngineLostError, GenerateRequest, SamplingParams
from lightrl.engine.sglang import Model, SGLangEngine
from lightrl.observe.rollouts import RolloutDump
from lightrl.sync.weights import sync_weights
from lightrl.training.trainer import Trainer

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="sglang is not installed here: make test-sglang-cpu"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this SGLang is one for GPUs: tests/gpu/test_sglang_gpu.py"),
]

# on a busy machine a batch may take long: only what is really stopped counts as hung
ENGINE = {"kind": "sglang", "memory_fraction": 0.1, "hang_timeout": 30, "args": {"max_total_tokens": 40_000}}


def text_of(ids: list[int]) -> str:
    return "".join(chr(65 + i) for i in ids)


def make_engine(model: torch.nn.Module, folder: Path, **sync: Any) -> SGLangEngine:
    """An engine that holds the weights of a stock float32 model as version 7."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    engine = SGLangEngine(
        Model(
            path=folder,
            layout=[(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()],
            eos_token_ids=[EOS],
            decode=text_of,
            dtype=torch.float32,
            context_length=CONTEXT,
            vocab_size=VOCAB,
        ),
        EngineConfig(**ENGINE),
        SyncConfig(**sync),
        device=torch.device("cpu"),
        log_dir=folder / "engine",
    )
    engine.load_weights(((n, p.detach()) for n, p in model.named_parameters()), 7)
    return engine


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """The matrices of its MLPs do not fit into a bucket of 1 MiB: they come in parts."""
    shape = {**SMALL, "hidden_size": 64, "head_dim": 16, "intermediate_size": 4200}
    return stock(LlamaConfig(**shape, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def engine(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    made = make_engine(model, tmp_path_factory.mktemp("engine"), bucket_mib=1, verify_every=1)
    yield made
    made.close()


# ---- the contract of all engines


def test_greedy_equals_stock(engine: SGLangEngine, model: torch.nn.Module) -> None:
    assert isinstance(engine, Engine)
    contract.check_greedy(engine, model, VOCAB, tolerance=1e-4)


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.3}])
def test_sampled_logprobs_equal_stock(engine: SGLangEngine, model: torch.nn.Module, truncation: dict[str, Any]) -> None:
    contract.check_sampled_logprobs(engine, model, VOCAB, temperature=0.7, joint=True, **truncation)


def test_likeliest_tokens_equal_stock(engine: SGLangEngine, model: torch.nn.Module) -> None:
    contract.check_likeliest(engine, model, VOCAB)


def test_ends_of_answers(engine: SGLangEngine, model: torch.nn.Module) -> None:
    contract.check_length_and_eos(engine, VOCAB, EOS, seeded=False)
    contract.check_greedy_end(engine, model, VOCAB, EOS)
    contract.check_stop_ids(engine, VOCAB)
    contract.check_bad_requests(engine, VOCAB, CONTEXT)


def test_abort(engine: SGLangEngine) -> None:
    contract.check_abort(engine, VOCAB)


def test_new_weights(engine: SGLangEngine, model: torch.nn.Module) -> None:
    contract.check_new_weights(engine, model, stock(model.config, seed=1), VOCAB, tolerance=1e-4)


# ---- weights


def test_a_change_of_one_value_is_found(engine: SGLangEngine, model: torch.nn.Module) -> None:
    assert engine._sender is not None
    parts = [s for bucket in engine._sender.plan.buckets for s in bucket if s.name.endswith("1.mlp.down_proj.weight")]
    assert len(parts) == 2
    tensors = [(n, p.detach().clone()) for n, p in model.named_parameters()]
    assert engine._pass("verify", [tensors], 7) == {
        "differing": {},
        "compared": sum(p.numel() for p in model.parameters()),
    }
    tensor = dict(tensors)[parts[0].name]
    tensor[[3, 60], [5, 9]] += 1  # in either part
    assert engine._pass("verify", [tensors], 7)["differing"] == {parts[0].name: 2}


def test_an_engine_that_is_stopped_and_restarted(engine: SGLangEngine, model: torch.nn.Module) -> None:
    """A short stop is no loss, and a long one is; the new engine gives the same answers."""
    greedy = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    [before] = asyncio.run(engine.generate(GenerateRequest(id="a", tokens=[4, 5], sampling=greedy)))
    [scheduler, *_] = engine._host.call("pids")

    async def stopped(seconds: float) -> None:
        sampling = SamplingParams(max_new_tokens=CONTEXT - 8, ignore_eos=True)
        task = asyncio.create_task(engine.generate(GenerateRequest(id="x", tokens=[4], sampling=sampling, n=64)))
        await asyncio.sleep(0.05)
        os.kill(scheduler, signal.SIGSTOP)
        if not (await asyncio.wait([task], timeout=seconds))[0]:
            os.kill(scheduler, signal.SIGCONT)
        await task

    asyncio.run(stopped(6))  # it was asked for a sign meanwhile, and gives it
    with pytest.raises(EngineLostError, match=r"scheduler is stuck \(under way: \d+ x generate\)"):
        asyncio.run(stopped(60))
    assert engine.lost
    engine.restart()
    engine.load_weights(((n, p.detach()) for n, p in model.named_parameters()), 7)
    [after] = asyncio.run(engine.generate(GenerateRequest(id="a", tokens=[4, 5], sampling=greedy)))
    assert after.tokens == before.tokens


# ---- runs


@pytest.mark.model
def test_a_real_mixture_routes_as_in_sglang(tmp_path: Path) -> None:
    """Pretrained weights, experts that differ: log-probs agree before an update and after."""
    model = make_real_moe(SMOLLM2, tmp_path / "model", noise=0.3, layers=4)
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "What is 4 - 1?", "label": "3"}\n{"input": "What is 2 + 5?", "label": "7"}\n')
    engine = {key: value for key, value in ENGINE.items() if key != "kind"}
    for step in train_with_sglang(model, data, tmp_path, "cpu", **engine):
        assert step["optim/grad_norm"] > 0
        assert step["mismatch/logprob_abs_diff"] < 1e-4


def test_reward_rises_also_when_the_engine_dies(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "engine": ENGINE,
        "rollout": {"prompts_per_step": 8, "group_size": 8},
        "optim": {"lr": 1e-2},
        "sync": {"verify_every": 1},
        "log": {"save_samples": False},
    }
    trainer = Trainer(tiny_run.make_run(tmp_path, **sections))
    try:
        steps = [trainer.step(trainer.source.next(8)) for _ in range(16)]
        rewards = [step["reward/mean"] for step in steps]
        assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
        assert max(step["mismatch/logprob_abs_diff"] for step in steps) < 1e-5
        sync_weights(trainer.policy, trainer.engine, 16)
        sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
        (scheduler, *_) = trainer.engine._host.call("pids")

        async def killed() -> None:
            task = asyncio.create_task(
                trainer.engine.generate(GenerateRequest(id="x", tokens=[4], sampling=sampling, n=64))
            )
            await asyncio.sleep(0.05)
            os.kill(scheduler, signal.SIGKILL)
            await task

        with pytest.raises(EngineLostError, match=r"The end of .*sglang_cpu0\.log"):
            asyncio.run(killed())
        after = trainer.step(trainer.source.next(8))  # starts it anew
        assert not trainer.engine.lost
        assert after["mismatch/logprob_abs_diff"] < 1e-5
        assert after["reward/mean"] > 2 * sum(rewards[:5]) / 5
    finally:
        trainer.close()
        close_world()


def test_it_is_served(tmp_path: Path) -> None:
    """`lightrl serve`: two turns of a session, whose log-probs are the stock model's."""
    tiny_run.make_model(tmp_path / "model")
    toml = tmp_path / "serve.toml"
    toml.write_text(
        f'[run]\ndir = "{tmp_path}/run"\ndevice = "cpu"\n[model]\npath = "{tmp_path}/model"\n'
        'compute_dtype = "float32"\n[rollout]\nstop_token_ids = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]\n'
        '[engine]\nkind = "sglang"\nmemory_fraction = 0.1\n[engine.args]\nmax_total_tokens = 40000\n'
    )

    def use(url: str, key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "abc"}]
        for _ in range(2):
            status, answer = ask(url, key, "chat/completions", {"model": "m", "messages": messages})
            assert status == 200
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]

    config = load_for_run([str(toml)], [], command="serve")
    serve_while(config, use, record=tmp_path / "dump")
    (group,) = RolloutDump(tmp_path / "dump").groups(1)
    assert group.samples[0].metadata["turns"] == 2
    check_logprobs(tmp_path / "model", group.samples)


def some_generate(folder: str) -> None:
    """One rank trains, the other generates; every sync is compared."""
    from lightrl.training.rollout_ranks import serve_rollouts

    sections: dict[str, Any] = {
        "engine": ENGINE,
        "parallel": {"rollout_ranks": 1},
        "rollout": {"schedule": "async", "max_staleness": 2, "max_response_tokens": 40},
        "correction": {"use_tis": True},
        "sync": {"verify_every": 1},
        "optim": {"lr": 1e-5},
    }
    config = tiny_run.make_run(Path(folder), **sections)
    if not serve_rollouts(config):
        trainer = Trainer(config)
        trainer.train()
        trainer.close()
        close_world()


def test_a_rank_that_trains_beside_one_that_generates(tmp_path: Path, run_distributed: Any) -> None:
    tiny_run.make_run(tmp_path)
    run_distributed(some_generate, 2, tmp_path, timeout=300)
    found = tiny_run.metrics_of(tmp_path, "rollout/staleness_max", "mismatch/logprob_abs_diff")
    assert len(found) == 4
    assert all(age <= 2 for _, age, _ in found)
    assert max(difference for *_, difference in found) < 1e-3  # of older weights, which are nearly the same
