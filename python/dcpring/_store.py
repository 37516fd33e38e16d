"""The process group's store: what ranks agree by without a collective, so that none waits for another."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

_attempts: Counter[str] = Counter()
"""How often this process has begun each thing that ranks agree on."""


def has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def agree(what: str, proposal: str) -> str:
    """What the first rank to ask has proposed, for the n-th time that each does this; "" where there is no store."""
    if not has_group():
        return ""
    _attempts[what] += 1
    store = dist.distributed_c10d._get_default_store()
    return bytes(store.compare_set(f"{what}/{_attempts[what]}", "", proposal)).decode()
