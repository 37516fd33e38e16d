"""The programs of README.md and docs/howto run as they stand there, by the commands that stand below them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import _cli
import _torchrun
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
TIMEOUT_SECONDS = 300.0
WIDEST = 120

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and text of each block of a page."""
    return _BLOCK.findall(page.read_text())


def run_command(line: str, folder: Path) -> str:
    """What a command prints. It must succeed, or end with the exit status that the comment behind it says."""
    command, _, comment = line.partition("  # exit status ")
    words, status = shlex.split(command), int(comment[:1] or 0)
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        ranks = _torchrun.run(folder / words[3], int(words[2]), *words[4:], timeout=TIMEOUT_SECONDS)
        assert [rank.status for rank in ranks] == [0] * len(ranks), "\n".join(rank.err for rank in ranks)
        return ranks[0].out
    if words[0] == "python":
        (rank,) = _torchrun.run(folder / words[1], 1, *words[2:], timeout=TIMEOUT_SECONDS)
        assert rank.status == 0, rank.err
        return rank.out
    if words[0] == "dcpring":
        result = _cli.run(*words[1:])
        assert result.status == status, result.err + result.out
        return result.out
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def run_page(page: Path, folder: Path) -> str:
    """Writes the programs of a page and runs its commands; what they print."""
    printed = ""
    for language, text in blocks(page):
        if language == "python":
            name = _FILE.match(text)
            assert name is not None, f"a program of {page.name} has no name:\n{text}"
            (folder / name[1]).write_text(text)
        elif language == "sh":
            for command in text.splitlines():
                printed += run_command(command, folder)
    return printed


EXPECTED = {
    "first-save.md": ["resumed at step 1", "model.0.weight"],
    "other-ranks.md": ["resharded"],
    "fall-back.md": ["loaded step 10", "loaded step 1"],
    "rename-keys.md": ["'backbone.weight': tensor([1., 1., 1.]), 'head.weight': tensor([1., 1.])"],
    "convert.md": ["the same"],
    "check.md": ["weight"],
}
"""What the commands of a page print, among other things."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "howto"], ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_page(page, tmp_path)
    for words in EXPECTED.get(page.name, ()):
        assert words in printed, printed


def test_a_page_that_fails_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n# a.py\nraise SystemExit(3)\n```\n\n```sh\npython a.py\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_fit_a_screen(page: Path) -> None:
    """A code block of the site shows 88 columns, a page of GitHub some 120."""
    assert [line for _, text in blocks(page) for line in text.splitlines() if len(line) > WIDEST] == []
