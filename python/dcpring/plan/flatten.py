"""A state dict as names and values: what DCP does with nested mappings, without an object for each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dcpring.errors import CheckpointError
from dcpring.format.properties import varint
from dcpring.names.diff import check_state_dict
from dcpring.torchside import versions
from dcpring.torchside.dcp import flatten_sharded_tensors, flatten_state_dict
from dcpring.torchside.tensors import PLAIN_TYPES, ShardedTensor

Path = tuple[str | int, ...]


@dataclass
class Flat:
    """A nested state dict as one level: names, values and the paths that the names stand for."""

    values: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    codes: list[bytes] = field(default_factory=list)
    """The paths as the core has them: see ``_path_code``."""
    renamed: list[str] = field(default_factory=list)
    """Names of mappings with keys that are no strings, and so come back as others."""


def flatten(state_dict: Mapping[str, Any]) -> Flat:
    """As DCP's ``flatten_state_dict``: mappings are opened, and lists that hold tensors or mappings."""
    flat = Flat()
    try:
        if not versions.knows_torch():
            return _flattened_by_stock(state_dict)
        for key, value in state_dict.items():
            _flatten_value(flat, str(key), (str(key),), value)
    except RecursionError:
        check_state_dict(state_dict)
        raise
    return flat


def flat_of(values: dict[str, Any], paths: dict[str, Path]) -> Flat:
    """What is one level already, with the paths that its names stand for: all of strings."""
    codes = {above: _path_code((*above, "")) for above in {path[:-1] for path in paths.values()}}
    return Flat(values, paths, [codes[paths[name][:-1]] for name in values])


def _flattened_by_stock(state_dict: Mapping[str, Any]) -> Flat:
    values, mappings = flatten_state_dict(state_dict)
    return Flat(values, mappings, [path_code(mappings, name) for name in values])


def _flatten_value(flat: Flat, name: str, path: Path, value: Any) -> None:
    if isinstance(value, Mapping):
        _flatten_mapping(flat, name, path, value)
    elif isinstance(value, list) and not is_terminal(value):
        for index, entry in enumerate(value):
            _flatten_value(flat, f"{name}.{index}", (*path, index), entry)
    else:
        _add_leaf(flat, name, path, value, _path_code(path))


def _flatten_mapping(flat: Flat, name: str, path: Path, mapping: Mapping[Any, Any]) -> None:
    code = _path_code((*path, ""))  # the same for all leaves of this mapping
    if not {str}.issuperset(map(type, mapping)):
        _note_keys(flat, name, mapping)
    for key, value in mapping.items():
        child, child_path = f"{name}.{key}", (*path, str(key))
        if type(value) in PLAIN_TYPES or not isinstance(value, (Mapping, list)):
            _add_leaf(flat, child, child_path, value, code)
        else:
            _flatten_value(flat, child, child_path, value)


def _note_keys(flat: Flat, name: str, mapping: Mapping[Any, Any]) -> None:
    others = {type(key).__name__ for key in mapping if not isinstance(key, str)}
    if others:
        flat.renamed.append(f"{name} ({', '.join(sorted(others))})")


def _add_leaf(flat: Flat, name: str, path: Path, value: Any, code: bytes) -> None:
    if name in flat.values:
        raise ValueError(f"duplicated flatten key {name}")
    flat.values[name] = value
    flat.mappings[name] = path
    flat.codes.append(code)


def is_terminal(values: list[Any]) -> bool:
    """Whether a list, with the lists in it, holds no tensor and no mapping."""
    seen = {id(values)}
    waiting = [values]
    while waiting:
        for entry in waiting.pop():
            if isinstance(entry, (Mapping, Tensor)):
                return False
            if isinstance(entry, list) and id(entry) not in seen:  # a few lists can hold each other very often
                seen.add(id(entry))
                waiting.append(entry)
    return True


def _path_code(path: Path) -> bytes:
    """The number of parts; for all but the last twice their length, plus 1 for an int; then 1 for an int last."""
    parts = [_size_of(part) << 1 | isinstance(part, int) for part in path[:-1]]
    return b"".join(map(varint, (len(path), *parts, int(isinstance(path[-1], int)))))


def _size_of(part: str | int) -> int:
    text = str(part)
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def path_code(mappings: Mapping[str, Path], name: str) -> bytes:
    """A name's path as the core has it; empty where it has none."""
    path = mappings.get(name)
    if path is None:
        return b""
    if ".".join(map(str, path)) != name:
        raise CheckpointError(
            f"the key {name!r} has the path {path} in the planner's mappings, which is not what it is made of; "
            "a planner that renames keys must do so before set_up_planner, or with key_map="
        )
    return _path_code(path)


def open_sharded_tensors(flat: Flat) -> Flat:
    """As DCP does it: opens ShardedTensors of ShardedTensors."""
    if not any(issubclass(kind, ShardedTensor) for kind in set(map(type, flat.values.values()))):
        return flat
    codes = dict(zip(flat.values, flat.codes, strict=True))
    values = flatten_sharded_tensors(flat.values)
    return Flat(values, flat.mappings, [codes.get(name, b"") for name in values])
