"""What a model computes from its weights when it loads them, such as the absorbed matrices of MLA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Derived:
    """Renews it, in the memory where it is: CUDA graphs know that address and no other."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._makers = list(_makers(model))
        self._tensors = _attributes(model)
        self._replaced: set[str] = set()

    def renew(self) -> bool:
        """From the weights as they are; False where the model derives nothing."""
        with self.kept():
            for maker in self._makers:
                maker.post_load_weights()  # type: ignore[operator]
        return bool(self._makers)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Tensors that the model puts in the place of others go into their memory."""
        yield
        for place, name, tensor in self._tensors.values():
            new = place.get(name)
            if new is tensor:
                continue
            if not isinstance(new, Tensor) or new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise ValueError(f"SGLang has put something else in the place of {name}: cannot be synchronised")
            if new.data_ptr() != tensor.data_ptr() or new.stride() != tensor.stride():
                self._replaced.add(name)
                tensor.copy_(new)
            place[name] = tensor

    def check(self, computed: Sequence[Tensor]) -> None:
        """After a loading that has written `computed`: ValueError if what it derived cannot be renewed."""
        if self._makers:
            self._tensors = _attributes(self._model)  # with those that are new
            return
        weights = {_memory(parameter) for parameter in self._model.parameters()}
        new = [
            name
            for key, (_, name, tensor) in _attributes(self._model).items()
            if key not in self._tensors and _memory(tensor) not in weights
        ]
        new += self._replaced
        memory = weights | {_memory(buffer) for buffer in self._model.buffers()}
        memory |= {_memory(tensor) for _, _, tensor in self._tensors.values()}
        if new or any(tensor.numel() and _memory(tensor) in memory for tensor in computed):
            raise ValueError(
                f"the engine's {type(self._model).__name__} computes {new[0] if new else 'values'} from its weights "
                "when it loads them, and has no post_load_weights to do so again: cannot be synchronised"
            )


def _makers(model: nn.Module) -> Iterator[nn.Module]:
    """Outermost modules that derive something: theirs calls those within."""
    if callable(getattr(model, "post_load_weights", None)):
        yield model
    else:
        for child in model.children():
            yield from _makers(child)


def _attributes(model: nn.Module) -> dict[tuple[int, str], tuple[dict[str, Any], str, Tensor]]:
    """Tensors that are plain attributes: neither parameters nor buffers."""
    return {
        (id(module), name): (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
