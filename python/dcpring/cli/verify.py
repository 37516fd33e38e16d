"""``dcpring verify``: whether checkpoints are whole."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dcpring.cli._output import Output, in_words
from dcpring.cli._parser import Commands, add_checkpoint, add_json, add_trusted
from dcpring.errors import CheckpointError

if TYPE_CHECKING:
    from dcpring.tools.inspect.verify import VerifyReport

DESCRIPTION = """Reads every record of checkpoints, at the disk's speed, and compares it with its checksums, with its
headers, and with what the metadata says of it. Prints a line for each checkpoint that is whole, and for one
that is not what is wrong: the key, the file, and where in the file. The exit status is 1 then.

dcpring's own checkpoints are covered to the last byte of each record. What stock DCP wrote is covered by the
CRCs of torch.save's archives: tensors, objects and headers, but not the padding between them. Of safetensors the
headers and the index are checked, and the data of files that dcpring wrote with checksums."""

_MOST_ROWS = 100
"""Problems that a table shows; --json has all."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "verify",
        run,
        "whether checkpoints are whole",
        DESCRIPTION,
        [
            ("dcpring verify ckpt/step-100", "reads and checks all of it"),
            ("dcpring verify --quick ckpt/*", "of each: files, sizes and headers, but no tensor's bytes"),
            ("dcpring verify --json old", "the same for scripts"),
        ],
    )
    add_checkpoint(parser, "checkpoints", nargs="+")
    parser.add_argument("--quick", action="store_true", help="check structure, sizes and missing files only")
    add_trusted(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.tools.inspect.verify import verify

    status = 0
    reports = []
    for checkpoint in args.checkpoints:
        try:
            report = verify(checkpoint, quick=args.quick, trusted=args.trusted, progress=not args.json)
        except (CheckpointError, OSError) as error:  # the others may still be looked at
            out.error(in_words(error))
            status = 2
            continue
        reports.append(report)
        status = max(status, int(not report.ok))
        if not args.json:
            _print(report, out)
            out.flush()
    if args.json:
        out.json({"checkpoints": [_document(report) for report in reports]})
    return status


def _document(report: VerifyReport) -> dict[str, Any]:
    return {"checkpoint": report.checkpoint, "ok": report.ok} | asdict(report)


def _print(report: VerifyReport, out: Output) -> None:
    if report.ok:
        out.text(f"ok   {report.checkpoint}: {report.summary()}", style="green")
    else:
        out.text(f"BAD  {report.checkpoint}: {_verdict(report)}", style="bold red")
        rows = report.rows()
        out.table(("key", "file", "offset", "bytes", "what is wrong"), rows[:_MOST_ROWS], right=(2, 3))
        more = len(rows) - _MOST_ROWS + report.unlisted if len(rows) > _MOST_ROWS else report.unlisted
        if more:
            out.text(f"and {more} more (--json lists all that are known)")
        out.text(_cure(report))
    for note in report.all_notes():
        out.text(f"note {report.checkpoint}: {note}", style="dim")


def _verdict(report: VerifyReport) -> str:
    bad = len(report.bad_keys)
    if not report.keys:
        return "it cannot be read"
    whole = f"{report.keys} keys" if report.keys != 1 else "1 key"
    return f"{bad} of {whole} damaged" if bad else "its metadata contradicts itself"


def _cure(report: VerifyReport) -> str:
    if not report.keys:
        return "Load an earlier checkpoint."
    if not report.bad_keys:
        return "Its tensors and objects are whole, but do not rely on it: load it and save it anew."
    if report.quick:
        return "Load an earlier checkpoint. Without --quick, damaged data would be found too."
    if len(report.bad_keys) == report.keys:
        return "Load an earlier checkpoint."
    return "Load an earlier checkpoint; or this one into a state dict without these keys: all others are whole."
