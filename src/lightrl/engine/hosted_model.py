"""The engine's own copy of the model's code, whose weights are lent or copied in by name."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from lightrl.engine.kv_cache import ATTENTION_NAME, register_attention
from lightrl.errors import UserError
from lightrl.kernels.logprob import linear_logits
from lightrl.models import gated_delta, lora
from lightrl.models.registry import is_own_code, patch_layers
from lightrl.models.routing import RoutingShape, routers
from lightrl.wrappers import clean_name

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class HostedModel:
    """A causal LM on the meta device until `load` gives it weights; buffers that are not weights are real at once.

    Names are those of the module's `state_dict`, as its checkpoint has them (`wrappers.clean_name`). With `adapters`
    those of low-rank adapters are among them. Raises UserError for a model that keeps more state between tokens than
    keys and values.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        adapters: lora.Settings | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.loaded = False
        self._owned = False
        self.module = _build(config, device, dtype, trust_remote_code)
        if adapters is not None:
            lora.inject(self.module, adapters, dtype)
            self.module.requires_grad_(False).eval()
        self.routers = routers(self.module)
        self.routing_shape = RoutingShape.of(self.module, int(config.get_text_config().num_hidden_layers))
        # Tied weights have several names for one tensor: all are known, one is enough.
        by_tensor: dict[int, list[str]] = {}
        tensors = self.module.state_dict(keep_vars=True)
        self._places = {clean_name(place): place for place in tensors}
        for name, place in self._places.items():
            by_tensor.setdefault(id(tensors[place]), []).append(name)
        self._aliases = {name: tuple(names) for names in by_tensor.values() for name in names}
        self._parameters = {clean_name(name) for name, _ in self.module.named_parameters(remove_duplicate=False)}
        self._shapes = {name: tensors[place].shape for name, place in self._places.items()}
        self._dtypes = {name: tensors[place].dtype for name, place in self._places.items()}

    def load(self, weights: Iterable[tuple[str, Tensor]], *, share: bool) -> None:
        """Bind (`share`) or copy the tensors; ValueError names every unknown, missing or misshapen one."""
        if self._owned and share:
            self.drop()
        reuse = self._owned and self.loaded
        self.loaded = False
        seen: set[str] = set()
        problems: list[str] = []
        for name, tensor in weights:
            problem = self._problem(name, tensor, share)
            if problem:
                problems.append(problem)
            elif not seen.intersection(self._aliases[name]):
                self._take(name, tensor, share, reuse)
                seen.add(name)
        missing = [names[0] for names in dict.fromkeys(self._aliases.values()) if not seen.intersection(names)]
        if missing:
            problems.append(f"missing {_listing(missing)}")
        if problems:
            self.drop()
            raise ValueError(f"weights do not fit {type(self.module).__name__}: {_listing(problems)}")
        self._owned = not share
        self.loaded = True

    def _problem(self, name: str, tensor: Tensor, share: bool) -> str | None:
        if name not in self._shapes:
            return f"unknown {name}"
        if tensor.shape != self._shapes[name]:
            return f"{name} has shape {list(tensor.shape)}, not {list(self._shapes[name])}"
        if hasattr(tensor, "full_tensor"):
            return f"{name} is a DTensor: give the full tensor"
        if share and tensor.device.type != self.device.type:
            return f"{name} lies on {tensor.device}, the engine on {self.device}"
        return None

    def _take(self, name: str, tensor: Tensor, share: bool, reuse: bool) -> None:
        if share:
            self._bind(name, tensor.detach())
        elif reuse:
            self.module.state_dict()[self._places[name]].copy_(tensor)
        else:
            # weights of another dtype than the model's (a float32 router, say) keep theirs
            dtype = self._dtypes[name]
            self._bind(name, torch.empty_like(tensor, device=self.device, dtype=dtype).copy_(tensor))

    def _bind(self, name: str, tensor: Tensor) -> None:
        """Put a tensor under a name and all its aliases."""
        new = nn.Parameter(tensor, requires_grad=False) if name in self._parameters else tensor
        for alias in self._aliases[name]:
            owner_name, _, leaf = self._places[alias].rpartition(".")
            setattr(self.module.get_submodule(owner_name), leaf, new)

    def drop(self) -> None:
        """Let go of all weights: back to the meta device."""
        for name in dict.fromkeys(names[0] for names in self._aliases.values()):
            self._bind(name, torch.empty(self._shapes[name], dtype=self._dtypes[name], device="meta"))
        self.loaded = self._owned = False


def _listing(items: list[str], most: int = 5) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def _build(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    text = config.get_text_config()
    refusal = f"the embedded engine cannot run model type {config.model_type!r}"
    recurrent = text.model_type in gated_delta.FAMILIES
    known = _LAYER_TYPES | gated_delta.LAYER_TYPES if recurrent else _LAYER_TYPES
    kinds = set(getattr(text, "layer_types", None) or ()) - known
    if kinds:
        raise UserError(f"{refusal}: it has layers of type {', '.join(sorted(kinds))}, not only attention")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{refusal}: it is an encoder-decoder")
    if getattr(text, "num_kv_shared_layers", None):
        raise UserError(f"{refusal}: its layers share keys and values")
    register_attention()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                attn_implementation=ATTENTION_NAME,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
    except ValueError as error:
        raise UserError(f"{refusal}: {str(error).splitlines()[0]}") from error
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise UserError(f"{refusal}: it has a table of its own for its attention") from error  # as Falcon's
    if not model._supports_attention_backend and not recurrent:  # Qwen3-Next's can, though it does not say so
        raise UserError(f"{refusal}: its attention cannot be replaced through transformers' registry")
    if getattr(model, "_is_stateful", False) and not (recurrent and is_own_code(model)):
        raise UserError(f"{refusal}: it keeps a recurrent state between tokens")
    patch_layers(model)  # experts and routers compute what the trainer's do
    gated_delta.prepare_engine(model)
    model.requires_grad_(False).eval()
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        head.forward = partial(_head, head)  # type: ignore[method-assign]
    _compute_buffers(model, device, refusal)
    return model


def _head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """The head's logits in float32, as the trainer has them.

    Rounded to bfloat16, logits of a real model (SmolLM2, up to 40) put a mean error of 0.02 on log-probs.
    """
    return linear_logits(hidden.flatten(0, -2), head.weight, head.bias).unflatten(0, hidden.shape[:-1])


@torch.no_grad()
def _compute_buffers(model: nn.Module, device: torch.device, refusal: str) -> None:
    """Real values for buffers that no checkpoint holds (rotary frequencies …).

    transformers' own loader does the same: `_init_weights` restores such buffers, and on meta weights it does nothing.
    """
    persistent = model.state_dict().keys()
    for prefix, module in model.named_modules():
        names = [n for n, _ in module.named_buffers(recurse=False) if f"{prefix}.{n}".lstrip(".") not in persistent]
        if not names:
            continue
        for name in names:
            old = getattr(module, name)
            fill = float("nan") if old.is_floating_point() else 0
            module.register_buffer(name, torch.full(old.shape, fill, dtype=old.dtype, device=device), persistent=False)
        model._init_weights(module)  # type: ignore[operator]
        for name in names:
            value = getattr(module, name)
            if value.is_floating_point() and value.isnan().any():
                raise UserError(f"{refusal}: its buffer {prefix}.{name} cannot be computed from the config")
