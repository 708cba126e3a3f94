"""SGLang servers that somebody started elsewhere, as one engine.

Each rank sends its share of the prompts over HTTP (`sglang_http.py`); the first rank alone passes weights on, through a
shared folder or a broadcast (`lightrl.sync`), and tells the others how that went. The servers keep weights and memory
between steps: nothing is released for training.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightrl.config.schema import EngineConfig, SyncConfig, TeacherConfig
from lightrl.engine import sglang_checks as checks
from lightrl.engine.base import TAGS, Completion, GenerateRequest, check_tags
from lightrl.engine.sampling import check_request
from lightrl.engine.sglang_answers import fields_of
from lightrl.engine.sglang_http import PAUSES, RefusedError, Server, ServerError, UnreachableError
from lightrl.engine.sglang_requests import Model, Stops, completion_of, sampling_parameters, stops_of
from lightrl.errors import UserError
from lightrl.sync.broadcast import BroadcastSync
from lightrl.sync.disk import DiskSync
from lightrl.sync.peers import Groups, SyncError, Transport, post_all
from lightrl.threads import spawn
from lightrl.types import Status

_ABORT = 10.0  # seconds for a request to abort another


class Ranks(Protocol):
    """The trainer's ranks (`distributed.mesh.World`)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, record: Any) -> list[Any]: ...


def read_key(config: EngineConfig) -> str | None:
    """The servers' key. UserError where `engine.api_key_env` names a variable that is not set here."""
    return checks.read_key(config.api_key_env, os.environ)


def read_teacher_key(config: TeacherConfig) -> str | None:
    """The same of the teacher's server, `teacher.api_key_env`."""
    return checks.read_key(config.api_key_env, os.environ, "teacher.api_key_env")


class SGLangServers:
    """Implements `lightrl.engine.base.Engine` and `GroupLoader`, on every rank alike.

    `folder` is for weights that go through files. Raises UserError for servers that are not there or cannot work with
    this policy, ServerError for those that fail later, SyncError for weights that did not arrive.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        sync: SyncConfig,
        *,
        device: torch.device,
        ranks: Ranks,
        folder: Path,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self.policy_version = -1
        self._model, self._config, self._sync, self._ranks = model, config, sync, ranks
        self._pauses = tuple(pauses)
        self._load: dict[Server, int] = {}
        self._live: dict[str, dict[str, Server]] = {}  # by request: ids of its answers under way, and where
        self._aborted: set[str] = set()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._num_syncs = 0
        self._closed = False
        self._transport: Transport | None = None
        # Part of every weight version: a server that was restarted, or serves another run too, gives itself away.
        self._token = str(self._together(lambda: uuid.uuid4().hex[:8])[0])
        self._together(lambda: self._connect(device, folder))

    def _connect(self, device: torch.device, folder: Path) -> None:
        key = read_key(self._config)
        self._servers = [Server(url, key, self._pauses) for url in self._config.urls]
        self._load = dict.fromkeys(self._servers, 0)
        if self._ranks.rank == 0:
            for server in self._servers:
                checks.examine(server, self._model, broadcast=self._sync.transport == "nccl")
            self._transport = self._make_transport(device, folder)

    def _make_transport(self, device: torch.device, folder: Path) -> Transport:
        sync, layout = self._sync, self._model.layout
        if sync.transport == "disk":
            return DiskSync(
                self._servers,
                layout,
                folder=folder,
                config=self._model.path / "config.json",
                shard_bytes=sync.bucket_mib << 20,
                timeout=sync.timeout,
            )
        if device.type == "cuda" and "NCCL_CUMEM_ENABLE" not in os.environ:
            raise UserError(
                "sync.transport = 'nccl': NCCL was started otherwise than in SGLang's servers: make the process group "
                "with init_world(…, broadcasts_to_servers=True), or set NCCL_CUMEM_ENABLE=0 before"
            )
        return BroadcastSync(
            self._servers,
            layout,
            device=device,
            name=f"lightrl_{self._token}",
            bucket_bytes=sync.bucket_mib << 20,
            address=sync.address,
            port=sync.port,
            timeout=sync.timeout,
        )

    # ---- generation

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """All `n` answers of one request, in order, by one server; ValueError for one that can never be served."""
        if self.policy_version < 0:
            raise RuntimeError("the engine has no weights: call load_weights before generate")
        if request.id in self._live:
            raise ValueError(f"request {request.id!r} is under way already: ids must differ")
        model = self._model
        check_request(request, context_length=model.context_length, vocab_size=model.vocab_size, has_decoder=True)
        server = self._pick()
        self._load[server] += request.n
        self._live[request.id] = {}
        try:
            return list(await asyncio.gather(*(self._one(server, request, i) for i in range(request.n))))
        finally:
            self._load[server] -= request.n
            for rid, where in self._live.pop(request.id).items():  # cancelled, or another answer failed
                spawn(where.post_once, "/abort_request", {"rid": rid}, _ABORT)
            self._aborted.discard(request.id)

    def _pick(self) -> Server:
        """The server with the fewest answers of this rank under way; ranks begin with different ones."""
        start = self._ranks.rank % len(self._servers)
        return min(self._servers[start:] + self._servers[:start], key=lambda server: self._load[server])

    async def _one(self, server: Server, request: GenerateRequest, number: int) -> Completion:
        async with self._slot():
            for attempt in range(len(self._pauses) + 1):
                if request.id in self._aborted:
                    break
                try:
                    return await self._attempt(server, request, number)
                except UnreachableError as error:
                    if attempt == len(self._pauses):
                        raise UnreachableError(f"{error} ({attempt + 1} attempts)") from None
                    await asyncio.sleep(self._pauses[attempt])
            return _nothing()

    async def _attempt(self, server: Server, request: GenerateRequest, number: int) -> Completion:
        rid = f"{request.id}#{number}#{uuid.uuid4().hex}"  # a new one each time: the last may live on there
        stops = stops_of(self._model, request)
        live = self._live[request.id]
        live[rid] = server  # stays when this is cancelled or the connection breaks: `generate` ends it
        try:
            output = await asyncio.wrap_future(spawn(self._ask, server, request, number, rid, stops))
        except RefusedError as error:
            live.pop(rid, None)
            if request.id in self._aborted:  # before it ran
                return _nothing()
            if error.status == 400:
                raise ValueError(f"request {request.id!r}: {error}{self._advice(str(error))}") from None
            raise
        live.pop(rid, None)
        return self._completion(server, request, output, stops)

    def _advice(self, words: str) -> str:
        """What to do about a refusal whose own advice does not say it."""
        size = self._model.vocab_size
        if "sampling-mask-max-tokens" not in words:
            return ""
        return f": start it with --sampling-mask-max-tokens {size}, or set rollout.top_k to no more than its limit"

    def _ask(
        self, server: Server, request: GenerateRequest, number: int, rid: str, stops: Stops | None
    ) -> dict[str, Any]:
        """One answer, in a thread. With `stops` it is looked at as it grows, and aborted where it ends."""
        sampling = request.sampling
        truncated = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
        body: dict[str, Any] = {
            "input_ids": request.tokens,
            "sampling_params": sampling_parameters(self._model, request, number),
            "rid": rid,
            "return_logprob": True,
            "stream": stops is not None,
        }
        if sampling.top_logprobs:
            body["top_logprobs_num"] = sampling.top_logprobs
        if sampling.return_routing:
            body["return_routed_experts"] = True
        if truncated:  # plain log-probs are of the whole distribution
            body["return_sampling_mask"] = True
        timeout = self._config.request_timeout
        if stops is None:
            return fields_of(server.post_once("/generate", body, timeout), truncated)
        answer: dict[str, Any] = {}
        for answer in server.stream("/generate", body, timeout):
            if not stops.found and stops.end(answer.get("output_ids") or []) is not None:
                stops.found = True
                server.post_once("/abort_request", {"rid": rid}, _ABORT)
        return fields_of(answer, truncated)

    def _completion(
        self, server: Server, request: GenerateRequest, output: dict[str, Any], stops: Stops | None
    ) -> Completion:
        if output["tokens"] and output["version"] != self._label(self.policy_version):
            raise ServerError(
                f"{server.url} answers with weights {output['version']!r} instead of "
                f"{self._label(self.policy_version)!r}: it was restarted, or something else gives it weights"
            )
        output = output | {"version": self.policy_version}
        return completion_of(self._model, request, output, stops, self.policy_version)

    def _slot(self) -> asyncio.Semaphore:
        """Bounds what is under way: this rank's part of `engine.max_batch` answers a server."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            count = math.ceil(self._config.max_batch * len(self._servers) / self._ranks.size)
            self._slots = (loop, asyncio.Semaphore(count))
        return self._slots[1]

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all: what was sampled so far returns with `Status.ABORTED`."""
        for name in [r for r in self._live if request_id in (None, r)]:
            self._aborted.add(name)
            for rid, server in self._live[name].items():
                spawn(self._abort, server, name, rid)

    def _abort(self, server: Server, request_id: str, rid: str) -> None:
        """SGLang ignores ids that it has not queued yet: repeat until the answer is there."""
        for _ in range(100):
            if rid not in self._live.get(request_id, {}):
                return
            with contextlib.suppress(ServerError):  # busy: asked again
                server.post_once("/abort_request", {"rid": rid}, _ABORT)
            time.sleep(0.05)

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, share: bool = False) -> None:
        """`load_groups` of tensors that all exist; `share` is not possible and does nothing."""
        self.load_groups([list(weights)], version)

    def load_groups(self, groups: Groups, version: int) -> None:
        """Give all servers these weights as `version`. Every rank calls it; all raise if they did not arrive.

        The first time, and then every `sync.verify_every` times, they are sent twice and the servers' own checksums
        compared, between the two and between servers.
        """
        label = self._label(version)
        self._pass(groups, label)
        every = self._sync.verify_every
        if self._num_syncs == 0 or (every and self._num_syncs % every == 0):
            self._verify(groups, label)
        self._num_syncs += 1
        self.policy_version = version

    def _pass(self, groups: Groups, label: str) -> None:
        left = iter(groups)
        self._together(lambda: self._send(left, label), left)

    def _send(self, groups: Groups, label: str) -> None:
        if self._transport is None:
            return
        self._transport.send(groups, label)
        self._flush()  # not with the weights: SGLang's scheduler would end if anything were under way
        for server in self._servers:
            held = server.get("/model_info").get("weight_version")
            if held != label:
                raise SyncError(f"{server.url} says that it holds weights {held!r} after a sync of {label!r}")

    def _verify(self, groups: Groups, label: str) -> None:
        first: list[dict[str, str] | None] = []

        def look() -> bool:
            first.extend(self._checksums())
            return any(found is not None for found in first)

        def compare() -> None:
            if self._transport and (problem := checks.differing(self._servers, first, self._checksums())):
                raise SyncError(problem)

        if self._together(look)[0]:
            self._pass(groups, label)
            self._together(compare)

    def _checksums(self) -> list[dict[str, str] | None]:
        """Of each server; nothing on other ranks than the first."""
        if self._transport is None:
            return []
        return [checks.checksums(server, self._sync.timeout) for server in self._servers]

    def _label(self, version: int) -> str:
        return f"{self._token}.{version}"

    def _flush(self) -> None:
        """Forget cached prefixes, which SGLang does only once nothing is under way."""
        timeout = self._sync.timeout
        post_all(self._servers, f"/flush_cache?timeout={timeout}", {}, timeout + _ABORT)

    # ---- memory is the servers' own

    def flush_cache(self) -> None:
        """Forget cached prefixes, on all servers; waits until nothing is under way."""
        if self._ranks.rank == 0:
            self._flush()

    def offload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Wait until no rank has requests under way; memory stays with the servers. Every rank calls it."""
        check_tags(tags)
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are under way: await or abort them before offload")
        self._together(lambda: None)

    def onload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Nothing: the servers never let go of their memory."""
        check_tags(tags)

    def close(self) -> None:
        """End what is under way and leave the servers, which go on; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.abort()
        if self._transport is not None:
            self._transport.close()

    # ---- the ranks

    def _together(self, work: Callable[[], Any], rest: Iterable[Any] = ()) -> list[Any]:
        """Results of `work` on all ranks. Where it failed on one, all raise: none may wait for it in a collective.

        What it left of `rest` is gone through first: the other ranks gather weights with this one.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        for _ in rest:
            pass
        found = self._ranks.gather((result, None if error is None else (isinstance(error, UserError), str(error))))
        if error is not None:
            raise error
        for _, failure in found:
            if failure is not None:
                raise (UserError if failure[0] else SyncError)(failure[1])
        return [record for record, _ in found]


def _nothing() -> Completion:
    """An answer that was aborted before it began."""
    return Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[])
