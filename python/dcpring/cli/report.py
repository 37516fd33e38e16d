"""``dcpring report``: a page that shows a checkpoint."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpring.cli._output import Output
from dcpring.cli._parser import Commands, add_checkpoint, add_json, add_rank, add_trusted
from dcpring.report import count, format_bytes

if TYPE_CHECKING:
    from dcpring.tools.inspect.inventory import Inventory
    from dcpring.tools.inspect.page import Shares

DESCRIPTION = """\
Writes one HTML page that shows what is large, which rank wrote what into which file, how even that is, and all keys, to
be searched. It needs no network and no other file. No tensor is read."""

_MOST_LARGEST = 12


def add(commands: Commands) -> None:
    parser = commands.add(
        "report",
        run,
        "a page that shows what is large, and who wrote what",
        DESCRIPTION,
        [
            ("dcpring report ckpt/step-100", "writes step-100.html"),
            ("dcpring report ckpt/step-100 --output page.html", "likewise, by another name"),
            ("dcpring report ckpt/step-100 --json", "the numbers, for scripts; writes no page"),
        ],
        differs="",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="the page; default: CKPT's name.html in this directory"
    )
    add_rank(parser)
    add_trusted(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.base.files import replace_file
    from dcpring.tools.inspect.inventory import take_inventory
    from dcpring.tools.inspect.page import page, shares_of

    path: Path | None = args.output
    if path is None and not args.json:
        path = Path(f"{Path(args.checkpoint).absolute().name or 'checkpoint'}.html")
    if path is not None:
        os.stat(path.absolute().parent)  # a missing directory is an error before anything is read
    inventory = take_inventory(args.checkpoint, rank=args.rank, trusted=args.trusted)
    shares = shares_of(inventory)
    if path is not None:
        replace_file(path, page(inventory, shares).encode("utf-8", "backslashreplace"))
    if args.json:
        out.json(_document(inventory, shares, path))
    else:
        out.text(f"{path}: {_summary(shares)}")
    return 0


def _summary(shares: Shares) -> str:
    used = [file for file in shares.files if file.records]
    bad = sum(file.state in ("missing", "no file", "short") for file in used)
    even = f", the largest share {shares.imbalance:.2f} times the mean" if len(shares.ranks) > 1 else ""
    by = f" by {count(len(shares.ranks), 'rank')}" if shares.ranks else ""
    return f"{format_bytes(sum(file.bytes for file in used))} in {count(len(used), 'file')}{by}{even}" + (
        f"; {count(bad, 'file')} missing or too short" if bad else ""
    )


def _document(inventory: Inventory, shares: Shares, path: Path | None) -> dict[str, Any]:
    return {
        "checkpoint": str(inventory.directory),
        "output": None if path is None else str(path),
        "imbalance": shares.imbalance,
        "ranks": [{"rank": rank, "bytes": written} for rank, written in shares.ranks.items()],
        "components": dict(shares.components),
        "files": [
            {
                "file": file.name,
                "rank": file.rank,
                "state": file.state,
                "size": file.size,
                "bytes": file.bytes,
                "padding": file.padding,
                "components": dict(file.components),
            }
            for file in shares.files
        ],
        "largest": [
            {"key": item.entry.key, "bytes": item.entry.nbytes, "chunks": len(item.entry.records), "ranks": item.ranks}
            for item in shares.items[:_MOST_LARGEST]
        ],
    }
