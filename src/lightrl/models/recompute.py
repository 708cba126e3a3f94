"""What a block that is computed a second time, for its backward pass, takes over from the first.

Choices of experts must be the same ones. Outputs of attention are kept where a kernel computed them: they are small
(rows x heads x head size, 2 bytes each), and computing them costs more the longer the sequences are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightrl.kernels.attention_flash import Saved
from lightrl.models import attention, experts

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""`context_fn` of torch's checkpoint: what is entered around the forward, and around its repetition."""


def contexts(block: nn.Module, *, keep_attention: bool) -> Contexts | None:
    """For a decoder block; None if it has nothing to take over."""
    makers: list[Contexts] = []
    if (choices := experts.recompute_contexts(block)) is not None:
        makers.append(choices)
    modules = [m for m in block.modules() if hasattr(m, "is_causal")]  # what transformers' attention modules share
    if keep_attention and modules:
        makers.append(partial(_attention_contexts, modules))
    if len(makers) < 2:
        return makers[0] if makers else None
    return partial(_together, makers)


def _together(makers: Sequence[Contexts]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, second = zip(*(make() for make in makers), strict=True)
    return _All(first), _All(second)


class _All(AbstractContextManager[None]):
    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self.contexts = contexts
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for context in self.contexts:
            self._entered.enter_context(context)

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def _attention_contexts(modules: Sequence[nn.Module]) -> tuple[_Outputs, _Outputs]:
    made: list[tuple[Tensor, Saved]] = []
    return _Outputs(modules, made, repeat=False), _Outputs(modules, made, repeat=True)


class _Outputs(AbstractContextManager[None]):
    """While entered, these attention modules keep their outputs in `made`, or take them from there in the same order.

    `made` goes with the block's graph, which holds these contexts.
    """

    def __init__(self, modules: Sequence[nn.Module], made: list[tuple[Tensor, Saved]], *, repeat: bool) -> None:
        self.modules, self.made, self.repeat = modules, made, repeat
        self._position = 0

    def __enter__(self) -> None:
        self._position = 0
        for module in self.modules:
            setattr(module, attention.OUTPUTS, self)

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            setattr(module, attention.OUTPUTS, None)

    def next(self) -> tuple[Tensor, Saved] | None:
        if not self.repeat:
            return None
        self._position += 1
        return self.made[self._position - 1]

    def keep(self, out: Tensor, saved: Saved) -> None:
        self.made.append((out, saved))
