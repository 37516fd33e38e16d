"""``dcpring completion``: what a shell needs to complete commands, options and paths."""

from __future__ import annotations

import argparse

from dcpring.cli._output import Output
from dcpring.cli._parser import Commands
from dcpring.errors import CheckpointError

_DIRECTORIES = ("CKPT", "DIR", "A", "B")
_FILES = ("FILE", "MAP", "PATH")
"""What stands for paths; arguments that are no options are files or directories too, whatever they are called."""

DESCRIPTION = """Prints a script for SHELL, which then completes the commands, their options, and paths. For this
shell, and for all shells to come:

  bash:
    eval "$(dcpring completion bash)"
    mkdir -p ~/.local/share/bash-completion/completions
    dcpring completion bash > ~/.local/share/bash-completion/completions/dcpring

  zsh (compinit must have been run; ~/.zfunc stands for a directory in fpath):
    eval "$(dcpring completion zsh)"
    dcpring completion zsh > ~/.zfunc/_dcpring

  tcsh:
    dcpring completion tcsh > ~/.dcpring.tcsh
    echo 'source ~/.dcpring.tcsh' >> ~/.tcshrc"""


def add(commands: Commands) -> None:
    parser = commands.add(
        "completion",
        run,
        "completion of commands, options and paths, for bash, zsh and tcsh",
        DESCRIPTION,
        [
            ('eval "$(dcpring completion bash)"', "completion in this bash"),
            ("dcpring completion zsh > _dcpring", "a file for zsh's fpath"),
        ],
        differs="",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh")
    parser.set_defaults(commands=commands)


def run(args: argparse.Namespace, out: Output) -> int:
    try:
        import shtab
    except ImportError as error:
        raise CheckpointError("completion needs the package shtab: pip install 'dcpring[cli]'") from error
    for command in args.commands.parsers.values():
        command.description = command.summary  # zsh shows it beside the name
        for action in command._actions:
            if (kind := _kind(action)) is not None:
                action.complete = getattr(shtab, kind)
    out.raw(shtab.complete(args.commands.parser, args.shell) + "\n")
    return 0


def _kind(action: argparse.Action) -> str | None:
    """What the value of an action is completed with: the name of one of shtab's constants."""
    if action.choices is not None or action.nargs == 0:
        return None
    if action.metavar in _DIRECTORIES:
        return "DIRECTORY"
    return "FILE" if action.metavar in _FILES or not action.option_strings else None
