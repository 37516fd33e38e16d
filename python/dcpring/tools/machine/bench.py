"""What a storage can do: synced saves and cold loads with each way of doing I/O, in rounds that go through all of them.

It is the core that is measured, as saves and loads use it, CRC included: one file, one process, no planning. What each
of several processes gets is another question. All is written in a directory of its own, one file at a time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.format.metadata import place_at
from dcpring.options import Engine, IOOptions
from dcpring.report import format_bytes
from dcpring.tools.machine.scratch import private_directory
from dcpring.watch.progress import Meter, progress_bar

MIB = 1 << 20
PART_BYTES = 64 * MIB
"""Random bytes that are written again and again: that much memory, whatever the size."""

ROUNDS = 3
LARGEST_BYTES, SMALLEST_BYTES = 1 << 30, 16 * MIB
_SECONDS, _QUICK_SECONDS = 75.0, 7.0
"""What the rounds shall take where nobody asks for a size."""

_FREE_BYTES = 16 * MIB
"""Space that is left alone."""

_NOISE = 0.05
"""A difference that is not worth an option."""

Direction = Literal["save", "load"]
DIRECTIONS: tuple[Direction, ...] = ("save", "load")


class Transfer(NamedTuple):
    """One save, until it is durable, or one load: wall time, and the CPU seconds of all threads of this process."""

    seconds: float
    cpu_seconds: float


@dataclass
class Result:
    """What one way of doing I/O has done.

    Attributes:
        options: the way; ``direct`` and ``engine`` are never "auto".
        size_bytes: of each transfer.
        transfers: one for each round.
    """

    options: IOOptions
    size_bytes: int
    transfers: dict[Direction, list[Transfer]] = field(default_factory=lambda: {"save": [], "load": []})

    def rates(self, direction: Direction) -> list[float]:
        """Bytes per second, sorted."""
        return sorted(self.size_bytes / transfer.seconds for transfer in self.transfers[direction])

    def rate(self, direction: Direction) -> float:
        return statistics.median(self.rates(direction))

    def cpu_seconds_per_gib(self, direction: Direction) -> float:
        return statistics.median(part.cpu_seconds for part in self.transfers[direction]) * (1 << 30) / self.size_bytes

    def summary(self, direction: Direction) -> dict[str, float]:
        rates = self.rates(direction)
        return {
            "bytes_per_second": self.rate(direction),
            "lowest_bytes_per_second": rates[0],
            "highest_bytes_per_second": rates[-1],
            "cpu_seconds_per_gib": self.cpu_seconds_per_gib(direction),
        }


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        directory: where.
        size_bytes: of each save and load.
        rounds: of each way.
        cold: whether loads came from the storage: the page cache could be emptied.
        usual: the options that "auto" and the defaults come to here.
        results: of each way.
    """

    directory: Path
    size_bytes: int
    rounds: int
    cold: bool
    usual: IOOptions
    results: list[Result]

    def best(self, direction: Direction) -> Result:
        """Of those that cannot be told from the fastest by these rounds, the one with the fewest options changed."""
        fastest = max(self.results, key=lambda result: result.rate(direction))
        near = [
            result
            for result in self.results
            if result.rates(direction)[-1] >= fastest.rates(direction)[0]
            or result.rate(direction) >= fastest.rate(direction) * (1 - _NOISE)
        ]
        return min(near, key=lambda result: (len(self.changed(result)), -result.rate(direction)))

    def changed(self, result: Result) -> dict[str, Any]:
        """The options of a way that are not the defaults."""
        usual = asdict(self.usual)
        return {name: value for name, value in asdict(result.options).items() if value != usual[name]}

    def call(self, direction: Direction) -> str:
        """The Python that uses the best."""
        given = [f"{name}={_as_python(value)}" for name, value in self.changed(self.best(direction)).items()]
        return f"{'RingWriter' if direction == 'save' else 'RingReader'}({', '.join(['path', *given])})"

    def as_json(self) -> dict[str, Any]:
        best = {name: self.best(name) for name in DIRECTIONS}
        return {
            "directory": str(self.directory.resolve()),
            "size_bytes": self.size_bytes,
            "rounds": self.rounds,
            "cold": self.cold,
            "results": [
                {**asdict(result.options), **{name: result.summary(name) for name in DIRECTIONS}}
                for result in self.results
            ],
            "best": {
                name: {"changed": self.changed(result), **result.summary(name), "use": self.call(name)}
                for name, result in best.items()
            },
        }


def _as_python(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= MIB:
        return f"{value >> 20} << 20"
    return f'"{value}"' if isinstance(value, str) else str(value)


# ---- what is tried ----


def engines_here() -> list[Engine]:
    """Those that work on this machine, the one that "auto" takes first."""
    (error, _, _), _ = _C.probe_ring(1, MIB)
    return ["threads"] if error else ["uring", "threads"]


def ways(engines: Sequence[Engine], direct: bool, quick: bool) -> list[IOOptions]:
    """The grid: blocks and depths around the defaults with direct I/O, and some through the page cache.

    Quick, it is a cross: other blocks, the page cache, and the other engine, each from the defaults.
    """
    usual = IOOptions()
    sizes = [(4, 8), (1, 8), (8, 8)]
    if not quick:
        sizes += [(1, 32), (2, 16), (4, 4), (4, 16), (4, 32), (8, 4), (8, 16), (16, 4), (16, 8)]
    shapes = [replace(usual, block_size_bytes=block * MIB, queue_depth=depth) for block, depth in sizes]
    if not quick:
        shapes += [replace(usual, workers=workers) for workers in (1, 4)]
    chosen = {True: shapes if direct else [], False: shapes[: 1 if quick else 3] if direct else shapes}
    return [
        replace(shape, engine=engine, direct=is_direct)
        for engine in engines
        for is_direct in (True, False)
        for shape in chosen[is_direct]
        if not quick or engine == engines[0] or (shape == usual and is_direct is direct)
    ]


# ---- one transfer ----


class _Bench:
    """Saves and loads one file again and again; it lies in ``scratch``."""

    def __init__(self, scratch: Path) -> None:
        import torch

        self._scratch = scratch
        self._source = torch.frombuffer(bytearray(os.urandom(PART_BYTES)), dtype=torch.uint8)
        self._target = torch.zeros(PART_BYTES, dtype=torch.uint8)
        self.is_cold = True

    def save(self, options: IOOptions, size: int) -> tuple[Transfer, _C.StorageIndex, bool]:
        """What it took, where the parts lie, and whether it was direct."""
        parts = [self._source[: min(PART_BYTES, size - done)] for done in range(0, size, PART_BYTES)]
        placed = _C.StorageIndex(len(parts))
        watch = _Stopwatch()
        with contextlib.closing(_C.FileWriter(str(self._scratch), "file", size, options.for_core(True))) as writer:
            writer.write_tensors(_C.Tensors(parts), placed)
            writer.finish()
            direct = writer.stats()[2]
        _C.sync_directory(str(self._scratch))
        return watch.stop(), placed, direct

    def load(self, options: IOOptions, placed: _C.StorageIndex) -> Transfer:
        """Loads what was saved, from the storage where the page cache lets go of it."""
        self._forget()
        places = [place_at(placed, number)[4:] for number in range(len(placed))]
        reads: list[Any] = [(0, offset, size, crcs, None, (size,), (0,), (size,)) for offset, size, crcs in places]
        targets = [self._target[:size] for _, size, _ in places]
        watch = _Stopwatch()
        with contextlib.closing(_C.Input(str(self._scratch), ["file"])) as inputs:
            _C.load(inputs, reads, targets, options.for_core(False))
        return watch.stop()

    def _forget(self) -> None:
        """Has the page cache let go of the file, and notes whether it did."""
        with open(self._scratch / "file", "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(stream.fileno()).st_size
        if _C.probe_cached(str(self._scratch), "file") > _NOISE * size:
            self.is_cold = False

    def remove(self) -> None:
        (self._scratch / "file").unlink()


class _Stopwatch:
    """Wall time and CPU time since it was made."""

    def __init__(self) -> None:
        self._wall, self._used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)

    def stop(self) -> Transfer:
        now = resource.getrusage(resource.RUSAGE_SELF)
        cpu = now.ru_utime - self._used.ru_utime + now.ru_stime - self._used.ru_stime
        return Transfer(time.perf_counter() - self._wall, cpu)


# ---- all of it ----


def measure(directory: Path, *, size: int | None, quick: bool, engines: Sequence[Engine] | None = None) -> Report:
    """Measures all ways; shows a bar on a terminal.

    Args:
        directory: on the storage.
        size: bytes of each save and load; None: as much as there is time for.
        quick: fewer ways, less time.
        engines: those to try; None: all that work.

    Raises:
        CheckpointError: there is no such directory, too little space in it, or no such engine here.
        OSError: the storage failed.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; name one on the storage to be measured")
    if size is not None and size < MIB:
        raise CheckpointError(f"a size of {format_bytes(size)} is below 1 MiB")
    here = engines_here()
    if missing := [engine for engine in engines or () if engine not in here]:
        raise CheckpointError(f"{missing[0]} does not work on this machine; dcpring doctor says why")
    _check_space(directory, (size or SMALLEST_BYTES))
    with private_directory(directory, "bench") as scratch:
        bench = _Bench(scratch)
        direct, pair_seconds = _warm_up(bench, min(size or PART_BYTES, PART_BYTES))
        tried = ways(engines or here, direct, quick)
        size = size or _fitting_size(directory, pair_seconds, len(tried), quick)
        results = [Result(options, size) for options in tried]
        with progress_bar("measuring", 2 * ROUNDS * len(results) * size) as bar:
            for number in range(ROUNDS):
                _round(bench, results, number, bar)
        usual = replace(IOOptions(), engine=here[0], direct=direct)
        return Report(directory, size, ROUNDS, bench.is_cold, usual, results)


def _warm_up(bench: _Bench, size: int) -> tuple[bool, float]:
    """Whether there is direct I/O, and seconds that a save and a load of PART_BYTES take."""
    options = IOOptions()
    saved, placed, direct = bench.save(options, size)
    loaded = bench.load(replace(options, direct=direct), placed)
    bench.remove()
    return direct, (saved.seconds + loaded.seconds) * PART_BYTES / size


def _fitting_size(directory: Path, pair_seconds: float, count: int, quick: bool) -> int:
    """So large that all rounds take the time that they shall, and that there is space for it."""
    seconds = (_QUICK_SECONDS if quick else _SECONDS) / (count * ROUNDS)
    wanted = min(LARGEST_BYTES, int(PART_BYTES * seconds / pair_seconds), _free_bytes(directory) // 2)
    return max(SMALLEST_BYTES, wanted // SMALLEST_BYTES * SMALLEST_BYTES)


def _round(bench: _Bench, results: list[Result], number: int, bar: Meter) -> None:
    """One save and one load of each way; each round begins with another."""
    start = number * len(results) // ROUNDS
    for result in results[start:] + results[:start]:
        saved, placed, _ = bench.save(result.options, result.size_bytes)
        bar.advance(result.size_bytes)
        loaded = bench.load(result.options, placed)
        bar.advance(result.size_bytes)
        bench.remove()
        result.transfers["save"].append(saved)
        result.transfers["load"].append(loaded)


def _free_bytes(directory: Path) -> int:
    (error, cure, _), _, size, free, _, _ = _C.probe_space(str(directory))
    if error:
        raise OSError(error, f"{os.strerror(error)}; {cure}", str(directory))
    return free if size else LARGEST_BYTES * 2  # ramfs does not count


def _check_space(directory: Path, size: int) -> None:
    free = _free_bytes(directory)
    if free < size + _FREE_BYTES:
        raise CheckpointError(
            f"{directory} has {format_bytes(free)} free, and a save of {format_bytes(size)} shall leave "
            f"{format_bytes(_FREE_BYTES)}; free space, or pass a smaller --size"
        )
