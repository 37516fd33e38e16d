"""The I/O options that the writer and the reader share, and what they report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from dcpring import _C

Engine = Literal["auto", "uring", "threads"]
Direct = Literal["auto", True, False]

MAX_WORKERS = 64
MAX_QUEUE_DEPTH = 4096
MAX_BLOCK_BYTES = 1 << 30
_DIRECT_CODES: dict[Direct, int] = {False: 0, True: 1, "auto": 2}


class IOArguments(TypedDict, total=False):
    """``IOOptions`` as ``RingWriter`` and ``RingReader`` take them: by name, any of them."""

    engine: Engine
    direct: Direct
    queue_depth: int
    block_size_bytes: int
    workers: int
    checksum: bool


IO_NAMES = tuple(IOArguments.__annotations__)


@dataclass(frozen=True)
class IOOptions:
    """How files are written or read.

    Args:
        engine: "uring" (io_uring), "threads" (pread and pwrite), or "auto": io_uring where it is allowed, and mmap for
            columns that come through the page cache.
        direct: O_DIRECT or not; "auto" uses it where the file system takes it.
        queue_depth: blocks in flight, over all workers. With block_size_bytes it sets the memory used.
        block_size_bytes: size of one I/O, a multiple of 1 MiB.
        workers: threads that copy and checksum; the queue is shared out between them.
        checksum: compute (save) or check (load) CRC-32.
    """

    engine: Engine = "auto"
    direct: Direct = "auto"
    queue_depth: int = 8
    block_size_bytes: int = 4 << 20
    workers: int = 2
    checksum: bool = True

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "uring", "threads"):
            raise ValueError(f'engine={self.engine!r}: must be "auto", "uring" or "threads"')
        if self.direct not in (True, False, "auto"):
            raise ValueError(f'direct={self.direct!r}: must be True, False or "auto"')
        _check_range("queue_depth", self.queue_depth, MAX_QUEUE_DEPTH)
        _check_range("workers", self.workers, MAX_WORKERS)
        _check_range("block_size_bytes", self.block_size_bytes, MAX_BLOCK_BYTES)
        if self.block_size_bytes % _C.CRC_BLOCK_BYTES:
            raise ValueError(f"block_size_bytes={self.block_size_bytes}: must be a multiple of 1 MiB")

    def changed(self) -> dict[str, Any]:
        """Those that are not as by default."""
        return {name: value for name, value in vars(self).items() if value != getattr(IOOptions, name)}

    def for_core(
        self, sync: bool, watch: _C.Watch | None = None, *, exact: bool = False
    ) -> tuple[str, int, int, int, int, bool, int, _C.Watch | None]:
        """The tuple that dcpring._C takes.

        Args:
            sync: whether files are durable when they are finished.
            exact: and their length, too, which is less than was allocated.
        """
        direct = _DIRECT_CODES[self.direct]
        return (
            self.engine,
            direct,
            self.queue_depth,
            self.block_size_bytes,
            self.workers,
            self.checksum,
            sync * (1 + exact),
            watch,
        )


def _check_range(name: str, value: int, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name}={value!r}: must be an int from 1 to {most}")


def overrides(planner: object, defaults: tuple[type, ...], methods: tuple[str, ...]) -> bool:
    """Whether a planner does anything of its own in these methods of one of the default planners."""
    kind = type(planner)
    if not set(methods).isdisjoint(getattr(planner, "__dict__", ())):  # set on this one, as unittest.mock does
        return True
    return kind not in defaults and (
        not isinstance(planner, defaults)
        or any(all(getattr(kind, method) is not getattr(default, method) for default in defaults) for method in methods)
    )


@dataclass
class IOStats:
    """What one rank's last ``write_data`` or ``read_data`` did.

    Attributes:
        bytes: written to, or read from, files.
        tensor_bytes: of tensors saved or loaded.
        items: tensors (or shards) and objects.
        files: files written or read.
        linked_bytes: of ``tensor_bytes``, those in files that an earlier save has written, and that were linked.
        linked_files: how many these are; not part of ``files``.
        seconds: wall time.
        engine: "uring" or "threads", "mmap" where all came from the page cache by columns; "" when there was nothing to
            do.
        direct: whether any direct I/O was done.
        cached_bytes: of ``bytes``, those read through the page cache because they were in it, or used there.
        sent_bytes: of tensors that this rank has read and passed on to others.
        received_bytes: of tensors that others have read for this rank and sent; not part of ``bytes``.
        refused: keys of objects that were saved and that a load refuses by default, with what they hold.
    """

    bytes: int = 0
    tensor_bytes: int = 0
    items: int = 0
    files: int = 0
    seconds: float = 0.0
    engine: str = ""
    direct: bool = False
    cached_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    linked_bytes: int = 0
    linked_files: int = 0
