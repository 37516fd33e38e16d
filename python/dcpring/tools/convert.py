"""``convert``: a checkpoint in another format, or in another number of files, without holding it in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dcpring.base.arguments import strings
from dcpring.base.files import open_regular
from dcpring.base.text import some_keys
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.model_files import DEFAULT_SHARD_BYTES, is_model
from dcpring.names.key_map import KeyMap, KeyMapLike, new_path
from dcpring.sources.beside import check_target
from dcpring.sources.dcp import ContentsSource, DcpTarget
from dcpring.sources.safetensors import SafetensorsTarget
from dcpring.sources.stream import Source, SourceItem
from dcpring.sources.torch_file import TorchSource, TorchTarget
from dcpring.tools.inspect.select import check_patterns, key_filter
from dcpring.watch.progress import progress_bar

__all__ = ["ConvertReport", "convert"]

Format = Literal["dcp", "torch", "safetensors"]
FORMATS: tuple[Format, ...] = ("dcp", "torch", "safetensors")

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_MOST_BYTES = 1 << 60
_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True)
class ConvertReport:
    """What ``convert`` has done.

    Attributes:
        source, target: paths.
        source_format, target_format: "dcp", "torch" or "safetensors".
        tensors, objects: how many of each.
        left_out: how many ``only`` and ``exclude`` left out.
        renamed: how many have another name than before.
        cast: how many tensors have another dtype than before.
        tied: names whose tensor has another name, too, under which it is stored.
        bytes: of tensors, in the target.
        files: with data, in the target.
        seconds: wall time.
    """

    source: str
    target: str
    source_format: Format
    target_format: Format
    tensors: int
    objects: int
    left_out: int
    renamed: int
    cast: int
    tied: int
    bytes: int
    files: Sequence[str]
    seconds: float


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Format | None = None,
    only: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    key_map: KeyMapLike = None,
    dtype: torch.dtype | str | None = None,
    files: int | None = None,
    shard_bytes: int | None = None,
    rank: int | None = None,
    trusted: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> ConvertReport:
    """Converts a checkpoint: DCP, a file of ``torch.save``, or safetensors, to any of these.

    The target is written beside where it goes and renamed when it is complete and durable: on a failure, or Ctrl-C,
    what was there is as it was. Memory is about 150 MiB (220 with casts), and the largest object, or tensor
    of a ``torch.save`` file that is not contiguous there.

    Values keep every bit unless they are cast. DCP knows a nested state dict by names like "model.layer.weight": a
    ``torch.save`` file is flattened into these and nested again, where keys of mappings that are no str become str.

    Args:
        source: directory of a DCP checkpoint, file of ``torch.save`` (since torch 1.6), safetensors file, its index, or
            a directory with either, or with the shards of ``HuggingFaceStorageWriter(save_distributed=True)``: these
            do not say how large a tensor is, so that the last rank's must not be missing.
        target: to be made. Without ``to``, its name says what: ``.safetensors`` one such file; ``.pt``, ``.pth``,
            ``.bin``, ``.ckpt``, ``.tar`` a file of ``torch.save``; any other a directory, of DCP.
        to: "dcp", "torch" or "safetensors". With the last, a name without ``.safetensors`` is a directory of shards.
        only: patterns of names in the source, which are taken with those below them; others are left out.
        exclude: patterns of names that are left out, with those below them, whatever ``only`` takes.
        key_map: new names, as for ``RingReader``; applied to names in the source.
        dtype: of all floating-point tensors in the target; others keep theirs. A value that it does not have is an
            error, such as 1e10 in float16.
        files: data files of a DCP checkpoint, of about the same size; None: as many as a DCP source has, else 1.
        shard_bytes: most bytes of a safetensors shard; 5 GiB if None.
        rank: of a DCP checkpoint saved with ``use_collectives=False``, the part to convert.
        trusted: unpickle whatever is in the source, even if that runs code.
        overwrite: replace a target that is there. A directory must hold nothing but a checkpoint; one that gets
            safetensors may hold other files than those of a DCP checkpoint, which stay.
        progress: draw a bar on standard error, if that is a terminal.

    Raises:
        CheckpointError: it cannot be done; the message says why and what to do.
        CorruptCheckpointError: the source is damaged; names key, file and offset.
        UntrustedCheckpointError: loading the source could run code.
        OSError: with errno and path.
        ValueError: arguments that contradict each other.
    """
    started = time.perf_counter()
    where = Path(os.path.abspath(target))
    goal = _format_of(where, to, files, shard_bytes)
    check_target(where, _is_directory(where, goal), overwrite, goal == "safetensors")
    opened = open_source(Path(source), rank=rank, trusted=trusted)
    chosen = _chosen(opened, strings(only, "only"), strings(exclude, "exclude"), os.fspath(source))
    items = _cast(_renamed(chosen, key_map), None if dtype is None else float_dtype(dtype))
    _check_sizes(items, os.fspath(source))
    made = _target(goal, where, items, opened, files, shard_bytes)
    with progress_bar("converting", made.nbytes, enabled=progress) as bar:
        made.write(opened, overwrite, bar.watch)
    return ConvertReport(
        source=os.fspath(source),
        target=os.fspath(target),
        source_format=opened.format,  # type: ignore[arg-type]
        target_format=goal,
        tensors=sum(item.shape is not None for item in items),
        objects=sum(item.shape is None for item in items),
        left_out=len(opened.items) - len(items),
        renamed=sum(item.name != item.source for item in items),
        cast=sum(item.dtype != item.stored for item in items),
        tied=made.tied,
        bytes=made.nbytes,
        files=made.files,
        seconds=time.perf_counter() - started,
    )


def open_source(path: Path, *, rank: int | None = None, trusted: bool = False) -> Source:
    """Whatever a path names, by what is there rather than by its name."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_dir() or (rank is None and is_model(path)):
        return ContentsSource(path, rank=rank, trusted=trusted)
    if rank is not None:
        raise CheckpointError(f"{path} is a file; ranks are parts of a DCP checkpoint, which is a directory")
    if path.suffix == ".distcp":
        raise CheckpointError(f"{path} is a data file of a DCP checkpoint; name the directory, {path.parent}")
    with open_regular(path) as file:
        if file.read(2) == b"PK":
            return TorchSource(path, trusted=trusted)
    raise CheckpointError(
        f"{path} is neither a safetensors file nor a zip file of torch.save; one that torch.save wrote in its old "
        "format (before 1.6) must be loaded and saved again"
    )


def _format_of(target: Path, to: Format | None, files: int | None, shard_bytes: int | None) -> Format:
    if to is not None and to not in FORMATS:
        raise ValueError(f'to={to!r}: must be "dcp", "torch" or "safetensors"')
    guessed: Format = "dcp"
    if target.suffix == ".safetensors" or shard_bytes is not None:
        guessed = "safetensors"
    elif target.suffix in _TORCH_SUFFIXES:
        guessed = "torch"
    goal = to or guessed
    if files is not None and (goal != "dcp" or files < 1):
        raise ValueError(f"files={files}: is for DCP, and at least 1; {target} will be {goal}")
    if shard_bytes is not None and (goal != "safetensors" or target.suffix == ".safetensors" or shard_bytes < 1):
        raise ValueError(f"shard_bytes={shard_bytes}: is for a directory of safetensors files; {target} is not one")
    return goal


def _is_directory(target: Path, goal: Format) -> bool:
    return goal == "dcp" or (goal == "safetensors" and target.suffix != ".safetensors")


def _target(
    goal: Format, path: Path, items: Sequence[SourceItem], source: Source, files: int | None, shard_bytes: int | None
) -> DcpTarget | TorchTarget | SafetensorsTarget:
    if goal == "dcp":
        kept = source.files if source.format == "dcp" else 1
        return DcpTarget(path, items, files or max(1, kept))
    if goal == "torch":
        return TorchTarget(path, items)
    shards = shard_bytes or DEFAULT_SHARD_BYTES if _is_directory(path, goal) else None
    return SafetensorsTarget(path, items, source.notes, shards)


def _check_sizes(items: Sequence[SourceItem], source: str) -> None:
    """What a source says of shapes is not believed before it has been looked at."""
    strange = [item.source for item in items if min(item.shape or (0,)) < 0]
    if strange or sum(item.nbytes for item in items) >= _MOST_BYTES:
        what = f"{strange[0]!r} has a negative size" if strange else "the source claims to hold more than any disk does"
        raise CorruptCheckpointError(what, source)


def _chosen(opened: Source, only: Sequence[str], exclude: Sequence[str], source: str) -> list[SourceItem]:
    is_chosen, is_excluded = key_filter(only), key_filter(exclude)
    names = [*(item.source for item in opened.items), *opened.unreadable]
    chosen = {name for name in names if is_chosen(name) and not (exclude and is_excluded(name))}
    check_patterns(only, names, source)
    check_patterns(exclude, names, source)
    if unreadable := chosen & opened.unreadable.keys():
        raise CheckpointError(
            f"{source}: torch lacks the dtypes of {some_keys(unreadable)}; leave them out with --exclude PATTERN"
        )
    return [item for item in opened.items if item.source in chosen]


def _renamed(items: list[SourceItem], key_map: KeyMapLike) -> list[SourceItem]:
    if key_map is None:
        return items
    names = KeyMap(key_map).rename(item.source for item in items)
    return [
        replace(item, name=(new := names[item.source]), path=new_path(item.path, item.source, new)) for item in items
    ]


def _cast(items: list[SourceItem], dtype: torch.dtype | None) -> list[SourceItem]:
    if dtype is None:
        return items
    for item in {item.stored: item for item in items if _is_float(item)}.values():
        assert item.stored is not None
        try:
            torch.empty(1, dtype=item.stored).to(dtype)
        except RuntimeError as error:
            raise CheckpointError(f"{item.source!r} is of {item.stored}, which torch cannot cast to {dtype}") from error
    return [replace(item, dtype=dtype) if _is_float(item) else item for item in items]


def _is_float(item: SourceItem) -> bool:
    return item.stored is not None and item.stored.is_floating_point


def float_dtype(given: torch.dtype | str) -> torch.dtype:
    """A floating-point dtype by torch's name for it, or by bf16, fp16, fp32 or fp64; ValueError for others."""
    found: Any = given
    if isinstance(given, str):
        name = given.removeprefix("torch.")
        found = getattr(torch, _FLOATS.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{given!r} is no floating-point dtype; examples: bfloat16, float16, float32")
    return found
