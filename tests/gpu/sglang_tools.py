"""What the tests of SGLang on GPUs share: engines and runs to start, faults to make, memory to look at."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_run
import torch
from engine import contract
from engine.tiny_models import CONTEXT, EOS, VOCAB

from lightrl.config.schema import EngineConfig, SyncConfig
from lightrl.distributed.mesh import close_world
from lightrl.engine.base import Completion, Engine, GenerateRequest, SamplingParams
from lightrl.engine.sglang import Model, SGLangEngine
from lightrl.training.trainer import Trainer
from lightrl.types import SampleGroup

MIB, GIB = 1 << 20, 1 << 30
LEFT_OVER = 256 * MIB
"""Two starts of an engine differ by less (what of CUDA was loaded); one that stays behind holds 2 GiB or more."""
# SGLang's kernels want heads of 64 or more
SHAPE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 512}
QWEN3 = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
ENGINE = {"kind": "sglang", "memory_fraction": 0.1}
LONG = 400  # tokens of an answer that may be interrupted; one in thirty tokens ends it
Key = tuple[str, int]  # an answer: its request and its seed


def text_of(ids: list[int]) -> str:
    return "".join(chr(65 + i) for i in ids)


def make_engine(model: torch.nn.Module, folder: Path, **config: Any) -> SGLangEngine:
    """An engine that holds the weights of a stock bfloat16 model as version 7."""
    return make_stored_engine(model, [(n, p.detach()) for n, p in model.named_parameters()], folder, **config)


def make_stored_engine(
    model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]], folder: Path, **config: Any
) -> SGLangEngine:
    """As `make_engine`, with the names of a checkpoint."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    engine = SGLangEngine(
        Model(
            path=folder,
            layout=[(n, tuple(t.shape), t.dtype) for n, t in tensors],
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
    engine.load_weights(tensors, 7)
    return engine


def stored(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Its tensors under a checkpoint's names, as views of its own where they are parts of them."""
    from lightrl.models.names import StoredTensors, kept_names, persistent_tensors

    tensors = persistent_tensors(model)
    group = [(name, tensors[name].detach()) for name in kept_names(model)]  # type: ignore[arg-type]

    class One:
        def layout(self) -> list[list[tuple[str, tuple[int, ...], torch.dtype]]]:
            return [[(name, tuple(t.shape), t.dtype) for name, t in group]]

        def __iter__(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
            yield group

    return [pair for made in StoredTensors(model, One()) for pair in made]  # type: ignore[arg-type]


def mean_difference(model: torch.nn.Module, request: GenerateRequest, completions: Sequence[Completion]) -> float:
    """Between an engine's log-probs of what it sampled and a stock forward's, absolute."""
    found = []
    for completion in completions:
        logits = contract.reference_logits(model, request, completion).log_softmax(-1)
        expected = logits.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        found.append((torch.tensor(completion.logprobs) - expected).abs())
    return float(torch.cat(found).mean())


def load(engine: SGLangEngine, model: torch.nn.Module, version: int) -> None:
    engine.load_weights(((n, p.detach()) for n, p in model.named_parameters()), version)


def sections(**more: Any) -> dict[str, Any]:
    """Of a run with SGLang that learns within 30 steps; keywords replace whole sections."""
    base: dict[str, Any] = {"run": {"device": "cuda", "steps": 100}, "model": {"compute_dtype": "bfloat16"}}
    base |= {"engine": ENGINE, "rollout": {"prompts_per_step": 8, "group_size": 8}, "optim": {"lr": 1e-2}}
    return base | {"log": {"trackers": ["jsonl"], "print_samples": 0, "save_samples": False}} | more


def make_files(folder: Path, family: str = "llama", **shape: Any) -> None:
    tiny_run.make_model(folder / "model", family=family, **(shape or SHAPE))
    tiny_run.make_data(folder / "data.jsonl")


def truncated_jointly(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """[N, V] log-probs (-inf outside what is kept). SGLang takes the nucleus of the whole distribution and its best k;
    transformers takes the nucleus of the best k."""
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    keep = probs.cumsum(-1) - probs <= top_p
    keep[:, top_k or keep.shape[1] :] = False
    kept = torch.zeros_like(probs).scatter(-1, order, probs * keep)
    return (kept / kept.sum(-1, keepdim=True)).log()


def check_logprobs(
    engine: Engine, model: torch.nn.Module, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
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


def started(folder: Path, config: dict[str, Any]) -> Iterator[Trainer]:
    """A trainer, for a fixture."""
    trainer = Trainer(tiny_run.make_run(folder, **config))
    try:
        yield trainer
    finally:
        trainer.close()
        close_world()


# ---- faults


@dataclass
class Watched:
    """What an engine is asked, and does, before it is restarted (0) and after (1, 2, …)."""

    asked: dict[int, list[Key]] = field(default_factory=lambda: defaultdict(list))
    answered: dict[int, dict[Key, Completion]] = field(default_factory=lambda: defaultdict(dict))
    passes: dict[int, list[tuple[str, dict[str, Any]]]] = field(default_factory=lambda: defaultdict(list))
    """Loader and report of everything that weights went through."""
    struck: float | None = None
    noticed: float | None = None

    @property
    def seconds(self) -> float:
        """From the fault until all who waited had their error."""
        assert self.struck is not None
        assert self.noticed is not None, "the engine was not lost while it generated"
        return self.noticed - self.struck


def watch(engine: SGLangEngine, strike: Callable[[], None] | None = None, after: int = 0) -> Watched:
    """Note what happens to the engine; `strike` once when `after` answers are complete."""
    seen = Watched()
    generate, one, send = engine.generate, engine._one, engine._pass

    async def generating(request: GenerateRequest) -> list[Completion]:
        seen.asked[engine._restarts] += [(request.id, seed) for seed in seeds_of(request)]
        try:
            return await generate(request)
        finally:
            if engine.lost and seen.noticed is None:
                seen.noticed = time.monotonic()

    async def answering(host: Any, request: GenerateRequest, number: int) -> Completion:
        completion = await one(host, request, number)
        answered = seen.answered[engine._restarts]
        answered[request.id, seeds_of(request)[number]] = completion
        if strike is not None and len(answered) == after and seen.struck is None:
            seen.struck = time.monotonic()
            strike()
        return completion

    def sending(loader: str, *given: Any) -> dict[str, Any]:
        report = send(loader, *given)
        seen.passes[engine._restarts].append((loader, report))
        return report

    engine.generate, engine._one, engine._pass = generating, answering, sending  # type: ignore[method-assign]
    return seen


def seeds_of(request: GenerateRequest) -> Sequence[int]:
    """An answer's number in the place of its seed where it has none."""
    return request.seeds or range(request.n)


def unwatch(engine: SGLangEngine) -> None:
    for name in ("generate", "_one", "_pass"):
        vars(engine).pop(name, None)


def check_only_lost_ones_were_asked_again(seen: Watched, groups: list[SampleGroup]) -> None:
    """Answers that were complete when the engine was lost are in the groups, and nobody asked for them twice."""
    first, again = seen.asked[0], seen.asked[1]
    done = seen.answered[0]
    assert 0 < len(done) < len(first), "the fault came before or after the rollout, not in its middle"
    assert Counter(again) == Counter(first) - Counter(done.keys())
    assert seen.answered[1].keys() == set(again)
    trained = Counter(tuple(s.response_tokens) for g in groups for s in g.samples)
    sampled = Counter(tuple(c.tokens) for answers in seen.answered.values() for c in answers.values())
    assert trained == sampled


def check_verified(seen: Watched, restart: int, values: int) -> None:
    """The first sync after a start was sent once more and compared, all of it."""
    (sent, _), (compared, report) = seen.passes[restart][:2]
    assert (sent, compared) == ("receive", "verify")
    assert report == {"differing": {}, "compared": values}


def schedulers(engine: SGLangEngine) -> list[int]:
    """Process ids of SGLang's own processes, the first rank's scheduler first."""
    assert engine._host is not None
    return [int(pid) for pid in engine._host.call("pids")]


def processes(engine: SGLangEngine) -> list[int]:
    """… and of the process that holds them."""
    assert engine._host is not None
    return [engine._host.pid, *schedulers(engine)]


def living(pids: list[int], seconds: float = 20.0) -> list[int]:
    """Those that have not ended after so long."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kill(pid: int, number: int) -> Callable[[], None]:
    return lambda: os.kill(pid, number)


async def interrupted(engine: SGLangEngine, request: GenerateRequest, fault: Callable[[], None]) -> None:
    """The fault comes while the request is under way."""
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.05)
    fault()
    await task


# ---- memory


def memory_in_use(device: int = 0) -> int:
    """Bytes of a GPU that all processes hold, without what torch's allocator here keeps unused."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def settled(expected: int, device: int = 0, seconds: float = 20.0) -> int:
    """`memory_in_use`, once it is down to about what is expected: a process that ended may still be put away."""
    deadline = time.monotonic() + seconds
    while (used := memory_in_use(device)) > expected + 64 * MIB and time.monotonic() < deadline:
        time.sleep(0.2)
    return used


def fill_memory(leave: int) -> torch.Tensor:
    """Take all of the GPU but `leave` bytes."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - leave, dtype=torch.uint8, device="cuda")


class MemoryWatch:
    """The most of the GPU in use by all processes, by stage; looked at every 2 ms from entering to leaving it."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.peaks: dict[str, int] = defaultdict(int)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.002):
            stage = self.stage
            free, total = torch.cuda.mem_get_info(0)
            self.peaks[stage] = max(self.peaks[stage], total - free)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()


# ---- a trainer's insides


def num_values(trainer: Trainer) -> int:
    """Of all weights, each tied one once."""
    return sum(parameter.numel() for parameter in trainer.policy.module.parameters())


def shards(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of this rank's float32 parameters, on the host: they are not to count as the GPU's memory."""
    trainer.policy.reclaim()  # shards again, if a forward or the engine left whole parameters
    return [_local(p).to("cpu", copy=True) for p in trainer.policy.parameters()]


def put_back(trainer: Trainer, copies: list[torch.Tensor]) -> None:
    """Those weights again, and an optimizer that has done nothing yet."""
    trainer.policy.reclaim()
    with torch.no_grad():
        for parameter, copy in zip(trainer.policy.parameters(), copies, strict=True):
            _local(parameter).copy_(copy)
    trainer.optimizer.state.clear()


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(first, second, strict=True))


def set_learning_rate(trainer: Trainer, lr: float) -> None:
    trainer.schedule.base_lrs = [lr for _ in trainer.schedule.base_lrs]
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = lr


def _local(parameter: torch.Tensor) -> torch.Tensor:
    detached = parameter.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached
