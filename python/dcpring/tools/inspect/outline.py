"""The keys of a checkpoint as a tree, in which numbered parts that are alike ("layers.0" to "layers.31") are one.

A name's parts are what lies between its dots. Where only one way leads on, several parts share a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpring.base.text import ranges
from dcpring.tools.inspect.inventory import Listed

_MOST_PARTS = 64
"""What is behind so many dots is one part, however many more it has."""

_MOST_SPANS = 5

_NUMBERED = re.compile(r"((?:dp_)?rank_)?(0|[1-9]\d{0,8})")
"""Parts that come in series: "0", "1", ..., and "rank_0", "rank_1", ..."""


class _Node:
    """A beginning of names: the key that is called so, and what lies below."""

    __slots__ = ("children", "item", "kind")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.item: Listed | None = None
        self.kind = 0
        """The same number for nodes with the same names, shapes and dtypes below."""

    def items(self) -> Iterator[Listed]:
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.item is not None:
                yield node.item
            if node.children:
                waiting += node.children.values()


@dataclass
class Line:
    """A line of the tree.

    Attributes:
        name: the part of the name that this row adds; several parts may be joined.
        path: for each level above, and this row's own, whether it is the last of its siblings.
        nodes: what it stands for; several for parts that are alike.
        inside: whether a row above stands for several.
    """

    name: str
    path: tuple[bool, ...]
    nodes: Sequence[_Node] = field(repr=False)
    inside: bool

    @property
    def count(self) -> int:
        """How many are alike."""
        return len(self.nodes)

    @property
    def item(self) -> Listed | None:
        """The key (the first of those that are alike), if the row stands for a key, with nothing below it."""
        first = self.nodes[0]
        return None if first.children else first.item

    def items(self) -> Iterator[Listed]:
        """All keys that the row stands for."""
        return (item for node in self.nodes for item in node.items())


class Outline:
    """The tree."""

    def __init__(self, items: Iterable[Listed]) -> None:
        self._root = _Node()
        nodes = [self._root]
        for item in items:
            node = self._root
            for part in _parts(item):
                child = node.children.get(part)
                if child is None:
                    child = node.children[part] = _Node()
                    nodes.append(child)
                node = child
            node.item = item
        _number_kinds(nodes)

    def rows(self, depth: int) -> Iterator[Line]:
        """The lines of the tree, down to names of ``depth`` parts."""
        return self._rows([self._root], (), depth, False)

    def _rows(self, nodes: Sequence[_Node], path: tuple[bool, ...], depth: int, inside: bool) -> Iterator[Line]:
        groups = _groups(nodes)
        for number, (name, members) in enumerate(groups):
            levels = depth - 1
            while levels and members[0].item is None and len(following := _groups(members)) == 1:
                if len(members) > len(nodes) and len(following[0][1]) > len(members):
                    break  # one row for one series
                part, members = following[0]
                name = f"{name}.{part}"
                levels -= 1
            row = Line(name, (*path, number == len(groups) - 1), members, inside)
            yield row
            if levels and members[0].children:
                yield from self._rows(members, row.path, levels, inside or len(members) > len(nodes))


def _parts(item: Listed) -> list[str]:
    parts = item.entry.key.split(".", _MOST_PARTS - 1)
    return parts if item.part is None else [f"(rank {item.part})", *parts]


def _number_kinds(nodes: Sequence[_Node]) -> None:
    """Parents come before their children, which are numbered first."""
    kinds: dict[Any, int] = {}
    for node in reversed(nodes):
        entry = None if node.item is None else node.item.entry
        own = None if entry is None else (entry.shape, entry.dtype)
        below = frozenset((name, child.kind) for name, child in node.children.items())
        node.kind = kinds.setdefault((entry is None, own, below), len(kinds))


def _groups(nodes: Sequence[_Node]) -> list[tuple[str, list[_Node]]]:
    """What lies below nodes that are alike: names, and for each the nodes that it stands for."""
    series: dict[Any, list[tuple[int, str]]] = {}
    for name, child in nodes[0].children.items():
        match = _NUMBERED.fullmatch(name)
        place = (match[1], child.kind) if match else (name, None)
        series.setdefault(place, []).append((int(match[2]) if match else 0, name))
    return [
        (_series_name(members), [node.children[name] for node in nodes for _, name in sorted(members)])
        for members in series.values()
    ]


def _series_name(members: list[tuple[int, str]]) -> str:
    if len(members) == 1:
        return members[0][1]
    members = sorted(members)
    spans = ranges((number for number, _ in members), ",").split(",")
    if len(spans) > _MOST_SPANS:
        spans = [*spans[: _MOST_SPANS - 2], "...", spans[-1]]
    match = _NUMBERED.fullmatch(members[0][1])
    assert match is not None
    return f"{match[1] or ''}{','.join(spans)}"
