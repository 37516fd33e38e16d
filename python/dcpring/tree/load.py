"""``dcpring.load``: a tree of one process, exactly as ``dcpring.save`` was given it."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.unpickler import Trust
from dcpring.plan.load_planner import RingLoadPlanner
from dcpring.resume.manifest import Stored
from dcpring.store.once_reader import OnceReader
from dcpring.torchside import dcp
from dcpring.torchside.dcp import own_errors
from dcpring.tree.layouts import MemoryLayout, view_of, with_strides
from dcpring.tree.nodes import (
    HIDDEN,
    LAID_OUT,
    NAMEDTUPLE,
    PARAMETER,
    TREE_KEY,
    WITH_ATTRIBUTES,
    WITH_NODES,
)

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    trusted: Trust = False,
    safe_globals: Sequence[Any] = (),
    reader_options: Mapping[str, Any] | None = None,
) -> Any:
    """Loads a tree that ``dcpring.save`` has saved, as it was. Other processes take no part.

    Any other checkpoint of DCP comes as a dict of whole tensors and values, nested as it was when it was saved, as far
    as DCP knows that: with keys that are strings, and without empty dicts.

    Args:
        path: directory of the checkpoint.
        device: where tensors go.
        trusted: unpickle objects whatever they hold. Only for checkpoints you would run as a program.
        safe_globals: classes that objects may refer to besides plain data and tensors. Namedtuples need not be among
            them where their module has been imported.
        reader_options: for ``RingReader``.

    Returns:
        The tree.

    Raises:
        CorruptCheckpointError: bytes are damaged, missing or contradict each other.
        UntrustedCheckpointError: the checkpoint refers to what is not allowed.
        CheckpointError: the class of a namedtuple is not there.
        OSError: with errno and path.
    """
    reader = OnceReader(path, **{"trusted": trusted, "safe_globals": safe_globals, **(reader_options or {})})
    stored = Stored(reader)
    keys = list(stored.metadata.state_dict_metadata)
    if TREE_KEY not in keys:
        values = _read(stored, keys, device)
        reader.tell(0)
        return stored.rebuilt(values, depth=0) or {}
    again = stored.same_data()  # tied tensors, which were written once
    values = _read(stored, [key for key in keys if key not in again], device)
    reader.tell(0)
    try:
        tree = values.pop(TREE_KEY)[1]
        names, layouts = tree[1:] if type(tree) is tuple and tree[:1] == (LAID_OUT,) else (tree, {})
        _lay_out(values, stored, layouts)
        values |= {name: values[first].clone() for name, first in again.items() if name not in values}
        return _Decoder(values, trusted is True, safe_globals).tree(names)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        message = f"the tree ({TREE_KEY!r}) does not fit the checkpoint: {error!r}"
        raise CorruptCheckpointError(message, stored.path) from error


def _read(stored: Stored, keys: list[str], device: str | torch.device) -> dict[str, Any]:
    state = stored.blank(keys, device)
    with own_errors():
        dcp.load(state, stored.reader, RingLoadPlanner(), None)
    return state


def _lay_out(values: dict[str, Any], stored: Stored, layouts: Mapping[str, MemoryLayout]) -> None:
    """Gives tensors their order in memory, and then lays those that are views over the memory of others."""
    for name, (base, _, stride) in layouts.items():
        if not base:
            values[name] = with_strides(values[name], stride)
    for name, (base, offset, stride) in layouts.items():
        if base:
            values[name] = view_of(values[base], *stored.tensor(name), offset, stride)


class _Decoder:
    """Puts a tree together from its leaves and the tree of their names."""

    def __init__(self, values: dict[str, Any], trusted: bool, safe_globals: Sequence[Any]) -> None:
        self._values = values
        self._made: dict[int, Any] = {}  # of the tree's own nodes: they live as long as the tree
        self._trusted = trusted
        self._known = {f"{one.__module__}:{one.__qualname__}": one for one in safe_globals if isinstance(one, type)}

    def tree(self, node: Any) -> Any:
        if isinstance(node, str):
            return self._values[node]
        if id(node) not in self._made:
            self._made[id(node)] = self._tree(node)
        return self._made[id(node)]

    def _tree(self, node: Any) -> Any:
        if type(node) in (dict, OrderedDict):
            return type(node)((key, self.tree(one)) for key, one in node.items())
        if type(node) is list:
            return [self.tree(one) for one in node]
        if type(node) is not tuple:
            raise TypeError(f"a {type(node).__name__} is no node")
        if not node or type(node[0]) is not int:
            return tuple(self.tree(one) for one in node)
        return self._special(*node)

    def _special(self, kind: int, *parts: Any) -> Any:
        if kind == NAMEDTUPLE:
            name, fields, nodes = parts
            return tuple.__new__(self._namedtuple(name, fields), [self.tree(one) for one in nodes])
        if kind in (WITH_ATTRIBUTES, WITH_NODES):
            found = self.tree(parts[0])
            own = parts[1] if kind == WITH_ATTRIBUTES else {key: self.tree(one) for key, one in parts[1].items()}
            vars(found).update(own)
            return found
        value = self._values[parts[0]]
        if kind == HIDDEN:
            return value[1]
        if kind == PARAMETER:
            return nn.Parameter(value, requires_grad=parts[1])
        return value.requires_grad_()

    def _namedtuple(self, name: str, fields: list[str]) -> type:
        """Its class, of a module that has been imported: an import would run code that the checkpoint names."""
        module, _, path = name.partition(":")
        if self._trusted and module not in sys.modules:
            __import__(module)
        found: Any = self._known.get(name) or sys.modules.get(module)
        for part in () if name in self._known else path.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type) or not issubclass(found, tuple) or list(getattr(found, "_fields", ())) != fields:
            raise CheckpointError(
                f"the checkpoint holds a namedtuple {name.replace(':', '.')}({', '.join(fields)}), which this process "
                f"does not have: import {module} before the load, or pass the class in safe_globals=[...]"
            )
        return found
