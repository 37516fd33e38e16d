"""``dcpring bench``: what a storage can do, and the options to use on it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dcpring.cli._output import Output
from dcpring.cli._parser import Commands, add_json, given_path, size
from dcpring.report import format_bytes

if TYPE_CHECKING:
    from dcpring.options import Engine
    from dcpring.tools.machine.bench import Direction, Report, Result

_ENGINES = ("uring", "threads")

DESCRIPTION = """Saves and loads a file in DIR with each engine, direct and through the page cache, with several sizes
of blocks and depths of the queue: saves until they are durable, loads after the page cache has let go of the file, both
with CRC-32, in one process. Rounds go through all of them; medians are shown, and the options of RingWriter and
RingReader that make the best of this storage: the defaults where nothing is clearly faster. The file lies in a
directory of its own in DIR, which is removed at the end."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "bench",
        run,
        "what a storage can do, and the options to use on it",
        DESCRIPTION,
        [
            ("dcpring bench . --quick", "in ten seconds, the options for the storage that . is on"),
            ("dcpring bench . --quick --size 16M --engines threads", "threads only"),
            ("dcpring bench . --quick --size 16M --json", "all numbers, for a script"),
        ],
        differs="",
    )
    parser.add_argument("directory", metavar="DIR", type=given_path, help="a directory on the storage")
    parser.add_argument(
        "--size",
        type=size,
        metavar="SIZE",
        help="bytes of each save and load, at least 1M; default: what the time allows, at most 1G",
    )
    parser.add_argument("--quick", action="store_true", help="fewer ways, in about 10 s instead of one to two minutes")
    parser.add_argument(
        "--engines",
        type=_engines,
        metavar="ENGINE,...",
        help="of uring (io_uring) and threads, those to try; default: all that work on this machine",
    )
    add_json(parser)


def _engines(text: str) -> list[Engine]:
    names = text.split(",")
    for name in names:
        if name not in _ENGINES:
            raise argparse.ArgumentTypeError(f"{name!r} is no engine; there are {' and '.join(_ENGINES)}")
    return cast("list[Engine]", list(dict.fromkeys(names)))


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.tools.machine import bench

    report = bench.measure(Path(args.directory), size=args.size, quick=args.quick, engines=args.engines)
    if args.json:
        out.json(report.as_json())
    else:
        _show(report, out)
    return 0


def _show(report: Report, out: Output) -> None:
    header = ("engine", "I/O", "block", "depth", "workers", "GB/s", "min", "max", "CPU s/GiB")
    titles: dict[Direction, str] = {
        "save": "save, synced",
        "load": "load, cold" if report.cold else "load, from the page cache",
    }
    for direction, title in titles.items():
        results = sorted(report.results, key=lambda result: -result.rate(direction))
        out.table(header, [_row(result, direction) for result in results], right=range(2, len(header)), title=title)
        out.text()
    rounds = f"{report.rounds} rounds of {format_bytes(report.size_bytes)} in {report.directory}"
    out.text(f"{rounds}; medians")
    if not report.cold:
        out.text("loads are not cold: the page cache does not let go of files here", style="yellow")
    for direction in titles:
        _advise(report, direction, out)


def _row(result: Result, direction: Direction) -> tuple[str, ...]:
    options, rates = result.options, result.rates(direction)
    return (
        options.engine,
        "direct" if options.direct else "cached",
        f"{options.block_size_bytes >> 20} MiB",
        str(options.queue_depth),
        str(options.workers),
        *(f"{rate / 1e9:.2f}" for rate in (result.rate(direction), rates[0], rates[-1])),
        f"{result.cpu_seconds_per_gib(direction):.2f}",
    )


def _advise(report: Report, direction: Direction, out: Output) -> None:
    best = report.best(direction)
    usual = ", the defaults: nothing is clearly faster" if best.options == report.usual else ""
    out.text(f"for {direction}s: {best.rate(direction) / 1e9:.2f} GB/s{usual}", style="bold")
    out.text(f"  {report.call(direction)}")
