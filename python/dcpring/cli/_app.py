"""The program: finds the command, runs it, and turns what goes wrong into a message and an exit status."""

from __future__ import annotations

import logging
import os
import signal
import sys

from dcpring import __version__
from dcpring.base.text import visible
from dcpring.cli import bench, completion, convert, diff, doctor, keys, ls, report, trace, verify
from dcpring.cli import run as run_command
from dcpring.cli._output import Output, in_words, take_streams
from dcpring.cli._parser import Commands, Parser
from dcpring.errors import CheckpointError

_COMMANDS = (ls, keys, verify, diff, convert, report, trace, bench, doctor, run_command, completion)

DESCRIPTION = "Looks into, checks, compares and converts checkpoints of torch.distributed.checkpoint."


def make_parser() -> tuple[Parser, Commands]:
    """The parser of the whole command line, and the commands in it."""
    parser = Parser(prog="dcpring", description=DESCRIPTION)
    parser.epilog = f"dcpring COMMAND --help has examples of each.\n\n{parser.epilog}"
    parser.add_argument("--version", action="version", version=f"dcpring {__version__}")
    commands = Commands(parser)
    for module in _COMMANDS:
        module.add(commands)
    return parser, commands


def run(argv: list[str]) -> int:
    """See ``dcpring.cli.main``."""
    take_streams()
    out = Output()
    try:
        parser, _ = make_parser()
        args = parser.parse_args(argv)
        _log_to_stderr()
        status = int(args.run(args, out))
        out.flush()
        return status
    except BrokenPipeError:
        # Whoever read the output has seen enough (`| head`). Python must not try to flush it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        out.error("interrupted")
        return 128 + signal.SIGINT
    except (CheckpointError, OSError) as error:
        out.error(in_words(error))
    except MemoryError:
        out.error("there is not enough memory")
    return 2


class _Line(logging.Formatter):
    """A message may quote names out of a checkpoint."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(visible, super().format(record).split("\n")))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Line("dcpring: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
