"""SGLang on the trainer's own GPUs: one engine for every `tensor_parallel` consecutive ranks of the job, no server.

The first rank of such a group holds the engine, in a child process (`sglang_host.py`), and gets the group's prompts;
the others only pass weights. Weights go through device memory (`sync/buckets.py`). While training, the engine's weights
and KV cache are released (`offload`) and hold no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.config.schema import EngineConfig, SyncConfig
from lightrl.engine.base import Completion, GenerateRequest, SamplingParams
from lightrl.engine.sampling import check_request
from lightrl.engine.sglang_process import HostProcess
from lightrl.errors import UserError
from lightrl.sync.buckets import BucketSender, plan_buckets
from lightrl.sync.mailbox import MailboxError
from lightrl.sync.shared import EMPTY_PAYLOAD
from lightrl.types import Status

SUPPORTED = ((0, 5, 17), (0, 5, 23))
"""First and last version of SGLang that this module is written for."""
_TAGS = ("weights", "kv_cache")
_WATCH_EVERY = 16  # tokens between looks at an answer whose end SGLang cannot see
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
_LOADERS = "lightrl.engine.sglang_receiver."
_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the engine must know of the policy."""

    path: Path
    """Folder with config.json."""
    layout: Sequence[tuple[str, Sequence[int], torch.dtype]]
    """Name, shape and dtype of every tensor, in the order in which `load_weights` gets them."""
    eos_token_ids: Sequence[int]
    decode: Callable[[list[int]], str]
    """Ids to text, special tokens included."""
    dtype: torch.dtype
    context_length: int
    vocab_size: int
    trust_remote_code: bool = False


class SGLangEngine:
    """Implements `lightrl.engine.base.Engine`, on every rank of its group alike.

    `group` is the gloo group of the ranks that share this engine (None: this rank alone), `member` this rank's place in
    it; only member 0 generates. `log_dir` takes SGLang's output. Raises UserError for settings and versions that cannot
    work; EngineDiedError, with the end of the log, when SGLang ends by itself.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        sync: SyncConfig,
        *,
        device: torch.device,
        seed: int = 0,
        log_dir: Path,
        group: Any = None,
        member: int = 0,
    ) -> None:
        check_platform(os.environ, device)
        self.policy_version = -1
        self._model, self._config, self._sync = model, config, sync
        self._device, self._group, self._member = device, group, member
        self._released: set[str] = set()
        self._room: dict[str, int] = {}
        self._sender: BucketSender | None = None
        self._num_syncs = 0
        self._rids: dict[str, set[str]] = {}
        self._aborted: set[str] = set()
        self._count = 0
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._closed = False
        share = self._share_of_free()
        self._host = self._start(seed, log_dir, share) if member == 0 else None
        self._barrier()

    def _share_of_free(self) -> float:
        """`engine.memory_fraction`, which is of the whole GPU, as SGLang wants it: of what is free at its start."""
        if self._device.type != "cuda":
            return self._config.memory_fraction
        free, total = torch.cuda.mem_get_info(self._device)
        share = self._config.memory_fraction / min(float(f) for f in self._gather(str(free / total)))
        if share > 0.95:
            raise UserError(
                f"engine.memory_fraction: {self._config.memory_fraction} of the GPU are not free beside the training "
                f"state ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are): lower it, let the state leave with "
                "parallel.offload = 'always', or shard over more ranks"
            )
        return share

    def _start(self, seed: int, log_dir: Path, memory_fraction: float) -> HostProcess:
        config, model = self._config, self._model
        on_cpu = self._device.type == "cpu"
        # an engine's own among those of this machine: the GPU's number, or where there is none the rank
        index = (dist.get_rank() if dist.is_initialized() else 0) if on_cpu else self._device.index or 0
        settings = {
            "model_path": str(model.path),
            "dtype": str(model.dtype).removeprefix("torch."),
            "trust_remote_code": model.trust_remote_code,
            "context_length": model.context_length,
            "tensor_parallel": config.tensor_parallel,
            "device": self._device.type,
            "gpu": 0 if on_cpu else index,
            "capability": None if on_cpu else list(torch.cuda.get_device_capability(self._device)),
            "seed": (seed + index) % 2**31,
            "memory_fraction": memory_fraction,
            "max_batch": config.max_batch,
            "max_prefill_tokens": config.max_prefill_tokens,
            "port": _free_port(),
        }
        host = HostProcess(
            {"settings": settings, "args": config.args},
            log=log_dir / f"sglang_{'cpu' if on_cpu else 'gpu'}{index}.log",
            environment=child_environment(os.environ) | (_CPU_ENVIRONMENT if on_cpu else {}),
            hint=f"lower engine.memory_fraction (now {config.memory_fraction}) or engine.max_batch "
            f"(now {config.max_batch})",
        )
        try:
            host.wait_ready()
        except BaseException:
            host.stop()
            raise
        return host

    # ---- generation

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """All `n` answers of one request, in order; ValueError for one that can never be served."""
        host = self._leader()
        if self._released:
            raise RuntimeError(f"the engine is offloaded ({', '.join(sorted(self._released))}): call onload first")
        if self.policy_version < 0:
            raise RuntimeError("the engine has no weights: call load_weights before generate")
        if request.id in self._rids:
            raise ValueError(f"request {request.id!r} is under way already: ids must differ")
        model = self._model
        check_request(request, context_length=model.context_length, vocab_size=model.vocab_size, has_decoder=True)
        self._rids[request.id] = set()
        try:
            return list(await asyncio.gather(*(self._one(host, request, i) for i in range(request.n))))
        finally:
            if left := self._rids.pop(request.id):  # cancelled, or another answer failed
                host.submit("abort", rids=sorted(left))
            self._aborted.discard(request.id)

    async def _one(self, host: HostProcess, request: GenerateRequest, number: int) -> Completion:
        async with self._slot():
            if request.id in self._aborted:
                return Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[])
            self._count += 1
            rid = f"{request.id}#{number}#{self._count}"
            sampling = request.sampling
            stops = Stops(sampling, self._model.decode) if needs_watching(sampling) else None
            future: Future[Any] = host.submit(
                "generate",
                on_partial=None if stops is None else lambda out: self._look(host, rid, stops, out),
                rid=rid,
                tokens=request.tokens,
                sampling=sampling_parameters(self._model, request, number),
                truncated=sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0),
                watch=stops is not None,
            )
            self._rids[request.id].add(rid)
            output = await asyncio.wrap_future(future)
            self._rids[request.id].discard(rid)
            return completion_of(self._model, request, output, stops, self.policy_version)

    def _look(self, host: HostProcess, rid: str, stops: Stops, output: dict[str, Any]) -> None:
        if not stops.found and stops.end(output["tokens"]) is not None:
            stops.found = True
            host.submit("abort", rids=[rid])

    def _slot(self) -> asyncio.Semaphore:
        """Bounds what is under way: beyond what SGLang runs at once, some to choose from."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(8 * self._config.max_batch))
        return self._slots[1]

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all: what was sampled so far returns with `Status.ABORTED`."""
        for name in [r for r in self._rids if request_id in (None, r)]:
            self._aborted.add(name)
            if self._rids[name]:
                self._leader().submit("abort", rids=sorted(self._rids[name]))

    # ---- weights and memory

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, share: bool = False) -> None:
        """`load_groups` of tensors that all exist; `share` is not possible and does nothing."""
        self.load_groups([list(weights)], version)

    def load_groups(self, groups: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> None:
        """Copy the policy's tensors into the engine as `version`. Every rank of the engine calls it.

        They must come in the layout's order. The first time, and then every `sync.verify_every` times, `groups` is
        gone through once more and each value compared with what the engine holds.
        """
        if "weights" in self._released:
            raise RuntimeError("the engine's weights are offloaded: call onload(('weights',)) first")
        if self._sender is None:
            self._sender = self._open()
        self._pass("receive", groups, version)
        every = self._sync.verify_every
        if self._num_syncs == 0 or (every and self._num_syncs % every == 0):
            report = self._pass("verify", groups, version)
            if wrong := report["differing"]:
                raise RuntimeError(
                    f"the engine holds other weights than the trainer after the sync of version {version}: "
                    + ", ".join(f"{name} ({count} values)" for name, count in wrong.items())
                )
        self._num_syncs += 1
        self.policy_version = version

    def _open(self) -> BucketSender:
        """Lend this rank's buffers to the engine's processes, and let them learn where each tensor goes."""
        plan = plan_buckets(self._model.layout, self._sync.bucket_mib << 20)
        handle, name = tempfile.mkstemp(prefix="lightrl_mailbox_")
        os.close(handle)
        sender = BucketSender(plan, self._device, Path(name))
        payloads = self._gather(sender.introduction())
        sender.mailbox.begin()
        self._barrier()
        if self._member == 0:
            self._leader().call("update", loader=_LOADERS + "open_buffers", payloads=payloads, flush=False)
        self._barrier()
        try:
            sender.mailbox.wait("drained", len(plan.buckets) + 1, timeout=1)
        except MailboxError as error:
            raise UserError(f"engine.kind: SGLang cannot take this model's weights: {error}") from None
        return sender

    def _pass(self, loader: str, groups: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> dict[str, Any]:
        """Send everything once; the report of this rank's receiver.

        Cached prefixes are of the old weights. They are gone already where the KV cache was released since.
        """
        assert self._sender is not None
        self._sender.mailbox.begin()
        self._barrier()
        host, done = self._host, None
        if host is not None:
            payloads = [EMPTY_PAYLOAD] * self._config.tensor_parallel
            flush = loader == "receive" and "kv_cache" not in self._released
            done = host.submit("update", loader=_LOADERS + loader, payloads=payloads, flush=flush, version=str(version))
        report = self._sender.send(groups, None if host is None else host.check)
        if done is not None:
            done.result(120)
        return report

    def flush_cache(self) -> None:
        """Forget cached prefixes."""
        if self._host is not None:
            self._host.call("flush")

    def offload(self, tags: tuple[str, ...] = _TAGS) -> None:
        """Release memory by tag; what is released already stays so. Every rank of the group calls it."""
        _check_tags(tags)
        if self._rids:
            raise RuntimeError(f"{len(self._rids)} requests are under way: await or abort them before offload")
        for tag in (t for t in reversed(_TAGS) if t in tags and t not in self._released):
            before = self._free_memory()
            if self._host is not None:
                self._host.call("release", tags=[tag])
            self._barrier()  # the others' GPUs are free as well now
            self._room[tag] = max(self._room.get(tag, 0), self._free_memory() - before)
            self._released.add(tag)

    def room(self, tag: str) -> int:
        """Bytes of this rank's GPU that `onload` of `tag` will take; 0 while they are taken."""
        return self._room[tag] if tag in self._released else 0

    def onload(self, tags: tuple[str, ...] = _TAGS) -> None:
        """Take released memory again. After `weights`, new ones must be loaded before generating."""
        _check_tags(tags)
        new = [t for t in _TAGS if t in tags and t in self._released]
        if not new:
            return
        self._barrier()  # the others have made room as well
        if self._host is not None:
            self._host.call("resume", tags=new)
        self._released.difference_update(new)

    def close(self) -> None:
        """End the engine's processes and free the buffers; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._host is not None:
            if self._sender is not None:
                with contextlib.suppress(RuntimeError, TimeoutError):  # it may have died
                    payloads = [EMPTY_PAYLOAD] * self._config.tensor_parallel
                    self._host.call("update", 10.0, loader=_LOADERS + "close_buffers", payloads=payloads, flush=False)
            self._host.stop()
        if self._sender is not None:
            self._sender.close()

    def _free_memory(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0

    # ---- the group

    def _leader(self) -> HostProcess:
        if self._host is None:
            raise RuntimeError("only the first rank of engine.tensor_parallel consecutive ones generates")
        return self._host

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def _gather(self, payload: str) -> list[Any]:
        if self._group is None:
            return [payload]
        payloads: list[Any] = [None] * self._config.tensor_parallel
        dist.all_gather_object(payloads, payload, group=self._group)
        return payloads


class Stops:
    """Ends of an answer that SGLang cannot see: strings (it has no tokenizer here), and ids while it ignores EOS."""

    def __init__(self, sampling: SamplingParams, decode: Callable[[list[int]], str]) -> None:
        self._ids = frozenset(sampling.stop_token_ids)
        self._strings = sampling.stop
        self._decode = decode
        self.found = False

    def end(self, tokens: list[int]) -> int | None:
        """Length of the answer with its end, None if there is none yet."""
        by_id = next((i + 1 for i, token in enumerate(tokens) if token in self._ids), None)
        shown = tokens[:by_id]
        if not any(s in self._decode(shown) for s in self._strings):
            return by_id
        low, high = 1, len(shown)  # the shortest prefix whose text has a stop string
        while low < high:
            middle = (low + high) // 2
            text = self._decode(shown[:middle])
            if any(s in text for s in self._strings):
                high = middle
            else:
                low = middle + 1
        return low


def needs_watching(sampling: SamplingParams) -> bool:
    return bool(sampling.stop) or (sampling.ignore_eos and bool(sampling.stop_token_ids))


def sampling_parameters(model: Model, request: GenerateRequest, number: int) -> dict[str, Any]:
    """SGLang's sampling parameters.

    EOS ids are given as stop ids: without a tokenizer it knows only some. Nucleus sampling gets a top_k that cuts
    nothing: without one SGLang does not say what the kept tokens sum up to.
    """
    sampling = request.sampling
    room = model.context_length - len(request.tokens)
    parameters: dict[str, Any] = {
        "max_new_tokens": min(sampling.max_new_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or (model.vocab_size if sampling.top_p < 1 else -1),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": _stop_ids(model, sampling),
    }
    if needs_watching(sampling):
        parameters["stream_interval"] = _WATCH_EVERY
    if request.seeds is not None:
        parameters["sampling_seed"] = request.seeds[number] % 2**31
    return parameters


def _stop_ids(model: Model, sampling: SamplingParams) -> list[int]:
    """Ids at which SGLang itself ends an answer."""
    return [] if sampling.ignore_eos else sorted({*model.eos_token_ids, *sampling.stop_token_ids})


def completion_of(
    model: Model, request: GenerateRequest, output: dict[str, Any], stops: Stops | None, policy_version: int
) -> Completion:
    """SGLang's answer, cut where `stops` finds an end. RuntimeError for one that cannot be trusted."""
    request_id = request.id
    if output["matched"] == "NaN happened":
        raise RuntimeError(f"the model gave logits that are not finite, for request {request_id!r}")
    tokens, logprobs = output["tokens"], output["logprobs"]
    status = _STATUS.get(output["reason"])
    if status is None:
        raise RuntimeError(f"request {request_id!r} ended for an unknown reason: {output['reason']}")
    if stops is not None and (end := stops.end(tokens)) is not None:
        tokens, logprobs, status = tokens[:end], logprobs[:end], Status.COMPLETED
    if status is Status.TRUNCATED and tokens[-1] in _stop_ids(model, request.sampling):
        status = Status.COMPLETED  # SGLang looks at the length first, and not at what the last token is
    if len(logprobs) != len(tokens):
        raise RuntimeError(f"request {request_id!r}: {len(logprobs)} log-probs for {len(tokens)} tokens")
    version = int(output["version"]) if str(output["version"]).isdigit() else policy_version
    return Completion(tokens=tokens, logprobs=logprobs, status=status, policy_versions=[version] if tokens else [])


def check_platform(environment: Any, device: torch.device) -> None:
    """UserError when SGLang is missing, of an unknown version, or cannot work with this process's settings."""
    try:
        text = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise UserError(
            "engine.kind: 'sglang' is not installed: pip install 'lightrl-torch[gpu]', or engine.kind = 'transformers'"
        ) from None
    if problem := version_problem(text):
        raise UserError(f"engine.kind: {problem}")
    if device.type == "cpu":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
            raise UserError(
                f"{name}: expandable_segments:True makes memory that cannot be shared with the engine's process: "
                "unset it, or set engine.kind = 'transformers'"
            )


def version_problem(text: str) -> str | None:
    """What is wrong with this version of SGLang.

    >>> version_problem("0.5.17.post1") is None
    True
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    version = tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
    if SUPPORTED[0] <= version <= SUPPORTED[1]:
        return None
    first, last = (".".join(map(str, v)) for v in SUPPORTED)
    return f"SGLang {text} is installed; supported are {first} to {last}: pip install 'sglang=={last}'"


def child_environment(environment: Any) -> dict[str, str]:
    """Without torchrun's variables: SGLang's own process group must not join the job's store."""
    ours = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC", "GROUP_", "ROLE_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in environment.items() if not k.startswith(ours) and k not in names}
    source = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH", "")]))
    return kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_tags(tags: tuple[str, ...]) -> None:
    if unknown := set(tags) - set(_TAGS):
        raise ValueError(f"unknown tags {sorted(unknown)}: known are {', '.join(_TAGS)}")
