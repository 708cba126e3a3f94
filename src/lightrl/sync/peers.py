"""Servers as weight sync sees them, and work that runs beside others and must end in bounded time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol

from torch import Tensor

from lightrl.errors import LostError
from lightrl.threads import spawn

Groups = Iterable[Sequence[tuple[str, Tensor]]]
_LAST_WORDS = 5.0  # seconds in which the others may say why one failed


class SyncError(LostError):
    """New weights did not reach a server; the message says which and why."""


class Peer(Protocol):
    """A server that takes weights (`engine.sglang_http.Server`)."""

    url: str
    tensor_parallel: int
    """Its processes that each hold a part of the model."""
    weight_sessions: bool
    """Whether it takes broadcast weights only between `/begin_weight_update` and `/end_weight_update`."""

    def post(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Its answer; RuntimeError, naming the server, for a refusal or none in `timeout` seconds."""


class Transport(Protocol):
    """One way for weights to reach all servers; used by one rank."""

    def send(self, groups: Groups, label: str) -> None:
        """Go through `groups` once; after it every server holds them under the weight version `label`."""

    def close(self) -> None:
        """Leave nothing behind; idempotent, and never raises."""


def together(futures: Mapping[str, Future[Any]], timeout: float) -> list[Any]:
    """Results of all, in order. The first of them that failed is raised, SyncError for those without an end.

    Where only the last failed, which is our own part, the others get a moment to say why.
    """
    *_, own = futures.values()
    done, left = wait(futures.values(), timeout=timeout, return_when=FIRST_EXCEPTION)
    if left and [future for future in done if future.exception()] == [own]:
        done, left = wait(futures.values(), timeout=_LAST_WORDS, return_when=ALL_COMPLETED)
    for future in futures.values():
        if future in done:
            future.result()
    if left:
        names = ", ".join(name for name, future in futures.items() if future in left)
        raise SyncError(f"{names}: no end after {timeout:.0f} s (sync.timeout)")
    return [future.result() for future in futures.values()]


def post_all(peers: Sequence[Peer], path: str, body: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """The same request to all at once; their answers, in order."""
    return together({p.url: spawn(p.post, path, body, timeout) for p in peers}, timeout + _LAST_WORDS)
