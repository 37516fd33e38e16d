"""``dcpring doctor``: what works here, and the cure for what does not."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from dcpring import __version__
from dcpring.cli._output import Output
from dcpring.cli._parser import Commands, add_json, given_path
from dcpring.tools.machine.doctor import Check, examine, works

_STYLES = {"ok": "green", "slow": "yellow", "missing": "yellow", "failed": "bold red"}

DESCRIPTION = """Tries out what dcpring uses: io_uring and its registered buffers, direct I/O, preallocation, syncs and
renames on the file system of DIR, a small save and load with each engine, and the torch that is installed. For all
that is slow or missing it says what that means, and the cure. What it writes lies in a directory of its own in DIR,
which it removes."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "doctor",
        run,
        "what works here, and the cure for what does not",
        DESCRIPTION,
        [
            ("dcpring doctor ckpt", "whether checkpoints can be saved to ckpt, and how well"),
            ("dcpring doctor --json | grep '\"works\": true'", "the same for the current directory, for a script"),
        ],
        differs="checkpoints cannot be saved to DIR; what is only slow or missing does not count",
    )
    help = "where checkpoints will go; default: ."
    parser.add_argument("directory", metavar="DIR", type=given_path, nargs="?", default=".", help=help)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    directory = Path(args.directory)
    checks: list[Check] = []
    for group, members in itertools.groupby(examine(directory), key=lambda check: check.group):
        found = list(members)
        checks += found
        if not args.json:
            _show(group, found, out)
            out.flush()
    fine = works(checks)
    if args.json:
        document = {"dcpring": __version__, "directory": str(directory.resolve()), "works": fine}
        out.json(document | {"checks": [vars(check) for check in checks]})
    elif fine:
        less = sum(check.status != "ok" for check in checks)
        remark = f"; {less} of {len(checks)} checks have something to improve" if less else ""
        out.text(f"checkpoints can be saved to {directory}{remark}", style="bold green")
    else:
        failed = ", ".join(check.name for check in checks if check.status == "failed")
        out.text(f"checkpoints cannot be saved to {directory}: {failed}", style="bold red")
    return 0 if fine else 1


def _show(group: str, checks: list[Check], out: Output) -> None:
    out.text(group, style="bold")
    width = max(len(check.name) for check in checks)
    for check in checks:
        status = (f"  {check.status:<7}", _STYLES[check.status])
        out.lines([[status, (f"  {check.name:<{width}}  {check.found}", "")]])
        if check.meaning:
            out.text(f"           {check.meaning}")
        if check.cure:
            out.text(f"           cure: {check.cure}")
