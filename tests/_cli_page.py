"""docs/cli.md, from the parser of the command line: ``python tests/_cli_page.py`` writes it, a test compares.

It is made from the parser's actions: what ``--help`` prints depends on the terminal's width and on Python's version.
"""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path

from dcpring.cli._app import make_parser
from dcpring.cli._parser import Parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

INTRODUCTION = """\
# The command line

<!-- made by tests/_cli_page.py from the parser; change that -->

The package brings the program `dcpring`; `python -m dcpring` is the same. It needs nothing else.

{description} It reads checkpoints of stock and of
dcpring, and trusts none of them: no code in a checkpoint is run, and names are shown with their control characters
escaped.

On a terminal there are colours, and tables fit its width; in a pipe there is plain text, a line for each thing.
`NO_COLOR=1` switches colours off everywhere. Where a command has `--json`, that prints one document for scripts.
Results go to standard output, all else to standard error.

Every command has `--help`, which says what is said here. `dcpring --version` prints the version. Sizes are written as
`4096`, `64K`, `512MiB` or `4G`, in powers of 1024.
"""


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What a command takes, but for ``--help``."""
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """An action's help, with its default and the like put in."""
    values = {**vars(action), "prog": parser.prog}
    if action.choices is not None:
        values["choices"] = ", ".join(map(str, action.choices))
    return (action.help or "") % values


def _value(action: argparse.Action) -> str:
    """How the value of an action is written: ``CKPT``, ``[DIR]``, ``CKPT...``; "" for a switch."""
    if action.nargs == 0:
        return ""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else ""
    metavar = action.metavar or choices or (action.dest.upper() if action.option_strings else action.dest)
    if isinstance(metavar, tuple):
        return " ".join(metavar)
    if isinstance(action.nargs, int):
        return " ".join([metavar] * action.nargs)
    return {"?": f"[{metavar}]", "*": f"[{metavar}...]", "+": f"{metavar}..."}.get(str(action.nargs), metavar)


def _in_synopsis(action: argparse.Action) -> str:
    if not action.option_strings:
        return _value(action)
    return f"{max(action.option_strings, key=len)} {_value(action)}".rstrip()


def _synopsis(parser: argparse.ArgumentParser) -> str:
    """Options, then arguments; those that exclude each other once, with bars between them."""
    together = {id(action): group for group in parser._mutually_exclusive_groups for action in group._group_actions}
    parts: list[str] = []
    done: set[int] = set()
    for action in sorted(options_of(parser), key=lambda action: not action.option_strings):
        group = together.get(id(action))
        if group is None:
            part = _in_synopsis(action)
            parts.append(f"[{part}]" if action.option_strings and not action.required else part)
        elif id(group) not in done:
            done.add(id(group))
            part = " | ".join(map(_in_synopsis, group._group_actions))
            parts.append(f"({part})" if group.required else f"[{part}]")
    return " ".join([parser.prog, *parts])


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in options_of(parser):
        value = _value(action)
        names = [f"{name} {value}".rstrip() for name in action.option_strings] or [value]
        yield f"- {', '.join(f'`{name}`' for name in names)}: {help_of(action, parser)}"


def _indented_as_code(text: str) -> str:
    """Lines that ``--help`` leaves as they are, by their indentation, as blocks of code."""
    parts = []
    for raw, group in itertools.groupby(text.split("\n"), key=lambda line: line.startswith("  ")):
        lines = "\n".join(group)
        parts.append(f"```bash\n{textwrap.dedent(lines)}\n```" if raw else lines)
    return "\n".join(parts)


def _command(parser: Parser) -> Iterator[str]:
    """The sections of a man page."""
    yield f"## {parser.prog}\n\n**Name**: {parser.prog} - {parser.summary}"
    yield f"**Synopsis**: `{_synopsis(parser)}`"
    yield f"**Description**: {_indented_as_code(parser.description or '')}"
    options = list(_options(parser))
    if options:
        yield "**Options**:\n\n" + "\n".join(options)
    lines = "\n".join(f"# {example.meaning}\n{example.command}" for example in parser.examples)
    yield f"**Examples**:\n\n```bash\n{lines}\n```"
    yield "**Exit status**:\n\n" + "\n".join(f"- {status}: {text}" for status, text in parser.statuses.items())


def page() -> str:
    """The page in Markdown."""
    parser, commands = make_parser()
    rows = (
        f"| [`{part.prog}`](#{part.prog.replace(' ', '-')}) | {part.summary} |" for part in commands.parsers.values()
    )
    parts = [INTRODUCTION.format(description=parser.description), "\n".join(["| command | |", "| --- | --- |", *rows])]
    for command in commands.parsers.values():
        parts += _command(command)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
