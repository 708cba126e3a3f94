"""SGLang on the trainer's own GPUs: one engine for every `tensor_parallel` consecutive ranks of the job, no server.

The first rank of such a group holds the engine, in a child process (`sglang_host.py`), and gets the group's prompts;
the others only pass weights. Weights go through device memory (`sync/buckets.py`). While training, the engine's weights
and KV cache are released (`offload`) and hold no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.config.schema import EngineConfig, SyncConfig
from lightrl.distributed.waiting import waiting
from lightrl.engine.base import TAGS, Completion, EngineLostError, EngineStartError, GenerateRequest, check_tags
from lightrl.engine.sampling import check_request
from lightrl.engine.sglang_process import HostProcess
from lightrl.engine.sglang_requests import Model, Stops, completion_of, sampling_parameters, stops_of
from lightrl.engine.sglang_start import (
    check_platform,
    check_routing,
    config_override,
    fp8_plan,
    start_host,
    stream_seed,
)
from lightrl.errors import UserError
from lightrl.sync.buckets import BucketSender, plan_buckets
from lightrl.sync.mailbox import MailboxError, MailboxTimeoutError
from lightrl.sync.shared import EMPTY_PAYLOAD
from lightrl.types import Status

_LOADERS = "lightrl.engine.sglang_receiver."


class SGLangEngine:
    """Implements `Engine`, `GroupLoader` and `Restartable` of `lightrl.engine.base`, on every rank of its group alike.

    `group` is the gloo group of the ranks that share this engine (None: this rank alone), `member` this rank's place in
    it; only member 0 generates. `log_dir` takes SGLang's output. Raises UserError for settings and versions that cannot
    work; EngineLostError, with the end of the log, when SGLang ends by itself or hangs.
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
        check_routing(model, device)
        self._fp8 = fp8_plan(model, config, device)
        self.policy_version = -1
        self._model, self._config, self._sync = model, config, sync
        self._device, self._group, self._member = device, group, member
        self._seed, self._log_dir = seed, log_dir
        self._restarts = 0
        self._released: set[str] = set()
        self._room: dict[str, int] = {}
        self._sender: BucketSender | None = None
        self._opened = False  # the engine has the sender's buffers
        self._num_syncs = 0
        self._rids: dict[str, set[str]] = {}
        self._aborted: set[str] = set()
        self._count = 0
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._closed = False
        self._host: HostProcess | None = None
        try:
            self._start()
        except EngineLostError as error:
            given = f" with engine.args = {config.args}" if config.args else ""
            raise EngineStartError(f"engine.kind: SGLang did not start{given}: {error}") from None

    def _start(self) -> None:
        share = self._share_of_free()
        self._lead(lambda: self._launch(share))

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

    def _launch(self, memory_fraction: float) -> None:
        # an engine's own in the whole job: machines, and ranks that see a single GPU each, repeat the GPU's number
        number = dist.get_rank() if dist.is_initialized() else self._device.index or 0
        self._host = start_host(
            self._model,
            self._config,
            device=self._device,
            number=number,
            seed=stream_seed(self._seed, number, self._restarts),
            memory_fraction=memory_fraction,
            log_dir=self._log_dir,
            override=config_override(self._model, self._fp8),
        )

    # ---- losses

    @property
    def lost(self) -> bool:
        """Whether this rank's engine process has died or hangs; False on ranks that hold none."""
        return self._host is not None and self._host.error is not None

    @property
    def why_lost(self) -> str:
        """In one line; empty while it works."""
        error = None if self._host is None else self._host.error
        return "" if error is None else error.line

    def restart(self) -> None:
        """A new engine process in place of the old: without weights, its memory taken. All the group's ranks call it.

        EngineLostError when `engine.max_restarts` are used up, with the error of the present loss; or when the new
        one does not start.
        """
        if self._restarts == self._config.max_restarts:
            error = self._host.error if self._host is not None else None
            used = f"engine.max_restarts: {self._restarts} restarts are used up: raise it to go on longer"
            raise EngineLostError(f"{used}. At last {error or 'the engine was lost'}")
        self._restarts += 1
        self._released.clear()
        self._rids.clear()
        self._aborted.clear()
        self._opened, self._num_syncs, self.policy_version = False, 0, -1
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the new one's share is of what it finds free
        self._lead(self._end)
        self._start()

    def _end(self) -> None:
        old = self._leader()
        if not old.stop():
            raise EngineLostError(f"{old.error}\nIts processes (group {old.pid}) cannot be ended: no new one starts")

    # ---- generation

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """All `n` answers of one request, in order; ValueError for one that can never be served."""
        host = self._leader()
        host.check()
        if self._released:
            raise RuntimeError(f"the engine is offloaded ({', '.join(sorted(self._released))}): call onload first")
        if self.policy_version < 0:
            raise RuntimeError("the engine has no weights: call load_weights before generate")
        if request.id in self._rids:
            raise ValueError(f"request {request.id!r} is under way already: ids must differ")
        model = self._model
        check_request(request, context_length=model.context_length, vocab_size=model.vocab_size, has_decoder=True)
        self._rids[request.id] = set()
        answers = [asyncio.ensure_future(self._one(host, request, i)) for i in range(request.n)]
        try:
            return list(await asyncio.gather(*answers))
        except EngineLostError as error:
            await asyncio.wait(answers)  # they have their error as well
            finished = {i: answer.result() for i, answer in enumerate(answers) if answer.exception() is None}
            raise EngineLostError(str(error), finished) from None
        finally:
            if left := self._rids.pop(request.id, None):  # cancelled, or another answer failed
                with contextlib.suppress(EngineLostError):
                    host.submit("abort", rids=sorted(left))
            self._aborted.discard(request.id)

    async def _one(self, host: HostProcess, request: GenerateRequest, number: int) -> Completion:
        async with self._slot():
            if request.id in self._aborted:
                return Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[])
            self._count += 1
            rid = f"{request.id}#{number}#{self._count}"
            sampling = request.sampling
            stops = stops_of(self._model, request)
            future: Future[Any] = host.submit(
                "generate",
                on_partial=None if stops is None else lambda out: self._look(host, rid, stops, out),
                rid=rid,
                tokens=request.tokens,
                sampling=sampling_parameters(self._model, request, number),
                truncated=sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0),
                top_logprobs=sampling.top_logprobs,
                routing=sampling.return_routing,
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
        for name in list(self._rids) if request_id is None else [request_id] if request_id in self._rids else []:
            self._aborted.add(name)
            if self._rids[name]:
                with contextlib.suppress(EngineLostError):  # who waits for the answers gets it
                    self._leader().submit("abort", rids=sorted(self._rids[name]))

    # ---- weights and memory

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, share: bool = False) -> None:
        """`load_groups` of tensors that all exist; `share` is not possible and does nothing."""
        self.load_groups([list(weights)], version)

    def load_groups(self, groups: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> None:
        """Copy the policy's tensors into the engine as `version`. Every rank of the job calls it.

        They must come in the layout's order. After an engine's start, and then every `sync.verify_every` times,
        `groups` is gone through once more and each value compared with what the engine holds. EngineLostError comes
        when this rank has gone through all groups, as making them takes all ranks.
        """
        if "weights" in self._released:
            raise RuntimeError("the engine's weights are offloaded: call onload(('weights',)) first")
        every = self._sync.verify_every
        loaders = ["receive"]
        if self._agree(self._num_syncs == 0 or (every > 0 and self._num_syncs % every == 0)):
            loaders.append("verify")
        lost: EngineLostError | None = None
        for loader in loaders:
            walk = iter(groups)
            try:
                if lost is None:
                    report = self._pass(loader, walk, version)
            except EngineLostError as error:
                lost = error
            if lost is not None:
                for _ in walk:
                    pass
            lost = self._loss_of_any(lost)
        if lost is not None:
            raise lost
        if wrong := report.get("differing"):
            raise RuntimeError(
                f"the engine holds other weights than the trainer after the sync of version {version}: "
                + ", ".join(f"{name} ({count} values)" for name, count in wrong.items())
            )
        self._num_syncs += 1
        self.policy_version = version

    def _open(self) -> None:
        """Lend this rank's buffers to the engine's processes, and let them learn where each tensor goes."""
        if self._sender is None:
            layout = self._model.layout if self._fp8 is None else self._fp8.layout
            plan = plan_buckets(layout, self._sync.bucket_mib << 20)
            self._sender = BucketSender(plan, self._device)
        payloads = self._gather(self._sender.introduction())
        lost: EngineLostError | None = None
        try:
            self._round("open_buffers", payloads, self._sender.wait_done)
        except MailboxError as error:
            raise UserError(f"engine.kind: SGLang cannot take this model's weights: {error}") from None
        except EngineLostError as error:
            lost = error
        if (lost := self._loss_of_any(lost)) is not None:
            raise lost
        self._opened = True

    def _pass(self, loader: str, groups: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> dict[str, Any]:
        """Send everything once; the report of this rank's receiver.

        Cached prefixes are of the old weights. They are gone already where the KV cache was released since.
        """
        if not self._opened:
            self._open()
        sender = self._sender
        assert sender is not None
        if self._fp8 is not None:
            groups = self._fp8.apply(groups, self._model.dtype)
        payloads = [EMPTY_PAYLOAD] * self._config.tensor_parallel
        flush = loader == "receive" and "kv_cache" not in self._released
        return self._round(
            loader, payloads, lambda check: sender.send(groups, check), flush=flush, version=str(version)
        )

    def _round(
        self,
        loader: str,
        payloads: Sequence[str],
        work: Callable[[Callable[[], None] | None], dict[str, Any]],
        flush: bool = False,
        **fields: Any,
    ) -> dict[str, Any]:
        """Let the engine's processes run a loader while this rank does its part of it; the loader's report."""
        assert self._sender is not None
        mailbox, host, done = self._sender.mailbox, self._host, None
        limit = self._sender.timeout = 0.8 * self._config.hang_timeout
        mailbox.begin()
        self._barrier()
        try:
            if host is None:
                return work(None)
            done = host.submit("update", loader=_LOADERS + loader, payloads=payloads, flush=flush, **fields)
            report = work(host.check)
            host.wait(done, limit, loader)
            return report
        except MailboxTimeoutError:
            why = f"took no weights for {limit:.0f} s ({loader})"
            raise EngineLostError(f"the SGLang engine {why}") if host is None else host.give_up(why) from None
        except BaseException as error:
            mailbox.fail(f"the trainer has given up: {type(error).__name__}: {error}")
            if done is not None:
                wait([done], 5)  # before the next round the receiver must be out of this one
            raise

    def flush_cache(self) -> None:
        """Forget cached prefixes."""
        if self._host is not None:
            self._host.call("flush")

    def offload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Release memory by tag; what is released already stays so. Every rank of the group calls it.

        A lost engine has none: the next call that needs the engine says that it is lost.
        """
        check_tags(tags)
        if self._rids:
            raise RuntimeError(f"{len(self._rids)} requests are under way: await or abort them before offload")
        for tag in (t for t in reversed(TAGS) if t in tags and t not in self._released):
            before = self._free_memory()
            self._lead(partial(self._release, tag))  # the others' GPUs are free as well then
            self._room[tag] = max(self._room.get(tag, 0), self._free_memory() - before)
            self._released.add(tag)

    def _release(self, tag: str) -> None:
        with contextlib.suppress(EngineLostError):
            self._leader().call("release", tags=[tag])

    def room(self, tag: str) -> int:
        """Bytes of this rank's GPU that `onload` of `tag` will take; 0 while they are taken."""
        return self._room[tag] if tag in self._released else 0

    def onload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Take released memory again. After `weights`, new ones must be loaded before generating.

        Of a lost engine the weights seem to be taken: loading them is what raises, once all ranks are through.
        """
        check_tags(tags)
        new = [t for t in TAGS if t in tags and t in self._released]
        if not new:
            return
        self._barrier()  # the others have made room as well
        if self._host is not None:
            try:
                self._host.call("resume", tags=new)
            except EngineLostError:
                if "weights" not in new:
                    raise
            finally:
                self._released.difference_update(new)  # on all ranks alike
        else:
            self._released.difference_update(new)

    def close(self) -> None:
        """End the engine's processes and free the buffers; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._host is not None:
            if self._opened:
                with contextlib.suppress(Exception):  # it may be lost; all of it ends with the next line
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

    def _lead(self, work: Callable[[], None]) -> None:
        """What the first rank does; the others wait, and fail where it fails."""
        error: Exception | None = None
        if self._member == 0:
            try:
                work()
            except Exception as caught:
                error = caught
        text = self._gather(None if error is None else str(error))[0]
        if error is not None:
            raise error
        if text is not None:
            raise EngineLostError(text)

    def _loss_of_any(self, lost: EngineLostError | None) -> EngineLostError | None:
        """This rank's loss, or another's of the group: one may be through with the weights when the engine dies, and
        must not go on to what takes all ranks. An engine that only another rank has given up is ended."""
        texts = self._gather(None if lost is None else str(lost))
        found = next((text for text in texts if text is not None), None)
        if lost is not None or found is None:
            return lost
        return EngineLostError(found) if self._host is None else self._host.give_up(f"failed another rank: {found}")

    def _agree(self, wanted: bool) -> bool:
        """Whether any rank of the job wants it: all must go through the weights equally often."""
        if not dist.is_initialized():
            return wanted
        flag = torch.tensor(int(wanted), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _barrier(self) -> None:
        if self._group is not None:
            with waiting(self._group):
                dist.barrier(group=self._group)

    def _gather(self, payload: str | None) -> list[Any]:
        if self._group is None:
            return [payload]
        payloads: list[Any] = [None] * self._config.tensor_parallel
        with waiting(self._group):
            dist.all_gather_object(payloads, payload, group=self._group)
        return payloads
