"""RingHFReader: the storage reader for directories of safetensors, such as model hubs have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import HuggingFaceStorageReader

from dcpring.errors import CheckpointError
from dcpring.format.safetensors import Model, is_safetensors, read_model
from dcpring.store.reader import RingReader

__all__ = ["RingHFReader"]


class RingHFReader(RingReader, HuggingFaceStorageReader):
    """Reads safetensors: ``dcp.load(state_dict, storage_reader=RingHFReader(path))``.

    Takes the arguments of ``HuggingFaceStorageReader``, and all that ``RingReader`` has. A path is a directory, with
    ``model.safetensors``, an index and its files, or the shards of all ranks
    (``HuggingFaceStorageWriter(save_distributed=True)``); or one such file, or an index. Headers are read and checked
    as a whole before a tensor is touched, and of the data only what the plan needs. Files have no checksums but those
    that dcpring has written.

    Args:
        path: of the model.
        thread_count: taken for programs that give it, and without meaning: see ``workers`` and ``queue_depth``.
        **options: as for ``RingReader``.

    Raises:
        CheckpointError: the path leads to no safetensors, or to several models.
        CorruptCheckpointError: a file is missing, cut off, or contradicts the index, its header, or the other shards.
        Others: as ``RingReader``.
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1, **options: Any) -> None:
        super().__init__(path, **options)
        self.thread_count = thread_count

    def _find_model(self, path: Path) -> Model:
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        if not is_safetensors(path):
            raise CheckpointError(f"{path} holds no safetensors; RingReader reads checkpoints of DCP")
        return read_model(path)
