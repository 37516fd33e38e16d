"""How two stored objects differ: as plain data, or by their bytes where loading them could run code."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from dcpring.base.values import digest
from dcpring.format.unpickler import Safe
from dcpring.move.objects import load

_SHOWN = 60
"""Characters of a value in a message."""

_NOTHING = object()


def difference(a: bytes, b: bytes) -> str:
    """Where two pickled objects differ, for people; "" where they are the same data.

    Both are loaded as plain data. What cannot be is the same only if its bytes are.
    """
    if a == b:
        return ""
    try:
        left, right = _load(a), _load(b)
    except Exception as error:  # refused, or damaged, which ends in errors of any kind
        reason = type(error).__name__
        return f"other bytes, {len(a)} and {len(b)} of them; as it is no plain data ({reason}) there is no saying what"
    try:
        found = list(_differences("", left, right, set()))
    except RecursionError:
        return "other data, nested too deeply to say where"
    if not found:
        return "" if digest(left) == digest(right) else "equal items, in containers that differ"
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{more}"


def _load(data: bytes) -> Any:
    return load(io.BytesIO(data), Safe()).value


def _differences(path: str, a: Any, b: Any, seen: set[tuple[int, int]]) -> Iterator[str]:
    """What is held in several places is compared once: so held again and again, it would take forever."""
    if isinstance(a, (Mapping, Sequence)) and not isinstance(a, (str, bytes, bytearray)):
        if (id(a), id(b)) in seen:
            return
        seen.add((id(a), id(b)))
    if type(a) is not type(b):
        yield f"{path}{_short(a)} is {_short(b)}"
    elif isinstance(a, Tensor):
        if digest(a) != digest(b):
            yield f"{path}tensors of {list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype} differ"
    elif isinstance(a, Mapping):
        for key in {**a, **b}:
            yield from _differences(f"{path}[{_short(key)}] ", a.get(key, _NOTHING), b.get(key, _NOTHING), seen)
    elif isinstance(a, Sequence) and not isinstance(a, (str, bytes, bytearray)):
        if len(a) != len(b):
            yield f"{path}has {len(a)} elements and {len(b)}"
        for number, (left, right) in enumerate(zip(a, b, strict=False)):
            yield from _differences(f"{path}[{number}] ", left, right, seen)
    elif digest(a) != digest(b):
        yield f"{path}{_short(a)} is {_short(b)}"


def _short(value: Any) -> str:
    if value is _NOTHING:
        return "(nothing)"
    text = repr(value) if isinstance(value, (str, bytes, int, float, bool, type(None))) else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
