"""The embedded engine: batched generation with transformers' model code, on CPU or GPU, in the trainer's own process.

Requests queue; a driver task on the caller's event loop takes steps while there is work. A step admits what fits (the
prompts packed into one forward, each prompt of a group computed once), then decodes one token of every running row.
Rows that end leave at once and waiting ones take their place. No padding tokens are ever fed to the model: prompts are
packed, and rows of unlike length read the cache in separate spans.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrl.engine.base import TAGS, Completion, GenerateRequest, NotFiniteError, check_tags
from lightrl.engine.batch import Decode, Job, Row, Slots
from lightrl.engine.hosted_model import HostedModel
from lightrl.engine.kv_cache import KVCache, Segment, plan_spans
from lightrl.engine.sampling import check_request, likeliest, sample
from lightrl.models import lora
from lightrl.models.routing import Recorder, routed
from lightrl.types import Status


class TransformersEngine:
    """Implements `lightrl.engine.base.Engine`.

    `model_config` is the configuration of a Hugging Face causal LM; weights come by `load_weights` only. `decode` (a
    tokenizer, or a function from ids to text) is needed for stop strings only. `dtype` is that of copied weights; lent
    ones are used as they are. With `adapters`, weights and adapters come apart. Raises UserError for a model type it
    cannot run.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        *,
        eos_token_ids: Iterable[int] = (),
        decode: Any = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_batch: int = 64,
        max_prefill_tokens: int = 8192,
        context_length: int | None = None,
        trust_remote_code: bool = False,
        adapters: lora.Settings | None = None,
    ) -> None:
        self.policy_version = -1
        self.device = torch.device(device)
        self.max_batch = max_batch
        self.max_prefill_tokens = max_prefill_tokens
        self._model = HostedModel(model_config, self.device, dtype, trust_remote_code, adapters)
        text_config = model_config.get_text_config()
        self.context_length = context_length or int(text_config.max_position_embeddings)
        self._vocab_size = int(text_config.vocab_size)
        self._num_layers = int(text_config.num_hidden_layers)
        self._eos_ids = frozenset(eos_token_ids)
        self._decode_text = _text_decoder(decode)
        self._cache = KVCache(self.device)
        self._slots = Slots(max_batch)
        self._jobs: dict[str, Job] = {}
        self._queue: deque[Job] = deque()  # jobs with answers that have not started, oldest first
        self._driver: asyncio.Task[None] | None = None
        self._offloaded: set[str] = set()
        self._spans: list[tuple[int, int]] | None = None

    # ---- generation

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """All `n` answers of one request, in order; ValueError for one that can never be served."""
        self._check_ready()
        self._check(request)
        self._adopt_loop()
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        job = Job(
            request=request,
            future=asyncio.get_running_loop().create_future(),
            stop_ids=stop_ids,
            max_tokens=min(sampling.max_new_tokens, self.context_length - len(request.tokens)),
        )
        self._jobs[request.id] = job
        self._queue.append(job)
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        try:
            return await job.future
        finally:
            if self._jobs.get(request.id) is job:
                self._end(job)  # the caller was cancelled

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all: what was sampled so far returns with `Status.ABORTED`."""
        for job in [j for j in self._jobs.values() if request_id in (None, j.request.id)]:
            for row in self._slots.running():
                if row.job is job:
                    job.settle(row.number, row.completion(Status.ABORTED))
            for number in job.waiting:
                job.settle(number, Completion(tokens=[], logprobs=[], status=Status.ABORTED, policy_versions=[]))
            self._end(job)

    def _check_ready(self) -> None:
        if self._offloaded:
            raise RuntimeError(f"the engine is offloaded ({', '.join(sorted(self._offloaded))}): call onload first")
        if not self._model.loaded:
            raise RuntimeError("the engine has no weights: call load_weights before generate")

    def _check(self, request: GenerateRequest) -> None:
        if request.id in self._jobs:
            raise ValueError(f"request {request.id!r} is under way already: ids must differ")
        check_request(
            request,
            context_length=self.context_length,
            vocab_size=self._vocab_size,
            has_decoder=self._decode_text is not None,
        )
        if request.sampling.return_routing and self._model.routing_shape is None:
            raise ValueError(f"request {request.id!r}: the model has no experts whose choice could be returned")

    def _adopt_loop(self) -> None:
        """The engine outlives event loops: leftovers of a closed one are dropped, a second live one is refused."""
        if self._driver is None or self._driver.get_loop() is asyncio.get_running_loop():
            return
        if not self._driver.get_loop().is_closed():
            raise RuntimeError("the engine is in use on another event loop")
        self._reset()

    async def _drive(self) -> None:
        try:
            while self._jobs:
                self._step()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            for job in list(self._jobs.values()):
                job.future.cancel()
                self._end(job)
            raise
        except Exception as error:
            failed = list(self._jobs.values())
            self._reset()
            for job in failed:
                if not job.future.done():
                    job.future.set_exception(error)
        finally:
            self._driver = None

    def _end(self, job: Job) -> None:
        """The job is over, whatever its rows were doing."""
        self._jobs.pop(job.request.id, None)
        if job in self._queue:
            self._queue.remove(job)
        for slot, row in enumerate(self._slots.rows):
            if row is not None and row.job is job:
                self._slots.release(slot)
                self._spans = None

    def _reset(self) -> None:
        """Nothing is under way any more; the cache may hold non-finite values and is freed."""
        self._jobs.clear()
        self._queue.clear()
        self._slots.clear()
        self._cache.free()
        self._spans = None
        self._driver = None

    # ---- one step

    @torch.inference_mode()
    def _step(self) -> None:
        self._check_ready()
        try:
            self._admit()
            self._compact()
            if self._slots.rows:
                self._decode()
        except torch.OutOfMemoryError as error:
            held = self._cache.num_bytes / 2**30
            raise torch.OutOfMemoryError(
                f"out of GPU memory with {self._slots.num_running} sequences and {held:.1f} GiB of keys and values: "
                f"lower engine.max_batch (now {self.max_batch}) or engine.max_prefill_tokens "
                f"(now {self.max_prefill_tokens})"
            ) from error

    def _admit(self) -> None:
        """Start waiting answers, oldest request first, while slots are free."""
        new_prompts: list[tuple[Job, list[int]]] = []  # jobs to prefill and the slots of their first answers
        ready: list[tuple[Row, Tensor]] = []  # rows whose prompt's logits are known
        num_tokens = 0
        while self._queue and self._slots.num_free:
            job = self._queue[0]
            source = None if job.logits is None else self._slots.find_prompt(job)
            length = len(job.request.tokens)
            if source is None:
                if new_prompts and num_tokens + length > self.max_prefill_tokens:
                    break
                num_tokens += length
            rows = [Row.start(job, job.waiting.popleft()) for _ in range(min(len(job.waiting), self._slots.num_free))]
            slots = [self._slots.take(row) for row in rows]
            self._reserve(job)
            if source is None:
                new_prompts.append((job, slots))
            else:
                assert job.logits is not None
                if others := [s for s in slots if s != source]:
                    self._cache.copy_slot(source, others, length)
                self._cache.recurrent.restore(job.states, slots)
                for row in rows:
                    row.routing = [job.routing] if job.routing is not None else []
                ready += [(row, job.logits) for row in rows]
            if not job.waiting:
                self._queue.popleft()
            self._spans = None
        if new_prompts:
            ready += self._prefill(new_prompts)
        if ready:
            logits = torch.stack([row_logits for _, row_logits in ready])
            self._sample([row for row, _ in ready], logits)
        for job in {id(row.job): row.job for row, _ in ready}.values():
            if not job.waiting:
                job.forget_prompt()

    def _reserve(self, job: Job | None = None) -> None:
        rows = self._slots.running()
        self._cache.reserve(
            len(self._slots.rows),
            max(row.length for row in rows),
            max_slots=self.max_batch,
            max_capacity=max(len(row.job.request.tokens) + row.job.max_tokens for row in rows),
        )

    def _prefill(self, prompts: list[tuple[Job, list[int]]]) -> list[tuple[Row, Tensor]]:
        """One packed forward over new prompts; each row started with the logits [V] that its first token comes from."""
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for job, slots in prompts:
            prompt = job.request.tokens
            segment_slots = torch.tensor(slots, device=self.device)
            segments.append(Segment(start=len(tokens), stop=len(tokens) + len(prompt), slots=segment_slots))
            tokens += prompt
            positions += range(len(prompt))
            last.append(len(tokens) - 1)
        self._cache.begin_prefill(segments)
        recorder = self._recorder(job for job, _ in prompts)
        logits = self._forward(torch.tensor([tokens]), torch.tensor([positions]), torch.tensor(last), recorder)[0]
        if self._cache.num_layers != self._num_layers:
            raise RuntimeError(
                f"{self._cache.num_layers} of {self._num_layers} layers attend through the cache: this model type "
                "keeps other state between tokens and cannot run in the embedded engine"
            )
        started = []
        routing = None if recorder is None else recorder.experts.cpu()
        for (job, slots), row_logits, segment in zip(prompts, logits, segments, strict=True):
            job.logits = row_logits
            if routing is not None and job.request.sampling.return_routing:
                job.routing = routing[segment.start : segment.stop]
                for slot in slots:
                    if (row := self._slots.rows[slot]) is not None:
                        row.routing = [job.routing]
            if job.waiting:
                job.states = self._cache.recurrent.snapshot(slots[0])
            started += [(row, row_logits) for slot in slots if (row := self._slots.rows[slot]) is not None]
        return started

    def _compact(self) -> None:
        moves = self._slots.compact()
        for source, target in moves:
            row = self._slots.rows[target]
            assert row is not None
            self._cache.copy_slot(source, [target], row.length - 1)
        if moves:
            self._spans = None

    def _decode(self) -> None:
        """One token of every running row; they fill the slots 0..R-1."""
        rows = self._slots.running()
        lengths = [row.length for row in rows]
        self._reserve()
        if self._spans is None:  # rows came or went; until then all grow alike, and padding stays as it is
            self._spans = plan_spans(lengths, self._cache.bytes_per_position(), self.device.type)
        self._cache.begin_decode(lengths, self._spans)
        tokens = torch.tensor([[row.tokens[-1]] for row in rows])
        positions = torch.tensor([[length - 1] for length in lengths])
        recorder = self._recorder(row.job for row in rows)
        logits = self._forward(tokens, positions, torch.tensor([0]), recorder)[:, 0]
        if recorder is not None:
            for row, chosen in zip(rows, recorder.experts.cpu().split(1), strict=True):
                if row.routing:
                    row.routing.append(chosen)
        self._sample(rows, logits)

    def _recorder(self, jobs: Iterable[Job]) -> Recorder | None:
        """Where any of these wants to know which experts are chosen."""
        shape = self._model.routing_shape
        wanted = any(job.request.sampling.return_routing for job in jobs)
        return Recorder(shape) if wanted and shape is not None else None

    def _forward(self, tokens: Tensor, positions: Tensor, keep: Tensor, recorder: Recorder | None) -> Tensor:
        """Logits [B, len(keep), V] in float32 of the columns `keep` of a batch [B, Q]."""
        with routed(self._model.routers, recorder):
            output = self._model.module(
                input_ids=tokens.to(self.device),
                position_ids=positions.to(self.device),
                use_cache=False,
                logits_to_keep=keep.to(self.device),
                kv_cache=self._cache,
            )
        return output.logits.float()

    def _sample(self, rows: list[Row], logits: Tensor) -> None:
        """Draw the next token of each row from logits [R, V]; rows that end with it leave."""
        uniforms = [row.rng.random() for row in rows]
        ids, logprobs = sample(logits, [row.job.request.sampling for row in rows], uniforms)
        for row, (top_ids, top_logprobs) in zip(
            rows, likeliest(logits, [r.job.request.sampling for r in rows]), strict=True
        ):
            row.top_ids += [top_ids] if top_ids else []
            row.top_logprobs += [top_logprobs] if top_ids else []
        # one transfer for both; float64 holds any id exactly
        drawn_ids, drawn_logprobs = torch.stack([ids.double(), logprobs.double()]).tolist()
        slot_of = {id(row): slot for slot, row in enumerate(self._slots.rows) if row is not None}
        for row, token, logprob in zip(rows, drawn_ids, drawn_logprobs, strict=True):
            if logprob != logprob:
                raise NotFiniteError(row.job.request.id)
            status = row.append(int(token), logprob, self.policy_version, self._decode_text)
            if status is not None:
                self._slots.release(slot_of[id(row)])
                self._spans = None
                row.job.settle(row.number, row.completion(status))
                if row.job.future.done():
                    self._jobs.pop(row.job.request.id, None)

    # ---- weights and memory

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, share: bool = False) -> None:
        """Take the named tensors (names of the model's `state_dict`; tied ones may be given once) as `version`.

        `share=True` uses the given tensors themselves, so changes made to them in place are seen; `share=False` copies
        into the engine's own memory. ValueError names unknown, missing and misshapen tensors.
        """
        self._model.load(weights, share=share)
        self._offloaded.discard("weights")
        self.flush_cache()
        self.policy_version = version

    def flush_cache(self) -> None:
        """Forget cached prompts: answers that have not started compute theirs anew."""
        self._slots.forget_prompts()
        for job in self._jobs.values():
            job.forget_prompt()

    def offload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Release memory by tag. After `weights`, new ones must be loaded before generating."""
        check_tags(tags)
        if self._jobs:
            raise RuntimeError(f"{len(self._jobs)} requests are under way: await or abort them before offload")
        if "weights" in tags:
            self._model.drop()
        if "kv_cache" in tags:
            self._slots.clear()
            self._cache.free()
        self._offloaded.update(tags)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, tags: tuple[str, ...] = TAGS) -> None:
        """Allow generating again; memory is taken when weights are loaded and when sequences need it."""
        check_tags(tags)
        self._offloaded.difference_update(tags)

    def close(self) -> None:
        """Abort what runs and free everything; idempotent."""
        self.abort()
        self.offload()


def _text_decoder(decode: Any) -> Decode | None:
    """A function from ids to text, special tokens included, from a tokenizer or such a function."""
    if decode is None or not hasattr(decode, "decode"):
        return decode
    return lambda ids: decode.decode(ids, skip_special_tokens=False)
