"""Weights through a shared file system: a Hugging Face checkpoint a sync, which the servers read.

Slow but undemanding: servers need no network way to the trainer's GPUs, only the same folder under the same path.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightrl.files import fsync
from lightrl.sync.peers import Groups, Peer, SyncError, post_all

_PREFIX = "weights_"


class DiskSync:
    """Implements `lightrl.sync.peers.Transport`.

    `folder` is this run's own: checkpoints in it from an earlier, killed run are removed. `layout` says which tensors
    come, and in which dtype they are stored; `config` is a config.json that goes with them.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        layout: Sequence[tuple[str, Sequence[int], torch.dtype]],
        *,
        folder: Path,
        config: Path,
        shard_bytes: int,
        timeout: float,
    ) -> None:
        self._peers, self._config = peers, config
        self._folder = folder.expanduser().absolute()
        self._dtypes = {name: dtype for name, _, dtype in layout}
        self._shard_bytes, self._timeout = shard_bytes, timeout
        self._count = 0
        self._present: Path | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in [*self._folder.glob(f"{_PREFIX}*"), *self._folder.glob(f".{_PREFIX}*")]:
            shutil.rmtree(old, ignore_errors=True)

    def send(self, groups: Groups, label: str) -> None:
        """Write a checkpoint, let all servers read it, remove the one before."""
        self._count += 1  # a name of its own each time: caches of network file systems may hold old contents
        path = self._folder / f"{_PREFIX}{self._count:06d}"
        self._write(groups, path)
        body = {
            "model_path": str(path),
            "load_format": "safetensors",  # else a server that was started without weights makes up some again
            "weight_version": label,
            "flush_cache": False,
        }
        try:
            post_all(self._peers, "/update_weights_from_disk", body, self._timeout)
        except RuntimeError as error:
            raise SyncError(f"{error}; weights are in {path}, which every server must see (sync.folder)") from error
        if self._present is not None:
            shutil.rmtree(self._present, ignore_errors=True)
        self._present = path

    def close(self) -> None:
        """Remove the last checkpoint: the servers hold its values."""
        if self._present is not None:
            shutil.rmtree(self._present, ignore_errors=True)
            self._present = None

    def _write(self, groups: Groups, path: Path) -> None:
        """The folder appears whole or not at all."""
        temporary = path.with_name(f".{path.name}")
        temporary.mkdir()
        try:
            files: dict[str, str] = {}
            for number, shard in enumerate(self._shards(groups)):
                file = f"model-{number + 1:05d}.safetensors"
                save_file(shard, temporary / file, metadata={"format": "pt"})
                files.update(dict.fromkeys(shard, file))
            if missing := self._dtypes.keys() - files.keys():
                raise ValueError(f"nothing came for {', '.join(sorted(missing)[:3])}")
            index = {"metadata": {}, "weight_map": files}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
            shutil.copyfile(self._config, temporary / "config.json")
            for file_path in [*temporary.iterdir(), temporary]:
                fsync(file_path)
            temporary.rename(path)
            fsync(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _shards(self, groups: Groups) -> Iterator[dict[str, Tensor]]:
        shard: dict[str, Tensor] = {}
        size = 0
        for group in groups:
            for name, tensor in group:
                if name not in self._dtypes:
                    raise ValueError(f"{name} is not in the layout")
                # a copy: the group's tensors are valid only until the next is asked for
                stored = torch.empty(tensor.shape, dtype=self._dtypes[name]).copy_(tensor)
                if shard and size + stored.nbytes > self._shard_bytes:
                    yield shard
                    shard, size = {}, 0
                shard[name] = stored
                size += stored.nbytes
        yield shard
