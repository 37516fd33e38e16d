"""JSON from files that nobody is believed about."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """As ``json.loads``; bytes are UTF-8, where Python guesses, and an object that names a thing twice is an error,
    where Python takes the last.

    Raises:
        ValueError: it is no JSON, a name is there twice, or things lie in each other deeper than Python follows.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_without_twice)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r:.200} is there twice")
        result[name] = value
    return result
