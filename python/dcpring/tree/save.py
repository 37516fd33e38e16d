"""``dcpring.save``: a tree of one process, which comes back exactly as it was.

Every tensor and every value is an ordinary entry of a DCP checkpoint, named as DCP would name it, so that stock and
the tools read them. Beside them lies the tree itself, with the names in the places of what they stand for: it has the
containers and the keys that names do not tell (ints, tuples, empty dicts). What is one object in several places has
an entry for each, and one node in the tree: pickles keep that it is one. No collective is called, whether or not there
is a process group.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dcpring.errors import CheckpointError
from dcpring.format.archive import refused_text
from dcpring.format.manifest import MANIFEST_KEY
from dcpring.format.unpickler import Safe
from dcpring.move.objects import ObjectPolicy, refusals
from dcpring.plan.flatten import Flat, Path, flat_of
from dcpring.plan.save_planner import RingSavePlanner
from dcpring.resume import trees
from dcpring.store.writer import RingWriter
from dcpring.torchside import dcp
from dcpring.torchside.dcp import own_errors, plans_for_itself
from dcpring.torchside.tensors import PLAIN_TYPES, ShardedTensor
from dcpring.tree.layouts import layouts_of
from dcpring.tree.nodes import (
    HIDDEN,
    LAID_OUT,
    MEMORY,
    NAMEDTUPLE,
    PARAMETER,
    ROOT,
    TREE_KEY,
    WITH_ATTRIBUTES,
    WITH_GRADIENT,
    WITH_NODES,
)

__all__ = ["save"]

logger = logging.getLogger("dcpring")

_IN_TREE = "a key or an attribute of a dict in the tree"
"""What errors call what is pickled with it."""

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
    with own_errors():
        dcp.save(values, writer, _NamedPlanner(encoder.paths), None)


def _judge(values: Mapping[str, Any], writer: RingWriter, load: str, save: str) -> None:
    objects = ((name, value) for name, value in values.items() if not isinstance(value, Tensor))
    named = ((_IN_TREE if name == TREE_KEY else name, value) for name, value in objects)
    refused = refusals(named, Safe(writer.safe_globals))
    if not refused:
        return
    if writer.objects == "error":
        raise CheckpointError(f"cannot save {refused_text(refused, load, save)}")
    logger.warning("%s holds %s", writer.path, refused_text(refused, load, save))


class _NamedPlanner(RingSavePlanner):
    """Plans leaves by their names, as if they lay below the mappings that these have."""

    def __init__(self, paths: dict[str, Path]) -> None:
        super().__init__(check_replicas="off")
        self._known_paths = paths

    def _flat(self, state_dict: dict[str, Any]) -> Flat:
        return flat_of(state_dict, self._known_paths)


class _Encoder:
    """Takes a tree apart into leaves with names, and a tree of these names.

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
        return (LAID_OUT, names, layouts) if layouts else names

    def node(self, value: Any, path: tuple[str, ...]) -> Any:
        """Gives the node of a value in the tree of names; a value at several places has the same node at each.

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
            return (WITH_ATTRIBUTES, node, dict(attributes)) if attributes else node
        if kind in (list, tuple) and not _is_leaf(value):
            return kind(self._nodes(value, path))
        if isinstance(value, tuple) and _is_namedtuple(kind):
            return NAMEDTUPLE, f"{kind.__module__}:{kind.__qualname__}", list(kind._fields), self._nodes(value, path)
        if isinstance(value, Mapping) or plans_for_itself(value):
            return HIDDEN, self._leaf((trees.MARK, value), path)
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
            return HIDDEN, self._leaf((trees.MARK, value), path)
        name = self._leaf(value.detach(), path)
        self._tensors[name] = self.values[name]
        node: Any = (WITH_GRADIENT, name) if value.requires_grad else name
        if type(value) is nn.Parameter:
            node = PARAMETER, name, value.requires_grad
        return (WITH_NODES, node, self._attributes(vars(value), path)) if vars(value) else node

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
