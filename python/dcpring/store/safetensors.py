"""A directory of safetensors as storage of DCP: its headers say what ``.metadata`` says otherwise.

The metadata that is made of them has the same tables as a checkpoint of RingWriter, so plans, loads, sharing between
ranks and errors are those that all checkpoints have.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcpring import _C
from dcpring.errors import CorruptCheckpointError
from dcpring.format.lazy import Chunks, LazyMetadata
from dcpring.format.metadata import METADATA_NAME, TENSOR, load_metadata
from dcpring.format.safetensors import Model, is_safetensors, read_model
from dcpring.plan.table import table_of_chunks


def is_model(path: Path) -> bool:
    """Whether a path means safetensors: a file, an index, or a directory without metadata of DCP's that has some."""
    if path.is_dir():
        return is_safetensors(path) and not any(path.glob("*.metadata"))
    return path.is_file() and is_safetensors(path)


def chunks_of(model: Model) -> Chunks:
    """The tables of a model: a row for each part of a tensor.

    Raises:
        CorruptCheckpointError: names that no table can have.
    """
    properties = {dtype: TensorProperties(dtype=dtype) for dtype in {whole.dtype for whole in model.tensors.values()}}
    chunks = [
        [(whole.shape, part.offsets, part.stored.shape, properties[whole.dtype]) for part in whole.parts]
        for whole in model.tensors.values()
    ]
    places = []
    for whole in model.tensors.values():
        for file, _, stored in whole.parts:
            size = stored.end - stored.begin
            places.append((file, TENSOR, stored.begin, size, stored.begin, size, stored.crcs))
    try:
        table = table_of_chunks(list(model.tensors), None, chunks)
        storage = _C.StorageIndex(len(table))
        storage.put(places)
    except ValueError as error:
        raise CorruptCheckpointError(f"it holds what no checkpoint can ({error})", str(model.path)) from error
    return Chunks(table, False, storage)


def metadata_of(path: Path) -> Metadata:
    """The metadata of a checkpoint's directory, or made of the headers that a path leads to.

    Raises:
        CheckpointError, CorruptCheckpointError, UntrustedCheckpointError, OSError: it cannot be read.
    """
    return (
        LazyMetadata(source=chunks_of(read_model(path))) if is_model(path) else load_metadata(path / METADATA_NAME)[0]
    )
