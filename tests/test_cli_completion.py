"""dcpring completion: each shell takes the script, and completes with it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import _cli
import pytest

from dcpring.cli._app import make_parser
from dcpring.cli._parser import Parser

PARSERS = make_parser()[1].parsers


def script(shell: str, folder: Path) -> Path:
    result = _cli.run("completion", shell)
    assert result.status == 0 and not result.err and "\x1b" not in result.out
    path = folder / f"completion.{shell}"
    path.write_text(result.out)
    return path


def ask(*command: str, cwd: Path) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def bash(folder: Path, *words: str) -> set[str]:
    """What bash offers for the last word, in this directory."""
    lines = (
        f"source {shlex.quote(str(script('bash', folder)))}",
        f"COMP_WORDS=({' '.join(map(shlex.quote, words))})",
        f"COMP_CWORD={len(words) - 1}",
        "$(complete -p dcpring | sed 's/.*-F \\([^ ]*\\).*/\\1/')",  # the function that it is to call
        'printf "%s\\n" "${COMPREPLY[@]}"',
    )
    return {line for line in ask("bash", "--norc", "-c", "\n".join(lines), cwd=folder) if line}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ckpt" / "step-100").mkdir(parents=True)
    (tmp_path / "ckpt.txt").write_text("")
    return tmp_path


def test_bash_completes_commands(folder: Path) -> None:
    assert set(PARSERS) <= bash(folder, "dcpring", "")
    assert bash(folder, "dcpring", "doc") == {"doctor"}
    assert bash(folder, "dcpring", "--ver") == {"--version"}


@pytest.mark.parametrize("parser", [pytest.param(parser, id=name) for name, parser in PARSERS.items()])
def test_bash_completes_every_option(folder: Path, parser: Parser) -> None:
    options = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    assert bash(folder, *parser.prog.split(), "--") == options


def test_bash_completes_paths(folder: Path) -> None:
    assert bash(folder, "dcpring", "ls", "ck") == {"ckpt"}, "directories only"
    assert bash(folder, "dcpring", "ls", "ckpt/") == {"ckpt/step-100"}
    assert bash(folder, "dcpring", "report", "ckpt", "--output", "ck") == {"ckpt", "ckpt.txt"}
    assert bash(folder, "dcpring", "completion", "") == {"bash", "zsh", "tcsh"}


def test_zsh_takes_it(folder: Path) -> None:
    path = shlex.quote(str(script("zsh", folder)))
    lines = f'autoload -U compinit; compinit -u -d dump; eval "$(<{path})"; print -- $_comps[dcpring]'
    assert ask("zsh", "-f", "-c", lines, cwd=folder) == ["_shtab_dcpring"]
    text = (folder / "completion.zsh").read_text()
    assert text.startswith("#compdef dcpring")
    assert all(f"{name}:'{parser.summary[:12]}" in text.replace("\\'", "'") for name, parser in PARSERS.items())


def test_tcsh_takes_it(folder: Path) -> None:
    path = shlex.quote(str(script("tcsh", folder)))
    [answer] = ask("tcsh", "-f", "-c", f"source {path}; complete dcpring", cwd=folder)
    assert f"p/1/({' '.join(PARSERS)})/" in answer


def test_wrong_arguments() -> None:
    for args in (("completion",), ("completion", "cmd.exe")):
        result = _cli.run(*args)
        assert result.status == 2 and "usage: dcpring completion" in result.err and not result.out


def test_without_shtab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    result = _cli.run("completion", "bash")
    assert result.status == 2 and "pip install 'dcpring[cli]'" in result.err and not result.out
