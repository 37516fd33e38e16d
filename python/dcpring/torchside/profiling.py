"""Private names of ``torch.profiler``."""

from __future__ import annotations

from torch.autograd import profiler


def is_on() -> bool:
    """Whether somebody profiles this process now; a module's flag, which costs nothing to look at."""
    return getattr(profiler, "_is_profiler_enabled", False)
