"""The documents are complete, and their links lead somewhere. `make docs` checks them too, and the docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dcpring

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "csrc", "python", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))])


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """The relative links of a page whose file or heading is not there."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        target = (page.parent / name) if name else page
        if "://" in link or (target.exists() and (not heading or heading in anchors(target))):
            continue
        found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#no-title) [c](nowhere.md) [d](https://example.org/)")
    assert broken(page) == ["#no-title", "nowhere.md"]


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: dcpring\.(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(dcpring.__all__)
    assert [name for name in dcpring.__all__ if not (getattr(dcpring, name).__doc__ or "").strip()] == []


def literals(source: str) -> str:
    """The texts in a module, as they are put together where they stand one behind the other."""
    return "\n".join(
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_errors_of_troubleshooting_are_those_of_the_package() -> None:
    """The first column of its tables has what dcpring says; what others say is named here."""
    from_others = {
        "No space left on device",
        "No such file or directory: open failed",
        "liburing.h: No such file or directory",
        "unexpected keyword argument",
    }
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = {text for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for text in re.findall("`([^`]*)`", row)}
    texts = "\n".join(literals(path.read_text()) for path in ROOT.glob("python/**/*.py"))
    texts += "\n".join(path.read_text() for path in ROOT.glob("csrc/**/*.c")).replace('"\n', "")
    assert len(quoted) > 20
    assert sorted(text for text in quoted - from_others if text not in texts) == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []
