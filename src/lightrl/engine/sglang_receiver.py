"""Runs inside SGLang's scheduler processes: takes weights from the trainer's buffers into the model's parameters.

SGLang calls these functions as custom weight loaders with its model. Which memory each tensor belongs to is learnt
once, by a rehearsal (`sglang_rehearsal.py`). A sync then is the copies that it found, and what the model derives.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.engine.sglang_copies import Fill, joined
from lightrl.engine.sglang_derived import Derived
from lightrl.engine.sglang_rehearsal import rehearse
from lightrl.sync.buckets import Plan
from lightrl.sync.mailbox import Mailbox
from lightrl.sync.shared import open_shared, release_shared, synchronize

_STATE = "_lightrl_receiver"


@dataclass
class Receiver:
    """What one scheduler process keeps between syncs."""

    buffers: list[Tensor]
    mailbox: Mailbox
    parts: list[list[tuple[str, Tensor, Tensor]]]
    """By bucket: (tensor's name, its part in the buffer, the parameter's part). A bucket always has the same buffer."""
    copies: list[tuple[list[Tensor], list[Tensor]]]
    """By bucket the same, in as few copies as it takes: targets and sources."""
    fills: list[Fill]
    derived: Derived

    def run(self, use: Callable[[int], None]) -> None:
        """Wait for each bucket, `use` it by its number, let go of it."""
        for number in range(len(self.parts)):
            self.mailbox.wait("filled", number + 1, timeout=None, check=self.mailbox.check_sender)
            use(number)
            synchronize(self.buffers[0].device)  # only now may the trainer fill the buffer again
            self.mailbox.set("drained", number + 1)

    def finish(self, report: dict[str, Any]) -> None:
        self.mailbox.report(report)
        self.mailbox.set("drained", len(self.parts) + 1)


def open_buffers(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """The trainer introduces itself: keep its buffers open, and rehearse."""
    message, buffers = open_shared(named_tensors)
    mailbox = Mailbox(Path(message["mailbox"]))
    with _reported(mailbox):
        plan = Plan.from_json(message["plan"])
        derived = Derived(model)
        rehearsed = rehearse(model, plan, derived, beat=mailbox.beat)
        parts = []
        for number, bucket in enumerate(rehearsed.copies):
            buffer = buffers[number % len(buffers)]
            parts.append(
                [(s.name, c.source(s.view(buffer), s.start), c.target) for s, copies in bucket for c in copies]
            )
        copies = [joined([(source, target) for _, source, target in bucket]) for bucket in parts]
        targets_first = [([target for _, target in bucket], [source for source, _ in bucket]) for bucket in copies]
        receiver = Receiver(buffers, mailbox, parts, targets_first, rehearsed.fills, derived)
        model.__dict__[_STATE] = receiver
        receiver.finish({})


def receive(model: nn.Module, _: Sequence[tuple[str, Tensor]]) -> None:
    """Take the weights of one sync."""
    receiver: Receiver = model.__dict__[_STATE]

    def copy(number: int) -> None:
        targets, sources = receiver.copies[number]
        if targets:  # another rank's part of a large tensor may fill one
            torch._foreach_copy_(targets, sources)

    with _reported(receiver.mailbox), torch.no_grad():
        for fill in receiver.fills:
            fill.run()
        receiver.run(copy)
        if receiver.derived.renew():
            synchronize(receiver.buffers[0].device)
        receiver.finish({})


def verify(model: nn.Module, _: Sequence[tuple[str, Tensor]]) -> None:
    """Compare, bit by bit, what is sent with what the parameters hold; the report names what differs.

    Every element that a copy puts into a parameter counts once: not paddings, nor what the model derives.
    """
    receiver: Receiver = model.__dict__[_STATE]
    differing: dict[str, Tensor] = {}
    compared = 0

    def compare(number: int) -> None:
        nonlocal compared
        for name, source, target in receiver.parts[number]:
            wrong = (_bits(source.to(target.dtype)) != _bits(target)).sum()
            differing[name] = differing[name] + wrong if name in differing else wrong
            compared += target.numel()

    with _reported(receiver.mailbox), torch.no_grad():
        receiver.run(compare)
        totals = torch.stack(list(differing.values())).tolist() if differing else []
        wrong = {name: int(n) for name, n in zip(differing, totals, strict=True) if n}
        receiver.finish({"differing": dict(list(wrong.items())[:20]), "compared": compared})


def close_buffers(model: nn.Module, _: Sequence[tuple[str, Tensor]]) -> None:
    """Let go of the trainer's memory."""
    model.__dict__.pop(_STATE, None)
    release_shared()


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


class _reported:
    """An error goes into the mailbox: SGLang's scheduler would end with it, and the trainer would not know why."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)  # into the engine's log
        self._mailbox.fail(f"{type(error).__name__}: {error}")
        return True
