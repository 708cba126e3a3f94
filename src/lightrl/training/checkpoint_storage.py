"""torch DCP with safetensors: what is in the files of a checkpoint, and how they are written and read.

DCP plans (who writes what, which pieces to read at another world size); the files are ours, so that no pickle is in
them: `rank_00000_0000.safetensors` … hold this rank's pieces, `tensors.json` says which file holds which piece.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Replicate
from torch.futures import Future

from lightrl.files import fsync
from lightrl.models.load import read_slice
from lightrl.models.shards import local_shard

TENSORS_FILE = "tensors.json"
FILE_BYTES = 1 << 30  # a file is copied in memory while it is written
_BLOCK = 1 << 23


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor, and where it lies in the whole."""

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]


def own_piece(name: str, tensor: Tensor, rank: int, world: int) -> Piece | None:
    """The part of `tensor` that this rank saves; None if it has none. Copies on several ranks are saved by one of them,
    picked by the name, so that replicas share the work."""
    replicas, index = world, rank
    if isinstance(tensor, DTensor):
        replicas, index = 1, 0
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                size = tensor.device_mesh.size(axis)
                replicas, index = replicas * size, index * size + coordinate[axis]
    local, offsets = local_shard(tensor)
    if local.numel() == 0 or zlib.crc32(name.encode()) % replicas != index:
        return None
    return Piece(local, offsets, tuple(tensor.shape))


class PiecePlanner(DefaultSavePlanner):
    """Plans a state dict of `Piece`s, which need no process group or device to describe themselves."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, piece in self.state_dict.items():
            offsets = torch.Size(piece.offsets)
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.tensor.size()),
                properties=TensorProperties.create_from_tensor(piece.tensor),
                size=torch.Size(piece.whole),
            )
            items.append(WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        piece: Piece = self.state_dict[write_item.index.fqn]
        return piece.tensor.detach()


class SafetensorsWriter(StorageWriter):
    """Writes pieces to safetensors files in `folder`.

    `commit(files)` runs on the coordinator once every rank has written; an exception in it, or in any rank's writing,
    is raised on all ranks. `files` maps each file name to its size and checksum.
    """

    def __init__(self, folder: Path, rank: int, commit: Callable[[dict[str, dict[str, int]]], None]) -> None:
        self.folder, self.rank, self.commit = folder, rank, commit

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing is kept between saves: a writer is made for each."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        pending: dict[str, Tensor] = {}
        offsets: dict[str, list[int]] = {}
        items: list[WriteItem] = []
        size = count = 0

        def flush() -> None:
            nonlocal size, count
            if not items:
                return
            name = f"rank_{self.rank:05d}_{count:04d}.safetensors"
            info = self._write_file(name, pending, offsets)
            for item in items:
                results.append(WriteResult(item.index, pending[item.index.fqn].nbytes, info))
            pending.clear()
            offsets.clear()
            items.clear()
            size, count = 0, count + 1

        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            if size + tensor.nbytes > FILE_BYTES:
                flush()
            name = item.index.fqn
            pending[name] = tensor.to("cpu").contiguous()
            offsets[name] = list(item.index.offset or ())
            items.append(item)
            size += tensor.nbytes
        flush()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, tensors: dict[str, Tensor], offsets: dict[str, list[int]]) -> dict[str, Any]:
        path = self.folder / name
        # The offsets in the header make each file readable without tensors.json.
        save_file(tensors, path, metadata={"format": "pt", "offsets": json.dumps(offsets)})
        fsync(path)
        return {"file": name, **describe(path)}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, dict[str, int]] = {}
        file_of: dict[tuple[str, tuple[int, ...]], str] = {}
        for result in (r for of_rank in results for r in of_rank):
            info = result.storage_data
            files[info["file"]] = {"bytes": info["bytes"], "crc32": info["crc32"]}
            file_of[result.index.fqn, tuple(result.index.offset or ())] = info["file"]
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [
                {"offsets": list(c.offsets), "sizes": list(c.sizes), "file": file_of[name, tuple(c.offsets)]}
                for c in stored.chunks
            ]
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
        write_json(self.folder / TENSORS_FILE, tensors)
        files[TENSORS_FILE] = describe(self.folder / TENSORS_FILE)
        self.commit(files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads the parts of a checkpoint folder that DCP's plan asks for, and no more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_tensors(folder)
        self.file_of = {
            MetadataIndex(name, torch.Size(chunk["offsets"])): chunk["file"]
            for name, tensor in self.tensors.items()
            for chunk in tensor["chunks"]
        }

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """A reader is made for each load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        stored = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=stored_dtype(tensor)),
                size=torch.Size(tensor["shape"]),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(c["offsets"]), sizes=torch.Size(c["sizes"]))
                    for c in tensor["chunks"]
                ],
            )
            for name, tensor in self.tensors.items()
        }
        return Metadata(state_dict_metadata=stored)  # type: ignore[arg-type]  # dict is invariant

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Everything is known since `__init__`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.file_of[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with safe_open(self.folder / name, framework="pt", device="cpu") as handle:
                for item in items:
                    part = read_slice(handle, item.storage_index.fqn, item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return Path(checkpoint_id).is_dir()


# ----- files


def read_tensors(folder: Path) -> dict[str, Any]:
    """`tensors.json`: name -> dtype, shape and the pieces with their files."""
    tensors: dict[str, Any] = json.loads((folder / TENSORS_FILE).read_text(encoding="utf-8"))
    return tensors


def stored_dtype(tensor: Mapping[str, Any]) -> torch.dtype:
    """torch type of an entry of `tensors.json`."""
    dtype = getattr(torch, tensor["dtype"])
    assert isinstance(dtype, torch.dtype)
    return dtype


def read_whole(folder: Path, name: str, tensors: Mapping[str, Any]) -> Tensor:
    """One tensor put together from its pieces; `tensors` as from `read_tensors`."""
    entry = tensors[name]
    whole = torch.empty(entry["shape"], dtype=stored_dtype(entry))
    for chunk in entry["chunks"]:
        with safe_open(folder / chunk["file"], framework="pt", device="cpu") as handle:
            where = tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
            whole[where] = handle.get_tensor(name)
    return whole


def describe(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file: what a flipped bit or a cut changes."""
    checksum = size = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return {"bytes": size, "crc32": checksum}


def write_json(path: Path, content: Any) -> None:
    """Write and flush to disk."""
    with path.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1, allow_nan=True)
        stream.flush()
        os.fsync(stream.fileno())
