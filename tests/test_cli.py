"""What all commands have in common."""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import _cli
import _prepared
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import dcpring
from dcpring.base.text import visible
from dcpring.cli._app import make_parser
from dcpring.cli._output import Output
from dcpring.format.outline import DTYPE_BYTES

COMMANDS = sorted(make_parser()[1].parsers)


def test_version_and_help() -> None:
    assert _cli.run("--version").out.strip() == f"dcpring {dcpring.__version__}"
    help = _cli.run("--help")
    assert help.status == 0 and "exit status:" in help.out and "  ls " in help.out


@pytest.mark.parametrize("args", [(), ("nothing",), ("ls",), ("ls", "--nothing", ".")])
def test_wrong_arguments_are_status_2(args: tuple[str, ...]) -> None:
    result = _cli.run(*args)
    usage = "usage: dcpring ls" if "ls" in args else "usage: dcpring [-h]"
    assert result.status == 2 and usage in result.err and not result.out


def test_an_interruption_that_python_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped(args: argparse.Namespace, out: Output) -> int:
        raise RuntimeError("Error calling __set_name__ on 'Field'") from KeyboardInterrupt()

    monkeypatch.setattr("dcpring.cli.ls.run", wrapped)
    assert _cli.run("ls", "ckpt") == _cli.Result(130, "", "dcpring: interrupted\n")


def test_no_checkpoint(tmp_path: Path) -> None:
    for where, problem in [(tmp_path / "x", "does not exist"), (tmp_path, "is no checkpoint")]:
        result = _cli.run("ls", where)
        assert result.status == 2 and problem in result.err and not result.out
    dcp.save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "step-5"), no_dist=True)
    assert "there are some in it: step-5" in _cli.run("ls", tmp_path).err


def test_a_strangers_text_cannot_steer_the_terminal(tmp_path: Path) -> None:
    key = "evil\x1b]0;title\x07\x9b31m\nnew line\u202e"
    assert visible(key) == r"evil\x1b]0;title\x07\x9b31m\nnew line\u202e"
    dcp.save({key: torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    result = _cli.run("ls", tmp_path)
    assert result.status == 0 and r"evil\x1b]0;title" in result.out
    assert not set(result.out) & {"\x1b", "\x07", "\x9b", "\u202e"}


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "2>/dev/full", ">/dev/full", ">&- 2>&-"])
def test_streams_that_take_nothing(tmp_path: Path, redirection: str) -> None:
    with _prepared.files() as files, open("/dev/full", "w") as full:
        streams: list[int | None] = list(files.streams)
        for word in redirection.split():
            streams[2 if word[0] == "2" else 1] = None if word.endswith("&-") else full.fileno()
        program = _prepared.Program(["-m", "dcpring", "ls", str(tmp_path)], (streams[0], streams[1], streams[2]))
        assert program.wait() == 2 and "Traceback" not in files.err


def test_a_full_standard_output_is_named(tmp_path: Path) -> None:
    dcp.save({f"{n}": torch.ones(1) for n in range(3000)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for options in (["--keys", "1"], [], ["--json"]):
        with _prepared.files() as files, open("/dev/full", "w") as full:
            streams = (files.streams[0], full.fileno(), files.streams[2])
            assert _prepared.Program(["-m", "dcpring", "ls", str(tmp_path), *options], streams).wait() == 2
            assert files.err == "dcpring: No space left on device: standard output\n"


@pytest.mark.parametrize("arguments", [("ls", ""), ("convert", "ckpt", ""), ("bench", ""), ("doctor", "")])
def test_an_empty_path_is_not_the_current_directory(arguments: tuple[str, ...]) -> None:
    result = _cli.run(*arguments)
    assert result.status == 2 and 'the path is empty; "." is the current directory' in result.err


def test_whoever_reads_has_seen_enough(tmp_path: Path) -> None:
    """Status 1 would say that something differs."""
    dcp.save({f"key {n}": torch.ones(1) for n in range(5000)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for options in ([], ["--files"], ["--json"]):
        with _prepared.files() as files:
            reads, writes = os.pipe()
            os.close(reads)
            streams = (files.streams[0], writes, files.streams[2])
            program = _prepared.Program(["-m", "dcpring", "ls", str(tmp_path), *options], streams)
            os.close(writes)
            assert program.wait() == 128 + signal.SIGPIPE and not files.err


def test_names_that_a_terminal_cannot_show(tmp_path: Path) -> None:
    dcp.save({"größe": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert r"gr\xf6\xdfe" in _cli.run_piped("ls", tmp_path, PYTHONIOENCODING="ascii").out
    assert _cli.run_in_terminal("ls", tmp_path, PYTHONIOENCODING="latin-1").status == 0


@pytest.mark.parametrize("module", ["dcpring.cli._app", "dcpring.cli._parser", "dcpring.tools.inspect.inventory"])
def test_ctrl_c_while_modules_are_loaded(tmp_path: Path, module: str) -> None:
    code = f"""
import signal, sys
from dcpring.cli import main

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.exit(main(["ls", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stderr == "dcpring: interrupted\n"


def test_nothing_but_the_package_is_needed(tmp_path: Path) -> None:
    """As ``pip install dcpring`` leaves it."""
    dcp.save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    code = "import sys; sys.modules.update(dict.fromkeys(['rich', 'shtab', 'matplotlib', 'numpy'])); "
    code += f"from dcpring.cli import main; sys.exit(main(['ls', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "float32" in done.stdout, done.stderr


@pytest.mark.parametrize("args", [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_needs_no_torch(args: list[str]) -> None:
    code = f"""
import sys
from dcpring.cli import main
try:
    main({args})
except SystemExit as exit:
    assert exit.code == 0
else:
    raise AssertionError("--help and --version end the program")
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "dcpring" in done.stdout, done.stderr


WITHOUT_TORCH = """
import json, sys
from dcpring.cli import main
statuses = [main(command.split()) for command in json.load(sys.stdin)]
assert not any(statuses), statuses
assert "torch" not in sys.modules, "torch has been imported"
"""


@pytest.mark.parametrize("writer", ["stock", "ring"])
def test_looking_at_checkpoints_needs_no_torch(tmp_path: Path, writer: str) -> None:
    """Its import takes seconds, and a look at names and sizes none."""
    path, page = tmp_path / "step-1", tmp_path / "page.html"
    storage = FileSystemWriter(path) if writer == "stock" else dcpring.RingWriter(path)
    dcp.save(
        {"model": {"w": torch.ones(3, 4), "h": torch.ones(2).half()}, "step": 7}, storage_writer=storage, no_dist=True
    )
    commands = ["ls", "ls --json", "ls --files", "keys", "keys --json", "verify", "verify --quick", f"report -o {page}"]
    given = [f"{command} {path}" for command in commands] + [f"diff --quick {path} {path}"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and page.exists(), done.stderr
    assert "[3, 4]" in done.stdout and "float32" in done.stdout


def test_the_step_that_a_checkpointer_noted_needs_no_torch(tmp_path: Path) -> None:
    dcpring.Checkpointer(tmp_path, {"model": torch.nn.Linear(2, 2)}).save(5)
    command = [sys.executable, "-c", WITHOUT_TORCH]
    given = json.dumps([f"ls {tmp_path / 'step-5'}"])
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "step 5, 1 rank saved" in done.stdout, done.stderr


def test_every_dtype_of_torch_is_known_without_it() -> None:
    found = {
        str(value).removeprefix("torch."): value.itemsize
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    }
    assert found.items() <= DTYPE_BYTES.items()


def test_names_that_are_imported_when_asked_for() -> None:
    assert sorted(dcpring._HOMES) == sorted(dcpring.__all__)
    assert set(dcpring.__all__) <= set(dir(dcpring))
    for name in dcpring.__all__:
        assert getattr(dcpring, name).__name__ == name
    source = ast.parse(Path(dcpring.__file__).read_text())
    (typing,) = (node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    declared = {
        (alias.name, node.module) for node in typing.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == {(name, f"dcpring.{module}") for name, module in dcpring._HOMES.items()}
    with pytest.raises(AttributeError, match="nothing"):
        _ = dcpring.nothing
