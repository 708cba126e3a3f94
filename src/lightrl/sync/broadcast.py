"""Weights over NCCL (gloo on CPUs): one trainer rank broadcasts, bucket by bucket, to all processes of all servers.

The group is no part of torch.distributed's job: it is made over a store of its own, under the keys that SGLang's side
uses (`init_custom_process_group` there). A bucket is one flat tensor; names, dtypes and shapes go over HTTP at the same
time. Everything that may hang runs in threads that can be left behind, so that a lost server is an error in bounded
time.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.sync.peers import Groups, Peer, SyncError, post_all, together
from lightrl.threads import spawn

_GOODBYE = 10.0  # seconds for leaving the group


@dataclass(frozen=True)
class Piece:
    """Where one tensor lies in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the bucket; a multiple of the dtype's size."""

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor itself, in a buffer of bytes."""
        return buffer[self.offset : self.end].view(self.dtype).view(self.shape)


Bucket = Sequence[Piece]


class BroadcastSync:
    """Implements `lightrl.sync.peers.Transport`.

    `layout` says which tensors come, in order; buckets are of at most `bucket_bytes` (or one layer). Servers
    connect to `address` (None: the one this machine has in their network), `port` (0: any that is free). `name` is the
    group's and must be new to the servers.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        layout: Sequence[tuple[str, Sequence[int], torch.dtype]],
        *,
        device: torch.device,
        name: str,
        bucket_bytes: int,
        address: str | None,
        port: int,
        timeout: float,
    ) -> None:
        self._peers, self._device, self._name = peers, device, name
        self._buckets = plan(layout, bucket_bytes)
        self._address = address or own_address([peer.url for peer in peers])
        self._port, self._timeout = port, timeout
        self._store: Any = None
        self._group: Any = None
        self._broken: str | None = None

    def send(self, groups: Groups, label: str) -> None:
        """Broadcast all buckets; the servers load each as it comes, and take the label with the last."""
        if self._broken is not None:
            raise SyncError(f"the group with the servers broke earlier: {self._broken}")
        try:
            if self._group is None:
                self._open()
            buffer = torch.empty(max(b[-1].end for b in self._buckets), dtype=torch.uint8, device=self._device)
            self._in_sessions(self._begin)
            for number, bucket in enumerate(filled(self._buckets, groups, buffer)):
                last = number + 1 == len(self._buckets)
                self._send(bucket, buffer[: bucket[-1].end], label if last else None)
            self._in_sessions(self._end)
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            self._leave()
            raise

    def close(self) -> None:
        """Leave the group, on both sides."""
        if self._group is not None:
            with contextlib.suppress(Exception):
                post_all(self._peers, "/destroy_weights_update_group", {"group_name": self._name}, _GOODBYE)
            self._leave()
        self._broken = self._broken or "it was closed"

    def _open(self) -> None:
        """A process group of this process (rank 0) and all processes of all servers."""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        limit = timedelta(seconds=2 * self._timeout)  # later than our own, which knows what to say
        try:
            store = serve_store(self._address, self._port, limit)
        except (OSError, RuntimeError) as error:
            where = f"{self._address}, port {self._port} (sync.address, sync.port)"
            raise SyncError(f"cannot listen on {where}: {error}") from None
        self._store = store
        body = {
            "master_address": self._address,
            "master_port": store.port,
            "world_size": 1 + sum(peer.tensor_parallel for peer in self._peers),
            "group_name": self._name,
            "backend": backend,
        }
        joining: dict[str, Any] = {}
        offset = 1
        for peer in self._peers:
            request = {**body, "rank_offset": offset}
            joining[peer.url] = spawn(peer.post, "/init_weights_update_group", request, self._timeout)
            offset += peer.tensor_parallel
        joining["joining the servers' group"] = spawn(self._join, backend, body["world_size"], limit)
        self._group = together(joining, self._timeout)[-1]

    def _join(self, backend: str, size: int, limit: timedelta) -> Any:
        device = "cuda" if backend == "nccl" else "cpu"
        store = dist.PrefixStore(self._name, self._store)  # SGLang's own prefix, then torch's two
        store = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{self._name}/", store))
        return join_group(store, 0, size, self._device, limit)

    def _send(self, bucket: Bucket, flat: Tensor, label: str | None) -> None:
        self._synchronize()  # the copies into the bucket: another thread, with a stream of its own, sends it
        body = {
            "names": [piece.name for piece in bucket],
            "dtypes": [str(piece.dtype).removeprefix("torch.") for piece in bucket],
            "shapes": [list(piece.shape) for piece in bucket],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        if label is not None:
            body["weight_version"] = label
        path = "/update_weights_from_distributed"
        under_way: dict[str, Any] = {p.url: spawn(p.post, path, body, self._timeout) for p in self._peers}
        under_way["broadcast"] = spawn(self._broadcast, flat)
        together(under_way, self._timeout)

    def _in_sessions(self, step: Callable[[Peer], Any]) -> None:
        """Begin or end the session of each server that takes weights only within one."""
        peers = [peer for peer in self._peers if peer.weight_sessions]
        if peers:
            together({peer.url: spawn(step, peer) for peer in peers}, 3 * self._timeout)

    def _begin(self, peer: Peer) -> None:
        try:
            peer.post("/begin_weight_update", {}, self._timeout)
        except RuntimeError:  # perhaps a trainer that died in a sync left one open
            self._end(peer)
            peer.post("/begin_weight_update", {}, self._timeout)

    def _end(self, peer: Peer) -> None:
        peer.post("/end_weight_update", {}, self._timeout)

    def _broadcast(self, flat: Tensor) -> None:
        broadcast(self._group, flat)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _leave(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None:
            held = [group]
            del group  # freed in the thread, which must not be in the middle of it when the process ends
            leaving = spawn(abandon, held, self._broken is not None)
            if self._broken is None:
                wait([leaving], _GOODBYE)


def join_group(store: Any, rank: int, size: int, device: torch.device, limit: timedelta) -> Any:
    """A process group of its own, no part of torch.distributed's job: NCCL for tensors on a GPU, gloo on a CPU."""
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


def broadcast(group: Any, flat: Tensor) -> None:
    """From rank 0 of the `group`, into or out of `flat`; it is there on return. May run in any thread."""
    if flat.device.type == "cuda":
        torch.cuda.set_device(flat.device)  # a thread starts with device 0
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([flat], options).wait()
    if flat.device.type == "cuda":
        torch.cuda.synchronize(flat.device)


def abandon(held: list[Any], broken: bool) -> None:
    """Abort what is under way and free the one group in `held`; keep a broken one for as long as the process lives.

    Freeing one of gloo's waits, without letting Python run, until its broadcast times out.
    """
    with contextlib.suppress(RuntimeError):  # not every backend can
        held[0].abort()
    if broken:
        threading.Event().wait()
    held.clear()


def plan(layout: Iterable[tuple[str, Sequence[int], torch.dtype]], limit: int) -> list[Bucket]:
    """Place tensors, in order, into buckets of at most `limit` bytes, or of one layer.

    Layers are not split: some models of SGLang's must be handed certain tensors of a layer together. There are no gaps
    in a bucket, as SGLang cuts it up again: wide dtypes come first, so that each lies at a multiple of its own size.
    """
    units: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = []
    previous: str | None = None
    for name, shape, dtype in layout:
        found = re.match(r"(.*?\.\d+)\.", name)
        layer = found[1] if found else None
        if layer is None or layer != previous:
            units.append([])
        units[-1].append((name, tuple(shape), dtype))
        previous = layer
    buckets: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    room = limit
    for unit in units:
        size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in unit)
        if buckets[-1] and size > room:
            buckets.append([])
            room = limit
        buckets[-1] += unit
        room -= size
    return [_place(bucket) for bucket in buckets]


def _place(tensors: list[tuple[str, tuple[int, ...], torch.dtype]]) -> Bucket:
    pieces: list[Piece] = []
    for name, shape, dtype in sorted(tensors, key=lambda tensor: -tensor[2].itemsize):
        pieces.append(Piece(name, shape, dtype, pieces[-1].end if pieces else 0))
    return pieces


def filled(buckets: Sequence[Bucket], groups: Groups, buffer: Tensor) -> Iterator[Bucket]:
    """Each bucket when its tensors are in `buffer`; the next one is copied over it. ValueError for another order."""
    coming = iter(buckets)
    bucket = next(coming)
    places = {piece.name: piece for piece in bucket}
    for group in groups:
        for name, tensor in group:
            piece = places.pop(name, None)
            if piece is None:
                expected = next(iter(places), "nothing more")
                raise ValueError(f"expected {expected} in the layout's order, got {name}")
            piece.view(buffer).copy_(tensor)
            if not places:
                yield bucket
                bucket = next(coming, [])
                places = {piece.name: piece for piece in bucket}
    if places:
        raise ValueError(f"nothing came for {next(iter(places))}")


def serve_store(address: str, port: int, limit: timedelta) -> Any:
    """torch's store at `address` and `port` (0: any that is free), for whoever can reach it there and nowhere else.

    By itself it listens on all of a machine's addresses. So it does where `address` is none of this machine's own (as
    behind a translation of addresses), or a name that may mean another one elsewhere. OSError, RuntimeError where
    nothing can listen there.
    """
    arguments: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": limit}
    places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    found = list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in places))
    is_certain = address == "localhost" or any(own == address for _, own in found)
    if not is_certain and (len(found) > 1 or found[0][1].startswith("127.") or found[0][1] == "::1"):
        return dist.TCPStore(address, port, **arguments)
    family, own = found[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((own, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return dist.TCPStore(address, port, **arguments)
        listener.listen(512)
        port = listener.getsockname()[1]
        return dist.TCPStore(address, port, master_listen_fd=os.dup(listener.fileno()), **arguments)


def own_address(urls: Sequence[str]) -> str:
    """The address of this machine in the network of the servers; nothing is sent."""
    addresses = []
    for url in urls:
        host = urlsplit(url).hostname or ""
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            addresses.append(str(probe.getsockname()[0]))
    # one that servers on other machines can use, where there are any
    return next((a for a in addresses if not a.startswith("127.") and a != "::1"), addresses[0])
