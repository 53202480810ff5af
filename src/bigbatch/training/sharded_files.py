"""Tensors that are spread over the ranks, in files that each rank writes for itself: PyTorch's distributed checkpoint.

The files are those of ``torch.distributed.checkpoint.save``: ``__0_0.distcp`` of rank 0, ``__1_0.distcp`` of rank 1,
and ``.metadata``, which says what is where. Any number of ranks can read them, also one process without a group.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from bigbatch.errors import CheckpointError
from bigbatch.training.on_disk import ONE_FOLDER, Files, Trouble, on_disk

if TYPE_CHECKING:
    from bigbatch.training.group import Group

SUFFIX = ".distcp"
_METADATA = ".metadata"
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
}
"""What ``.metadata`` is made of: plain values, and these."""


def write(tensors: Mapping[str, torch.Tensor], folder: Path, group: Group) -> list[Files | Trouble]:
    """Write the parts of all ranks to a folder that one of them has made, and bring them to the disk.

    Returns:
        The files of each rank, or why there are none: what is wrong on one rank must not keep the others waiting.
    """
    # torch would make a folder that is not there.
    seen = group.gathered(folder.is_dir())
    if not all(seen):
        why = f"rank {seen.index(False)} does not see {folder}. {ONE_FOLDER}"
        return [Trouble(None, why)]
    return group.gathered(_write_part(tensors, folder, group.rank))


def _write_part(tensors: Mapping[str, torch.Tensor], folder: Path, rank: int) -> Files | Trouble:
    writer = _Writer(folder, sync_files=False)  # below, with the digest
    try:
        save(dict(tensors), storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False))
        if writer.error is not None:
            raise writer.error
        names = [path.name for path in folder.glob(f"__{rank}_*")] + [_METADATA] * (rank == 0)
        return {name: on_disk(folder / name) for name in names}
    except CheckpointException as error:
        failed, (first, _) = next(iter(error.failures.items()))
        return Trouble.of(first, whose=f"rank {failed}: ")
    except Exception as error:
        return Trouble.of(error, whose=f"rank {rank}: ")


class _Writer(FileSystemWriter):
    """Keeps its error. Raised, torch would send it to all ranks, without the error of the system that is below it."""

    error: Exception | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            self.error = error
            nothing: Future[Any] = Future()
            nothing.set_result([])
            return nothing


def read(rooms: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Fill tensors with what is in the files by their names: of one that is spread over ranks, the part of this one.

    Raises:
        CheckpointError: Something is not there, or has another shape.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Each rank reads for itself: an error is of one rank, and nobody waits for it.
            load(
                dict(rooms),
                storage_reader=_Reader(folder),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=True,
            )
    except CheckpointException as error:
        first, _ = error.failures[0]
        why = Trouble.of(first).why
        raise CheckpointError(f"The checkpoint {folder} cannot be used: {why}.", path=folder, why=why) from first


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as file:
            return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    """Reads ``.metadata``, which torch would read with code that is in it."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _OF_METADATA.get(module, ()) or (module == "torch" and isinstance(_of_torch(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is in {_METADATA}, where no checkpoint has it")


def _of_torch(name: str) -> Any:
    return getattr(torch, name, None)
