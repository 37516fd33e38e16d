"""The process group, where there is one: which rank this is, and what ranks agree on without a collective."""

from __future__ import annotations

import threading
from collections import Counter

import torch.distributed as dist

from dcpring.torchside.groups import default_store

_attempts_lock = threading.Lock()
_attempts: Counter[str] = Counter()
"""How often this process has begun each thing that ranks agree on."""


def has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in a group, None for all; 0 where there is no group."""
    return dist.get_rank(group) if has_group() else 0


def world_size() -> int:
    """1 where there is no group."""
    return dist.get_world_size() if has_group() else 1


def agree(what: str, proposal: str) -> str:
    """What the first rank to ask has proposed, for the n-th time that each does this; "" where there is no store."""
    if not has_group():
        return ""
    with _attempts_lock:
        _attempts[what] += 1
        attempt = _attempts[what]
    return bytes(default_store().compare_set(f"{what}/{attempt}", "", proposal)).decode()
