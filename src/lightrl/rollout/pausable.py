"""An engine that can be held in the middle of its answers, to get new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightrl.engine.base import TAGS, Completion, Engine, EngineLostError, GenerateRequest
from lightrl.types import Status

_AGAIN = 5.0  # seconds until what was not ended by an abort is aborted again


@dataclass(eq=False, kw_only=True)
class _Call:
    """A request under way. Its answers, by their number: those that are complete, and what there is of the others."""

    request: GenerateRequest
    done: dict[int, Completion] = field(default_factory=dict)
    parts: dict[int, Completion] = field(default_factory=dict)
    is_aborted: bool = False
    ids: tuple[str, ...] = ()
    """Of the engine's own requests."""

    def requests(self) -> list[tuple[list[int], GenerateRequest]]:
        """What is still to be sampled: the answers that have not begun in one, each of the others by itself."""
        request = self.request
        missing = [i for i in range(request.n) if i not in self.done]
        fresh = [i for i in missing if i not in self.parts]
        found = []
        if fresh:
            seeds = None if request.seeds is None else tuple(request.seeds[i] for i in fresh)
            found.append((fresh, replace(request, n=len(fresh), seeds=seeds)))
        for i in (i for i in missing if i in self.parts):
            tokens = self.parts[i].tokens
            sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(tokens))
            seeds = None if request.seeds is None else (request.seeds[i],)
            rest = replace(
                request,
                id=f"{request.id}~{i}",
                tokens=request.tokens + tokens,
                sampling=sampling,
                n=1,
                seeds=seeds,
                resumed=request.resumed + len(tokens),
            )
            found.append(([i], rest))
        return found

    def take(self, number: int, completion: Completion) -> None:
        """An answer, or its next part."""
        whole = joined(self.parts.pop(number, None), completion)
        if whole.status is Status.ABORTED and len(whole.tokens) >= self.request.sampling.max_new_tokens:
            whole.status = Status.TRUNCATED  # its last token came as it was ended
        if whole.status is not Status.ABORTED:
            self.done[number] = whole
        elif whole.tokens:
            self.parts[number] = whole

    def answers(self) -> list[Completion]:
        """All of them; what was aborted as it is."""
        nothing = Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[])
        return [self.done.get(i) or self.parts.get(i) or nothing for i in range(self.request.n)]


class PausableEngine:
    """Implements `lightrl.engine.base.Engine` for samplers; weights and memory are `inner`'s own business.

    `pause` ends everything that is under way in `inner`, which is then idle. Callers of `generate` do not notice: after
    `resume` each answer goes on from the tokens that it had, with its own draws, and says which version gave how many.
    All of it on one event loop.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self._calls: dict[str, _Call] = {}
        self._num_running = 0  # calls that `inner` works on
        self._num_pauses = 0
        self._is_open = True
        self._changed = asyncio.Event()
        self._busy, self._since = 0.0, 0.0

    @property
    def policy_version(self) -> int:
        return self.inner.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.inner.policy_version = version

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """All `n` answers of one request, in order, whatever pauses there are in between."""
        if request.id in self._calls:
            raise ValueError(f"request {request.id!r} is under way already: ids must differ")
        call = self._calls[request.id] = _Call(request=request)
        try:
            while True:
                while not (self._is_open or call.is_aborted):
                    await self._changed.wait()
                if call.is_aborted:
                    return call.answers()
                pauses = self._num_pauses
                await self._sample(call)
                if len(call.done) == request.n or call.is_aborted or pauses == self._num_pauses:
                    return call.answers()
        finally:
            del self._calls[request.id]

    async def _sample(self, call: _Call) -> None:
        """What is missing, until the engine has answered or a pause has ended it."""
        asked = call.requests()
        call.ids = tuple(request.id for _, request in asked)
        self._begin()
        try:
            answers = await asyncio.gather(
                *(self.inner.generate(request) for _, request in asked), return_exceptions=True
            )
        finally:
            call.ids = ()
            self._end()
        errors = []
        for (numbers, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                errors.append(answer)
                finished = answer.finished if isinstance(answer, EngineLostError) else {}
            else:
                finished = dict(enumerate(answer))
            for place, completion in finished.items():
                call.take(numbers[place], completion)
        if errors and isinstance(errors[0], EngineLostError):
            raise EngineLostError(str(errors[0]), dict(call.done))
        if errors:
            raise errors[0]

    def _begin(self) -> None:
        if self._num_running == 0:
            self._since = time.perf_counter()
        self._num_running += 1

    def _end(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._busy += time.perf_counter() - self._since
            self._note()

    def _note(self) -> None:
        """Wake who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all: what was sampled so far returns with `Status.ABORTED`."""
        for name in [n for n in self._calls if request_id in (None, n)]:
            self._calls[name].is_aborted = True
            for inner in self._calls[name].ids:
                self.inner.abort(inner)
        self._note()

    async def pause(self) -> None:
        """Nothing is under way in `inner` when this returns, and nothing begins before `resume`."""
        self._is_open = False
        self._num_pauses += 1
        while self._num_running:
            for call in self._calls.values():
                for name in call.ids:
                    self.inner.abort(name)
            changed = self._changed
            try:
                if self._num_running:
                    await asyncio.wait_for(changed.wait(), _AGAIN)
            except TimeoutError:
                continue

    async def resume(self) -> None:
        """Go on with what was under way."""
        self._is_open = True
        self._note()

    async def take_busy_seconds(self) -> float:
        """Seconds in which `inner` had something to do, since the last call."""
        now = time.perf_counter()
        busy = self._busy + (now - self._since if self._num_running else 0.0)
        self._busy, self._since = 0.0, now
        return busy

    # ---- what is done with the engine itself

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, share: bool = False) -> None:
        self.inner.load_weights(weights, version, share=share)

    def flush_cache(self) -> None:
        self.inner.flush_cache()

    def offload(self, tags: tuple[str, ...] = TAGS) -> None:
        self.inner.offload(tags)

    def onload(self, tags: tuple[str, ...] = TAGS) -> None:
        self.inner.onload(tags)

    def close(self) -> None:
        self.inner.close()


def joined(first: Completion | None, rest: Completion) -> Completion:
    """Two parts of one answer as one.

    >>> a = Completion(tokens=[5, 6], logprobs=[-1.0, -2.0], status=Status.ABORTED, policy_versions=[3])
    >>> b = Completion(tokens=[7], logprobs=[-0.5], status=Status.COMPLETED, policy_versions=[4])
    >>> whole = joined(a, b); whole.tokens, whole.policy_versions, whole.version_tokens
    ([5, 6, 7], [3, 4], [2, 1])
    """
    if first is None or not first.tokens:
        return rest
    versions: dict[int, int] = {}
    for part in (first, rest) if rest.tokens else (first,):  # ended again before it had begun
        for version, count in zip(part.policy_versions, part.version_tokens or [len(part.tokens)], strict=True):
            versions[version] = versions.get(version, 0) + count
    routing = first.routing
    if routing is not None and rest.routing is not None:  # of the whole: its beginning was chosen by older weights
        routing = torch.cat([routing, rest.routing[len(routing) :]])
    return Completion(
        tokens=first.tokens + rest.tokens,
        logprobs=first.logprobs + rest.logprobs,
        status=rest.status,
        policy_versions=list(versions),
        version_tokens=list(versions.values()),
        error=rest.error,
        top_ids=first.top_ids + rest.top_ids,
        top_logprobs=first.top_logprobs + rest.top_logprobs,
        routing=routing,
    )
