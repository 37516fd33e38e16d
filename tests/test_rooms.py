"""The rooms of python/dcpring: who may import whom. What is read is the source: imports anywhere in it count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dcpring

PACKAGE = Path(dcpring.__file__).resolve().parent

BELOW: dict[str, tuple[str, ...]] = {
    "cli": ("tools",),
    "tools": ("sources", "integrations"),
    "integrations": ("tree",),
    "tree": ("resume",),
    "resume": ("hf",),
    "sources": ("hf",),
    "hf": ("store",),
    "store": ("move",),
    "move": ("plan",),
    "plan": ("format", "names", "watch"),
    "format": ("base",),
    "names": ("base",),
    "watch": ("base",),
    "base": ("torchside",),
    "torchside": (),
}
"""What lies below each room. It imports that, and all that lies below that."""

FACE = ("_C", "errors", "options", "report")
"""Modules of no room that every room may import. They import no room."""

MUST_STAY = {
    ("cli/_app.py", "dcpring.__version__"): "the version that it prints",
    ("cli/doctor.py", "dcpring.__version__"): "likewise",
}
"""Imports that run back up, and what for. Nothing is added here: what two rooms need lies below both."""


def reach(room: str) -> set[str]:
    return {room}.union(*map(reach, BELOW[room]))


def imported(source: str) -> Iterator[str]:
    """The modules of dcpring that a source names in imports: at its top, in functions, and for type checkers alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "dcpring")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            if node.module == "dcpring":
                yield from (f"dcpring.{alias.name}" for alias in node.names)
            elif node.module and node.module.split(".")[0] == "dcpring":
                yield node.module


def refused(room: str | None, source: str) -> list[str]:
    """The imports in a source that a module of this room (None: of the face) may not have."""
    allowed = {*FACE, *(reach(room) if room else ())}
    return [name for name in imported(source) if name.partition("dcpring.")[2].split(".")[0] not in allowed]


def test_every_folder_is_a_room() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(BELOW)


def test_nothing_is_imported_from_above() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        room = place.parts[0] if len(place.parts) > 1 else None
        if room is not None or path.stem in FACE:
            found |= {(str(place), name) for name in refused(room, path.read_text())}
    assert found == MUST_STAY.keys()


def test_imports_from_above_are_found() -> None:
    hidden = "def f():\n    import dcpring.tools.convert\n"
    typed = "if TYPE_CHECKING:\n    from dcpring.store.writer import RingWriter\n"
    plain = "from dcpring import _C, resume\nfrom dcpring.errors import CheckpointError\n"
    assert refused("move", hidden) == ["dcpring.tools.convert"]
    assert refused("move", typed) == ["dcpring.store.writer"]
    assert refused("move", plain) == ["dcpring.resume"]
    assert refused("resume", "from dcpring.tools.keys import diff_keys\nfrom dcpring.torchside import dcp\n") == [
        "dcpring.tools.keys"
    ]
    assert refused(None, "from dcpring.base import text") == ["dcpring.base"]
    assert refused("watch", "from dcpring.names.diff import KeyDiff") == ["dcpring.names.diff"]
