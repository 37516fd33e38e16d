"""What only some versions of torch have: tests that need it say what they need, not which version."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def needs(there: bool, what: str) -> Any:
    """A mark for tests that need something which torch has or lacks."""
    return pytest.mark.skipif(not there, reason=f"torch {torch.__version__} has no {what}")
