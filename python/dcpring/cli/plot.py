"""``dcpring plot``: a picture of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpring.cli._output import Output
from dcpring.cli._parser import Commands, add_checkpoint, add_json, add_output, add_rank, add_trusted
from dcpring.report import count, format_bytes

if TYPE_CHECKING:
    from dcpring.tools.inspect.inventory import Inventory
    from dcpring.tools.inspect.plot import Shares

DESCRIPTION = """\
Draws which rank wrote what into which file, how even that is, and which tensors are the largest. No tensor is read."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "plot",
        run,
        "a picture of who wrote what into which file",
        DESCRIPTION,
        [
            ("dcpring plot ckpt/step-100", "draws step-100.png"),
            ("dcpring plot ckpt/step-100 --output picture.svg", "likewise, as SVG"),
            ("dcpring plot ckpt/step-100 --json", "the numbers, for scripts; draws nothing"),
        ],
        differs="",
    )
    add_checkpoint(parser)
    add_output(parser, "the picture; default: CKPT's name.png")
    add_rank(parser)
    add_trusted(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.tools.inspect.inventory import take_inventory
    from dcpring.tools.inspect.plot import draw, shares_of
    from dcpring.tools.picture import check

    path: Path | None = args.output
    if path is None and not args.json:
        path = Path(f"{Path(args.checkpoint).absolute().name or 'checkpoint'}.png")
    if path is not None:
        check(path)
    inventory = take_inventory(args.checkpoint, rank=args.rank, trusted=args.trusted)
    shares = shares_of(inventory)
    if path is not None:
        draw(path, inventory, shares)
    if args.json:
        out.json(_document(inventory, shares, path))
    else:
        out.text(f"{path}: {_summary(shares)}")
    return 0


def _summary(shares: Shares) -> str:
    used = [file for file in shares.files if file.records]
    bad = sum(file.state in ("missing", "short") for file in used)
    return (
        f"{format_bytes(sum(file.bytes for file in used))} in {count(len(used), 'file')} by "
        f"{count(len(shares.ranks), 'rank')}, the largest {shares.imbalance:.2f} of the mean"
        + (f"; {count(bad, 'file')} missing or too short" if bad else "")
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
            for item in shares.largest
        ],
    }
