"""What commands print with: colours and boxes on a terminal, plain text in a pipe, JSON for scripts.

Names out of a checkpoint are a stranger's text: whatever could steer a terminal is shown escaped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dcpring.base.text import visible
from dcpring.report import format_table

_MOST_DRAWN = 2000
"""Rows of a table that gets a box; rich takes 0.2 ms for each."""

_PIPE_WIDTH = 1 << 16
"""Columns where there is no terminal: nothing is wrapped or cut."""


def take_streams() -> None:
    """Makes the process's streams fit to print to: closed ones swallow it, and what they cannot encode is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def in_words(error: Exception) -> str:
    """What an error says; of the system's, without the number."""
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


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Left to the caller: rich's own way ends the program with status 1."""
        raise BrokenPipeError


Piece = tuple[str, str]
"""A part of a line: its text, and rich's style of it."""


class Output:
    """Standard output and standard error.

    Attributes:
        interactive: whether standard output is a terminal.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = self._console(out or sys.stdout, "standard output")
        self._err = self._console(err or sys.stderr, "standard error")
        self.interactive = self._out.is_terminal

    @staticmethod
    def _console(stream: TextIO, name: str) -> _Console:
        # rich looks at FORCE_COLOR and the like: a pipe gets plain text whatever they say.
        plain: dict[str, Any] = {"force_terminal": False, "color_system": None, "width": _PIPE_WIDTH}
        return _Console(
            file=cast(TextIO, _Named(stream, name)),
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
            **({} if stream.isatty() else plain),
        )

    def text(self, text: str = "", style: str = "") -> None:
        """A line (or several)."""
        self._out.print(Text("\n".join(map(visible, text.split("\n"))), style=style))

    def render(self, what: RenderableType) -> None:
        """Anything that rich can draw; its texts must have gone through ``visible``."""
        self._out.print(what, soft_wrap=False)

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
            styles: rich's, by column.
        """
        cells = [[visible(cell) for cell in row] for row in rows]
        if not self.interactive or len(cells) > _MOST_DRAWN:
            text = format_table(header, cells, right)
            self._out.file.write(f"{visible(title)}\n{text}\n" if title else f"{text}\n")
            return
        if title:  # rich's own would be folded to the width of the table
            self.text(title, style="italic")
        numbers = set(right)
        # Numbers are never folded; on a narrow screen the frame goes first.
        widths = [_width(number in numbers, column) for number, column in enumerate(zip(header, *cells, strict=True))]
        fits = sum(widths) + 3 * len(widths) + 1 <= self.screen[0]
        table = Table(box=box.ROUNDED if fits else None, header_style="bold", pad_edge=fits)
        for number, name in enumerate(header):
            # On a terminal a long name is folded rather than cut: it shall be copied from there.
            table.add_column(
                name,
                justify="right" if number in numbers else "left",
                overflow="fold",
                min_width=widths[number],
                style=(styles or {}).get(number),
            )
        for row in cells:
            table.add_row(*map(Text, row))
        self.render(table)

    @property
    def screen(self) -> tuple[int, int]:
        """Columns and rows of the terminal."""
        return self._out.size.width, self._out.size.height

    def lines(self, lines: Iterable[Sequence[Piece]]) -> None:
        """Lines made of pieces; for many of them, as rich takes its time. They are not fitted to the screen."""
        codes: dict[str, list[str]] = {"": ["", ""]}
        for pieces in lines:
            for text, style in pieces:
                if style not in codes:
                    codes[style] = self._codes(style)
                begin, end = codes[style]
                self._out.file.write(f"{begin}{visible(text)}{end}")
            self._out.file.write("\n")

    def _codes(self, style: str) -> list[str]:
        """What turns a style on and off here; nothing where there are no colours."""
        with self._out.capture() as capture:
            self._out.print(Text("|", style=style), end="")
        return capture.get().split("|")

    def raw(self, text: str) -> None:
        """The program's own text for another program, as it is."""
        self._out.file.write(text)

    def json(self, value: Any) -> None:
        """One JSON document; long lists have a line for each element.

        Characters beyond ASCII are escaped, so it can be piped anywhere.
        """
        if not isinstance(value, dict):
            self._out.file.write(json.dumps(value, indent=2) + "\n")
            return
        members = (f"  {json.dumps(name)}: {_json_member(member)}" for name, member in value.items())
        self._out.file.write("{\n" + ",\n".join(members) + "\n}\n")

    def error(self, text: str) -> None:
        """A line on standard error, if that takes any."""
        with contextlib.suppress(OSError):
            self._err.print(Text("dcpring: ", style="bold red").append(visible(text), style="default"))

    def note(self, text: str) -> None:
        """A line on standard error that is no error: progress, where a file went."""
        self._err.print(Text(visible(text), style="dim"))

    def flush(self) -> None:
        self._out.file.flush()
        self._err.file.flush()


_NARROWEST = 8
"""Of columns whose texts may be folded."""


def _width(is_number: bool, column: Sequence[str]) -> int:
    """What a column needs: its numbers, and the words of its header."""
    header, *cells = column
    words = max(map(len, header.split()), default=0)
    return max(words, *map(len, cells)) if is_number else max(words, min(_NARROWEST, *map(len, cells)))


def _json_member(member: Any) -> str:
    if isinstance(member, list) and member and isinstance(member[0], dict):
        return "[\n" + ",\n".join(f"    {json.dumps(element)}" for element in member) + "\n  ]"
    return json.dumps(member, indent=2).replace("\n", "\n  ")
