"""What may be sent to another process. Imports no torch, as ``install()`` needs it before."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["pickles"]


def pickles(value: Any) -> bool:
    """Whether a value can be pickled: a lambda cannot."""
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
