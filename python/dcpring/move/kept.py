"""What a process keeps between saves and loads, and how to be rid of it."""

from __future__ import annotations

from dcpring import _C

__all__ = ["empty_cache"]


def empty_cache() -> None:
    """Gives back at once what saves and loads keep for the next one in this process.

    That is I/O buffers (at most 64 MiB; 40 MiB at the defaults), their io_uring rings, and threads that wait for work.
    Without this they go by themselves 30 s after they were last used, and when the process ends; a forked child has
    none of them. What a save or a load is using stays with it. The next one sets up anew, some 10 to 50 ms.
    """
    _C.release_kept()
