"""The folders of csrc/core: each includes only what is below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parent.parent / "csrc" / "core"

BELOW: dict[str, set[str]] = {
    "base": set(),
    "io": {"base"},
    "record": {"base", "io"},
    "data": {"base", "io", "record"},
    "plan": {"base"},
    "keys": {"base"},
    "tools": {"base", "io", "record"},
    "ipc": {"base", "io"},
}
LIBRARIES = {"liburing.h": {"io"}, "libdeflate.h": {"base"}}
"""Whose headers only these folders include; nobody includes Python's."""

SOURCES = sorted(CORE.rglob("*.[ch]"))


def test_every_file_of_the_core_is_in_a_folder() -> None:
    assert {path.parent.relative_to(CORE).as_posix() for path in SOURCES} == set(BELOW)


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_includes_only_those_below_it(folder: str) -> None:
    wrong = []
    for path in SOURCES:
        if path.parent.name != folder:
            continue
        for kind, name in re.findall(r'^#include ([<"])(.+)[>"]$', path.read_text(), re.MULTILINE):
            if kind == "<":
                allowed = name != "Python.h" and folder in LIBRARIES.get(name, {folder})
            else:
                allowed = name.partition("/")[0] in {folder, *BELOW[folder]} and (CORE / name).is_file()
            if not allowed:
                wrong.append(f"{path.relative_to(CORE)} includes {name}")
    assert not wrong
