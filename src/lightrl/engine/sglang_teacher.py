"""A teacher that an SGLang server elsewhere holds: log-probs of tokens that somebody else sampled.

A request holds prompt and answer as one prompt and asks for no new token; SGLang gives its log-probs of the prompt's
tokens from a place on, and the likeliest ones there. They are of the untempered distribution, whatever the request's
temperature is (`temp_scaled_logprobs` of its requests is always off, as of 0.5.17).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from typing import Any

from lightrl.engine.sglang_checks import vocabulary_of
from lightrl.engine.sglang_http import PAUSES, Server, ServerError
from lightrl.errors import UserError
from lightrl.threads import spawn

_AT_ONCE = 32  # requests under way, a rank
_PROBE = 60.0  # seconds
_DECODED_AT_ONCE = 8192  # tokens
_SPARE = 8  # more likeliest tokens are asked for, where some may be padding that the policy does not have
_LOWEST = -1e6  # for a log-prob that JSON cannot hold
_UNKNOWN = -100.0  # of an id that the server's model has no output for


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of each token of one answer."""

    logprobs: list[float]
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


class TeacherServer:
    """Scores answers by the model of the server at `url`. Errors of a server are one line that names `teacher.url`."""

    def __init__(self, url: str, key: str | None, *, timeout: float, pauses: Sequence[float] = PAUSES) -> None:
        self._server = Server(url, key, pauses, key_setting="teacher.api_key_env")
        self._timeout = timeout
        self._vocabulary: int | None = None
        self._asked = False

    def check(self, tokenizer: Any, vocab_size: int, longest: int) -> None:
        """UserError where the server is not there, reads other tokens than the policy writes, or too few of them.

        `tokenizer` and `vocab_size` are the policy's, `longest` the tokens of its longest prompt and answer.
        """
        where = f"teacher.url: {self._server.url}"
        try:
            context = self._server.get("/server_info", _PROBE).get("context_length")
            size = self._size()
            if isinstance(context, int) and context <= longest:
                raise UserError(
                    f"{where}: its context is {context} tokens, and prompts with answers come to {longest}: start it "
                    "with a larger one, or lower rollout.max_response_tokens"
                )
            needed = min(vocab_size, len(tokenizer))
            if size is not None and size < needed:
                raise UserError(f"{where}: its model has {size} tokens, the policy (model.path) {needed}")
            self._compare(tokenizer, needed, where)
        except ServerError as error:
            raise UserError(f"teacher.url: {error}") from None

    def _size(self) -> int | None:
        """Of the server's vocabulary, None if it does not tell; asked for once."""
        if not self._asked:
            self._vocabulary, self._asked = vocabulary_of(self._server), True
        return self._vocabulary

    def _compare(self, tokenizer: Any, count: int, where: str) -> None:
        """Tokens 0 to `count` as texts, there and here. A few may differ by how releases of transformers write them."""
        differing = []
        for start in range(0, count, _DECODED_AT_ONCE):
            ids = list(range(start, min(start + _DECODED_AT_ONCE, count)))
            body = {"tokens": [[i] for i in ids], "skip_special_tokens": False}
            try:
                texts = self._server.ask("/detokenize", body, _PROBE).get("text")
            except ServerError as error:
                raise UserError(
                    f"{where}: it does not decode tokens, so that they cannot be compared with the policy's: start it "
                    f"with its tokenizer ({error})"
                ) from None
            if not isinstance(texts, list) or len(texts) != len(ids):
                raise UserError(f"{where}: it does not decode tokens as SGLang's servers do")
            mine = [str(tokenizer.decode([i], skip_special_tokens=False)) for i in ids]
            pairs = zip(ids, mine, texts, strict=True)
            differing += [(i, a, b) for i, a, b in pairs if a.strip() != str(b).strip()]
        if len(differing) > count // 100:
            first, here, there = differing[0]
            raise UserError(
                f"{where}: its tokenizer is another than the policy's (model.path): token {first} is {there!r} there "
                f"and {here!r} here, as are {len(differing) - 1} of {count} others; name a teacher with the policy's "
                "tokenizer"
            )

    def score(
        self, answers: Sequence[tuple[list[int], int]], top_k: int = 0, vocab_size: int | None = None
    ) -> list[Scores]:
        """Of each (prompt and answer, length of the answer), in order. ServerError for what a server cannot do.

        `top_k` likeliest tokens of the first `vocab_size`, the policy's.
        """
        if not answers:
            return []
        left, found = deque(range(len(answers))), dict[int, Scores]()

        def work() -> None:
            while left:
                try:
                    number = left.popleft()
                except IndexError:  # another thread was faster
                    return
                found[number] = self._score(*answers[number], top_k, vocab_size)

        try:
            self._size()
            for worker in as_completed([spawn(work) for _ in range(min(_AT_ONCE, len(answers)))]):
                worker.result()
        except ServerError as error:
            left.clear()
            raise ServerError(f"teacher.url: {error}") from None
        return [found[number] for number in range(len(answers))]

    def _score(self, tokens: list[int], length: int, top_k: int, vocab_size: int | None) -> Scores:
        size = self._vocabulary
        padded = top_k and size is not None and vocab_size is not None and size > vocab_size
        body = {
            "input_ids": self._known(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(tokens) - length - 1,
            "top_logprobs_num": min(top_k + _SPARE, size or top_k) if padded else top_k,
        }
        answer = self._server.ask("/generate", body, self._timeout)
        try:
            return self._scores_of(answer.get("meta_info") or {}, tokens[-length:], top_k, vocab_size)
        except _BadReplyError as error:
            raise ServerError(f"{self._server.url}/generate: {error}") from None

    def _known(self, tokens: list[int]) -> list[int]:
        """Ids that the server has; SGLang's scheduler dies of others."""
        size = self._vocabulary
        return tokens if size is None else [min(token, size - 1) for token in tokens]

    def _scores_of(self, meta: dict[str, Any], response: list[int], top_k: int, vocab_size: int | None) -> Scores:
        """The first entry of a reply is of the prompt's last token, and says nothing."""
        places = _last(meta.get("input_token_logprobs"), len(response), "log-probs")
        expected = self._known(response)
        for (_, given), token in zip((entry[:2] for entry in places), expected, strict=True):
            if given not in (token, 0):  # SGLang writes 0 for the last ids of its vocabulary
                raise _BadReplyError(f"it gave the log-prob of token {given} where {token} stands")
        known = [given == token for given, token in zip(expected, response, strict=True)]
        logprobs = [_number(entry[0]) if k else _UNKNOWN for entry, k in zip(places, known, strict=True)]
        if not top_k:
            return Scores(logprobs=logprobs)
        tops = _last(meta.get("input_top_logprobs"), len(response), "lists of likeliest tokens")
        if vocab_size is not None:
            tops = [[entry for entry in top if entry[1] < vocab_size] for top in tops]
        if short := [top for top in tops if len(top) < top_k]:
            raise _BadReplyError(f"it named {len(short[0])} likeliest tokens of {top_k} that the policy knows")
        return Scores(
            logprobs=logprobs,
            top_ids=[[int(entry[1]) for entry in top[:top_k]] for top in tops],
            top_logprobs=[[_number(entry[0]) for entry in top[:top_k]] for top in tops],
        )


class _BadReplyError(Exception):
    """A reply that is none of SGLang's."""


def _last(entries: Any, count: int, what: str) -> list[Any]:
    """The last `count` of a reply's entries."""
    if not isinstance(entries, list) or len(entries) < count:
        found = len(entries) if isinstance(entries, list) else "no"
        raise _BadReplyError(f"it gave {found} {what} for an answer of {count} tokens")
    last = entries[len(entries) - count :]
    if any(not isinstance(entry, list) or (entry and entry[0] is None) for entry in last):
        raise _BadReplyError(f"it left out {what} of an answer of {count} tokens")
    return last


def _number(value: Any) -> float:
    number = float(value) if isinstance(value, int | float) else math.nan
    if math.isnan(number):
        raise _BadReplyError("it gave a log-prob that is not a number")
    return max(number, _LOWEST)
