"""The order prompts come in: seeded, endless, and continued exactly after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from lightrl.data.errors import DataError

_MASK = (1 << 64) - 1
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RowSet(Protocol[T_co]):
    """What can be dealt out: a `PromptSet`, a `ConversationSet`."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> T_co: ...


class PromptSource(Generic[T]):
    """Deals prompts, or conversations, out, epoch after epoch. The same on every rank: each takes its own share of what
    `next` returns.

    >>> source = PromptSource(prompts, seed=0, shuffle=True)          # doctest: +SKIP
    >>> step = source.next(32); state = source.state()                # doctest: +SKIP
    >>> PromptSource(prompts, seed=0, shuffle=True).restore(state)    # continues with the 33rd # doctest: +SKIP
    """

    def __init__(self, prompts: RowSet[T], *, seed: int, shuffle: bool) -> None:
        if not len(prompts):
            raise DataError("no prompts to draw from")
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self._fingerprint = prompts.fingerprint
        self._epoch = 0
        self._position = 0  # always < len(prompts)
        self._order = self._permutation(0)
        self._place: tuple[int, int, np.ndarray] | None = None  # where a block of `dealt` goes back to

    @property
    def epoch(self) -> float:
        """Epochs dealt out so far, such as 1.25."""
        return self._epoch + self._position / len(self.prompts)

    @property
    def num_dealt(self) -> int:
        """Prompts dealt out so far, over all epochs."""
        return self._epoch * len(self.prompts) + self._position

    def next(self, n: int) -> list[T]:
        """The next `n` prompts. They may end one epoch and begin the next, or span several."""
        taken: list[T] = []
        while len(taken) < n:
            part = self._order[self._position : self._position + n - len(taken)]
            taken += [self.prompts[int(i)] for i in part]
            self._position += len(part)
            if self._position == len(self.prompts):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
        return taken

    def peek(self, n: int) -> list[T]:
        """What `next` would deal, which stays where it is."""
        place = self._epoch, self._position, self._order
        try:
            return self.next(n)
        finally:
            self._epoch, self._position, self._order = place

    def give_back(self, n: int) -> None:
        """The last `n` prompts that `next` dealt were not needed: they come again, first and in the same order."""
        self._position -= n
        while self._position < 0:
            self._epoch -= 1
            self._position += len(self.prompts)
            self._order = self._permutation(self._epoch)

    @contextmanager
    def dealt(self, n: int) -> Iterator[list[T]]:
        """The next `n` prompts, for a block. If it raises (Ctrl-C in a notebook …) they come again, not skipped."""
        self._place = self._epoch, self._position, self._order
        try:
            yield self.next(n)
        except BaseException:
            if self._place is not None:
                self._epoch, self._position, self._order = self._place
            raise
        finally:
            self._place = None

    def settle(self) -> None:
        """What was dealt is used up: it does not come again if the block of `dealt` raises later."""
        self._place = None

    def state(self) -> dict[str, Any]:
        """Where the source stands, for a checkpoint (JSON values only)."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_prompts": len(self.prompts),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises DataError when data, seed or shuffling have changed since: the order would silently be another one.
        """
        for name, key, ours in (("seed", "run.seed", self.seed), ("shuffle", "data.shuffle", self.shuffle)):
            if state[name] != ours:
                raise DataError(
                    f"{key} = {ours}, but the checkpoint was made with {state[name]}: set it back, or start a new "
                    "run.dir"
                )
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"data.path: the checkpoint was made with other rows ({state['num_prompts']}, now "
                f"{len(self.prompts)}; content, tokenizer, template, length limits and command count): restore them, "
                "or start a new run.dir"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        """Order of an epoch, [number of prompts] int64.

        Sorts raw output of the Philox counter: numpy promises that this stream never changes, while the methods of
        `Generator` may change between releases.
        """
        size = len(self.prompts)
        if not self.shuffle:
            return np.arange(size)
        key = np.array([self.seed & _MASK, epoch], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")
