"""The documents are complete, and their links lead somewhere. `make docs` checks them too, and the docstrings."""

from __future__ import annotations

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


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []
