"""A rank's training state to page-locked host memory and back, so that an engine on the same GPU has the room.

What moves is the *storage* under each tensor: its bytes are copied, then the storage is resized to 0 and later back.
Tensors, their views and the references FSDP2 keeps (`sharded_param`, `_sharded_param_data`) are never replaced, so
nothing has to be told about it, and this holds for every torch version that keeps shards in storages of their own.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal
from weakref import finalize

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightrl.distributed.fsdp import reshard_all
from lightrl.errors import UserError

_MIB, _GIB = 1 << 20, 1 << 30
_CHUNK = _GIB  # host memory is page-locked in pieces of at most this
_BATCH = 256 * _MIB  # device memory is freed after this much was copied
_DIRECT = _MIB  # smaller storages are copied through one flat buffer: a copy of its own costs microseconds
_PACKED = 32 * _MIB  # … of at most this
_ALIGN = 512  # the allocator's granularity, too
_THREADS = 8
_MARGIN = _GIB  # what an engine takes while it runs, beside what it asks for


class HostMemory:
    """Host memory seen as one range of bytes. Grows in chunks and is kept until `close`; page-locked if `pin`.

    The chunks are mapped, touched by several threads and then registered, several times faster than cudaHostAlloc;
    torch's pinned allocator would also round each up to a power of two.
    """

    def __init__(self, *, pin: bool, limit: int | None, key: str, chunk_bytes: int = _CHUNK) -> None:
        self._pin, self._limit, self._key, self._chunk_bytes = pin, limit, key, chunk_bytes
        self._chunks: list[Tensor] = []
        self._starts: list[int] = []
        self.nbytes = 0
        # CUDA must let go of the pages before they are unmapped, or the next mapping at their address cannot be used.
        self._release = finalize(self, _unlock, self._chunks, pin)
        self._release.atexit = False  # the process's end unlocks them

    def reserve(self, nbytes: int) -> None:
        """Have at least `nbytes`. UserError, before anything is allocated, where that is more than the limit."""
        total = _round_up(nbytes, mmap.PAGESIZE)
        if self._limit is not None and nbytes > self.nbytes and total > self._limit:
            raise UserError(
                f"{self._key}: the training state of this rank takes {total / _GIB:.2f} GiB of host memory while the "
                f"engine generates, {self._limit / _GIB:.2f} GiB are allowed: raise it, or shard over more ranks"
            )
        while self.nbytes < total:
            self._grow(min(self._chunk_bytes, total - self.nbytes))

    def pieces(self, start: int, nbytes: int) -> Iterator[Tensor]:
        """The bytes [start, start + nbytes) as one view a chunk."""
        index = bisect_right(self._starts, start) - 1
        while nbytes > 0:
            first = start - self._starts[index]
            piece = self._chunks[index][first : first + nbytes]
            yield piece
            start, nbytes, index = start + piece.numel(), nbytes - piece.numel(), index + 1

    def close(self) -> None:
        """Give all of it back."""
        _unlock(self._chunks, self._pin)
        self._starts, self.nbytes = [], 0

    def _grow(self, nbytes: int) -> None:
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A forked child must not turn these pages copy-on-write: the GPU would go on writing to the old ones.
            # Huge pages are locked faster. A kernel that knows neither is no reason to stop.
            for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
                if hasattr(mmap, advice):
                    with suppress(OSError):
                        memory.madvise(getattr(mmap, advice))
            chunk = torch.frombuffer(memory, dtype=torch.uint8)
            if self._pin:
                parts = chunk.split(max(_round_up(nbytes // _THREADS, mmap.PAGESIZE), mmap.PAGESIZE))
                with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
                    list(pool.map(Tensor.zero_, parts))
                portable = 1  # cudaHostRegisterPortable: page-locked for every context of this process
                _check(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), nbytes, portable))
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"{self._key}: no {nbytes / _GIB:.2f} GiB of page-locked host memory beside {self.nbytes / _GIB:.2f} "
                f"GiB held already ({str(error).splitlines()[0]}): free host memory or shard over more ranks"
            ) from error
        self._chunks.append(chunk)
        self._starts.append(self.nbytes)
        self.nbytes += nbytes


@dataclass(frozen=True)
class _Batch:
    """Storages that move together; their bytes lie one after the other on the host from `starts[0]`."""

    storages: list[UntypedStorage]
    sizes: list[int]  # bytes
    starts: list[int]  # host offsets, bytes
    packed: bool

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class Offloader:
    """Moves parameters, gradients and optimizer state of this rank off the GPU and back, bit for bit.

    `module`: the FSDP2 root, or any module. `max_host_bytes`: page-locked memory this rank may hold, set by the config
    key `host_key`; that memory is taken at the first `offload` and kept until `close`. On the CPU all calls do
    nothing, unless `on_cpu` asks for the copies all the same.

    While the state is away nothing may read or replace it: no forward, step, checkpoint or `load_state_dict`. Buffers
    of the module stay. Gradients of microbatches not yet reduced (`set_gradient_sync(False)`) stay, too.
    """

    def __init__(
        self,
        module: nn.Module,
        *optimizers: Optimizer | None,
        max_host_bytes: int | None = None,
        host_key: str = "parallel.offload_host_gib",
        on_cpu: bool = False,
        chunk_bytes: int = _CHUNK,
    ) -> None:
        self._module, self._optimizers = module, [o for o in optimizers if o is not None]
        first = next(module.parameters(), None)
        self.device = torch.device("cpu") if first is None else next(_plain(first)).device
        self._cuda = self.device.type == "cuda"
        self._active = self._cuda or on_cpu
        self._host = HostMemory(pin=self._cuda, limit=max_host_bytes, key=host_key, chunk_bytes=chunk_bytes)
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        self._away: deque[_Batch] = deque()

    @property
    def is_offloaded(self) -> bool:
        """Whether any of the state is on the host."""
        return bool(self._away)

    @property
    def host_bytes(self) -> int:
        """Page-locked host memory held."""
        return self._host.nbytes

    @torch.no_grad()
    def state_bytes(self) -> int:
        """Device memory that `offload` would free now."""
        return sum(s.nbytes() for s in self._resident()) if self._active else 0

    def needed(self, free_bytes: int) -> bool:
        """Whether an engine that wants `free_bytes` of device memory would not find them with the state left there."""
        if not self._cuda:
            return False
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + unused < free_bytes

    @torch.no_grad()
    def offload(self) -> int:
        """Copy the state to the host and free its device memory, with all that torch's allocator keeps unused.

        Whole parameters that a forward left behind are freed first. What is away already stays there. Returns the
        bytes moved; UserError, with nothing moved, where host memory does not suffice.
        """
        if not self._active:
            return 0
        reshard_all(self._module)
        batches, end = _plan(self._resident(), self._end())
        self._host.reserve(end)
        self._synchronize()  # whatever still computes with these tensors, on any stream
        copying: list[tuple[_Batch, Any]] = []
        for batch in batches:
            copying.append((batch, self._copy_out(batch)))
            if len(copying) > 2:  # free the oldest while the next two are copied
                self._free(*copying.pop(0))
        for item in copying:
            self._free(*item)
        if self._cuda:
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()
        return sum(batch.nbytes for batch in batches)

    @torch.no_grad()
    def onload(self) -> int:
        """Bring everything back. Returns the bytes moved.

        UserError where the device has no room: what did not fit stays on the host, and `onload` can be called again.
        """
        if not self._away:
            return 0
        self._synchronize()
        # All memory first: cudaMalloc waits for copies that are under way.
        ready: list[tuple[_Batch, Tensor | None]] = []
        full: torch.OutOfMemoryError | None = None
        for batch in self._away:
            try:
                ready.append((batch, self._allocate(batch)))
            except torch.OutOfMemoryError as error:
                full = error
                break
        for batch, flat in ready:
            self._copy_in(batch, flat)
            self._away.popleft()
        self._synchronize()
        if full is not None:
            free, _ = torch.cuda.mem_get_info(self.device)
            raise UserError(
                f"{self.device}: {sum(b.nbytes for b in self._away) / _GIB:.2f} GiB of training state do not fit back, "
                f"{free / _GIB:.2f} GiB are free: has the engine released its memory? Lower engine.memory_fraction "
                "or shard over more ranks"
            ) from full
        return sum(batch.nbytes for batch, _ in ready)

    def close(self) -> None:
        """Bring the state back and give the host memory back."""
        self.onload()
        self._host.close()

    def _resident(self) -> list[UntypedStorage]:
        """Storages of the state on this device, each once, in the order of use."""
        found: dict[int, UntypedStorage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.device == self.device and storage.nbytes() and storage.resizable():
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())

    def _tensors(self) -> Iterator[Tensor]:
        parameters = list(self._module.parameters())
        for parameter in parameters:
            yield from _plain(parameter)
        for parameter in parameters:
            if parameter.grad is not None:
                yield from _plain(parameter.grad)
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from _nested(state)

    def _end(self) -> int:
        """First host byte that holds nothing."""
        return max((batch.starts[-1] + batch.sizes[-1] for batch in self._away), default=0)

    def _copy_out(self, batch: _Batch) -> Any:
        """Start the copy to the host; returns the event that ends it."""
        with self._side_stream():
            views = [_bytes(storage) for storage in batch.storages]
            if batch.packed:
                self._to_host(torch.cat(views), batch.starts[0])
            else:
                for view, start in zip(views, batch.starts, strict=True):
                    self._to_host(view, start)
            return None if self._stream is None else self._stream.record_event()

    def _free(self, batch: _Batch, copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        self._away.append(batch)
        for storage in batch.storages:
            storage.resize_(0)

    def _allocate(self, batch: _Batch) -> Tensor | None:
        """Device memory for a batch, from the current stream's pool; the flat buffer of a packed one.

        A block as large as the batch is taken and given back first, so that torch's allocator cuts the storages out
        of one segment: a cudaMalloc and a cudaFree for each of them took as long as a quarter of the copies.
        """
        try:
            if self._cuda and not batch.packed:
                block = torch.empty(
                    sum(_round_up(n, _ALIGN) for n in batch.sizes), dtype=torch.uint8, device=self.device
                )
                del block
            for storage, size in zip(batch.storages, batch.sizes, strict=True):
                storage.resize_(size)
            if not batch.packed:
                return None
            with self._side_stream():
                return torch.empty(batch.nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            for storage in batch.storages:
                storage.resize_(0)
            raise

    def _copy_in(self, batch: _Batch, flat: Tensor | None) -> None:
        """Start the copy from the host."""
        with self._side_stream():
            views = [_bytes(storage) for storage in batch.storages]
            if flat is not None:
                self._from_host(flat, batch.starts[0])
                torch._foreach_copy_(views, flat.split(batch.sizes))
            else:
                for view, start in zip(views, batch.starts, strict=True):
                    self._from_host(view, start)

    def _to_host(self, source: Tensor, start: int) -> None:
        first = 0
        for piece in self._host.pieces(start, source.numel()):
            piece.copy_(source[first : first + piece.numel()], non_blocking=self._cuda)
            first += piece.numel()

    def _from_host(self, target: Tensor, start: int) -> None:
        first = 0
        for piece in self._host.pieces(start, target.numel()):
            target[first : first + piece.numel()].copy_(piece, non_blocking=self._cuda)
            first += piece.numel()

    def _side_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)


class TrainingState:
    """What training keeps on this rank's GPU, and whether it leaves while an engine generates (`parallel.offload`).

    `auto`: only where the engine would not find its memory otherwise.
    """

    def __init__(self, offloader: Offloader, mode: Literal["auto", "always", "never"]) -> None:
        self._offloader, self._mode = offloader, mode

    @property
    def is_offloaded(self) -> bool:
        return self._offloader.is_offloaded

    def free_cache(self, nbytes: int) -> None:
        """Give what torch's allocator keeps unused back to the driver, if `nbytes` are not free without it."""
        device = self._offloader.device
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < nbytes:
            torch.cuda.empty_cache()

    def make_room(self, nbytes: int) -> None:
        """An engine is about to take `nbytes` of device memory: leave, if need be. What is away stays away."""
        if self._mode == "always" or (self._mode == "auto" and self._offloader.needed(nbytes + _MARGIN)):
            self._offloader.offload()
        else:
            self.free_cache(nbytes + _MARGIN)

    def come_back(self) -> None:
        """All of it on the GPU again, once the engine has released its memory."""
        self._offloader.onload()

    def close(self) -> None:
        """As `come_back`, and the host memory is given back."""
        self._offloader.close()


def _plan(storages: Iterable[UntypedStorage], start: int) -> tuple[list[_Batch], int]:
    """Batches with their places on the host from byte `start`, large storages first; and the first byte after them."""
    batches: list[_Batch] = []
    room, packing = 0, False  # bytes that the last batch still takes, and its kind
    for storage in sorted(storages, key=lambda storage: storage.nbytes() < _DIRECT):  # stable: else as they come
        size = storage.nbytes()
        packed = size < _DIRECT
        if not batches or packed != packing or size > room:
            batches.append(_Batch([], [], [], packed))
            room, packing = (_PACKED if packed else _BATCH), packed
        last = batches[-1]
        if not (packed and last.storages):  # packed storages touch one another
            start = _round_up(start, _ALIGN)
        last.storages.append(storage)
        last.sizes.append(size)
        last.starts.append(start)
        start += size
        room -= size
    return batches, start


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with storage inside a DTensor or another wrapper, such as a quantised optimizer state."""
    if isinstance(tensor, DTensor):
        yield from _plain(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from _plain(inner)
    else:
        yield tensor


def _nested(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield from _plain(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _nested(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nested(item)


def _bytes(storage: UntypedStorage) -> Tensor:
    """A storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unlock(chunks: list[Tensor], pinned: bool) -> None:
    """Empty the list; its memory is no longer page-locked."""
    while chunks:
        chunk = chunks.pop()
        if pinned:
            _check(torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr()))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check(code: Any) -> None:
    """RuntimeError unless a CUDA runtime call succeeded."""
    torch.cuda.check_error(code)
