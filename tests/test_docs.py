"""The documents are what the code says: docs/api.md is that of the docstrings, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dcpring

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/*.md"), *ROOT.glob("csrc/**/*.md")])


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


def test_api_page_is_that_of_the_docstrings() -> None:
    checked = subprocess.run([sys.executable, ROOT / "docs" / "make_api.py", "--check"], check=False)
    assert checked.returncode == 0, "run: python docs/make_api.py"


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in dcpring.__all__ if f"\n## {name}\n" not in page] == []
    assert [name for name in dcpring.__all__ if not (getattr(dcpring, name).__doc__ or "").strip()] == []
