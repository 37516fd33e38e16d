"""``dcpring run``: a program runs as Python would run it, with dcpring in place of torch's storage and planners.

It needs no package that the command line needs, as it stands where ``python`` would: in a job's environment. The
program has a ``__main__`` of its own, which stays after its last line: threads that go on (``async_save``) and what
runs at exit pickle its classes by that name.
"""

from __future__ import annotations

import argparse
import builtins
import os
import pkgutil
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
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
    if not is_module and not os.path.exists(program):
        print(f"dcpring run: there is no {program}", file=sys.stderr)
        return 2
    os.environ[install.VARIABLE] = "1"  # for programs that it starts
    install.install_if_asked_for()
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # since then they are made when they are asked for
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    try:
        if is_module:
            _begin_path(os.getcwd())
            _run_module(program, alter_argv=True)
        elif pkgutil.get_importer(program) is not None:  # a folder or a zip file
            _begin_path(os.path.abspath(program), always=True)
            _run_module("__main__", alter_argv=False)
        else:
            _begin_path(os.path.dirname(os.path.realpath(program)))
            _run_script(os.path.join(os.getcwd(), program))
    except BaseException as error:
        _leave_us_out(error)
        raise
    return 0


_run_module = runpy._run_module_as_main  # type: ignore[attr-defined]
"""What Python itself calls for ``-m``, folders and zip files."""


def _begin_path(folder: str, always: bool = False) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def _run_script(path: str) -> None:
    is_compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
    names = vars(sys.modules["__main__"])
    names.update(__file__=path, __cached__=None, __loader__=loader)
    # By itself the loader would keep what it compiles.
    code = loader.get_code("__main__") if is_compiled else compile(loader.get_data(path), path, "exec", 0, True)
    exec(code, names)  # type: ignore[arg-type]


def _leave_us_out(error: BaseException) -> None:
    """What ends the program is told as Python tells it, without the functions here."""
    hook, traceback = sys.excepthook, error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.excepthook = lambda kind, value, _: hook(kind, value.with_traceback(traceback), traceback)
