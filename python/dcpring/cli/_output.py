"""What commands print with: colours and boxes on a terminal, plain text in a pipe, JSON for scripts.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO, cast

from dcpring.base.text import visible
from dcpring.errors import UntrustedCheckpointError
from dcpring.report import format_table

_STYLES = {"bold": "1", "dim": "2", "italic": "3", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
"""The codes of a terminal; a style is one of these words or more."""

_MOST_DRAWN = 2000
"""Rows of a table that gets a box."""

_NARROWEST = 8
"""Of columns whose texts may be folded."""


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


class _Named:
    """A stream whose errors say which one it is."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._naming():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._naming():
            self._stream.flush()

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._name
            raise


Piece = tuple[str, str]
"""A part of a line: its text, and its style."""


class Output:
    """Standard output and standard error.

    Attributes:
        interactive: whether standard output is a terminal.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        out, err = out or sys.stdout, err or sys.stderr
        self._out = cast(TextIO, _Named(out, "standard output"))
        self._err = cast(TextIO, _Named(err, "standard error"))
        self.interactive = out.isatty()
        # Only these decide: a pipe gets plain text whatever FORCE_COLOR and the like say.
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._has_colours = self.interactive and not plain
        self._err_has_colours = err.isatty() and not plain

    def _styled(self, text: str, style: str) -> str:
        return _styled(visible(text), style) if self._has_colours else visible(text)

    def text(self, text: str = "", style: str = "") -> None:
        """A line (or several)."""
        self._out.write("\n".join(self._styled(line, style) for line in text.split("\n")) + "\n")

    def lines(self, lines: Iterable[Sequence[Piece]]) -> None:
        """Lines made of pieces. They are not fitted to the screen."""
        for pieces in lines:
            self._out.write("".join(self._styled(text, style) for text, style in pieces) + "\n")

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
        if not self.interactive or len(cells) > _MOST_DRAWN:
            self._out.write(format_table(header, cells, right) + "\n")
            return
        for line in _drawn(header, cells, set(right), styles or {}, self.screen[0], self._styled):
            self._out.write(line + "\n")

    @property
    def screen(self) -> tuple[int, int]:
        """Columns and rows of the terminal."""
        return shutil.get_terminal_size()

    def raw(self, text: str) -> None:
        """The program's own text for another program, as it is."""
        self._out.write(text)

    def json(self, value: Any) -> None:
        """One JSON document; long lists have a line for each element.

        Characters beyond ASCII are escaped, so it can be piped anywhere.
        """
        if not isinstance(value, dict):
            self._out.write(json.dumps(value, indent=2) + "\n")
            return
        members = (f"  {json.dumps(name)}: {_json_member(member)}" for name, member in value.items())
        self._out.write("{\n" + ",\n".join(members) + "\n}\n")

    def error(self, text: str) -> None:
        """A line on standard error, if that takes any."""
        with contextlib.suppress(OSError):
            begin = "dcpring: "
            self._err.write(f"{_styled(begin, 'bold red') if self._err_has_colours else begin}{visible(text)}\n")

    def note(self, text: str) -> None:
        """A line on standard error that is no error: progress, where a file went."""
        self._err.write((_styled(visible(text), "dim") if self._err_has_colours else visible(text)) + "\n")

    def flush(self) -> None:
        self._out.flush()
        self._err.flush()


def _styled(text: str, style: str) -> str:
    codes = ";".join(_STYLES[word] for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


# ---- tables on a terminal ----


def _drawn(
    header: Sequence[str],
    rows: list[list[str]],
    right: set[int],
    styles: dict[int, str],
    screen: int,
    styled: Callable[[str, str], str],
) -> Iterator[str]:
    """The lines of a table in a box; on a narrow screen the box goes first, then texts are folded. Numbers never are.

    A long name is folded rather than cut: it shall be copied from there.
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(_width, column)) for column in columns]
    least = [
        widths[n] if n in right else min(widths[n], max(_NARROWEST, _words(header[n]))) for n in range(len(widths))
    ]
    is_boxed = sum(least) + 3 * len(widths) + 1 <= screen
    room = screen - (3 * len(widths) + 1 if is_boxed else len(widths) - 1)
    while sum(widths) > room and widths != least:
        widest = max((n for n in range(len(widths)) if widths[n] > least[n]), key=lambda n: widths[n])
        widths[widest] = max(least[widest], widths[widest] - (sum(widths) - room))
    left, between, end = ("│ ", " │ ", " │") if is_boxed else ("", " ", "")

    def lines(cells: Sequence[str], styles: dict[int, str]) -> Iterator[str]:
        folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
        for at in range(max(map(len, folded))):
            parts = [column[at] if at < len(column) else "" for column in folded]
            shown = [_padded(part, widths[n], n in right, styles.get(n, ""), styled) for n, part in enumerate(parts)]
            yield (left + between.join(shown) + end).rstrip()

    def rule(begin: str, middle: str, end: str) -> str:
        return begin + middle.join("─" * (width + 2) for width in widths) + end

    if is_boxed:
        yield rule("╭", "┬", "╮")
    yield from lines(header, dict.fromkeys(range(len(header)), "bold"))
    if is_boxed:
        yield rule("├", "┼", "┤")
    for row in rows:
        yield from lines(row, styles)
    if is_boxed:
        yield rule("╰", "┴", "╯")


def _padded(text: str, width: int, is_right: bool, style: str, styled: Callable[[str, str], str]) -> str:
    padding = " " * (width - _width(text))
    return padding + styled(text, style) if is_right else styled(text, style) + padding


def _words(text: str) -> int:
    return max(map(_width, text.split()), default=0)


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


def _json_member(member: Any) -> str:
    if isinstance(member, list) and member and isinstance(member[0], dict):
        return "[\n" + ",\n".join(f"    {json.dumps(element)}" for element in member) + "\n  ]"
    return json.dumps(member, indent=2).replace("\n", "\n  ")
