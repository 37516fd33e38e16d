"""Choosing keys by patterns, as people type them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Sequence

from dcpring.errors import CheckpointError


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


def check_patterns(patterns: Sequence[str], keys: Collection[str], where: str) -> None:
    """Raises CheckpointError for a pattern that none of the keys matches; ``where`` says what has them."""
    for pattern in patterns:
        if not any(map(key_filter([pattern]), keys)):
            raise CheckpointError(f"no key of {where} matches {pattern!r}; `dcpring ls` shows what there is")
