"""What gated delta layers remember of the running sequences: a fixed amount each, beside the keys of other layers.

Each layer holds, for every slot, the last inputs of its convolution [slots, taps - 1, C] and a float32 state
[slots, Hv, Dk, Dv]. Unlike keys, these are overwritten with every token: what a prompt left is kept apart while answers
to it wait (`snapshot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightrl.kernels import gated_delta
from lightrl.kernels.gated_delta import Chains, DeltaInputs

Snapshot = dict[int, tuple[Tensor, Tensor]]


class RecurrentStates:
    """Slots of states. Say what the next forward is (`begin_prefill`, `begin_decode`), then run the model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_slots = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompts: _Prompts | None = None
        self._num_rows = 0

    @property
    def num_layers(self) -> int:
        """Layers that have written states so far."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def reserve(self, num_slots: int) -> None:
        """Have at least so many slots; what they hold stays."""
        self.num_slots = max(self.num_slots, num_slots)
        for index, (recent, state) in list(self._layers.items()):
            if recent.shape[0] < self.num_slots:
                self._layers[index] = (self._grown(recent), self._grown(state))

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.num_slots, *old.shape[1:])
        new[: old.shape[0]] = old
        return new

    def free(self) -> None:
        """Give all memory back."""
        self._layers.clear()
        self.num_slots = self._num_rows = 0
        self._prompts = None

    def copy_slot(self, source: int, targets: Sequence[int]) -> None:
        """Copy the present state of one slot to others."""
        self.restore({layer: (r[source], s[source]) for layer, (r, s) in self._layers.items()}, targets)

    def snapshot(self, slot: int) -> Snapshot:
        """A copy of one slot's present state, by layer."""
        return {layer: (recent[slot].clone(), state[slot].clone()) for layer, (recent, state) in self._layers.items()}

    def restore(self, snapshot: Snapshot, slots: Sequence[int]) -> None:
        """Put a snapshot into slots."""
        if not snapshot:
            return
        index = torch.tensor(slots, device=self.device)
        for layer, kept in snapshot.items():
            for cache, content in zip(self._layers[layer], kept, strict=True):
                cache.index_copy_(0, index, content.expand(len(slots), *content.shape).clone())

    def begin_prefill(self, prompts: Sequence[tuple[int, Tensor]]) -> None:
        """The next forward packs prompts into one row: the length of each, and its slots [n]."""
        self._prompts = _Prompts([length for length, _ in prompts], [slots for _, slots in prompts], self.device)

    def begin_decode(self, num_rows: int) -> None:
        """The next forward takes one token of each of the slots 0..R-1."""
        self._prompts, self._num_rows = None, num_rows

    def mix(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """Convolution and delta rule of one layer for the new rows [T, Hv, Dv]; the slots' states follow."""
        if layer not in self._layers:
            taps, channels = inputs.weight.shape[1], inputs.mixed.shape[1]
            shape = (inputs.value_heads, inputs.key_dim, inputs.value_dim)
            self._layers[layer] = (
                inputs.mixed.new_zeros(self.num_slots, taps - 1, channels),
                inputs.mixed.new_zeros(self.num_slots, *shape, dtype=torch.float32),
            )
        recent, state = self._layers[layer]
        if self._prompts is None:
            return gated_delta.step(inputs, recent[: self._num_rows], state[: self._num_rows])
        prompts = self._prompts
        out, ends = gated_delta.mix_with_ends(inputs, prompts.chains)
        assert ends is not None
        last = torch.stack([gated_delta.last_inputs(inputs.mixed, a, b, recent.shape[1]) for a, b in prompts.borders])
        recent.index_copy_(0, prompts.slots, last[prompts.owners])
        state.index_copy_(0, prompts.slots, ends[prompts.owners])
        return out


class _Prompts:
    """One packed prefill: which rows are which prompt's, and where their states go."""

    def __init__(self, lengths: list[int], slots: list[Tensor], device: torch.device) -> None:
        self.borders = list(pairwise([0, *accumulate(lengths)]))
        self.slots = torch.cat(slots)
        self.owners = torch.tensor([i for i, s in enumerate(slots) for _ in range(len(s))], device=device)
        self._lengths, self._device = lengths, device

    @cached_property
    def chains(self) -> Chains:
        """Made for the first layer that asks."""
        return Chains.build(self._lengths, [-1] * len(self._lengths), self._device)
