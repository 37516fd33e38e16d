"""What commands print with: colours on a terminal, plain text in a pipe, JSON for scripts.

Names out of a checkpoint are a stranger's text: whatever could steer a terminal is shown escaped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from dcpring.base.text import visible
from dcpring.errors import UntrustedCheckpointError
from dcpring.report import format_table

_STYLES = {"bold": "1", "dim": "2", "italic": "3", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
"""The codes of a terminal; a style is one of these words or more."""

_MOST_FITTED = 2000
"""Rows of a table that is made to fit the screen."""

_NARROWEST = 8
"""Of columns whose texts may be folded."""

Piece = tuple[str, str]
"""A part of a line: its text, and its style."""


def take_streams() -> None:
    """Makes the process's streams fit to print to: closed ones swallow it, and what they cannot encode is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def in_words(error: Exception) -> str:
    """What an error says; of the system's, without the number, and of what is not trusted with the option for it."""
    if isinstance(error, UntrustedCheckpointError):
        return f"{error.what}. If you trust it, pass --trusted."
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


class Output:
    """Standard output and standard error.

    Attributes:
        interactive: whether standard output is a terminal.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self.interactive = self._out.isatty()
        # Only these decide: a pipe gets plain text whatever FORCE_COLOR and the like say.
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._has_colours = self.interactive and not plain
        self._err_has_colours = self._err.isatty() and not plain

    def raw(self, text: str) -> None:
        """The program's own text for another program, as it is."""
        with _naming("standard output"):
            self._out.write(text)

    def text(self, text: str = "", style: str = "") -> None:
        """A line (or several)."""
        self.lines([[(line, style)] for line in text.split("\n")])

    def lines(self, lines: Iterable[Sequence[Piece]]) -> None:
        """Lines made of pieces. They are not fitted to the screen."""
        for pieces in lines:
            self.raw("".join(_styled(visible(text), style, self._has_colours) for text, style in pieces) + "\n")

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        right: Iterable[int] = (),
        title: str = "",
        styles: dict[int, str] | None = None,
    ) -> None:
        """A table.

        Args:
            header: of the columns.
            rows: cells.
            right: the columns that are aligned to the right.
            title: above it.
            styles: by column.
        """
        cells = [[visible(cell) for cell in row] for row in rows]
        if title:
            self.text(title, style="italic")
        if self.interactive and len(cells) <= _MOST_FITTED:
            self.lines(_fitted(header, cells, set(right), styles or {}, self.screen[0]))
        else:
            self.raw(format_table(header, cells, right) + "\n")

    @property
    def screen(self) -> tuple[int, int]:
        """Columns and rows of the terminal."""
        return shutil.get_terminal_size()

    def json(self, value: dict[str, Any]) -> None:
        """One JSON document; long lists have a line for each element.

        Characters beyond ASCII are escaped, so it can be piped anywhere.
        """
        members = (f"  {json.dumps(name)}: {_json_member(member)}" for name, member in value.items())
        self.raw("{\n" + ",\n".join(members) + "\n}\n")

    def error(self, text: str) -> None:
        """A line on standard error, if that takes any."""
        with contextlib.suppress(OSError):
            self._err.write(f"{_styled('dcpring: ', 'bold red', self._err_has_colours)}{visible(text)}\n")

    def note(self, text: str) -> None:
        """A line on standard error that is no error: progress, where a file went."""
        with _naming("standard error"):
            self._err.write(_styled(visible(text), "dim", self._err_has_colours) + "\n")

    def flush(self) -> None:
        with _naming("standard output"):
            self._out.flush()
        with _naming("standard error"):
            self._err.flush()


@contextlib.contextmanager
def _naming(stream: str) -> Iterator[None]:
    """An error of a stream says which one it is."""
    try:
        yield
    except OSError as error:
        error.filename = stream
        raise


def _styled(text: str, style: str, has_colours: bool) -> str:
    codes = ";".join(_STYLES[word] for word in style.split()) if has_colours and text else ""
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text


def _json_member(member: Any) -> str:
    if isinstance(member, list) and member and isinstance(member[0], dict):
        return "[\n" + ",\n".join(f"    {json.dumps(element)}" for element in member) + "\n  ]"
    return json.dumps(member, indent=2).replace("\n", "\n  ")


# ---- tables on a terminal ----


def _fitted(
    header: Sequence[str], rows: list[list[str]], right: set[int], styles: dict[int, str], screen: int
) -> Iterator[list[Piece]]:
    """The lines of a table, in which texts are folded where the screen is too narrow. Numbers never are.

    A long name is folded rather than cut: it shall be copied from there.
    """
    widths = [max(map(_width, column)) for column in zip(header, *rows, strict=True)]
    least = [width if n in right else min(width, max(_NARROWEST, len(header[n]))) for n, width in enumerate(widths)]
    while (surplus := sum(widths) + 2 * (len(widths) - 1) - screen) > 0 and widths != least:
        widest = max((n for n in range(len(widths)) if widths[n] > least[n]), key=lambda n: widths[n])
        widths[widest] = max(least[widest], widths[widest] - surplus)
    bold = dict.fromkeys(range(len(header)), "bold")
    for cells, style in [(header, bold), *((row, styles) for row in rows)]:
        columns = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
        for at in range(max(map(len, columns))):
            line: list[Piece] = []
            for n, column in enumerate(columns):
                part = column[at] if at < len(column) else ""
                padding = (" " * (widths[n] - _width(part)), "")
                pieces = [padding, (part, style.get(n, ""))] if n in right else [(part, style.get(n, "")), padding]
                line += [*([("  ", "")] if n else []), *pieces]
            yield line[:-1] if len(columns) - 1 not in right else line


def _width(text: str) -> int:
    """The columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _folded(text: str, width: int) -> list[str]:
    """Lines of at most so many columns: at spaces where there are some, else anywhere."""
    lines = []
    while _width(text) > width:
        fits = next((n for n in range(len(text), 0, -1) if _width(text[:n]) <= width), 1)
        at = text.rfind(" ", 1, fits + 1) if " " in text[1 : fits + 1] else fits
        lines.append(text[:at].rstrip())
        text = text[at:].lstrip(" ")
    return [*lines, text]
