"""Requests and answers between our protocol and SGLang's, and the ends of answers that SGLang cannot see itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightrl.engine.base import Completion, GenerateRequest, NotFiniteError, SamplingParams
from lightrl.engine.sglang_routing import routing_of
from lightrl.models.routing import RoutingShape
from lightrl.types import Status

_WATCH_EVERY = 16  # tokens between looks at an answer whose end SGLang cannot see
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
    routing: RoutingShape | None = None
    """What routers choose, where requests ask for it."""


def sampling_parameters(model: Model, request: GenerateRequest, number: int) -> dict[str, Any]:
    """SGLang's, for one answer.

    EOS ids are given as stop ids: without a tokenizer it knows only some. Nucleus sampling gets a top_k that cuts
    nothing: without one SGLang does not say what the kept tokens sum up to.
    """
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": _room(model, request),
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


def _room(model: Model, request: GenerateRequest) -> int:
    """Most tokens of an answer."""
    return min(request.sampling.max_new_tokens, model.context_length - len(request.tokens))


def _stop_ids(model: Model, sampling: SamplingParams) -> list[int]:
    """Ids at which SGLang itself ends an answer."""
    return [] if sampling.ignore_eos else sorted({*model.eos_token_ids, *sampling.stop_token_ids})


def completion_of(
    model: Model, request: GenerateRequest, output: dict[str, Any], stops: Stops | None, policy_version: int
) -> Completion:
    """SGLang's answer, cut where `stops` finds an end. RuntimeError for one that cannot be trusted.

    `policy_version` is that of the weights where SGLang names none.
    """
    if output["matched"] == "NaN happened":
        raise NotFiniteError(request.id)
    tokens, logprobs = output["tokens"], output["logprobs"]
    status = _STATUS.get(output["reason"])
    if status is None:
        raise RuntimeError(f"request {request.id!r} ended for an unknown reason: {output['reason']}")
    if stops is not None and (end := stops.end(tokens)) is not None:
        tokens, logprobs, status = tokens[:end], logprobs[:end], Status.COMPLETED
    if status is not Status.COMPLETED and tokens:  # SGLang looks at an abort first, then at the length
        if tokens[-1] in _stop_ids(model, request.sampling):
            status = Status.COMPLETED
        elif len(tokens) >= _room(model, request):
            status = Status.TRUNCATED
    if len(logprobs) != len(tokens):
        raise RuntimeError(f"request {request.id!r}: {len(logprobs)} log-probs for {len(tokens)} tokens")
    count = len(tokens) if request.sampling.top_logprobs else 0
    top_ids, top_logprobs = output["top_ids"][:count], output["top_logprobs"][:count]
    if len(top_ids) != count:
        raise RuntimeError(f"request {request.id!r}: {len(top_ids)} lists of likeliest tokens for {count} tokens")
    routing = None
    if tokens and request.sampling.return_routing:
        routing = routing_of(
            model.routing,
            output["routing"],
            rows=len(request.tokens) + len(tokens) - 1,
            aborted=output["reason"] == "abort",
            where=f"request {request.id!r}",
        )
    version = int(output["version"]) if str(output["version"]).isdigit() else policy_version
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        status=status,
        policy_versions=[version] if tokens else [],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        routing=routing,
    )


class Stops:
    """Ends of an answer that SGLang cannot see: strings (it has no tokenizer here), and ids while it ignores EOS.

    `before` are tokens that the answer had before it was resumed.
    """

    def __init__(
        self, sampling: SamplingParams, decode: Callable[[list[int]], str], before: Sequence[int] = ()
    ) -> None:
        self._ids = frozenset(sampling.stop_token_ids)
        self._strings = sampling.stop
        self._before = list(before)
        self._decode = decode
        self.found = False

    def end(self, tokens: list[int]) -> int | None:
        """How many of these tokens there are up to the answer's end, None if there is none yet."""
        end = self._end(self._before + tokens)
        return None if end is None else end - len(self._before)

    def _end(self, tokens: list[int]) -> int | None:
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


def stops_of(model: Model, request: GenerateRequest) -> Stops | None:
    """None where SGLang sees all ends itself."""
    if not needs_watching(request.sampling):
        return None
    return Stops(request.sampling, model.decode, request.tokens[len(request.tokens) - request.resumed :])


def needs_watching(sampling: SamplingParams) -> bool:
    return bool(sampling.stop) or (sampling.ignore_eos and bool(sampling.stop_token_ids))
