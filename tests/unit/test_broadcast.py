"""Weights by broadcast: buckets, addresses, the store, and what hangs."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightrl.sync.broadcast import filled, own_address, plan, serve_store
from lightrl.sync.peers import SyncError, together
from lightrl.threads import spawn


def test_buckets_and_addresses() -> None:
    """Values of any dtype come out of a flat bucket as SGLang cuts it up; the order of groups is the layout's."""
    tensors = [("a", torch.randn(3).bfloat16()), ("b", torch.randn(2, 2)), ("c", torch.arange(5, dtype=torch.uint8))]
    (bucket,) = plan([(n, t.shape, t.dtype) for n, t in tensors], 1 << 20)
    buffer = torch.zeros(sum(t.nbytes for _, t in tensors), dtype=torch.uint8)
    assert [b is bucket for b in filled([bucket], [tensors[:2], tensors[2:]], buffer)] == [True]
    given = dict(tensors)
    cut = buffer.split([given[piece.name].nbytes for piece in bucket])
    for piece, part in zip(bucket, cut, strict=True):
        assert torch.equal(part.view(piece.dtype).view(piece.shape), given[piece.name])
    first = [piece for piece in bucket if piece.name == "a"]
    with pytest.raises(ValueError, match="expected a in the layout's order, got b"):
        list(filled([first], [tensors[1:]], buffer))
    with pytest.raises(ValueError, match="nothing came for c"):
        list(filled([bucket], [tensors[:2]], buffer))
    layout = [("embed", (4,)), ("m.0.a", (4,)), ("m.0.b", (40,)), ("m.1.a", (4,)), ("m.1.b", (4,)), ("head", (9,))]
    names = [[p.name for p in b] for b in plan([(n, s, torch.float32) for n, s in layout], 64)]
    assert names == [["embed"], ["m.0.a", "m.0.b"], ["m.1.a", "m.1.b"], ["head"]]
    assert own_address(["http://127.0.0.1:1"]) == "127.0.0.1"


def test_the_store_listens_where_it_is_asked_to_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = timedelta(seconds=5)
    for address in ("127.0.0.1", "localhost"):
        store = serve_store(address, 0, limit)
        dist.TCPStore(address, store.port, is_master=False, wait_for_workers=False, timeout=limit).set("a", "b")
        assert store.get("a") == b"b"
        with pytest.raises(ConnectionRefusedError):  # another address of this machine
            socket.create_connection(("127.0.0.2", store.port), timeout=5)
        with pytest.raises(OSError, match="in use"):
            serve_store(address, store.port, limit)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "TCPStore", lambda *places, **more: asked.append((*places, "master_listen_fd" in more)))
    serve_store("192.0.2.1", 77, limit)  # not this machine's own: what it is here is unknown
    lookup = socket.getaddrinfo
    own = {"node7": "127.0.1.1"}  # as many systems call themselves; for others it is another address
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *args, **more: lookup(own.get(name, name), *args, **more))
    serve_store("node7", 77, limit)
    assert asked == [("192.0.2.1", 77, False), ("node7", 77, False)]


def test_what_hangs_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(SyncError, match=r"slow: no end after 0 s \(sync\.timeout\)"):
        together({"slow": spawn(never.wait), "quick": spawn(int)}, 0.05)
    with pytest.raises(ZeroDivisionError):
        together({"wrong": spawn(lambda: 1 // 0), "slow": spawn(never.wait)}, 5)
    assert together({"a": spawn(int, "3"), "b": spawn(int, "4")}, 5) == [3, 4]
    never.set()
