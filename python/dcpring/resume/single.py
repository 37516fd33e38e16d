"""``dcpring.save`` and ``dcpring.load``: a tree of one process, which comes back exactly as it was.

Every tensor and every value is an ordinary entry of a DCP checkpoint, named as DCP would name it, so that stock and
the tools read them. Beside them lies the tree itself, with the names in the places of what they stand for: it has the
containers and the keys that names do not tell (ints, tuples, empty dicts). What is one object in several places has
an entry for each, and one node in the tree: pickles keep that it is one. No collective is called, whether or not there
is a process group.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.unpickler import Safe, Trust
from dcpring.move.objects import ObjectPolicy, refusals, refused_text
from dcpring.plan.flatten import Flat, Path, flat_of
from dcpring.plan.load_planner import RingLoadPlanner
from dcpring.plan.save_planner import RingSavePlanner
from dcpring.resume import trees
from dcpring.resume.layouts import Layout, layouts_of, view_of, with_strides
from dcpring.resume.manifest import MANIFEST_KEY, OnceReader, Stored
from dcpring.store.writer import RingWriter
from dcpring.torchside import dcp
from dcpring.torchside.dcp import plans_for_itself
from dcpring.torchside.tensors import PLAIN_TYPES, ShardedTensor

__all__ = ["load", "save"]

logger = logging.getLogger("dcpring")

TREE_KEY = "dcpring.tree"
"""The entry that holds the tree of names."""

_IN_TREE = "a key or an attribute of a dict in the tree"
"""What errors call what is pickled with it."""

MEMORY = "dcpring.memory"
"""What entries are called that hold memory of which several tensors have a part, and none all."""

ROOT = "tree"
"""Where a tree lies that is no mapping."""

_NAMEDTUPLE, _PARAMETER, _WITH_GRADIENT, _HIDDEN, _WITH_ATTRIBUTES, _WITH_NODES, _LAID_OUT = range(7)
"""Kinds of nodes of the tree of names that are written as a tuple which begins with an int: all else in it is a
container, or the name of a leaf. A namedtuple has its class, its fields and its nodes; a parameter its name and
requires_grad; a tensor that requires a gradient, and an object that DCP would take for a mapping or a tensor, their
names; an OrderedDict that has attributes, as torch's state dicts have their versions, its node and these; a tensor that
has some, as ``nn.Buffer`` does, its node and their nodes. At the root of all may be the layouts of tensors (see
``layouts``), behind the tree."""

_SHARDED = (DTensor, ShardedTensor)
_SCALARS = (int, float, complex, bool, str, bytes, type(None))


def save(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    objects: ObjectPolicy = "error",
    safe_globals: Sequence[Any] = (),
    writer_options: Mapping[str, Any] | None = None,
) -> None:
    """Saves a tree of one process, such as all that a training has on rank 0, to be read by ``dcpring.load``.

    What it holds comes back as it was: dicts with keys of any kind, empty dicts, tuples, namedtuples, None, tensors,
    parameters, buffers, what ``state_dict()`` notes of its modules, and the objects that loads take (docs/objects.md).
    What is one object in several places is one again, and tensors that share elements share them again. Of a tensor
    come back values, dtype, shape, ``requires_grad``, attributes, and strides if it has no gaps; not its gradient, its
    hooks, its device, or what it is a view of where that is not in the tree. Conjugate and negative views, sparse
    tensors and those of subclasses share no memory afterwards.

    Other processes take no part, also where there is a process group. The directory is a checkpoint of DCP:
    ``dcp.load`` of stock reads tensors and values by their names. What is there stays good until the new one is
    complete.

    Args:
        tree: of dicts, lists and tuples; a tensor of which each rank has a part is none of one process.
        path: directory of the checkpoint, made if missing.
        objects: "error" refuses what a load would refuse, before anything is written; "warn" and "allow" as for
            ``RingWriter``: such a checkpoint is loaded with ``trusted=True``.
        safe_globals: classes that the load will be given as ``safe_globals``.
        writer_options: for ``RingWriter``.

    Raises:
        CheckpointError: something in the tree cannot come back as it is; the message names it, and the cure.
        OSError: with errno and path.
    """
    options = {"objects": objects, "safe_globals": safe_globals, **(writer_options or {})}
    write(tree, path, options, "dcpring.load(..., safe_globals=[{}]), or with trusted=True", "dcpring.save")


def write(tree: Any, path: str | os.PathLike[str], options: dict[str, Any], load: str, save: str) -> None:
    """``save`` by options of ``RingWriter``, and with the words of whoever calls it (``refused_text``)."""
    encoder = _Encoder()
    try:
        names = encoder.whole(tree)
    except RecursionError:
        raise CheckpointError("cannot save the tree: it holds itself, or is nested too deeply") from None
    values: dict[str, Any] = {**encoder.values, TREE_KEY: (trees.MARK, names)}
    writer = RingWriter(path, **options)
    if writer.objects != "allow":
        _judge(values, writer, load, save)
        writer.objects = "allow"
    try:
        dcp.save(values, writer, _NamedPlanner(encoder.paths), None)
    except CheckpointException as error:
        raise _first(error) from None


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    trusted: Trust = False,
    safe_globals: Sequence[Any] = (),
    reader_options: Mapping[str, Any] | None = None,
) -> Any:
    """Loads what ``dcpring.save`` has saved, as it says there; other processes take no part.

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
        names, layouts = tree[1:] if type(tree) is tuple and tree[:1] == (_LAID_OUT,) else (tree, {})
        _lay_out(values, stored, layouts)
        values |= {name: values[first].clone() for name, first in again.items() if name not in values}
        return _Decoder(values, trusted is True, safe_globals).tree(names)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        message = f"the tree ({TREE_KEY!r}) does not fit the checkpoint: {error!r}"
        raise CorruptCheckpointError(message, stored.path) from error


def _judge(values: Mapping[str, Any], writer: RingWriter, load: str, save: str) -> None:
    objects = ((name, value) for name, value in values.items() if not isinstance(value, Tensor))
    named = ((_IN_TREE if name == TREE_KEY else name, value) for name, value in objects)
    refused = refusals(named, Safe(writer.safe_globals))
    if not refused:
        return
    if writer.objects == "error":
        raise CheckpointError(f"cannot save {refused_text(refused, load, save)}")
    logger.warning("%s holds %s", writer.path, refused_text(refused, load, save))


def _read(stored: Stored, keys: list[str], device: str | torch.device) -> dict[str, Any]:
    state = stored.blank(keys, device)
    try:
        dcp.load(state, stored.reader, RingLoadPlanner(), None)
    except CheckpointException as error:
        raise _first(error) from None
    return state


def _lay_out(values: dict[str, Any], stored: Stored, layouts: Mapping[str, Layout]) -> None:
    """Gives tensors their order in memory, and then lays those that are views over the memory of others."""
    for name, (base, _, stride) in layouts.items():
        if not base:
            values[name] = with_strides(values[name], stride)
    for name, (base, offset, stride) in layouts.items():
        if base:
            values[name] = view_of(values[base], *stored.tensor(name), offset, stride)


def _first(error: CheckpointException) -> BaseException:
    first: BaseException = next(iter(error.failures.values()))[0]
    return first


class _NamedPlanner(RingSavePlanner):
    """Plans leaves by their names, as if they lay below the mappings that these have."""

    def __init__(self, paths: dict[str, Path]) -> None:
        super().__init__(check_replicas="off")
        self._known_paths = paths

    def _flat(self, state_dict: dict[str, Any]) -> Flat:
        return flat_of(state_dict, self._known_paths)


class _Encoder:
    """Takes a tree apart.

    Attributes:
        values: the leaves, by name.
        paths: what each name is made of.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.paths: dict[str, Path] = {TREE_KEY: (TREE_KEY,)}
        self._used: set[tuple[str, ...]] = {(TREE_KEY,), (MANIFEST_KEY,)}
        self._tensors: dict[str, Tensor] = {}
        self._nodes_of: dict[int, Any] = {}

    def whole(self, tree: Any) -> Any:
        """What stands for a tree, with the layouts of its tensors."""
        names = self.node(tree, () if type(tree) in (dict, OrderedDict) else (ROOT,))
        layouts = layouts_of(self._tensors, lambda memory: self._leaf(memory, self._unused((MEMORY,), by_name=True)))
        return (_LAID_OUT, names, layouts) if layouts else names

    def node(self, value: Any, path: tuple[str, ...]) -> Any:
        """What stands for a value in the tree of names; of what is at several places the same everywhere.

        DCP's readers find it under each name all the same.
        """
        made = self._node(value, path)
        return made if type(value) in _SCALARS else self._nodes_of.setdefault(id(value), made)

    def _node(self, value: Any, path: tuple[str, ...]) -> Any:
        kind: Any = type(value)
        if kind in _SCALARS:
            return self._leaf(value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind in (dict, OrderedDict):
            node = kind([(key, self.node(one, self._below(path, key))) for key, one in value.items()])
            attributes = vars(value) if kind is OrderedDict else {}
            return (_WITH_ATTRIBUTES, node, dict(attributes)) if attributes else node
        if kind in (list, tuple) and not _is_leaf(value):
            return kind(self._nodes(value, path))
        if isinstance(value, tuple) and _is_namedtuple(kind):
            return _NAMEDTUPLE, f"{kind.__module__}:{kind.__qualname__}", list(kind._fields), self._nodes(value, path)
        if isinstance(value, Mapping) or plans_for_itself(value):
            return _HIDDEN, self._leaf((trees.MARK, value), path)
        return self._leaf(value, path)

    def _nodes(self, values: Sequence[Any], path: tuple[str, ...]) -> list[Any]:
        return [self.node(one, self._below(path, index)) for index, one in enumerate(values)]

    def _below(self, path: tuple[str, ...], key: Any) -> tuple[str, ...]:
        """Where the value of a key lies: below its text, unless another key has the same."""
        text = key if type(key) is str else str(key) if type(key) in _SCALARS else type(key).__name__
        return self._unused((*path, text or "~"))

    def _unused(self, path: tuple[str, ...], *, by_name: bool = False) -> tuple[str, ...]:
        """The path, or the next like it, that nothing has yet; ``by_name``, that has no leaf's name either."""
        found, number = path, 1
        while found in self._used or (by_name and ".".join(found) in self.paths):
            number += 1
            found = (*path[:-1], f"{path[-1]}~{number}")
        self._used.add(found)
        return found

    def _tensor(self, value: Tensor, path: tuple[str, ...]) -> Any:
        if isinstance(value, _SHARDED):
            raise CheckpointError(
                f"cannot save {'.'.join(path)!r}: it is a {type(value).__name__}, of which each rank has a part. Save "
                "it with dcpring.Checkpointer, or with dcp.save on all ranks; or save its full_tensor()"
            )
        if value.is_meta:
            raise CheckpointError(f"cannot save {'.'.join(path)!r}: it is a tensor on the device meta, without values")
        is_plain = type(value) in PLAIN_TYPES and value.layout == torch.strided and not value.is_quantized
        if not is_plain or plans_for_itself(value):
            return _HIDDEN, self._leaf((trees.MARK, value), path)
        name = self._leaf(value.detach(), path)
        self._tensors[name] = self.values[name]
        node: Any = (_WITH_GRADIENT, name) if value.requires_grad else name
        if type(value) is nn.Parameter:
            node = _PARAMETER, name, value.requires_grad
        return (_WITH_NODES, node, self._attributes(vars(value), path)) if vars(value) else node

    def _attributes(self, attributes: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """Nodes of a leaf's attributes, which lie beside it: nothing lies below a leaf."""
        *above, last = path
        return {name: self.node(one, self._unused((*above, f"{last}~{name}"))) for name, one in attributes.items()}

    def _leaf(self, value: Any, path: tuple[str, ...]) -> str:
        """Its name: that of DCP, unless another leaf has it."""
        if ".".join(path) in self.paths:
            path = self._unused(path, by_name=True)
        name = ".".join(path)
        self.values[name], self.paths[name] = value, path
        return name


def _is_leaf(values: Any) -> bool:
    """Whether a list or a tuple, with those in it, holds nothing but numbers, texts and None."""
    return all(type(one) in _SCALARS or (type(one) in (list, tuple) and _is_leaf(one)) for one in values)


def _is_namedtuple(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


class _Decoder:
    """Puts a tree together again."""

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
        if kind == _NAMEDTUPLE:
            name, fields, nodes = parts
            return tuple.__new__(self._namedtuple(name, fields), [self.tree(one) for one in nodes])
        if kind in (_WITH_ATTRIBUTES, _WITH_NODES):
            found = self.tree(parts[0])
            own = parts[1] if kind == _WITH_ATTRIBUTES else {key: self.tree(one) for key, one in parts[1].items()}
            vars(found).update(own)
            return found
        value = self._values[parts[0]]
        if kind == _HIDDEN:
            return value[1]
        if kind == _PARAMETER:
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
