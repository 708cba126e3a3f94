"""One GPU, no run: what SGLang samples, what it holds after a sync, what is said and done when it dies or hangs.

One engine serves most tests; it is lost and started again in the last two that use it.
"""

from __future__ import annotations

import asyncio
import importlib.util
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
from gpu.sglang_tools import (
    GIB,
    LEFT_OVER,
    MIB,
    SHAPE,
    check_logprobs,
    fill_memory,
    interrupted,
    kill,
    living,
    load,
    make_engine,
    make_files,
    memory_in_use,
    num_values,
    processes,
    schedulers,
    sections,
    settled,
    text_of,
    watch,
)
from transformers import LlamaConfig

from lightrl.distributed.mesh import close_world
from lightrl.engine.base import EngineLostError, GenerateRequest, SamplingParams
from lightrl.engine.sglang import SGLangEngine
from lightrl.errors import UserError
from lightrl.training.trainer import Trainer
from lightrl.types import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]


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


# ---- what is sampled


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 9, 0.9), (1.2, 0, 0.8)],  # L3
)
def test_logprobs_are_of_the_distribution_drawn_from(
    engine: SGLangEngine, model: torch.nn.Module, temperature: float, top_k: int, top_p: float
) -> None:
    check_logprobs(engine, model, temperature, top_k, top_p)


def greedy(engine: SGLangEngine, name: str, **sampling: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True} | sampling)
    request = GenerateRequest(id=name, tokens=contract.prompt(9, VOCAB), sampling=params)
    return contract.run(engine, [request])[0][0]


def test_ends_of_answers(engine: SGLangEngine) -> None:
    contract.check_bad_requests(engine, VOCAB, CONTEXT)
    greedy(engine, "first")  # now the prompt is cached: what follows is computed alike
    free = greedy(engine, "free")
    assert (len(free.tokens), free.status, free.policy_versions) == (24, Status.TRUNCATED, [7])
    stop = free.tokens[7]
    expected = free.tokens[: free.tokens.index(stop) + 1]
    for ignore_eos in (True, False):  # with False, SGLang sees the stop itself
        stopped = greedy(engine, f"id{ignore_eos}", stop_token_ids=(stop,), ignore_eos=ignore_eos)
        assert (stopped.tokens, stopped.status) == (expected, Status.COMPLETED)
        assert len(stopped.logprobs) == len(stopped.tokens)
    text = text_of(free.tokens[4:6])
    stopped = greedy(engine, "string", stop=(text,), max_new_tokens=300)
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


# ---- weights and memory


def test_memory_is_released_and_other_weights_arrive(engine: SGLangEngine, model: torch.nn.Module) -> None:
    """W5 too: the prompt is cached with the old weights."""
    prompt = contract.prompt(90, VOCAB)
    request = GenerateRequest(id="r", tokens=prompt, sampling=SamplingParams(max_new_tokens=12, ignore_eos=True))
    contract.run(engine, [request])
    before = memory_in_use()
    engine.offload()
    engine.offload()
    released = before - memory_in_use()
    print(f"released {released / GIB:.2f} of {before / GIB:.2f} GiB in use")
    assert released > GIB
    with pytest.raises(RuntimeError, match="call onload first"):
        contract.run(engine, [request])
    other = stock(model.config, seed=1).to("cuda", torch.bfloat16)
    engine.onload(("weights",))
    load(engine, other, 8)
    engine.onload(("kv_cache",))
    try:
        check_logprobs(engine, other)
        ((completion,),) = contract.run(engine, [request])
        assert completion.policy_versions == [8]
    finally:
        load(engine, model, 7)
    check_logprobs(engine, model)


def test_a_change_of_one_value_is_found(engine: SGLangEngine, model: torch.nn.Module) -> None:
    tensors = [(n, p.detach().clone()) for n, p in model.named_parameters()]
    assert engine._pass("verify", [tensors], 7)["differing"] == {}
    name, tensor = next((n, t) for n, t in tensors if "layers.1.mlp.down_proj" in n)
    tensor[3, 5] += 1
    assert engine._pass("verify", [tensors], 7)["differing"] == {name: 1}


def test_settings_that_cannot_work(model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"engine.args.chunked_prefil_size: .*did you mean chunked_prefill_size"):
        make_engine(model, tmp_path, args={"chunked_prefil_size": 1})
    block = fill_memory(leave=30 * GIB)
    with pytest.raises(UserError, match=r"engine.memory_fraction: 0.5 of the GPU are not free") as error:
        make_engine(model, tmp_path, memory_fraction=0.5)
    print(error.value)
    assert "\n" not in str(error.value)
    del block
    torch.cuda.empty_cache()
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # W3
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
            with pytest.raises(UserError, match=rf"^{name}: expandable_segments:True .*unset it") as error:
                make_engine(model, tmp_path)
            assert "\n" not in str(error.value)


# ---- losses: the engine is another one after these


def test_memory_that_somebody_took_meanwhile(engine: SGLangEngine, model: torch.nn.Module) -> None:
    """No room for the KV cache to come back: the error's first line says what to change, and the restart works."""
    engine.flush_cache()  # as after a start: what is computed anew may round otherwise
    answer = greedy(engine, "before").tokens
    before, old = memory_in_use(), processes(engine)
    engine.offload()
    block = fill_memory(leave=GIB)
    try:
        engine.onload(("weights",))
        load(engine, model, 8)
        with pytest.raises(EngineLostError) as error:
            engine.onload(("kv_cache",))
    finally:
        del block
        torch.cuda.empty_cache()
    line = str(error.value).splitlines()[0]
    print(line)
    assert "no memory beside its weights and KV cache: lower engine.memory_fraction (now 0.1)" in line
    assert engine.lost
    assert not living(old)
    begun = time.monotonic()
    engine.restart()
    seconds, seen = time.monotonic() - begun, watch(engine)
    load(engine, model, 9)
    assert [loader for loader, _ in seen.passes[engine._restarts]] == ["receive", "verify"]
    assert greedy(engine, "after").tokens == answer
    after = memory_in_use()
    print(f"restarted in {seconds:.0f} s; in use before {before / MIB:.0f}, after {after / MIB:.0f} MiB")
    assert abs(after - before) <= LEFT_OVER


def test_a_scheduler_that_is_stopped(engine: SGLangEngine) -> None:
    """A short stop is no loss. A long one is found within `engine.hang_timeout`, and all of the engine is ended."""
    sampling = SamplingParams(max_new_tokens=CONTEXT - 8, ignore_eos=True)
    old, (pid, *_) = processes(engine), schedulers(engine)
    before = memory_in_use()

    def stop_for(seconds: float) -> None:
        kill(pid, signal.SIGSTOP)()
        time.sleep(seconds)
        kill(pid, signal.SIGCONT)()

    def request(name: str) -> GenerateRequest:
        return GenerateRequest(id=name, tokens=[4], sampling=sampling, n=64)

    asyncio.run(interrupted(engine, request("short"), lambda: stop_for(5)))
    assert not engine.lost
    begun = time.monotonic()
    with pytest.raises(EngineLostError, match=r"scheduler is stuck \(under way: \d+ x generate\)"):
        asyncio.run(interrupted(engine, request("long"), kill(pid, signal.SIGSTOP)))
    seconds = time.monotonic() - begun
    assert not living(old)
    after = settled(before - GIB)
    print(f"found after {seconds:.1f} s; in use before {before / MIB:.0f}, after {after / MIB:.0f} MiB")
    assert seconds < 15 + 5  # engine.hang_timeout, and a margin
    assert before - after > GIB


# ---- engines of their own


def test_seeds_with_deterministic_inference(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path, args={"enable_deterministic_inference": True})
    try:
        contract.check_stop_ids(engine, VOCAB)
        contract.check_length_and_eos(engine, VOCAB, EOS)
    finally:
        engine.close()


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """W4: experts that transformers fuses and SGLang fuses otherwise are equal bit by bit, and each can be told."""
    shape: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    }
    shape |= {"hidden_size": 256, "decoder_sparse_step": 1, "tie_word_embeddings": False}  # SGLang's has no tied head
    make_files(tmp_path, "qwen3_moe", **(SHAPE | shape))
    config = sections(sync={"verify_every": 1}, algorithm={"skip_zero_advantage": False})
    trainer = Trainer(tiny_run.make_run(tmp_path, **config))
    try:
        seen = watch(trainer.engine)
        steps = [trainer.step(trainer.source.next(8)) for _ in range(3)]
        print("mismatch", [round(step["mismatch/logprob_abs_diff"], 4) for step in steps])
        assert all(step["optim/grad_norm"] > 0 for step in steps)
        assert [loader for loader, _ in seen.passes[0]] == ["receive", "verify"] * 3
        expected = {"differing": {}, "compared": num_values(trainer)}
        assert [report for loader, report in seen.passes[0] if loader == "verify"] == [expected] * 3
        assert steps[0]["mismatch/logprob_abs_diff"] < 0.1  # where bfloat16 rounds otherwise a token may go another way
        check_one_expert_is_told(trainer)
    finally:
        trainer.close()
        close_world()


def check_one_expert_is_told(trainer: Trainer) -> None:
    engine, stream = trainer.engine, trainer.policy.stream()
    names = [name for name, _, _ in stream.layout() if name.endswith("experts.5.up_proj.weight")]
    assert len(names) == 2  # a layer's own; names as in the checkpoint
    engine.onload(("weights",))
    engine.load_groups(stream, 10)

    def changed() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for group in stream:
            tensors = [(name, tensor.clone() if name == names[1] else tensor) for name, tensor in group]
            for name, tensor in tensors:
                if name == names[1]:
                    tensor[3, 5] += 1
            yield tensors

    assert engine._pass("verify", changed(), 10)["differing"] == {names[1]: 1}
