"""``dcpring ls``: what a checkpoint holds."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcpring.base.text import ranges
from dcpring.cli._output import Output, Piece
from dcpring.cli._parser import Commands, add_checkpoint, add_json, add_patterns, add_rank, add_trusted, positive
from dcpring.report import count, format_bytes

if TYPE_CHECKING:
    from dcpring.sources.contents import Entry
    from dcpring.tools.inspect.inventory import DataFile, Inventory, Listed
    from dcpring.tools.inspect.outline import Line

_LINES_AROUND = 8
"""Of a screen, those that are left for what is not the tree."""

_FEWEST_ROWS = 16
_MOST_LEVELS = 64
_MOST_SHOWN = 4
_WIDEST_NAME = 72
_TO_RIGHT = (2, 3)

DESCRIPTION = """\
Shows the keys of a checkpoint: shape, dtype, size, chunks, and the files and ranks that they were written by.
No tensor is read.

On a terminal the keys are a tree, in which numbered parts that are alike are one line and whose depth fits the
screen. In a pipe, and with --flat, each key has a line of its own."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "ls",
        run,
        "what a checkpoint holds",
        DESCRIPTION,
        [
            ("dcpring ls ckpt/step-100", "its keys, as a tree"),
            ("dcpring ls ckpt/step-100 --depth 1", "its components, summed up"),
            ("dcpring ls ckpt/step-100 --keys 'model.*.weight'", "some keys"),
            ("dcpring ls ckpt/step-100 --files", "its data files: how full they are, which are shared or missing"),
            ("dcpring ls ckpt/step-100 --json", "everything, for scripts"),
        ],
        differs="",
    )
    add_checkpoint(parser)
    help = "only keys that match, and those below; * stands for anything; may be given several times"
    add_patterns(parser, "--keys", help)
    parser.add_argument("--files", action="store_true", help="show the data files instead of the keys")
    parser.add_argument("--depth", type=positive, metavar="N", help="sum up what lies below N parts of the names")
    parser.add_argument("--flat", action="store_true", help="a line for each key, on a terminal too")
    add_rank(parser)
    add_trusted(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.base.collector import collection_paused

    with collection_paused():  # the process is the command's own
        return _show(args, out)


def _show(args: argparse.Namespace, out: Output) -> int:
    from dcpring.format.archive import TO_A_COMMAND, refused_text
    from dcpring.tools.inspect.inventory import take_inventory
    from dcpring.tools.inspect.select import check_patterns, key_filter

    inventory = take_inventory(args.checkpoint, rank=args.rank, trusted=args.trusted)
    items = list(inventory.items(key_filter(args.keys)))
    check_patterns(args.keys, [item.entry.key for item in items], str(inventory.directory))
    files = inventory.files(items)
    refused = inventory.refused(items)
    if args.json:
        out.json(_document(inventory, items, files, refused, with_keys=not args.files))
        return 0
    if out.interactive:
        _print_summary(out, inventory, items, files)
    if args.files:
        _print_files(out, files)
    elif args.flat or (args.depth is None and not out.interactive):
        _print_flat(out, items, refused)
    else:
        _print_tree(out, inventory, items, refused, args.depth)
    if not out.interactive:
        out.text()
        _print_summary(out, inventory, items, files)
    _print_problems(out, inventory, files)
    if refused:
        out.note(f"it holds {refused_text(refused, TO_A_COMMAND)}")
    return 0


# ---- the summary ----


def _totals(items: Sequence[Listed], files: Sequence[DataFile]) -> dict[str, int]:
    from dcpring.tools.inspect.inventory import total

    used = [file for file in files if file.state != "leftover"]
    return {
        **vars(total(items)),
        "files": len(used),
        "file_bytes": sum(file.size or 0 for file in used),
        "shared_bytes": sum(file.shared_bytes for file in used),
        "ranks": len({file.rank for file in used} - {None}),
    }


def _print_summary(out: Output, inventory: Inventory, items: Sequence[Listed], files: Sequence[DataFile]) -> None:
    out.lines([[(str(inventory.directory), "bold"), (f"  {_origin(inventory)}", "dim")]])
    totals = _totals(items, files)
    objects = f", {count(totals['objects'], 'object')}" if totals["objects"] else ""
    writers = f" written by {count(totals['ranks'], 'rank')}" if totals["ranks"] else ""
    shared = (
        f", of which other checkpoints share {format_bytes(totals['shared_bytes'])}" if totals["shared_bytes"] else ""
    )
    facts = [
        f"{count(totals['keys'], 'key')}: {count(totals['tensors'], 'tensor')}{objects}",
        f", {format_bytes(totals['bytes'])} in {count(totals['chunks'], 'chunk')}",
        f"; {count(totals['files'], 'file')} of {format_bytes(totals['file_bytes'])}{writers}{shared}",
    ]
    out.text("".join(facts) if items else "no keys")


def _origin(inventory: Inventory) -> str:
    facts = [inventory.origin]
    if inventory.version:
        facts.append(f"format {inventory.version}")
    if inventory.step is not None:
        facts.append(f"step {inventory.step}")
    if inventory.manifest is not None:
        facts.append(count(inventory.manifest.world_size, "rank") + " saved")
    elif inventory.is_by_rank:
        facts.append(f"metadata of {count(len(inventory.parts), 'rank')}")
    return ", ".join(facts)


def _print_problems(out: Output, inventory: Inventory, files: Sequence[DataFile]) -> None:
    if inventory.problem:
        out.error(inventory.problem)
    for state, problem in (("missing", "missing"), ("no file", "that is no regular file"), ("short", "too short")):
        names = [f"{file.name}{f' ({file.kind})' if file.kind else ''}" for file in files if file.state == state]
        if names:
            more = ", ..." if len(names) > _MOST_SHOWN else ""
            out.error(f"{count(len(names), 'data file')} {problem}: {', '.join(names[:_MOST_SHOWN])}{more}")


# ---- keys ----


def _print_flat(out: Output, items: Sequence[Listed], refused: Mapping[str, str]) -> None:
    header = ["key", "shape", "dtype", "size", "chunks", "ranks", "files"]
    by_rank = any(item.part is not None for item in items)
    header += ["saved by rank"] if by_rank else []
    rows = ((*_flat_row(item, refused), *([str(item.part)] if by_rank else [])) for item in items)
    out.table(header, rows, right=(3, 4), styles={0: "bold", 1: "cyan", 2: "green"})


def _flat_row(item: Listed, refused: Mapping[str, str]) -> tuple[str, ...]:
    entry, files = item.entry, item.files
    where = files[0] if len(files) == 1 else f"{len(files)} files"
    sizes = format_bytes(entry.nbytes), str(len(entry.records))
    return (entry.key, *_kind(entry, refused), *sizes, ranges(item.ranks, ",") or "-", where)


def _kind(entry: Entry, refused: Mapping[str, str]) -> tuple[str, str]:
    """Shape and dtype as they are shown; of an object that a load refuses, what it holds."""
    if entry.shape is None:
        return "object", refused.get(entry.key, "-")
    return str(list(entry.shape)), entry.dtype or "-"


# ---- the tree ----


def _print_tree(
    out: Output, inventory: Inventory, items: Sequence[Listed], refused: Mapping[str, str], depth: int | None
) -> None:
    from dcpring.tools.inspect.outline import Outline

    outline = Outline(items)
    rows, hidden = (list(outline.rows(depth)), 0) if depth else _fitting(outline, out)
    notes = {} if inventory.manifest is None else inventory.manifest.components
    table = [(_name_pieces(row, notes), _row_cells(row, refused)) for row in rows]
    out.lines(_aligned(table, out.screen[0] if out.interactive else None))
    if hidden:
        out.note("there is more: --depth N and --keys PATTERN choose, --flat shows all")


def _fitting(outline: Any, out: Output) -> tuple[list[Line], int]:
    """The deepest tree that fits the screen, and whether anything of it is cut off."""
    room = max(out.screen[1] - _LINES_AROUND, _FEWEST_ROWS)
    best: list[Line] = []
    for depth in range(1, _MOST_LEVELS + 1):
        rows = list(itertools.islice(outline.rows(depth), room + 1))
        if len(rows) > room:
            return (best, 1) if best else (rows[:room], 1)
        if depth > 1 and len(rows) == len(best) and not any(row.nodes[0].children for row in _ends(rows)):
            return rows, 0
        best = rows
    return best, 0


def _ends(rows: Sequence[Line]) -> Iterator[Line]:
    """The rows with nothing drawn below them."""
    for row, after in itertools.zip_longest(rows, rows[1:]):
        if after is None or len(after.path) <= len(row.path):
            yield row


def _name_pieces(row: Line, notes: dict[str, dict[str, Any]]) -> list[Piece]:
    lines = "".join("   " if last else "│  " for last in row.path[:-1]) + ("└─ " if row.path[-1] else "├─ ")
    name: list[Piece] = [(lines, "dim"), (row.name, "" if row.item else "bold")]
    if not row.inside and row.count > 1:
        name.append((f" ({row.count:,} x)", "yellow"))
    note = notes.get(row.name) if len(row.path) == 1 else None
    if note:
        name.append((f"  {note.get('kind', '')} {note.get('type', '')}".rstrip(), "dim"))
    return name


def _row_cells(row: Line, refused: Mapping[str, str]) -> list[Piece]:
    """Shape or number of keys, dtype, size, chunks, ranks."""
    from dcpring.tools.inspect.inventory import ranks_of, total

    items = list(row.items())
    sum, ranks = total(items), ranks_of(items)
    where: list[Piece] = [
        (count(sum.chunks, "chunk"), "dim"),
        (f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks, ',')}" if ranks else "", "dim"),
    ]
    if row.item is None:
        return [(count(sum.keys, "key"), ""), ("", ""), (format_bytes(sum.bytes), ""), *where]
    shape, dtype = _kind(row.item.entry, refused)
    each = format_bytes(sum.bytes)
    if row.count > 1:
        each = f"{row.count:,} x {format_bytes(sum.bytes / row.count)}"
    return [(shape, "cyan"), (dtype, "green"), (each, ""), *where]


def _aligned(table: Sequence[tuple[list[Piece], list[Piece]]], columns: int | None) -> Iterator[list[Piece]]:
    """The rows of the tree as lines; the last columns are left out where the screen is too narrow for them."""
    names = [sum(len(text) for text, _ in pieces) for pieces, _ in table]
    name_width = max((width for width in names if width <= _WIDEST_NAME), default=0)
    widths = [max(len(cell[0]) for cell in column) for column in zip(*(cells for _, cells in table), strict=True)]
    while columns is not None and len(widths) > 3 and name_width + sum(2 + width for width in widths) > columns:
        widths.pop()
    for (pieces, cells), taken in zip(table, names, strict=True):
        line = [*pieces, (" " * (name_width - taken), "")]
        for number, ((text, style), width) in enumerate(zip(cells, widths, strict=False)):
            line.append((f"  {text.rjust(width) if number in _TO_RIGHT else text.ljust(width)}", style))
        yield line


# ---- files ----


def _print_files(out: Output, files: Sequence[DataFile]) -> None:
    rows = (
        (
            file.name,
            "-" if file.rank is None else str(file.rank),
            "-" if file.size is None else format_bytes(file.size),
            format_bytes(file.shared_bytes) if file.shared_bytes else "-",
            str(file.records),
            format_bytes(file.bytes),
            "-" if file.padding is None else f"{file.padding:.1%}",
            "" if file.state == "ok" else file.kind or file.state,
        )
        for file in files
    )
    header = ("file", "rank", "on disk", "shared", "records", "of bytes", "padding", "state")
    out.table(header, rows, right=(1, 2, 3, 4, 5, 6), styles={0: "bold", 7: "bold red"})


# ---- JSON ----


def _document(
    inventory: Inventory,
    items: Sequence[Listed],
    files: Sequence[DataFile],
    refused: Mapping[str, str],
    *,
    with_keys: bool,
) -> dict[str, Any]:
    from dcpring.tools.inspect.inventory import totals_by_component

    manifest = inventory.manifest
    notes = {} if manifest is None else manifest.components
    document: dict[str, Any] = {
        "checkpoint": str(inventory.directory),
        "writer": inventory.writer,
        "format": inventory.version,
        "step": inventory.step,
        "world_size": None if manifest is None else manifest.world_size,
        "problem": inventory.problem,
        "totals": _totals(items, files),
        "components": {
            name: {**vars(sum), "kind": notes.get(name, {}).get("kind"), "type": notes.get(name, {}).get("type")}
            for name, sum in totals_by_component(items).items()
        },
        "files": [{"file": file.name, **{name: getattr(file, name) for name in _FILE_FIELDS}} for file in files],
    }
    if with_keys:
        document["keys"] = [_key_document(item, refused) for item in items]
    return document


_FILE_FIELDS = (
    *("rank", "state", "kind", "size", "disk_bytes", "links", "shared_bytes", "needed", "records", "bytes", "padding"),
)


def _key_document(item: Listed, refused: Mapping[str, str]) -> dict[str, Any]:
    entry = item.entry
    return {
        "key": entry.key,
        "kind": "object" if entry.shape is None else "tensor",
        "shape": None if entry.shape is None else list(entry.shape),
        "dtype": entry.dtype,
        "bytes": entry.nbytes,
        "chunks": len(entry.records),
        "ranks": item.ranks,
        "files": item.files,
        "saved_by_rank": item.part,
        "refused": refused.get(entry.key),
    }
