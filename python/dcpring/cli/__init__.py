"""The command line: ``dcpring``, also ``python -m dcpring``.

Each command is a module with ``add``, which describes it to the parser, and the function that runs it: it gets the
arguments and an ``Output``, and returns the exit status. All else that is common to them is in ``_app``, ``_parser``
and ``_output``.
"""

from __future__ import annotations

import sys
import traceback

from dcpring.cli import run as run_command

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments, without the program's name; None: those of the process.

    Returns:
        The exit status: 0 for success, 1 where what was looked at differs or is damaged, 2 for wrong arguments and
        what cannot be done, 130 after Ctrl-C; after ``run`` that of the program.
    """
    argv = sys.argv[1:] if argv is None else argv
    if run_command.is_meant(argv):
        return run_command.execute(argv)
    try:
        from dcpring.cli._app import run

        return run(argv)
    except (KeyboardInterrupt, Exception) as error:  # status 1 would be a verdict on what was looked at
        # While all this is being loaded, Python 3.11 wraps what is raised in a class's __set_name__.
        is_interrupted = any(isinstance(one, KeyboardInterrupt) for one in (error, error.__cause__))
        print(f"dcpring: {'interrupted' if is_interrupted else fault(error)}", file=sys.stderr)
        return 130 if is_interrupted else 2


def fault(error: BaseException) -> str:
    """One line about an error that nobody has foreseen."""
    if sys.flags.dev_mode:
        traceback.print_exception(error)
    said = " ".join(str(error).split())[:500]
    said = said if said.isprintable() else ascii(said)  # it may quote a stranger's names
    return f"{type(error).__name__}: {said} (a fault of dcpring's; python -X dev -m dcpring shows where)"
