"""RingHFReader: the storage reader for directories of safetensors, such as model hubs have; another dequantises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, QuantizedHuggingFaceStorageReader

from dcpring.base.files import names_in
from dcpring.base.text import some
from dcpring.errors import CheckpointError
from dcpring.format.model_files import ModelFileNames, find_named, is_safetensors
from dcpring.format.quantised import BLOCK_SIZE
from dcpring.store.headers import Headers
from dcpring.store.reader import RingReader

__all__ = ["RingHFReader", "RingQuantizedHFReader"]


def check_exists(path: str | os.PathLike[str]) -> None:
    if not os.path.exists(path):
        raise CheckpointError(
            f"{os.fspath(path)} does not exist; what is on a hub is to be downloaded first, for example with "
            "huggingface_hub.snapshot_download"
        )


_TORCH_SAVE = (".bin", ".pt", ".pth", ".ckpt")


def no_safetensors(path: Path) -> str:
    """Why a path leads to no safetensors, and what to do about it."""
    names = sorted(names_in(path)) if path.is_dir() else [path.name]
    where = path if path.is_dir() else path.parent
    saved = [name for name in names if name.endswith(_TORCH_SAVE)]
    if saved:
        return (
            f"{path} holds no safetensors, but what torch.save has written, {some(saved, 3)}; make safetensors of it "
            f"with dcpring convert {where / saved[0]} NEW/model.safetensors"
        )
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return (
            f"{path} holds no safetensors, but GGUF, {some(gguf, 3)}; make safetensors of it with transformers' "
            f"from_pretrained({str(where)!r}, gguf_file={gguf[0]!r}) and save_pretrained"
        )
    return f"{path} holds no safetensors; RingReader reads checkpoints of DCP"


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
        name, variant: which of several models in a directory, as for ``RingHFWriter``.
        **options: as for ``RingReader``.

    Raises:
        CheckpointError: the path leads to no safetensors, or to several models.
        CorruptCheckpointError: a file is missing, cut off, or contradicts the index, its header, or the other shards.
        Others: as ``RingReader``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        *,
        name: str | None = None,
        variant: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        ModelFileNames.checked(name, variant)
        self.thread_count = thread_count
        self.name = name
        self.variant = variant

    def _is_model(self, path: Path) -> bool:
        check_exists(path)
        if not is_safetensors(path):
            raise CheckpointError(no_safetensors(path))
        return True

    def _read_headers(self, path: Path, is_shared: bool) -> Headers:
        path = find_named(path, self.name, self.variant) if path.is_dir() else path
        return super()._read_headers(path, is_shared)


class RingQuantizedHFReader(RingHFReader, QuantizedHuggingFaceStorageReader):
    """Reads safetensors and dequantises them on the way: ``storage_reader=RingQuantizedHFReader("org/model")``.

    Takes the arguments of ``QuantizedHuggingFaceStorageReader``, and all that ``RingHFReader`` has. Two forms are
    known: matrices of float8 ``x.weight`` with a factor in ``x.weight_scale_inv`` for each block, or one for all; and
    MXFP4, ``x_blocks`` with exponents in ``x_scales``. They have ``target_dtype`` in the metadata, and MXFP4 the shape
    [..., groups x bytes x 2]; the scales can be loaded as well. What else the files hold is read as it is stored.

    Values are those that torch's reader makes, bit for bit (of what is NaN, some NaN). They are made by the core, on
    ``workers`` threads, of the slices that a rank needs and the scales of these.

    Args:
        path: of the model.
        thread_count: as for ``RingHFReader``.
        target_dtype: what is made: float32, bfloat16 or float16, in which it is infinity where it is larger. It is cast
            if the state dict has another, as ``casts`` allows.
        block_size: rows and columns of a block of FP8.
        **options: as for ``RingReader``.

    Raises:
        CorruptCheckpointError: float8 weights without scales, or scales that do not fit.
        Others: as ``RingHFReader``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
        **options: Any,
    ) -> None:
        super().__init__(path, thread_count, dequantize=target_dtype, **options)
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size={block_size!r}: must be a positive int")
        self.target_dtype = target_dtype
        self.block_size = block_size
