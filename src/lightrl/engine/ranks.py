"""An engine that all training ranks hold together: one of them works for all, and the others hear how it went."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from lightrl.engine.remote.messages import pack_error, unpack_error


class Ranks(Protocol):
    """The training ranks (`distributed.mesh.World`)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, record: Any) -> list[Any]: ...


def on_all_ranks(ranks: Ranks, work: Callable[[], Any], rest: Iterable[Any] = ()) -> list[Any]:
    """Results of `work` on all ranks. Where it failed on one, all raise the same kind of error: none may go on alone.

    What it left of `rest` is gone through first: the other ranks gather weights with this one.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    for _ in rest:
        pass
    found = ranks.gather((result, None if error is None else pack_error(error)))
    if error is not None:
        raise error
    for _, failure in found:
        if failure is not None:
            raise unpack_error(failure)
    return [record for record, _ in found]
