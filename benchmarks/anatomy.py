"""What one save and one load run of dcpring's Python, and how much Python there is in each room.

    python benchmarks/anatomy.py                 # a table
    python benchmarks/anatomy.py --path          # and each change of module, in order
    python benchmarks/anatomy.py --json FILE

A save and a load of one process, with dcpring's storage and planners, of some tensors and an object. Both run once
before they are looked at, so that what is imported or worked out once per process does not count. Lines count when
they run for the first time, so loops over tensors do not. A *change of module* is such a line that runs after one of
another module, unless that called from here: what returns to where it came from is no change. The fewer, the less a
reader has to jump.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcpring
from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

PACKAGE = Path(dcpring.__file__).resolve().parent
FACE = "(the face)"


@dataclass
class Anatomy:
    """What ran of dcpring.

    Attributes:
        lines: distinct ones, by module.
        changes: (the module before, the module after, the function there), in order, without returns.
    """

    lines: dict[str, set[int]] = field(default_factory=dict)
    changes: list[tuple[str, str, str]] = field(default_factory=list)


class Tracer:
    """Listens to the lines of dcpring in all threads that begin while it does, and in this one."""

    def __init__(self) -> None:
        self.found = Anatomy()
        self._way: list[str] = [""]
        self._modules: dict[str, str | None] = {}

    def __enter__(self) -> Anatomy:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self.found

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _module_of(self, file: str) -> str | None:
        if file not in self._modules:
            path = Path(file)
            inside = path.is_relative_to(PACKAGE)
            self._modules[file] = str(path.relative_to(PACKAGE)) if inside else None
        return self._modules[file]

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if self._module_of(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        module = self._module_of(frame.f_code.co_filename)
        if event == "line" and module is not None:
            lines = self.found.lines.setdefault(module, set())
            if frame.f_lineno not in lines:
                self._go(module, frame.f_code.co_name)
            lines.add(frame.f_lineno)
        return self._line

    def _go(self, module: str, function: str) -> None:
        if module in self._way:  # a return, or the same module
            del self._way[self._way.index(module) + 1 :]
        else:
            self.found.changes.append((self._way[-1], module, function))
            self._way.append(module)


def state(value: float) -> dict[str, Any]:
    model = {f"layers.{number}.weight": torch.full((64, 32), value) for number in range(4)}
    return {"model": model, "epoch": int(value)}


def examine(directory: str) -> dict[str, Anatomy]:
    def save() -> None:
        dcp.save(state(1.0), storage_writer=RingWriter(directory), planner=RingSavePlanner(), no_dist=True)

    def load() -> None:
        loaded = state(0.0)
        dcp.load(loaded, storage_reader=RingReader(directory), planner=RingLoadPlanner(), no_dist=True)
        assert loaded["epoch"] == 1 and bool((loaded["model"]["layers.3.weight"] == 1).all())

    return {"save": _examined(save), "load": _examined(load)}


def _examined(run: Callable[[], None]) -> Anatomy:
    run()
    gc.collect()
    with Tracer() as found:
        run()
    return found


def room_of(module: str) -> str:
    folder = module.rpartition("/")[0]
    return folder.split("/")[0] or FACE


def lines_by_module() -> dict[str, tuple[int, int]]:
    """Lines of each module, and those of them that are code: neither empty, nor a comment, nor a docstring alone."""
    return {str(path.relative_to(PACKAGE)): _lines(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def _lines(source: str) -> tuple[int, int]:
    code: set[int] = set()
    at_start = True
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in skipped:
            continue
        if token.type == tokenize.NEWLINE:
            at_start = True
            continue
        if not (at_start and token.type == tokenize.STRING):
            code.update(range(token.start[0], token.end[0] + 1))
        at_start = False
    return source.count("\n"), len(code)


def report(found: dict[str, Anatomy]) -> dict[str, Any]:
    sizes = lines_by_module()
    ran = {module for anatomy in found.values() for module in anatomy.lines}
    rooms: Counter[str] = Counter()
    code: Counter[str] = Counter()
    path: Counter[str] = Counter()
    for module, (lines, of_code) in sizes.items():
        rooms[room_of(module)] += lines
        code[room_of(module)] += of_code
        path[room_of(module)] += lines if module in ran else 0
    return {
        "calls": {
            name: {
                "distinct lines": sum(map(len, anatomy.lines.values())),
                "modules": len(anatomy.lines),
                "changes of module": len(anatomy.changes),
                "changes of room": sum(room_of(before) != room_of(after) for before, after, _ in anatomy.changes),
            }
            for name, anatomy in found.items()
        },
        "lines": {
            room: {"all": rooms[room], "code": code[room], "that a save or load enters": path[room]} for room in rooms
        },
        "all lines": sum(rooms.values()),
        "lines of modules that a save or load enters": sum(path.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="store_true", help="print each change of module, in order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = examine(os.path.join(directory, "checkpoint"))
    numbers = report(found)
    for name, call in numbers["calls"].items():
        print(f"one {name}: " + ", ".join(f"{count} {what}" for what, count in call.items()))
        if arguments.path:
            for before, after, function in found[name].changes:
                print(f"    {before or '(dcp)':32} -> {after:32} {function}")
    print(f"\n{'room':12} {'lines':>7} {'code':>7} {'in modules that a save or load enters':>40}")
    for room, lines in sorted(numbers["lines"].items(), key=lambda item: -item[1]["all"]):
        print(f"{room:12} {lines['all']:7} {lines['code']:7} {lines['that a save or load enters']:40}")
    entered = numbers["lines of modules that a save or load enters"]
    print(f"{'all':12} {numbers['all lines']:7} {'':7} {entered:40}")
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
