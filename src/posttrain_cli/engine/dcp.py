"""Tensors in and out of a folder by torch's distributed checkpoints, without trusting it.

Only tensors are stored, so nothing needs to be unpickled but DCP's own index, `.metadata`,
which is read by an unpickler that admits DCP's classes and nothing else.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from posttrain_cli.engine.distributed import World
from posttrain_cli.errors import RunError, UsageError

INDEX = ".metadata"

_FILES = "torch.distributed.checkpoint.filesystem"
_ADMITTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (_FILES, "_StorageInfo"),
    *(
        (index.__name__, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _Writer(FileSystemWriter):
    """DCP's file writer, leaving out where on this machine the folder was."""

    def storage_meta(self) -> index.StorageMeta:
        return index.StorageMeta()


class _Reader(FileSystemReader):
    """DCP's file reader with an index that was read and checked before."""

    def __init__(self, path: Path, metadata: index.Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self) -> index.Metadata:
        return self._metadata


class _Unpickler(pickle.Unpickler):
    """Admits the classes of DCP's index; any other name is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _ADMITTED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names `{module}.{name}`, which no checkpoint needs")


def own_bytes(tensors: Mapping[str, torch.Tensor], *, replicas: bool) -> int:
    """Bytes of this rank's shards, and of the unsharded tensors if it counts `replicas`."""
    sharded = [each.to_local() for each in tensors.values() if isinstance(each, DTensor)]
    whole = [each for each in tensors.values() if replicas and not isinstance(each, DTensor)]
    return sum(each.nbytes for each in sharded + whole)


def write(folder: Path, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Write `tensors` of all ranks into `folder`, each rank its own shards, and fsync them.

    Raises:
        RunError: on all ranks, when any rank could not write.
    """
    wrong = [name for name, each in tensors.items() if not isinstance(each, torch.Tensor)]
    assert not wrong, f"only tensors go into a checkpoint, not {wrong}"
    try:
        with _alone_in_peace():
            dcp_save(
                dict(tensors),
                storage_writer=_Writer(folder, overwrite=False),
                process_group=world.group,
                no_dist=world.size == 1,
            )
    except CheckpointException as error:
        raise RunError(f"cannot write a checkpoint: {_causes(error)}") from error


def stage(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A copy of `tensors` on the CPU, shards staying shards, that training cannot change."""
    return dict(BlockingAsyncStager().stage(dict(tensors)))


def read(folder: Path, tensors: Mapping[str, torch.Tensor], *, partial: bool = False) -> None:
    """Fill `tensors` in place from `folder`, whatever world size wrote it.

    Args:
        folder: a checkpoint folder whose manifest has been verified.
        tensors: plain or sharded tensors by name, already of the right shape and type.
        partial: `tensors` may be fewer than the folder holds.

    Raises:
        UsageError: names, shapes or types differ, or the index holds what no checkpoint needs.
        RunError: on all ranks, when any rank could not read.
    """
    metadata = read_index(folder)
    problems = list(_differences(metadata, tensors, partial))
    if problems:
        raise UsageError(
            f"checkpoint `{folder}` does not fit the model and optimizer of this run",
            hint="it was written with other settings: see `config.yaml` of its run",
            problems=problems,
        )
    try:
        with _alone_in_peace():
            dcp_load(
                dict(tensors),
                storage_reader=_Reader(folder, metadata),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        raise RunError(f"cannot read checkpoint `{folder}`: {_causes(error)}") from error


def read_index(folder: Path) -> index.Metadata:
    """The index of the tensors in `folder`, read without running anything it names.

    Raises:
        UsageError: the index is no DCP index, or reaches outside `folder`.
    """
    try:
        metadata = _checked(_Unpickler(io.BytesIO((folder / INDEX).read_bytes())).load())
    except Exception as error:  # a hostile or cut pickle may raise anything
        raise UsageError(
            f"checkpoint `{folder}` cannot be trusted: its index `{INDEX}` is refused, {error}",
            hint="resume only from folders that `ptc` wrote, or remove this one",
        ) from error
    return metadata


def shapes(metadata: index.Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Global shape and type of each stored tensor, by name."""
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, index.TensorStorageMetadata)
    }


def _checked(metadata: object) -> index.Metadata:
    """`metadata` if it describes tensors in plain files of its own folder, else ValueError."""
    if not isinstance(metadata, index.Metadata):
        raise ValueError("it holds no checkpoint index")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, index.TensorStorageMetadata):
            raise ValueError(f"`{name}` is no tensor")
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it reaches for the file `{place.relative_path}`")
        if place.transform_descriptors:
            raise ValueError("its files are transformed")
    return metadata


def _differences(
    metadata: index.Metadata, tensors: Mapping[str, torch.Tensor], partial: bool
) -> Iterator[str]:
    """What keeps `tensors` from being filled, one sentence each."""
    stored = shapes(metadata)
    for name, tensor in tensors.items():
        if name not in stored:
            yield f"`{name}` is not in the checkpoint"
        elif stored[name] != (tensor.shape, tensor.dtype):
            shape, dtype = stored[name]
            yield (
                f"`{name}` is {tuple(shape)} {dtype} in the checkpoint and "
                f"{tuple(tensor.shape)} {tensor.dtype} in this run"
            )
    if not partial:
        for name in stored.keys() - tensors.keys():
            yield f"`{name}` is in the checkpoint and not in this run"


def _causes(error: CheckpointException) -> str:
    """One line: which rank failed with what."""
    texts = [
        f"rank {rank}: {type(cause).__name__}: {cause}"
        for rank, (cause, _) in sorted(error.failures.items())
    ]
    return "; ".join(texts)


@contextmanager
def _alone_in_peace() -> Iterator[None]:
    """Silence DCP's warning that one process without a process group is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
