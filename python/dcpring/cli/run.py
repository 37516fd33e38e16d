"""``dcpring run``: a program runs as Python would run it, with dcpring in place of torch's storage and planners.

It needs no package that the command line needs, as it stands where ``python`` would: in a job's environment.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcpring.integrations import install

if TYPE_CHECKING:
    from dcpring.cli._output import Output
    from dcpring.cli._parser import Commands

NAME = "run"

DESCRIPTION = """Runs a Python program as `python PROGRAM ...` would, with dcpring installed: what it saves and loads by
torch.distributed.checkpoint goes through dcpring, and so it does in processes that it starts. Programs that start
others by torchrun or accelerate take it as a module: `torchrun --nproc-per-node 8 -m dcpring run train.py`. Whatever
stands behind PROGRAM is the program's. See docs/install.md."""


def add(commands: Commands) -> None:
    parser = commands.add(
        NAME,
        run,
        "run a program with dcpring in place of torch's storage",
        DESCRIPTION,
        [
            ("dcpring run train.py --steps 2", "a script, with its arguments"),
            ("dcpring run -m timeit --number 1 pass", "a module, as python -m does"),
        ],
        differs="the program's exit statuses are those of dcpring run",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module: as python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a script, or with -m a module")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace, out: Output) -> int:
    raise NotImplementedError("execute() is called before anything is parsed")


def is_meant(argv: list[str]) -> bool:
    """Whether these arguments name a program to run; if not, the parser says what is wrong, or helps."""
    rest = argv[2:] if argv[1:2] == ["-m"] else argv[1:]
    return argv[:1] == [NAME] and bool(rest) and not rest[0].startswith("-")


def execute(argv: list[str]) -> int:
    """Runs the program; what it raises is its own, ``SystemExit`` included."""
    is_module = argv[1] == "-m"
    sys.argv = argv[2 if is_module else 1 :]
    program = sys.argv[0]
    os.environ[install.VARIABLE] = "1"  # for programs that it starts
    install.install_if_asked_for()
    if is_module:
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        if not Path(program).exists():
            print(f"dcpring run: there is no {program}", file=sys.stderr)
            return 2
        if not sys.flags.safe_path and Path(program).is_file():
            sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    return 0
