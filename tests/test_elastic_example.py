"""The example that is killed in the middle of a save: it checks its own results, and says so by its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_programs import run


@pytest.mark.slow
def test_elastic_resume(tmp_path: Path) -> None:
    out = run("examples/elastic_resume.py", "--dir", tmp_path)
    assert "0 of them more than once" in out
    assert not list(tmp_path.iterdir())
