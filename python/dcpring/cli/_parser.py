"""The arguments of all commands, and how their help looks; docs/cli.md is made from the same."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dcpring.cli._output import Output
    from dcpring.names.key_map import KeyTable

Run = Callable[[argparse.Namespace, "Output"], int]

DIFFERS = "what was looked at is damaged, or differs"
"""What exit status 1 says, unless a command says it more exactly."""


def exit_statuses(differs: str = DIFFERS) -> dict[int, str]:
    """What each exit status says.

    Args:
        differs: what 1 does; "": it is never given.
    """
    return {
        0: "success",
        **({1: differs} if differs else {}),
        2: "wrong arguments, or something that cannot be done",
        130: "interrupted with Ctrl-C; what was being written is not there",
    }


class Example(NamedTuple):
    """A line for the shell, what it does, and the exit status that it ends with."""

    command: str
    meaning: str
    status: int = 0


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal, and leaves lines that are indented as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for raw, group in itertools.groupby(text.split("\n"), key=lambda line: not line or line[0] == " "):
            part = list(group)
            lines += part if raw else textwrap.wrap(" ".join(part), width)
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """Keeps what its help ends with, for the documentation.

    Attributes:
        examples: lines for the shell.
        statuses: what its exit statuses say.
        summary: one line.
    """

    def __init__(
        self, *, examples: Sequence[Example] = (), differs: str = DIFFERS, summary: str = "", **kwargs: Any
    ) -> None:
        self.examples = examples
        self.summary = summary
        self.statuses = exit_statuses(differs)
        lines = ["examples:", *(f"  {e.command}\n      {e.meaning}" for e in examples), ""] if examples else []
        lines += ["exit status:", *(f"  {status:<4} {meaning}" for status, meaning in self.statuses.items())]
        kwargs["epilog"] = "\n".join(lines)
        kwargs["formatter_class"] = _Help
        super().__init__(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; but a command tells of what it does not know itself, with its own usage."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


class Commands:
    """Where command modules enter themselves.

    Attributes:
        parser: of the whole command line.
        parsers: by command.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        self._subparsers = parser.add_subparsers(
            title="commands", dest="command", metavar="COMMAND", required=True, parser_class=Parser
        )
        self.parsers: dict[str, Parser] = {}

    def add(
        self,
        name: str,
        run: Run,
        help: str,
        description: str,
        examples: Sequence[tuple[str, str] | tuple[str, str, int]],
        differs: str = DIFFERS,
    ) -> argparse.ArgumentParser:
        """A command.

        Args:
            name: as typed.
            run: does it; gets the arguments and the Output, and returns the exit status.
            help: one line, for the list of commands.
            description: for its own help.
            examples: lines for the shell, which the tests run, with what they do, and their exit status where it is
                not 0.
            differs: what its exit status 1 says; "": it never has it.
        """
        parser: Parser = self._subparsers.add_parser(
            name,
            help=help,
            description=description,
            examples=[Example(*example) for example in examples],
            differs=differs,
            summary=help,
        )
        parser.set_defaults(run=run)
        self.parsers[name] = parser
        return parser


def add_checkpoint(parser: argparse.ArgumentParser, name: str = "checkpoint", **kwargs: Any) -> None:
    """An argument that names a checkpoint."""
    kwargs.setdefault("help", "directory of a checkpoint, stock's or dcpring's, or of safetensors")
    parser.add_argument(name, metavar=kwargs.pop("metavar", "CKPT"), type=given_path, **kwargs)


def add_rank(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank", type=int, metavar="R", help="of a checkpoint saved with use_collectives=False, the part of this rank"
    )


def add_trusted(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="let pickles in the checkpoint refer to anything; only for checkpoints you would run as a program",
    )


def add_patterns(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    parser.add_argument(name, action="append", default=[], metavar="PATTERN", help=help)


def add_key_map(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument(
        "--key-map",
        type=_key_map,
        metavar="MAP",
        help=f"a JSON file with a table of names (docs/keys.md), or normalize: {help}",
    )


def _key_map(text: str) -> KeyTable | str:
    if text == "normalize":
        return text
    from dcpring.names.key_map import KeyTable

    try:
        return KeyTable.read(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def tolerance(text: str) -> float:
    """A float of 0 or more, for ``type=``."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def given_path(text: str) -> str:
    """A path, for ``type=``: a shell's variable that is not set would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError('the path is empty; "." is the current directory')
    return text


def positive(text: str) -> int:
    """An int above 0, for ``type=``."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def size(text: str) -> int:
    """Bytes, as "4096", "64K", "512MiB", "4G" (powers of 1024), for ``type=``."""
    units = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
    number = text.rstrip("iIbBkKmMgGtT ")
    unit = text[len(number) :].strip().lower().removesuffix("b").removesuffix("i")
    try:
        value = float(number) * 1024 ** units[unit]
    except (ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; examples: 4096, 64K, 512MiB, 4G") from error
    if not 1 <= value < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return int(value)
