"""What a checkpoint's keys are called, and what that says of how the model was wrapped when it was saved."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.names.key_map import KeyTable, Rule

ORIGINS: Mapping[str, tuple[str, bool]] = {
    "_orig_mod": ("torch.compile(module)", True),
    "_fsdp_wrapped_module": ("FSDP1 (FullyShardedDataParallel)", True),
    "_flat_param": ("FSDP1's flat parameter", True),
    "_checkpoint_wrapped_module": ("activation checkpointing or offloading", True),
    "module": ("DDP, DataParallel or AveragedModel, or the model's own", False),
    "base_layer": ("an adapter (LoRA), or the model's own", False),
    "parametrizations": ("torch.nn.utils.parametrize, or the model's own", False),
}
"""Parts of names that wrappers put in: who does, and whether nobody else is known to."""


@dataclass
class Origin:
    """A part of names that is, or may be, a wrapper's.

    Attributes:
        part: of a name, between dots.
        origin: who puts it there.
        certain: whether nobody else is known to.
        keys: that have it.
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
    origins: list[Origin]
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
    used: Counter[Rule] = Counter()
    mapped: Sequence[str | None] = [None] * len(names)
    if key_map == "normalize":
        mapped = canonical
    elif isinstance(key_map, KeyTable):
        try:
            found = [key_map.apply(name) for name in names]
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        mapped = [new for new, _ in found]
        used.update(rule for _, rule in found if rule is not None)
    rows = [KeyLine(*fields) for fields in zip(names, canonical, ambiguous, mapped, strict=True)]
    report = KeyReport(rows, _origins(names), _several(zip(canonical, names, strict=True)))
    if key_map is not None:
        report.collisions = _several((row.mapped or "", row.key) for row in rows)
    if isinstance(key_map, KeyTable):
        report.unused = [rule for rule in key_map.rules() if rule not in used]
    return report


def _canonical(names: list[str]) -> tuple[list[str], list[bool]]:
    try:
        canonical, flags = _C.guess_keys(names)
    except ValueError:  # two would be one: each by itself
        each = [_guess(name) for name in names]
        return [new for new, _ in each], [flag for _, flag in each]
    return canonical, [bool(flag) for flag in flags]


def _guess(name: str) -> tuple[str, bool]:
    try:
        (new,), flags = _C.guess_keys([name])
    except ValueError:  # it cannot be written as UTF-8
        return name, False
    return new, bool(flags[0])


def _several(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that more than one key would get."""
    owners: dict[str, list[str]] = defaultdict(list)
    for new, old in pairs:
        owners[new].append(old)
    return {new: old for new, old in owners.items() if len(old) > 1}


def _origins(names: Iterable[str]) -> list[Origin]:
    found: dict[str, Origin] = {}
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for name in names:
        # The last part is a tensor's own name, but for a flat parameter.
        parts = name.split(".")
        for part in dict.fromkeys(itertools.chain(parts[:-1], (p for p in parts[-1:] if p == "_flat_param"))):
            if part not in ORIGINS:
                continue
            origin = found.setdefault(part, Origin(part, *ORIGINS[part]))
            origin.keys += 1
            places[part][".".join(parts[: parts.index(part) + 1])] = None
    for part, origin in found.items():
        origin.places = list(places[part])
    return [found[part] for part in ORIGINS if part in found]
