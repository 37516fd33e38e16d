"""``dcpring trace``: why a save or a load took as long as it did, from the traces of its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dcpring.cli._output import Output
from dcpring.cli._parser import Commands, add_json, add_output, positive
from dcpring.errors import CheckpointError

if TYPE_CHECKING:
    from dcpring.tools.trace.read import Operation

_DESCRIPTION = """\
Reads the traces that RingWriter(trace="t.json"), RingReader(trace=...) or the environment variable DCPRING_TRACE have
made, and tells of each save and load: its critical path (what had to be over before the next could begin, through all
ranks), who waited for whom, what each rank's time went into, and the file that took longest. Give the traces of all
ranks: what a rank did whose trace is missing shows as waiting of the others.

"fill" copies tensors into blocks, "use" copies blocks into tensors, "CRC" sums them up; "write" and "read" are times
in which a rank had nothing to do but wait for the disk; "allocate" preallocates a file, "set up" makes buffers for
the workers and pins them, and "other" is all else: Python, opening files, waiting for a core. The traces themselves
can be looked at in ui.perfetto.dev or chrome://tracing."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "trace",
        run,
        "why a save or a load took so long",
        _DESCRIPTION,
        [
            ("dcpring trace trace/t.*.json", "what each save and load waited for"),
            ("dcpring trace trace/t.0.json trace/t.1.json --json", "the same, for scripts"),
            ("dcpring trace trace/t.*.json --output timeline.svg", "draws the timeline too"),
        ],
        differs="",
    )
    parser.add_argument(
        "traces", metavar="TRACE", nargs="+", type=Path, help="traces of all ranks of a run, or their folder"
    )
    parser.add_argument("--operation", metavar="N", type=positive, help="only the Nth save or load")
    add_output(parser, "draw the timeline of it, or of the last one")
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.cli import _trace_view
    from dcpring.tools.trace.critical import Analysis
    from dcpring.tools.trace.read import read_operations

    if args.output is not None:
        from dcpring.tools.picture import check

        check(args.output)
    operations, notes = read_operations([path for given in args.traces for path in _files(given)])
    if not operations:
        raise CheckpointError(f"there is no save or load in {args.traces[0]}")
    chosen = _chosen(operations, args.operation)
    analyses = {number: Analysis(operations[number - 1]) for number in chosen}
    if args.output is not None:
        from dcpring.tools.trace import timeline

        timeline.draw(args.output, analyses[chosen[-1]])
    if args.json:
        out.json({"operations": [_trace_view.as_json(number, one) for number, one in analyses.items()], "notes": notes})
    else:
        for number, one in analyses.items():
            _trace_view.show(number, one, out)
    for note in notes:
        out.note(note)
    if args.output is not None:
        out.note(f"the timeline of operation {chosen[-1]} is in {args.output}")
    return 0


def _files(given: Path) -> list[Path]:
    """The trace, or those in the folder."""
    if not given.is_dir():
        return [given]
    found = sorted(given.glob("*.json"))
    if not found:
        raise CheckpointError(f"there are no traces (*.json) in {given}")
    return found


def _chosen(operations: Sequence[Operation], number: int | None) -> list[int]:
    if number is None:
        return list(range(1, len(operations) + 1))
    if number > len(operations):
        raise CheckpointError(f"--operation {number}: there are only {len(operations)} in these traces")
    return [number]
