"""States as trees of plain data: made so that DCP gives them back exactly, and compared between ranks.

DCP flattens every mapping of a state dict and rebuilds it from the names: keys become strings, empty mappings vanish,
a Counter comes back as a dict. Such a mapping is stored as one object instead, marked so that it can be told.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dcpring.base import values
from dcpring.errors import CheckpointError
from dcpring.format.unpickler import Safe
from dcpring.move.objects import refusals
from dcpring.torchside.tensors import PLAIN_TYPES, is_whole

MARK = "dcpring.object"
"""First of the pair that stands for something stored as one object."""

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, OrderedDict, Counter)
"""What a ``weights_only`` load reads without being told to."""


def encode(state: Any) -> Any:
    """A state that comes back from DCP as it was, once ``decode`` has been over it."""
    if isinstance(state, Mapping):
        if type(state) is dict and state and all(type(key) is str for key in state):
            return {key: encode(value) for key, value in state.items()}
        return MARK, state
    if type(state) is list:
        return [encode(value) for value in state]
    return (MARK, state) if _is_marked(state) else state


def decode(state: Any) -> Any:
    if _is_marked(state):
        return state[1]
    if isinstance(state, dict):
        return {key: decode(value) for key, value in state.items()}
    if isinstance(state, list):
        return [decode(value) for value in state]
    return state


def _is_marked(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and isinstance(value[0], str) and value[0] == MARK


Place = tuple[tuple[str, str], ...]
"""Where a value lies: for each step to it the type of the key, which is empty for an index, and its text."""


def leaves(tree: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value that is no mapping, list or tuple, with its place."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*place, (type(key).__name__, _named(key))))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*place, ("", str(index))))
    else:
        yield place, tree


def text_of(place: Place) -> str:
    """A place in words, "a.b[2]": keys that differ may have the same."""
    return "".join(f".{text}" if kind else f"[{text}]" for kind, text in place).removeprefix(".")


def leaf_values(tree: Any) -> Iterator[Any]:
    """The values alone, in any order: quickly, for trees of many tensors."""
    rest = [tree]
    while rest:
        value = rest.pop()
        if type(value) in PLAIN_TYPES:
            yield value
        elif isinstance(value, Mapping):
            rest.extend(value.values())
        elif isinstance(value, list | tuple):
            rest.extend(value)
        else:
            yield value


def _named(key: Any) -> str:
    """The same on all ranks: a set is written in any order."""
    return str(key) if type(key) in _SCALARS else f"{type(key).__name__} {values.digest(key).hex()[:8]}"


def refuse_sharded(state: Any) -> None:
    """Raises CheckpointError if a state that is no rank's part of anything holds a part of something."""
    for place, value in leaves(state):
        if isinstance(value, DTensor) or (type(value) in PLAIN_TYPES and not is_whole(value)):
            what = f"{text_of(place)!r} is a {type(value).__name__}"
            raise CheckpointError(f"{what} of which each rank has a part; wrap the object in Sharded()")


def refuse_unloadable(state: Any, safe_globals: list[Any]) -> None:
    """Raises CheckpointError for an object that no load without ``trusted`` would read back."""
    for path, name in refusals(_unusual(state), Safe(safe_globals)).items():
        raise CheckpointError(
            f"{path!r} is no plain data, or holds more than that: {name}. A load would refuse it. Keep numbers, "
            f"strings, tensors and containers of them in the state, or pass reader_options={{'safe_globals': [{name}]}}"
        )


def _unusual(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is neither a plain container, nor a tensor, nor a scalar."""
    if isinstance(tree, Mapping) and type(tree) in _CONTAINERS:
        for key, value in tree.items():
            yield from _unusual(value, f"{path}.{key}" if path else str(key))
    elif type(tree) in _CONTAINERS:
        for index, value in enumerate(tree):
            yield from _unusual(value, f"{path}[{index}]")
    elif not isinstance(tree, Tensor) and type(tree) not in _SCALARS:
        yield path, tree


def digests(state: Any) -> dict[Place, str]:
    """A digest of every leaf, by its place."""
    return {place: values.digest(value).hex() for place, value in leaves(state)}


def digest(state: Any) -> str:
    """The same for states that are equal by value."""
    return values.digest(state).hex()
