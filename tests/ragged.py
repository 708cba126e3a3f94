"""Random groups of answers of odd lengths, with holes in their loss masks, packed; and their samples one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrl.training.packing import SampleSize, TrainSample, loss_weight, pack, plan_minibatches
from lightrl.types import Microbatch

LENGTHS = [[1, 63, 2], [257, 5], [1], [17, 9, 30, 4], [3, 8]]  # of the answers of each group


@dataclass
class Answer:
    """One sample in float64: what the trainer computes now and computed before, what the engine and a reference say."""

    sample: TrainSample
    now: Tensor  # [T]
    old: Tensor
    engine: Tensor
    reference: Tensor
    entropy: Tensor

    @property
    def mask(self) -> Tensor:
        return torch.tensor(self.sample.loss_mask).bool()


def answers(seed: int = 0, spread: float = 0.3, holes: bool = True) -> list[Answer]:
    """`spread`: how far log-probs of the four policies are apart. A group's first answer may have advantage 0."""
    g = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64)

    found = []
    for group, lengths in enumerate(LENGTHS):
        prompt = torch.randint(3, 97, (group + 2,), generator=g).tolist()
        for index, n in enumerate(lengths):
            engine = -normal(n).abs() - 0.05
            mask = torch.randint(0, 4, (n,), generator=g).clamp_max(1).tolist() if holes else [1] * n
            if (group, index) == (3, 3):
                mask = [0] * n if holes else mask  # an answer without a single token of its own
            sample = TrainSample(
                group_index=group,
                index=index,
                prompt=prompt,
                response=torch.randint(3, 97, (n,), generator=g).tolist(),
                loss_mask=mask,
                rollout_logprobs=engine.tolist(),
                advantage=float(normal(1)) if index or group else 0.0,
            )
            old = (engine + spread * normal(n)).clamp_max(-0.01)
            found.append(
                Answer(
                    sample=sample,
                    now=(old + spread * normal(n)).clamp_max(-0.01).requires_grad_(),
                    old=old,
                    engine=engine,
                    reference=(old + spread * normal(n)).clamp_max(-0.01),
                    entropy=normal(n).abs().requires_grad_(),
                )
            )
    return found


@dataclass
class Packed:
    """A microbatch in float64, and its answers' tensors, joined."""

    batch: Microbatch
    now: Tensor
    entropy: Tensor


def packed(found: list[Answer], *, parts: int = 1, **aggregation: Any) -> Iterator[Packed]:
    """The answers in `parts` microbatches of whole samples."""
    cost: Any = lambda tokens, pairs, targets: float(tokens)  # noqa: E731
    sizes = [
        SampleSize(
            a.sample.group_index, a.sample.index, 0, len(a.sample.prompt), len(a.sample.response), int(a.mask.sum())
        )
        for a in found
    ]
    (plan,) = plan_minibatches(sizes, world_size=1, minibatches=1, max_tokens=10**6, share_prompts=True, cost=cost)
    options = {"aggregation": "token_mean", "constant_length": 1} | aggregation
    for part in range(parts):
        mine = found[part::parts]
        batch = pack([[a.sample] for a in mine], [[loss_weight(plan, int(a.mask.sum()), **options)] for a in mine])
        for name, value in vars(batch).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(batch, name, value.double())
        # in float64 from the start: weights and advantages rounded to float32 would hide behind any tolerance
        batch.loss_weights = torch.cat(
            [loss_weight(plan, int(a.mask.sum()), **options) * a.mask.double() for a in mine]
        )
        batch.advantages = torch.cat([torch.full_like(a.old, a.sample.advantage) for a in mine])
        batch.rollout_logprobs = torch.cat([a.engine for a in mine])
        yield Packed(batch=batch, now=torch.cat([a.now for a in mine]), entropy=torch.cat([a.entropy for a in mine]))


def gradients(found: list[Answer]) -> list[Tensor]:
    """Of `now` and `entropy` of each answer."""
    return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for a in found for t in (a.now, a.entropy)]


def same_gradients(found: list[Answer], reference: list[Answer]) -> None:
    for mine, theirs in zip(gradients(found), gradients(reference), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def plain_mean(values: list[tuple[Answer, Tensor]], aggregation: str, constant_length: int = 1) -> Tensor:
    """Token losses of whole answers to one number, straight from the definitions."""
    counted = [(a, v[a.mask]) for a, v in values if bool(a.mask.any())]
    if aggregation == "token_mean":
        return torch.cat([v for _, v in counted]).mean()
    if aggregation == "sequence_mean":
        return torch.stack([v.mean() for _, v in counted]).mean()
    return torch.stack([v.sum() for _, v in counted]).sum() / (len(counted) * constant_length)
