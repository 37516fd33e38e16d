"""One self-contained HTML page that shows a checkpoint: what is large, who wrote it, and where it lies.

Nothing is read but the metadata and the sizes of files. The page loads nothing from anywhere, so it can be mailed; what
a stranger has put into names stays data: it is JSON in the page, and its script makes text of it, never markup.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from dcpring.base.text import visible
from dcpring.report import imbalance
from dcpring.tools.inspect.inventory import DataFile, Inventory, Listed, Sum, total

MOST_KEYS = 20_000
"""Of the largest keys, that the page knows by name: some 3 MB. The others are one block."""

_DATA = "/*DATA*/"


@dataclass
class Shares:
    """Who wrote how much.

    Attributes:
        files: the data files that keys lie in, and those that nothing refers to.
        ranks: by rank, the bytes of elements and objects that it wrote; files whose name tells no rank count for none.
        components: their bytes, the largest first; what several keys share counts once.
        items: all keys, the largest first.
        total: of all keys.
    """

    files: list[DataFile]
    ranks: dict[int, int] = field(default_factory=dict)
    components: Counter[str] = field(default_factory=Counter)
    items: list[Listed] = field(default_factory=list)
    total: Sum = field(default_factory=Sum)

    @property
    def imbalance(self) -> float:
        """The largest rank's bytes over the mean of the ranks that wrote. 1.0 is even."""
        return imbalance(self.ranks.values())


def shares_of(inventory: Inventory) -> Shares:
    """Reads nothing but the sizes of the files."""
    items = sorted(inventory.items(), key=lambda item: -item.entry.nbytes)
    shares = Shares(inventory.files(items), items=items, total=total(items))
    for file in shares.files:
        shares.components.update(file.components)
        if file.rank is not None and file.records:
            shares.ranks[file.rank] = shares.ranks.get(file.rank, 0) + file.bytes
    shares.ranks = dict(sorted(shares.ranks.items()))
    shares.components = Counter(dict(shares.components.most_common()))
    return shares


def page(inventory: Inventory, shares: Shares) -> str:
    """The page's HTML."""
    template = resources.files("dcpring.tools.inspect").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(_document(inventory, shares), separators=(",", ":"))
    for character in "<>&":  # whatever a name has, it cannot end the element that the data is in
        data = data.replace(character, f"\\u{ord(character):04x}")
    return template.replace(_DATA, data)


def _document(inventory: Inventory, shares: Shares) -> dict[str, Any]:
    shown, rest = shares.items[:MOST_KEYS], shares.items[MOST_KEYS:]
    dtypes: Counter[str] = Counter()
    for item in shares.items:
        dtypes[item.entry.dtype or "object"] += item.entry.nbytes
    return {
        "checkpoint": visible(str(inventory.directory)),
        "origin": inventory.origin,
        "step": None if inventory.manifest is None else inventory.manifest.step,
        "keys": shares.total.keys,
        "bytes": shares.total.bytes,
        "imbalance": shares.imbalance,
        "items": [
            [
                visible(item.entry.key),
                item.entry.dtype or "object",
                None if item.entry.shape is None else list(item.entry.shape),
                item.entry.nbytes,
                len(item.entry.records),
                item.ranks,
            ]
            for item in shown
        ],
        "others": [len(rest), sum(item.entry.nbytes for item in rest)],
        "dtypes": dtypes.most_common(),
        "ranks": list(shares.ranks.items()),
        "files": [
            [visible(file.name), file.rank, file.state, file.size, file.bytes, _parts(file)] for file in shares.files
        ],
    }


def _parts(file: DataFile) -> list[tuple[str, int]]:
    return [(visible(name), size) for name, size in file.components.most_common(8)]
