"""SGLang beside the trainer: what it samples, what it holds after a sync, runs that learn, engines that die."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from engine import contract
from engine.tiny_models import CONTEXT, EOS, SMALL, VOCAB, stock
from transformers import LlamaConfig

from lightrl.config.schema import EngineConfig, SyncConfig
from lightrl.distributed.mesh import close_world
from lightrl.engine.base import EngineLostError, GenerateRequest, SamplingParams
from lightrl.engine.sglang import Model, SGLangEngine
from lightrl.errors import UserError
from lightrl.sync.weights import release_engine, sync_weights
from lightrl.training.trainer import Trainer
from lightrl.types import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

# SGLang's kernels want heads of 64 or more
SHAPE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 512}
QWEN3 = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
ENGINE = {"kind": "sglang", "memory_fraction": 0.1}


def text_of(ids: list[int]) -> str:
    return "".join(chr(65 + i) for i in ids)


def make_engine(model: torch.nn.Module, folder: Path, **config: Any) -> SGLangEngine:
    """An engine that holds the weights of a stock bfloat16 model as version 7."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    engine = SGLangEngine(
        Model(
            path=folder,
            layout=[(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()],
            eos_token_ids=[EOS],
            decode=text_of,
            dtype=torch.bfloat16,
            context_length=CONTEXT,
            vocab_size=VOCAB,
        ),
        EngineConfig(**(ENGINE | config)),
        SyncConfig(),
        device=torch.device("cuda", 0),
        log_dir=folder / "engine",
    )
    engine.load_weights(((n, p.detach()) for n, p in model.named_parameters()), 7)
    return engine


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    # logits spread little: bfloat16 moves log-probs by 0.004 on the mean (0.03 at most), a wrong temperature by 0.2
    config = LlamaConfig(
        **{**SMALL, **SHAPE, "max_position_embeddings": CONTEXT, "initializer_range": 0.06}, tie_word_embeddings=True
    )
    return stock(config).to("cuda", torch.bfloat16)


@pytest.fixture(scope="module")
def engine(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    made = make_engine(model, tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


def truncated_jointly(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """[N, V] log-probs (-inf outside what is kept). SGLang takes the nucleus of the whole distribution and its best k;
    transformers takes the nucleus of the best k."""
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    keep = probs.cumsum(-1) - probs <= top_p
    keep[:, top_k or keep.shape[1] :] = False
    kept = torch.zeros_like(probs).scatter(-1, order, probs * keep)
    return (kept / kept.sum(-1, keepdim=True)).log()


def check_logprobs(
    engine: SGLangEngine, model: torch.nn.Module, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> None:
    """Log-probs against a stock forward. Next to the edge of what is kept, rounding decides otherwise now and then."""
    sampling = SamplingParams(max_new_tokens=16, temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=True)
    requests = [
        GenerateRequest(id=f"s{i}", tokens=contract.prompt(length, VOCAB, 1), sampling=sampling, n=4)
        for i, length in enumerate((2, 40, 90))
    ]
    found, expected, everything = [], [], []
    for request, completions in zip(requests, contract.run(engine, requests), strict=True):
        assert len({tuple(c.tokens) for c in completions}) > 1
        for completion in completions:
            tokens = torch.tensor(completion.tokens)[:, None]
            logits = contract.reference_logits(model, request, completion)
            kept = truncated_jointly(logits / temperature, top_k, top_p)
            expected.append(kept.gather(1, tokens)[:, 0])
            everything.append((logits / temperature).log_softmax(-1).gather(1, tokens)[:, 0])
            found.append(torch.tensor(completion.logprobs))
    ours, theirs, untruncated = (torch.cat(parts) for parts in (found, expected, everything))
    inside = theirs.isfinite()
    assert inside.float().mean() > 0.9
    error = (ours - theirs)[inside].abs()
    print(temperature, top_k, top_p, "mean", error.mean().item(), "max", error.max().item())
    assert error.mean() < 0.03
    if top_k or top_p < 1:
        assert (ours - untruncated).mean() > 0.1  # renormalised


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 9, 0.9), (1.2, 0, 0.8)]
)
def test_logprobs_are_of_the_distribution_drawn_from(
    engine: SGLangEngine, model: torch.nn.Module, temperature: float, top_k: int, top_p: float
) -> None:
    check_logprobs(engine, model, temperature, top_k, top_p)


def test_ends_of_answers(engine: SGLangEngine) -> None:
    contract.check_bad_requests(engine, VOCAB, CONTEXT)

    def greedy(name: str, **sampling: Any) -> Any:
        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True} | sampling)
        request = GenerateRequest(id=name, tokens=contract.prompt(9, VOCAB), sampling=params)
        return contract.run(engine, [request])[0][0]

    free = greedy("free")
    assert (len(free.tokens), free.status, free.policy_versions) == (24, Status.TRUNCATED, [7])
    stop = free.tokens[7]
    expected = free.tokens[: free.tokens.index(stop) + 1]
    for ignore_eos in (True, False):  # with False, SGLang sees the stop itself
        stopped = greedy(f"id{ignore_eos}", stop_token_ids=(stop,), ignore_eos=ignore_eos)
        assert (stopped.tokens, stopped.status) == (expected, Status.COMPLETED)
        assert len(stopped.logprobs) == len(stopped.tokens)
    text = text_of(free.tokens[4:6])
    stopped = greedy("string", stop=(text,), max_new_tokens=300)
    assert stopped.status is Status.COMPLETED
    assert text_of(stopped.tokens).endswith(text)
    assert text not in text_of(stopped.tokens[:-1])
    ended = contract.run(
        engine,
        [GenerateRequest(id="e", tokens=[5, 6], sampling=SamplingParams(max_new_tokens=200, temperature=1.5), n=32)],
    )[0]
    assert {c.status for c in ended} >= {Status.COMPLETED}
    for completion in ended:
        assert (completion.tokens[-1] == EOS) == (completion.status is Status.COMPLETED)
        assert EOS not in completion.tokens[:-1]


def test_abort(engine: SGLangEngine) -> None:
    def request(name: str, length: int) -> GenerateRequest:
        sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
        return GenerateRequest(id=name, tokens=[4, 5], sampling=sampling, n=2)

    async def scenario() -> Any:
        tasks = [asyncio.create_task(engine.generate(request(n, k))) for n, k in (("a", 390), ("b", 390), ("c", 8))]
        await asyncio.sleep(0.1)
        engine.abort("a")
        engine.abort("no such request")
        await tasks[2]
        engine.abort()
        late = asyncio.create_task(engine.generate(request("late", 390)))
        await asyncio.sleep(0)
        engine.abort("late")
        return [await task for task in (*tasks, late)]

    first, second, third, late = asyncio.run(scenario())
    for completion in first + second + late:
        assert completion.status is Status.ABORTED
        assert len(completion.tokens) == len(completion.logprobs) < 390
    assert [len(c.tokens) for c in third] == [8, 8]


def test_memory_is_released_and_other_weights_arrive(engine: SGLangEngine, model: torch.nn.Module) -> None:
    """W5 too: the prompt is cached with the old weights."""
    prompt = contract.prompt(90, VOCAB)
    request = GenerateRequest(id="r", tokens=prompt, sampling=SamplingParams(max_new_tokens=12, ignore_eos=True))
    contract.run(engine, [request])
    free = torch.cuda.mem_get_info()[0]
    engine.offload()
    engine.offload()
    assert torch.cuda.mem_get_info()[0] - free > 1 << 30
    with pytest.raises(RuntimeError, match="call onload first"):
        contract.run(engine, [request])
    other = stock(model.config, seed=1).to("cuda", torch.bfloat16)
    engine.onload(("weights",))
    engine.load_weights(((n, p.detach()) for n, p in other.named_parameters()), 8)
    engine.onload(("kv_cache",))
    try:
        check_logprobs(engine, other)
        ((completion,),) = contract.run(engine, [request])
        assert completion.policy_versions == [8]
    finally:
        engine.load_weights(((n, p.detach()) for n, p in model.named_parameters()), 7)
    check_logprobs(engine, model)


def test_a_change_of_one_value_is_found(engine: SGLangEngine, model: torch.nn.Module) -> None:
    tensors = [(n, p.detach().clone()) for n, p in model.named_parameters()]
    assert engine._pass("verify", [tensors], 7)["differing"] == {}
    name, tensor = next((n, t) for n, t in tensors if "layers.1.mlp.down_proj" in n)
    tensor[3, 5] += 1
    assert engine._pass("verify", [tensors], 7)["differing"] == {name: 1}


def test_seeds_with_deterministic_inference(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path, args={"enable_deterministic_inference": True})
    try:
        contract.check_stop_ids(engine, VOCAB)
        contract.check_length_and_eos(engine, VOCAB, EOS)
    finally:
        engine.close()


def test_settings_that_cannot_work(model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"engine.args.chunked_prefil_size: .*did you mean chunked_prefill_size"):
        make_engine(model, tmp_path, args={"chunked_prefil_size": 1})
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(UserError, match="expandable_segments"):  # W3
        make_engine(model, tmp_path)


# ---- runs


def sections(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"run": {"device": "cuda", "steps": 100}, "model": {"compute_dtype": "bfloat16"}}
    base |= {"engine": ENGINE, "rollout": {"prompts_per_step": 8, "group_size": 8}, "optim": {"lr": 1e-2}}
    return base | {"log": {"trackers": ["jsonl"], "print_samples": 0, "save_samples": False}} | more


def make_files(folder: Path, family: str = "llama", **shape: Any) -> None:
    tiny_run.make_model(folder / "model", family=family, **(shape or SHAPE))
    tiny_run.make_data(folder / "data.jsonl")


def test_reward_rises_then_the_engine_dies(tmp_path: Path) -> None:
    make_files(tmp_path)
    trainer = Trainer(tiny_run.make_run(tmp_path, **sections()))
    try:
        rewards = [trainer.step(trainer.source.next(8))["reward/mean"] for _ in range(30)]
        print([round(r, 2) for r in rewards])
        assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
        sync_weights(trainer.policy, trainer.engine, 30)
        pids = trainer.engine._host.call("pids")
        request = GenerateRequest(
            id="x", tokens=[4], sampling=SamplingParams(max_new_tokens=480, ignore_eos=True), n=64
        )

        async def killed() -> None:
            task = asyncio.create_task(trainer.engine.generate(request))
            await asyncio.sleep(0.05)
            os.kill(pids[0], signal.SIGKILL)
            await task

        begun = time.monotonic()
        with pytest.raises(EngineLostError, match=r"The end of .*sglang_gpu0\.log"):
            asyncio.run(killed())
        assert time.monotonic() - begun < 15
    finally:
        trainer.close()
        close_world()


def test_no_drift_and_no_growth_on_a_real_shape(tmp_path: Path) -> None:
    """Mismatch at step 0 and after 20 updates; weights equal bit by bit; W1: 100 syncs."""
    make_files(tmp_path, "qwen3", **QWEN3)
    config = sections(
        engine={"kind": "sglang", "memory_fraction": 0.4, "max_batch": 128},
        rollout={"prompts_per_step": 8, "group_size": 8, "max_response_tokens": 64},
        optim={"lr": 1e-6},
        algorithm={"skip_zero_advantage": False},
        sync={"verify_every": 7},
    )
    trainer = Trainer(tiny_run.make_run(tmp_path, **config))
    try:
        found = [trainer.step(trainer.source.next(8))["mismatch/logprob_abs_diff"] for _ in range(21)]
        print([round(x, 4) for x in found])
        assert max(found) <= 0.011
        for version in range(100):
            if version == 3:
                torch.cuda.synchronize()
                before = torch.cuda.mem_get_info()[0]
            sync_weights(trainer.policy, trainer.engine, 100 + version)
            release_engine(trainer.policy, trainer.engine)
        torch.cuda.synchronize()
        assert before - torch.cuda.mem_get_info()[0] < 16 << 20
    finally:
        trainer.close()
        close_world()


@pytest.mark.gpu2
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks(tmp_path: Path, run_distributed: Any, tensor_parallel: int) -> None:
    make_files(tmp_path)
    engine = ENGINE | {"tensor_parallel": tensor_parallel}
    more = sections(run={"device": "cuda", "steps": 25}, engine=engine, sync={"verify_every": 5})
    run_distributed(Path(tiny_run.__file__), 2, tmp_path, json.dumps(more), timeout=240)
    rewards = [reward for _, reward in tiny_run.metrics_of(tmp_path, "reward/mean")]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
