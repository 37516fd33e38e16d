"""Seeing names: what a model's keys are called, and how a state dict and a checkpoint differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from dcpring.format.metadata import METADATA_NAME, read_trailer
from dcpring.names.diff import Different, KeyDiff, Unmatched, describe_metadata, describe_state_dict, diff_described
from dcpring.names.key_map import KeyMap, KeyMapLike, KeyTable, load_tables, rename_metadata
from dcpring.names.wrapping import model_keys, register_wrapper
from dcpring.store import layout
from dcpring.store.safetensors import is_model, metadata_of

__all__ = [
    "Different",
    "KeyDiff",
    "KeyTable",
    "Unmatched",
    "diff_keys",
    "key_rows",
    "print_keys",
    "register_wrapper",
    "saved_key_map",
]

_COLUMNS = ("raw name", "canonical name", "shape", "dtype", "placement", "wrappers")


def diff_keys(
    state_dict: Mapping[str, Any] | nn.Module,
    checkpoint: str | os.PathLike[str] | Metadata,
    *,
    key_map: KeyMapLike = None,
) -> KeyDiff:
    """How the keys of a state dict and of a checkpoint differ. ``print(diff_keys(...))`` gives a report.

    Args:
        state_dict: as for ``dcp.load``, nested or not; a model stands for its ``get_model_state_dict``.
        checkpoint: the directory, of safetensors too, or metadata that was read already. No tensor is read.
        key_map: compares as a load with this map would (see docs/keys.md).

    Raises:
        OSError, CorruptCheckpointError, UntrustedCheckpointError: the metadata cannot be read.
        TypeError: a key of the state dict is not a str.
        ValueError: the state dict contains itself.
    """
    if isinstance(state_dict, nn.Module):
        from dcpring.names.state_dict.interface import get_model_state_dict

        state_dict = get_model_state_dict(state_dict)
    if not isinstance(checkpoint, Metadata):
        checkpoint = metadata_of(Path(checkpoint))
    if key_map is not None:
        checkpoint = rename_metadata(checkpoint, KeyMap(key_map).rename(checkpoint.state_dict_metadata))
    return diff_described(describe_state_dict(state_dict), describe_metadata(checkpoint))


def saved_key_map(checkpoint: str | os.PathLike[str], rank: int | None = None) -> KeyTable | None:
    """The key map that a checkpoint was saved with, from names in the state dict to those in the checkpoint.

    ``RingReader(path, key_map=saved_key_map(path).inverse())`` loads into the state dict that was saved.

    Args:
        checkpoint: the directory.
        rank: of a save with ``use_collectives=False``, the rank whose map is wanted.

    Returns:
        None when no map was used.

    Raises:
        OSError: there is no checkpoint, or it cannot be read.
        CorruptCheckpointError: the metadata is damaged, or something else is in a file's place.
        ValueError: the file with the map is damaged.
    """
    directory = Path(checkpoint)
    if rank is None and is_model(directory):
        return None
    trailer = read_trailer(directory / (METADATA_NAME if rank is None else layout.rank_metadata_name(rank)))
    tables = load_tables(directory / layout.table_name(rank))
    return None if trailer is None else tables.get(trailer.save_id)


def key_rows(model: nn.Module) -> list[tuple[str, str, str, str, str, str]]:
    """What ``print_keys`` prints: a row for each tensor, in the order of ``state_dict()``.

    Returns:
        The raw name, the canonical one, shape, dtype, placement (a DTensor's, else the device), and the wrappers around
        it, outermost first.
    """
    keys = model_keys(model)
    return [
        (
            entry.raw,
            name,
            "x".join(map(str, entry.shape)) or "scalar",
            str(entry.tensor.dtype).removeprefix("torch."),
            _placement(entry.tensor),
            " > ".join(entry.chain),
        )
        for entry, name in zip(keys.entries, keys.names, strict=True)
    ]


def _placement(tensor: Any) -> str:
    if not hasattr(tensor, "placements"):
        return str(tensor.device)
    return f"{', '.join(map(str, tensor.placements))} on {tuple(tensor.device_mesh.shape)} {tensor.device}"


def print_keys(model: nn.Module, file: TextIO | None = None) -> None:
    """Prints a table of a model's tensors: raw and canonical name, shape, dtype, placement, wrappers.

    Args:
        model: wrapped in whatever ways.
        file: where to; standard output by default.
    """
    rows = key_rows(model)
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for line in (_COLUMNS, tuple("-" * width for width in widths), *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), file=file)
