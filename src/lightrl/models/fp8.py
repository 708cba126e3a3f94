"""Weights for an engine that computes in FP8: which tensors go as numbers and scales, and making them.

The form is that of FP8 checkpoints (DeepSeek-V3, Qwen3-FP8): a tensor `NAME.weight` of e4m3 numbers and its
`NAME.weight_scale_inv`, a float32 scale for each block of 128 x 128. Products of the blocks are quantised: attention's
and the MLP's projections and the experts. Embeddings, head, norms, routers, what attention compresses (the first
projections of MLA) and the small projections of delta layers stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.kernels.fp8 import BLOCK, E4M3, quantize_weight

Layout = Sequence[tuple[str, Sequence[int], torch.dtype]]
Named = Sequence[tuple[str, Tensor]]

SCALE = "_scale_inv"
"""What a quantised tensor's name is followed by in the name of its scales."""

_QUANTISED = re.compile(r"(?P<owner>.*)\.(?P<part>(?:[qkvo]|q_b|gate|up|down|out)_proj|in_proj_(?:qkvz|qkv|z))\.weight")
_EXPERTS = re.compile(r"(?P<owner>.*)\.(?:experts\.\d+|shared_experts?)\b")
_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_TOGETHER |= {"in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz"}
_FUSED = {"q_a_proj": "fused_qkv_a_proj_with_mqa", "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa"}
_FUSED |= {"in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz"}
_FUSED |= {"in_proj_a": "in_proj_ba", "in_proj_b": "in_proj_ba"}
"""Names by which SGLang knows a layer that it makes of several."""


@dataclass(frozen=True)
class Fp8Plan:
    """What of a policy's stored tensors an engine gets in FP8."""

    names: frozenset[str]
    """Tensors that are quantised."""
    kept: tuple[str, ...]
    """Modules that have matrices and stay in the compute dtype."""
    layout: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """Name, shape and dtype of each tensor that the engine gets, in order."""

    @classmethod
    def of(cls, layout: Layout, parts: int = 1) -> Fp8Plan:
        """For `layout`, the policy's own, and an engine that is split over `parts` GPUs.

        An engine holds some matrices as one (q, k and v; gate and up; a layer's experts). Each part of each must be
        whole blocks: where one is not, all of them stay. ValueError when nothing is left to quantise.
        """
        wanted: dict[str, list[str]] = {}
        fitting: dict[str, bool] = {}
        for name, shape, _ in layout:
            if len(shape) == 2 and (unit := _unit(name)) is not None:
                wanted.setdefault(unit, []).append(name)
                fits = all(size % (BLOCK * parts) == 0 for size in shape)
                fitting[unit] = fitting.get(unit, True) and fits
        names = frozenset(name for unit, members in wanted.items() if fitting[unit] for name in members)
        if not names:
            raise ValueError(f"none of its matrices has sides that are multiples of {BLOCK * parts}")
        sent: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        for name, shape, dtype in layout:
            sent.append((name, tuple(shape), E4M3 if name in names else dtype))
            if name in names:
                sent.append((name + SCALE, tuple(-(-size // BLOCK) for size in shape), torch.float32))
        kept = dict.fromkeys(m for n, s, _ in layout if len(s) >= 2 and n not in names for m in _modules(n))
        return cls(names, tuple(kept), tuple(sent))

    def config(self) -> dict[str, object]:
        """`quantization_config` of a `config.json` whose checkpoint has these tensors."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(self.kept),
        }

    def apply(self, groups: Iterable[Named], dtype: torch.dtype) -> Iterator[list[tuple[str, Tensor]]]:
        """The tensors of `groups`, in order, each quantised one followed by its scales.

        Values are rounded to `dtype`, the compute dtype, before: that is what the policy computes with, and float32
        masters and gathered weights give the same.
        """
        for group in groups:
            made = _quantise({name: tensor for name, tensor in group if name in self.names}, dtype)
            sent: list[tuple[str, Tensor]] = []
            for name, tensor in group:
                if name in made:
                    numbers, scales = made[name]
                    sent += [(name, numbers), (name + SCALE, scales)]
                else:
                    sent.append((name, tensor))
            yield sent


def _unit(name: str) -> str | None:
    """What must be quantised together with it; None for what is not."""
    found = _QUANTISED.fullmatch(name)
    if found is None:
        return None
    if (experts := _EXPERTS.match(found["owner"])) is not None:
        return f"{experts['owner']}.experts"
    return f"{found['owner']}.{_TOGETHER.get(found['part'], found['part'])}"


def _modules(name: str) -> list[str]:
    """A kept tensor's module, under the names that an engine may know it by."""
    if (experts := re.match(r"(.*\.experts)\.", name)) is not None:
        return [experts[1]]
    owner, _, part = name.removesuffix(".weight").rpartition(".")
    prefix = f"{owner}." if owner else ""
    return [prefix + part, *([prefix + _FUSED[part]] if part in _FUSED else [])]


def _quantise(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Numbers and scales of each; those that lie at equal distances in one memory (a layer's experts) at once."""
    made: dict[str, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for names, stack in _stacks(tensors):
            numbers, scales = quantize_weight(stack.to(dtype))
            made.update(zip(names, zip(numbers.unbind(0), scales.unbind(0), strict=True), strict=True))
    return made


def _stacks(tensors: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """Names of [R, C] tensors, and all of them as one view [n, R, C]."""
    alike: dict[object, list[tuple[int, str]]] = {}
    for name, t in tensors.items():
        place = (t.untyped_storage()._cdata, t.dtype, tuple(t.shape), t.stride())
        alike.setdefault(place, []).append((int(t.storage_offset()), name))
    for members in alike.values():
        members.sort()
        start = 0
        while start < len(members):
            end = start + 1
            step = members[end][0] - members[start][0] if end < len(members) else 0
            while end < len(members) and members[end][0] - members[end - 1][0] == step:
                end += 1
            names = [name for _, name in members[start:end]]
            first = tensors[names[0]]
            yield names, first.as_strided((len(names), *first.shape), (step, *first.stride()), members[start][0])
            start = end
