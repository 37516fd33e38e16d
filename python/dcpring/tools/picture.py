"""Pictures that commands draw: made in memory with matplotlib, written beside their target and renamed."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpring.base.files import replace_file
from dcpring.base.groups import Held
from dcpring.errors import CheckpointError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BACKENDS = {".png": "agg", ".svg": "svg", ".pdf": "pdf"}
_UNDATED = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Metadata with which the same data give the same file."""

_STYLE: Any = {
    "text.parse_math": False,  # names are a stranger's: they are no formulas
    "svg.hashsalt": "dcpring",
    "font.size": 9,
}


def check(path: Path) -> None:
    """Fails before any work is done where the picture could not be made afterwards.

    Raises:
        CheckpointError: matplotlib is missing, the name is no picture's, or its directory cannot be written to.
    """
    *others, last = _BACKENDS
    if path.suffix.lower() not in _BACKENDS:
        raise CheckpointError(f"{path} is no picture's name; it must end with {', '.join(others)} or {last}")
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{path} cannot be written: it is a directory, or its own is missing or read-only")
    try:
        with Held():  # Python aborts at its end where one of matplotlib's C++ modules is only half loaded
            importlib.import_module(f"matplotlib.backends.backend_{_BACKENDS[path.suffix.lower()]}")
            importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise CheckpointError(f"pictures need {error.name}, which is missing: pip install 'dcpring[plot]'") from error


@contextlib.contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches to draw on; then it is written.

    Raises:
        CheckpointError: as ``check``.
        OSError: the file cannot be written.
    """
    check(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kind = path.suffix.lower()
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
        yield figure
        picture = io.BytesIO()
        figure.savefig(picture, format=kind[1:], metadata=_UNDATED[kind])
    replace_file(path, picture.getvalue())


def drawable(text: str, most: int = 200) -> str:
    """A stranger's text, short enough, and of what fonts can draw."""
    text = "".join(c if c.isprintable() else "?" for c in text[: 4 * most])
    return text if len(text) <= most else f"{text[: most // 2 - 1]}...{text[2 - most // 2 :]}"
