"""Renaming keys between a state dict and a checkpoint: ``key_map=`` of the writer, the reader and the planners.

A map always goes the way the data goes: on a save from the state dict's names to those in the checkpoint, on a load
from the checkpoint's names to those of the state dict.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dcpring import _C
from dcpring.base import strict_json
from dcpring.base.files import read_regular
from dcpring.errors import CheckpointError
from dcpring.names.diff import compressed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["KeyMapLike", "KeyTable"]

logger = logging.getLogger("dcpring")

FORMAT = 1
_FIELDS = ("format", "from", "to", "exact", "prefixes", "patterns")


def _check_names(what: str, names: Mapping[Any, Any]) -> None:
    for old, new in names.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise ValueError(f"{what} of a key map: {old!r:.200} to {new!r:.200}, where both must be str")
    _check_cycles(what, names)


def _check_cycles(what: str, names: Mapping[str, str]) -> None:
    done: set[str] = set()
    for start in names:
        path: dict[str, None] = {}
        name = start
        while name in names and name not in done and names[name] != name:
            if name in path:
                steps = list(path)[list(path).index(name) :]
                raise ValueError(f"{what} of a key map go in a circle: {' -> '.join([*steps, name])!s:.500}")
            path[name] = None
            name = names[name]
        done |= path.keys()


class Rule(NamedTuple):
    """A line of a table: "exact", "prefix" or "pattern", and what it matches."""

    kind: str
    old: str
    new: str


@dataclass(frozen=True)
class KeyTable:
    """Names before and after: the exact name counts first, then the longest prefix, then the first pattern.

    Names that none of them matches stay as they are; no rule is applied to what another one has made.

    Attributes:
        exact: whole names.
        prefixes: beginnings of names; a dot is no more than a character, so prefixes mostly end with one.
        patterns: regular expressions (``re``) that match the whole name, each with what to make of it: ``\\1`` or
            ``\\g<name>`` stand for groups.
        source, target: what the names before and after belong to: a version of the model, say ("from" and "to" in
            JSON). For people; nothing depends on them.

    Raises:
        ValueError: names go in a circle, two become one, or a pattern is no regular expression.
    """

    exact: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    patterns: Sequence[tuple[str, str]] = ()
    source: str = ""
    target: str = ""

    def __post_init__(self) -> None:
        _check_names("exact names", self.exact)
        _check_names("prefixes", self.prefixes)
        sources: dict[str, str] = {}
        for old, new in self.exact.items():
            if (first := sources.setdefault(new, old)) != old:
                raise ValueError(f"a key map has two sources for {new!r:.200}: {first!r:.200} and {old!r:.200}")
        for pattern, _ in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"pattern {pattern!r:.200} of a key map: {error}") from error

    def rename(self, name: str) -> str:
        """What the table makes of one name."""
        return self.apply(name)[0]

    def apply(self, name: str) -> tuple[str, Rule | None]:
        """What the table makes of one name, and by which rule; None where none matches."""
        if name in self.exact:
            return self.exact[name], Rule("exact", name, self.exact[name])
        for end in self._prefix_sizes:
            if (new := self.prefixes.get(name[:end])) is not None:
                return new + name[end:], Rule("prefix", name[:end], new)
        for pattern, template in self.patterns:
            if match := re.fullmatch(pattern, name):
                try:
                    return match.expand(template), Rule("pattern", pattern, template)
                except (re.error, IndexError) as error:
                    raise ValueError(f"pattern {pattern!r:.200} of a key map, to {template!r:.200}: {error}") from error
        return name, None

    def rules(self) -> list[Rule]:
        """All of them."""
        exact = [Rule("exact", *names) for names in self.exact.items()]
        prefixes = [Rule("prefix", *names) for names in self.prefixes.items()]
        return [*exact, *prefixes, *(Rule("pattern", *pair) for pair in self.patterns)]

    @functools.cached_property
    def _prefix_sizes(self) -> list[int]:
        return sorted({len(prefix) for prefix in self.prefixes}, reverse=True)

    def inverse(self) -> KeyTable:
        """The table that undoes this one.

        Raises:
            ValueError: it has patterns, which cannot be undone, or two prefixes become one.
        """
        if self.patterns:
            raise ValueError("a key map with patterns has no inverse")
        prefixes = {new: old for old, new in self.prefixes.items()}
        if len(prefixes) < len(self.prefixes):
            raise ValueError("two prefixes of the key map become one: it has no inverse")
        return KeyTable({new: old for old, new in self.exact.items()}, prefixes, (), self.target, self.source)

    def as_json(self) -> dict[str, Any]:
        """What ``from_json`` takes."""
        return {
            "format": FORMAT,
            "from": self.source,
            "to": self.target,
            "exact": dict(self.exact),
            "prefixes": dict(self.prefixes),
            "patterns": [list(pair) for pair in self.patterns],
        }

    @classmethod
    def from_json(cls, data: Any, origin: str = "the key map") -> KeyTable:
        """A table from what ``json.load`` gives.

        Args:
            data: an object with any of "format" (1), "from", "to" (str), "exact", "prefixes" (objects), "patterns"
                (a list of [pattern, replacement]).
            origin: for messages.

        Raises:
            ValueError: it is something else, or the table contradicts itself.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"{origin} is a {type(data).__name__}, not an object")
        unknown = [name for name in data if name not in _FIELDS]
        if unknown:
            raise ValueError(f"{origin} has {unknown[0]!r:.200}; known are {', '.join(_FIELDS)}")
        if data.get("format", FORMAT) != FORMAT:
            raise ValueError(f"{origin} has format {data['format']!r:.50}; this version of dcpring knows {FORMAT}")
        patterns = data.get("patterns", [])
        if not _is_pairs(patterns):
            raise ValueError(f'"patterns" of {origin} must be a list of [pattern, replacement]')
        for name, kind in (("from", str), ("to", str), ("exact", Mapping), ("prefixes", Mapping)):
            if not isinstance(data.get(name, kind() if kind is str else {}), kind):
                raise ValueError(f"{name!r} of {origin} is a {type(data[name]).__name__}")
        try:
            return cls(
                dict(data.get("exact", {})),
                dict(data.get("prefixes", {})),
                tuple((pattern, new) for pattern, new in patterns),
                data.get("from", ""),
                data.get("to", ""),
            )
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> KeyTable:
        """A table from a JSON file. Raises OSError, and ValueError where the file is not one."""
        try:
            data = strict_json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r} is no key map: {error}") from error
        return cls.from_json(data, repr(os.fspath(path)))


def _is_pairs(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in value
    )


KeyMapLike = Literal["normalize"] | str | os.PathLike[str] | Mapping[str, Any] | Callable[[str], str] | KeyTable | None
"""What ``key_map=`` takes: "normalize", the path of a JSON file, a dict of names or a table as one, a function, a
``KeyTable``, or None."""


class KeyMap:
    """What ``key_map=`` stands for, ready to be used."""

    def __init__(self, given: KeyMapLike) -> None:
        self.given = given
        self._function: Callable[[str], str] | None = None
        self.table: KeyTable | None = None
        if isinstance(given, KeyTable):
            self.table = given
        elif isinstance(given, Mapping):
            plain = all(isinstance(value, str) for name, value in given.items() if name not in ("from", "to", "format"))
            self.table = KeyTable(dict(given)) if plain and given else KeyTable.from_json(given)
        elif isinstance(given, (str, os.PathLike)):
            self.table = None if given == "normalize" else KeyTable.read(given)
        elif callable(given):
            self._function = given
        else:
            raise ValueError(
                f'key_map={given!r:.200}: must be "normalize", a JSON file, a dict, a function or a KeyTable'
            )

    def rename(self, names: Iterable[str]) -> dict[str, str]:
        """The new name of each.

        Raises:
            CheckpointError: two would become one, both named; or the function failed.
        """
        old = list(names)
        new = self._normalized(old) if self.given == "normalize" else [self._one(name) for name in old]
        owners: dict[str, str] = {}
        for before, after in zip(old, new, strict=True):
            if (first := owners.setdefault(after, before)) != before:
                raise CheckpointError(
                    f"key_map would call both {first!r:.200} and {before!r:.200} {after!r:.200}; give one of them "
                    "another name"
                )
        return dict(zip(old, new, strict=True))

    def _one(self, name: str) -> str:
        if self.table is not None:
            return self.table.rename(name)
        assert self._function is not None
        new = self._function(name)
        if not isinstance(new, str):
            raise CheckpointError(f"key_map gave a {type(new).__name__} for {name!r:.200}, not a str")
        return new

    def _normalized(self, names: list[str]) -> list[str]:
        try:
            new, ambiguous = _C.guess_keys(names)
        except ValueError as error:
            raise CheckpointError(f'key_map="normalize": {error}; pass key_map= with names of your own') from error
        kept = [name for name, flag in zip(new, ambiguous, strict=True) if flag]
        if kept:
            logger.warning(
                'key_map="normalize": "module", "base_layer" or "parametrizations" in these names may be a wrapper\'s '
                "or the model's own, and stay: %s; if they are wrappers', pass key_map={'prefixes': {'module.': ''}} "
                "or the like",
                compressed(kept),
            )
        return new

    def used(self, names: Mapping[str, str]) -> KeyTable:
        """A table of exactly what was renamed, to be kept with the checkpoint."""
        changed = {old: new for old, new in names.items() if old != new}
        table = self.table or KeyTable()
        return KeyTable(changed, source=table.source, target=table.target)


def one_map(storage: KeyMap | None, planner: KeyMap | None) -> KeyMap:
    """The key map that a planner applies: its own, or the storage's. Both may have the same.

    Raises:
        CheckpointError: they have different ones.
    """
    if storage is None or planner is None:
        only = storage or planner
        assert only is not None
        return only
    tables = storage.table, planner.table
    same = storage.given == planner.given if None in tables else tables[0] == tables[1]
    if not same:
        raise CheckpointError(
            "the storage and the planner have different key maps, by which names would change twice; give key_map= to "
            "one of the two"
        )
    return planner


# ---- metadata ----


def new_path(path: Any, old: str, new: str) -> Any:
    """Where a renamed value belongs in the nested state dict: the outer levels stay as far as the name allows."""
    if old == new:
        return path
    kept: list[Any] = []
    rest = new
    for step in path[:-1]:
        if not rest.startswith(f"{step}."):
            break
        kept.append(step)
        rest = rest[len(str(step)) + 1 :]
    return (*kept, rest)


def rename_metadata(metadata: Metadata, names: Mapping[str, str], *, storage: bool = True) -> Metadata:
    """A copy under new names; ``metadata`` itself, which a planner may keep, does not change.

    Args:
        metadata: of a checkpoint.
        names: the new name of each.
        storage: whether to rename ``storage_data`` too, or leave it out.
    """
    from torch.distributed.checkpoint.metadata import Metadata  # the command line answers without torch

    planner_data = metadata.planner_data
    if isinstance(planner_data, Mapping):
        planner_data = {
            names.get(old, old): new_path(path, old, names.get(old, old)) for old, path in planner_data.items()
        }
    storage_data = metadata.storage_data if storage else None
    if isinstance(storage_data, Mapping):
        storage_data = {_rename_index(index, names): info for index, info in storage_data.items()}
    return Metadata(
        {names[old]: entry for old, entry in metadata.state_dict_metadata.items()},
        planner_data,
        storage_data,
        metadata.storage_meta,
        getattr(metadata, "version", None),
    )


def _rename_index(index: MetadataIndex, names: Mapping[str, str]) -> MetadataIndex:
    new = names.get(index.fqn, index.fqn)
    return index if new == index.fqn else replace(index, fqn=new)


def rename_results(results: list[list[WriteResult]], names: Mapping[str, str]) -> list[list[WriteResult]]:
    return [[replace(result, index=_rename_index(result.index, names)) for result in part] for part in results]


# ---- the file beside the checkpoint ----


def dump_tables(tables: Mapping[str, KeyTable]) -> bytes:
    """The file: for each save, by DCP's id of it, the table that it used."""
    saves = {save_id: table.as_json() for save_id, table in tables.items()}
    return json.dumps({"format": FORMAT, "saves": saves}, indent=1).encode()


def load_tables(path: Path) -> dict[str, KeyTable]:
    """What ``dump_tables`` wrote; nothing when there is no file.

    Raises:
        OSError, CorruptCheckpointError: as ``read_regular``.
        ValueError: it is another file.
    """
    try:
        data = strict_json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from error
    saves = data.get("saves") if isinstance(data, dict) else None
    if not isinstance(saves, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is not a file that dcpring writes, or one of a later version")
    return {save_id: KeyTable.from_json(table, repr(str(path))) for save_id, table in saves.items()}
