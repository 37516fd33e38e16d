"""Private names of ``torch.optim``."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim.lr_scheduler import LRScheduler


def inner_schedulers(scheduler: LRScheduler) -> Sequence[LRScheduler]:
    """The schedulers that one is made of; none for most."""
    return getattr(scheduler, "_schedulers", ())
