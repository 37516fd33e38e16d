"""Choosing keys by patterns, as people type them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence


def key_filter(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a key is chosen: by any of the patterns, or because there are none.

    A pattern ("*" for anything, "?", "[0-9]") chooses the keys that it matches, and those below: "model.layers.0" all
    that begin with "model.layers.0.".
    """
    if not patterns:
        return lambda key: True
    either = "|".join(fnmatch.translate(text) for pattern in patterns for text in (pattern, f"{pattern}.*"))
    found = re.compile(either)
    return lambda key: found.match(key) is not None
