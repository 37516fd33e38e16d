"""What one operation costs one rank: wall time, CPU time, memory high-water mark, bytes read from the disk.

A `Meter` measures a whole `dcp.save` or `dcp.load`, and within it the call of `write_data` or `read_data`.
Times are of the monotonic clock, which all processes of a machine share, so that ranks can be merged.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SAVE = "save"
LOAD_COLD = "load cold"
LOAD_WARM = "load warm"
PHASES = (SAVE, LOAD_COLD, LOAD_WARM)


@dataclass
class Span:
    """One stretch of work in one process. `peak_bytes` is None where the kernel does not let it be measured."""

    begin: float = 0.0
    end: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int | None = None
    disk_read_bytes: int = 0


@dataclass
class Reading:
    """What one rank reports of one operation; `data` is the call of `write_data` or `read_data`."""

    whole: Span
    data: Span


@dataclass
class Sample:
    """One operation of all ranks together.

    Times run from the first rank's start to the last rank's end, so that ranks that get their plans late count too.
    CPU time and bytes are sums; memory is of the rank that needed most.
    """

    shape: str
    procs: int
    round: int
    phase: str
    who: str
    tensor_bytes: int
    file_bytes: int
    seconds: float
    data_seconds: float
    cpu_seconds: float
    data_cpu_seconds: float
    peak_bytes: int | None
    data_peak_bytes: int | None
    disk_read_bytes: int
    fsync: str
    engine: str


def merge_spans(spans: Sequence[Span]) -> Span:
    peaks = [span.peak_bytes for span in spans if span.peak_bytes is not None]
    return Span(
        begin=min(span.begin for span in spans),
        end=max(span.end for span in spans),
        cpu_seconds=sum(span.cpu_seconds for span in spans),
        peak_bytes=max(peaks) if peaks else None,
        disk_read_bytes=sum(span.disk_read_bytes for span in spans),
    )


class _Gauge:
    """Fills a `Span` between `start` and `stop`. Starting one resets the process's memory high-water mark."""

    def __init__(self) -> None:
        self.span = Span()
        self._base_bytes: int | None = None
        self._high_bytes = 0

    def start(self) -> None:
        self._base_bytes = _status_bytes("VmRSS") if _reset_high_water() else None
        self.span.disk_read_bytes = -_disk_read_bytes()
        self.span.cpu_seconds = -_cpu_seconds()
        self.span.begin = time.monotonic()

    def stop(self) -> None:
        self.span.end = time.monotonic()
        self.span.cpu_seconds += _cpu_seconds()
        self.span.disk_read_bytes += _disk_read_bytes()
        self.note_high_water()
        if self._base_bytes is not None:
            self.span.peak_bytes = max(0, self._high_bytes - self._base_bytes)

    def note_high_water(self) -> None:
        self._high_bytes = max(self._high_bytes, _status_bytes("VmHWM"))


class Meter:
    """`with Meter() as meter: meter.watch(writer, "write_data"); dcp.save(...)`, then `meter.reading()`."""

    def __init__(self) -> None:
        self._whole = _Gauge()
        self._data: _Gauge | None = None

    def __enter__(self) -> Meter:
        self._whole.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._whole.stop()

    def watch(self, storage: Any, method: str) -> None:
        """Measures `storage.method(plan, planner)`, the wait for its future included."""
        call = getattr(storage, method)

        def watched(plan: Any, planner: Any) -> Any:
            self._data = _Gauge()
            self._whole.note_high_water()
            self._data.start()
            future = call(plan, planner)
            future.wait()
            self._data.stop()
            self._whole.note_high_water()
            return future

        setattr(storage, method, watched)

    def reading(self) -> Reading:
        return Reading(self._whole.span, self._data.span if self._data else self._whole.span)


def release_free_memory() -> None:
    """Gives freed heap back to the system, so that reusing it would show in the high-water mark."""
    ctypes.CDLL(None).malloc_trim(0)


def _cpu_seconds() -> float:
    """User and system time of this process with all its threads (io_uring's workers are such threads)."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _reset_high_water() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as clear_refs:
            clear_refs.write("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    return _proc_number("/proc/self/status", field) * 1024


def _disk_read_bytes() -> int:
    return _proc_number("/proc/self/io", "read_bytes")


def _proc_number(path: str, field: str) -> int:
    with open(path) as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0])
    raise KeyError(f"{path} has no field {field}")
