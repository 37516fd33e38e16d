"""Names: how a state dict and a checkpoint differ, what a model's keys are called, and what a checkpoint's say.

Names are compared in ``names.diff``; this reads them. Only what is called with tensors imports torch, as the command
line answers without.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.format.metadata import METADATA_NAME, read_trailer
from dcpring.names.diff import WRAPPER_PARTS, Different, KeyDiff, Unmatched, diff_described
from dcpring.names.key_map import KeyMap, KeyMapLike, KeyTable, Rule, load_tables, rename_metadata
from dcpring.report import format_table
from dcpring.store import layout

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "Different",
    "KeyDiff",
    "KeyReport",
    "KeyTable",
    "Unmatched",
    "diff_keys",
    "print_keys",
    "report_keys",
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
    from torch import nn
    from torch.distributed.checkpoint.metadata import Metadata

    from dcpring.names.policy import describe_metadata, describe_state_dict
    from dcpring.names.state_dict.interface import get_model_state_dict
    from dcpring.store.headers import metadata_of

    wanted = get_model_state_dict(state_dict) if isinstance(state_dict, nn.Module) else state_dict
    metadata = checkpoint if isinstance(checkpoint, Metadata) else metadata_of(Path(checkpoint))
    if key_map is not None:
        metadata = rename_metadata(metadata, KeyMap(key_map).rename(metadata.state_dict_metadata))
    return diff_described(describe_state_dict(wanted), describe_metadata(metadata))


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
    path = directory / (METADATA_NAME if rank is None else layout.rank_metadata_name(rank))
    if rank is None and not path.exists():
        from dcpring.format.model_files import is_model

        if is_model(directory):
            return None
    trailer = read_trailer(path)
    tables = load_tables(directory / layout.table_name(rank))
    return None if trailer is None else tables.get(trailer.save_id)


def print_keys(model: nn.Module, file: TextIO | None = None) -> None:
    """Prints a table of a model's tensors: raw and canonical name, shape, dtype, placement, wrappers.

    Args:
        model: wrapped in whatever ways.
        file: where to; standard output by default.
    """
    from dcpring.names.wrapping import model_keys

    keys = model_keys(model)
    rows = [
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
    print(format_table(_COLUMNS, rows, right=()), file=file)


def _placement(tensor: Any) -> str:
    if not hasattr(tensor, "placements"):
        return str(tensor.device)
    return f"{', '.join(map(str, tensor.placements))} on {tuple(tensor.device_mesh.shape)} {tensor.device}"


# ---- what a checkpoint's names say of how the model was wrapped ----


@dataclass
class WrapperOrigin:
    """A part of names that is, or may be, a wrapper's.

    Attributes:
        part: of a name, between dots.
        origin: who puts it there.
        certain: whether nobody else is known to.
        keys: how many have it.
        places: the beginnings of these keys, up to the part, without repetition.
    """

    part: str
    origin: str
    certain: bool
    keys: int = 0
    places: list[str] = field(default_factory=list)


class KeyLine(NamedTuple):
    """A key.

    Attributes:
        key: in the checkpoint.
        canonical: without what only wrappers use.
        ambiguous: whether some of it may be a wrapper's, or may not.
        mapped: what the key map makes of it; None without one.
    """

    key: str
    canonical: str
    ambiguous: bool
    mapped: str | None


@dataclass
class KeyReport:
    """The names in a checkpoint.

    Attributes:
        rows: the keys, in their order.
        origins: what wrappers have, or may have, put in.
        clashes: canonical names that several keys would get, with these.
        collisions: names that the key map would give several keys, with these.
        unused: rules of the key map that match no key, or whose matches are all another rule's.
    """

    rows: list[KeyLine]
    origins: list[WrapperOrigin]
    clashes: dict[str, list[str]]
    collisions: dict[str, list[str]] = field(default_factory=dict)
    unused: list[Rule] = field(default_factory=list)


def report_keys(keys: Iterable[str], key_map: KeyTable | str | None = None) -> KeyReport:
    """What is to be said of names.

    Args:
        keys: of a checkpoint.
        key_map: a table, or "normalize"; None: none.

    Raises:
        CheckpointError: a pattern of the table does not fit its replacement.
    """
    names = list(keys)
    canonical, ambiguous = _canonical(names)
    mapped: Sequence[str | None] = canonical if key_map == "normalize" else [None] * len(names)
    unused: list[Rule] = []
    if isinstance(key_map, KeyTable):
        try:
            found = [key_map.apply(name) for name in names]
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        mapped = [new for new, _ in found]
        used = {rule for _, rule in found}
        unused = [rule for rule in key_map.rules() if rule not in used]
    rows = [KeyLine(*fields) for fields in zip(names, canonical, ambiguous, mapped, strict=True)]
    collisions = _several(mapped, names) if key_map is not None else {}
    return KeyReport(rows, _origins(names), _several(canonical, names), collisions, unused)


def _canonical(names: list[str]) -> tuple[list[str], list[bool]]:
    """Names without what only wrappers use, and whether more of them may be a wrapper's."""
    try:
        canonical, flags = _C.guess_keys(names)
    except ValueError:
        if len(names) == 1:  # it cannot be written as UTF-8
            return names, [False]
        each = [_canonical([name]) for name in names]  # two would be one: each by itself
        return [new for (new,), _ in each], [flag for _, (flag,) in each]
    return canonical, [bool(flag) for flag in flags]


def _several(new: Iterable[str | None], old: Iterable[str]) -> dict[str, list[str]]:
    """Names that more than one key would get."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name, key in zip(new, old, strict=True):
        owners[name or ""].append(key)
    return {name: keys for name, keys in owners.items() if len(keys) > 1}


def _origins(names: Iterable[str]) -> list[WrapperOrigin]:
    counts: Counter[str] = Counter()
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for name in names:
        # The last part is a tensor's own name, but for a flat parameter.
        parts = name.split(".")
        for part in dict.fromkeys(itertools.chain(parts[:-1], (p for p in parts[-1:] if p == "_flat_param"))):
            if part in WRAPPER_PARTS:
                counts[part] += 1
                places[part][".".join(parts[: parts.index(part) + 1])] = None
    return [
        WrapperOrigin(part, wrapper.origin, wrapper.certain, counts[part], list(places[part]))
        for part, wrapper in WRAPPER_PARTS.items()
        if part in counts
    ]
