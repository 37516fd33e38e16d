"""``dcpring ls``: what a checkpoint holds."""

from __future__ import annotations

import argparse

from dcpring.cli._output import Output
from dcpring.cli._parser import Commands, add_checkpoint, add_json, add_rank, add_trusted
from dcpring.report import format_bytes


def add(commands: Commands) -> None:
    parser = commands.add(
        "ls",
        run,
        "what a checkpoint holds",
        "Shows the keys of a checkpoint.",
        [("dcpring ls ckpt/step-100", "its keys")],
    )
    add_checkpoint(parser)
    add_rank(parser)
    add_trusted(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring._contents import open_contents

    contents = open_contents(args.checkpoint, rank=args.rank, trusted=args.trusted)
    rows = (
        (e.key, "object" if e.shape is None else str(list(e.shape)), format_bytes(e.nbytes)) for e in contents.values()
    )
    out.table(("key", "shape", "size"), rows, right=(2,))
    return 0
