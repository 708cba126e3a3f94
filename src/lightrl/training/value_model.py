"""A sharded model with a value head: a critic, or a reward model. In Hugging Face's words a sequence classifier of one
label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.config.schema import ModelConfig
from lightrl.distributed import fsdp
from lightrl.distributed.mesh import World
from lightrl.models import load, value_head
from lightrl.models.attention import Segments
from lightrl.training.policy import compute_dtype, padded, sharded_root, to_device
from lightrl.types import Microbatch


class ValueModule(nn.Module):
    """Root of the FSDP tree. `model` is a sequence classifier of one label: its `score` is the value head."""

    def __init__(self, model: nn.Module, *, packed: bool, kernels: bool = False) -> None:
        super().__init__()
        self.model: Any = model
        self.packed = packed

    def forward(self, batch: Microbatch, segments: Segments | None) -> Tensor:
        """[N] float32: the value of what comes before each response token."""
        hidden = self._packed(batch, segments) if self.packed else self._padded(batch)
        return self.model.score(hidden[batch.logit_rows].float()).sum(-1)

    def _packed(self, batch: Microbatch, segments: Segments | None) -> Tensor:
        return self.model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            segments=segments,
        ).last_hidden_state[0]

    def _padded(self, batch: Microbatch) -> Tensor:
        """One right-padded row a segment through the stock model."""
        ids, mask = padded(batch)
        return self.model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state[mask]


@dataclass(kw_only=True)
class ValueModel:
    """A model with a value head on this rank, sharded over the world."""

    module: ValueModule
    hf_config: Any
    source: Path
    """Folder of the checkpoint it was loaded from."""
    compute_dtype: torch.dtype
    device: torch.device
    adapters: None = None
    """All its weights are trained."""

    @classmethod
    def load(cls, config: ModelConfig, world: World, *, key: str, hf_config: Any = None) -> ValueModel:
        """Stream `config.path`, a causal LM or a sequence classifier of one label, into shards. A causal LM gets a new
        head, of zeros. `key` is the config's, for messages; `hf_config` is in place of the checkpoint's."""
        source = load.resolve_checkpoint(config.path, config.revision, key=key)
        if hf_config is None:
            hf_config = value_head.load_value_config(source, config.trust_remote_code, key=key)
        model = value_head.empty_value_model(hf_config, trust_remote_code=config.trust_remote_code)
        head: Any = model.score
        head.keeps_float32 = True  # values are regressed: bfloat16 would round them to 3 digits
        dtype = compute_dtype(config.compute_dtype, world.device)
        module = sharded_root(ValueModule, model, hf_config, config, world, dtype)
        with torch.no_grad():
            head.weight.zero_()  # a new head: worth nothing before it has learned
        load.load_weights(model, source, trust_remote_code=config.trust_remote_code, new_head=value_head.VALUE_HEAD)
        return cls(module=module, hf_config=hf_config, source=source, compute_dtype=dtype, device=world.device)

    def __call__(self, batch: Microbatch) -> Tensor:
        """Values [N], with gradients where enabled. Every rank must call it as often."""
        segments = Segments.from_microbatch(batch, self.device) if self.module.packed else None
        return self.module(to_device(batch, self.device), segments)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def reclaim(self) -> None:
        """Whole parameters that a forward left behind are freed."""
        fsdp.reshard_all(self.module)


def value_config_and_tokenizer(model: ModelConfig, key: str) -> tuple[Any, Any]:
    """Of a model with a value head to be trained, with the padding token that it is scored before. No weights."""
    folder = load.resolve_checkpoint(model.path, model.revision, weights=False, key=key)
    config = value_head.load_value_config(folder, model.trust_remote_code, key=key)
    if model.tokenizer is None:
        tokenizer = load.load_tokenizer(model.path, model.revision, model.trust_remote_code, key=key)
    else:
        tokenizer = load.load_tokenizer(model.tokenizer, None, model.trust_remote_code)
    config.get_text_config().pad_token_id = load.pad_token_id(config, tokenizer)
    return config, tokenizer
