"""``dcpring diff``: how two checkpoints differ."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dcpring.cli._output import Output
from dcpring.cli._parser import (
    Commands,
    add_checkpoint,
    add_json,
    add_key_map,
    add_patterns,
    add_rank,
    add_trusted,
    tolerance,
)
from dcpring.names.diff import folded
from dcpring.report import count, format_bytes

if TYPE_CHECKING:
    from dcpring.names.diff import Different, Unmatched
    from dcpring.tools.inspect.compare import CheckpointDiff, ObjectDiff, TensorDiff

_ROWS_ON_SCREEN = 40

_MOST_PROBLEMS = 20
"""Values that cannot be compared, told one by one; --json has all."""

_COLUMNS = ("key", "differ", "of", "largest", "relative", "at", "A", "B", "NaN in A", "in B")

_FEW_COLUMNS = (0, 1, 3, 6, 7)
"""Those of a terminal that is narrower than this, so that keys are not folded."""

_WIDE = 120

DESCRIPTION = """\
Compares two checkpoints: keys, shapes, dtypes and values, whatever the sharding of each, stock's or dcpring's.
Memory stays bounded whatever their size.

Elements differ where their bits do, or with --atol and --rtol where abs(a - b) > ATOL + RTOL * max(abs(a), abs(b)).
Objects are compared as plain data; their code is never run. What is damaged or missing counts as different."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "diff",
        run,
        "how two checkpoints differ",
        DESCRIPTION,
        [
            ("dcpring diff ckpt/step-100 ckpt/step-100", "nothing differs: status 0"),
            ("dcpring diff ckpt/step-100 ckpt/step-200 || true", "what a hundred steps have changed: status 1"),
            ("dcpring diff --quick ckpt/step-100 ckpt/step-200", "names, shapes and dtypes only"),
            ("dcpring diff ckpt/step-100 ckpt/step-200 --only 'model.*' --rtol 10 --atol 1", "close enough"),
            (
                "dcpring diff old ckpt/step-100 --key-map normalize --quick || true",
                "without what wrappers add to names",
            ),
        ],
    )
    add_checkpoint(parser, "a", metavar="A")
    add_checkpoint(parser, "b", metavar="B")
    add_key_map(parser, "makes A's names B's; normalize is applied to both")
    help = "only keys that match, and those below; * stands for anything; may be given several times"
    add_patterns(parser, "--only", help)
    parser.add_argument("--quick", action="store_true", help="do not compare values")
    parser.add_argument("--atol", type=tolerance, default=0.0, help="how far apart elements may be")
    parser.add_argument("--rtol", type=tolerance, default=0.0, help="the same, relative to the larger one")
    add_rank(parser)
    add_trusted(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.base.collector import collection_paused
    from dcpring.tools.inspect.compare import diff_checkpoints

    with collection_paused():  # the process is the command's own
        diff = diff_checkpoints(
            args.a,
            args.b,
            key_map=args.key_map,
            only=args.only,
            values=not args.quick,
            atol=args.atol,
            rtol=args.rtol,
            rank=args.rank,
            trusted=args.trusted,
            progress=True,
        )
    if args.json:
        out.json(_document(args, diff))
        return 1 if diff else 0
    _print_keys(out, diff)
    _print_problems(out, [*diff.tensors, *diff.objects])
    _print_tensors(out, diff.tensors)
    _print_objects(out, diff.objects)
    out.text(_summary(args, diff), style="bold" if diff else "bold green")
    return 1 if diff else 0


# ---- for people ----


def _print_keys(out: Output, diff: CheckpointDiff) -> None:
    keys = diff.keys
    rows: list[tuple[str, ...]] = [(item.key, item.candidate or "-", item.cause) for item in keys.missing]
    # A pair is told once.
    rows += [("-", item.key, "") for item in keys.unexpected if item.candidate is None]
    if rows:
        count = len(keys.missing) + len(keys.unexpected)
        _print_some(out, f"keys in one only ({count}):", ("A", "B", "why, perhaps"), rows, names=2)
    for title, differences in (("shapes", keys.shapes), ("dtypes", keys.dtypes)):
        if differences:
            rows = [(item.key, str(item.wanted), str(item.stored)) for item in differences]
            _print_some(out, f"different {title} ({len(rows)}):", ("key", "A", "B"), rows, names=1)


def _print_some(out: Output, title: str, header: tuple[str, ...], rows: list[tuple[str, ...]], names: int) -> None:
    """A table; on a terminal names that differ in numbers only are one row, and not all of very many are shown."""
    if not out.interactive:
        out.table(header, rows, title=title)
        return
    few = list(folded(rows, names))
    out.table((*header, "keys"), few[:_ROWS_ON_SCREEN], right=(len(header),), title=title)
    if len(few) > _ROWS_ON_SCREEN:
        out.note(f"{_ROWS_ON_SCREEN} rows of {len(few)}; a pipe gets all")


def _print_tensors(out: Output, diffs: Sequence[TensorDiff]) -> None:
    close = sum(not (diff.differing or diff.problem) for diff in diffs)
    if close:
        out.text(f"{count(close, 'tensor')} with other bits, but within the tolerance")
    diffs = [diff for diff in diffs if diff.differing and not diff.problem]
    if not diffs:
        return
    shown = diffs
    if out.interactive and len(diffs) > _ROWS_ON_SCREEN:
        shown = sorted(diffs, key=lambda diff: -diff.relative)[:_ROWS_ON_SCREEN]
    rows = [_tensor_row(diff) for diff in shown]
    is_narrow = out.interactive and out.screen[0] < _WIDE
    chosen = _FEW_COLUMNS if is_narrow else tuple(range(len(_COLUMNS)))
    out.table(
        [_COLUMNS[n] for n in chosen],
        ([row[n] for n in chosen] for row in rows),
        right=[place for place, n in enumerate(chosen) if _COLUMNS[n] not in ("key", "at")],
        title=f"different values ({count(len(diffs), 'tensor')}):",
        styles={0: "bold", 1: "red"},
    )
    if len(shown) < len(diffs):
        out.note(f"the {len(shown)} with the largest relative differences of {len(diffs)}; a pipe gets all")


def _tensor_row(diff: TensorDiff) -> tuple[str, ...]:
    a, b = diff.values or (None, None)
    return (
        diff.key if diff.key == diff.other else f"{diff.key} -> {diff.other}",
        f"{diff.differing:,}",
        f"{diff.elements:,}",
        "-" if diff.distance is None else f"{diff.distance:.3g}",
        "-" if diff.distance is None else f"{diff.relative:.3g}",
        "-" if diff.where is None else str(list(diff.where)),
        _number(a),
        _number(b),
        *(f"{count:,}" for count in diff.nans),
    )


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, (float, complex)) else str(value)


def _print_problems(out: Output, diffs: Sequence[TensorDiff | ObjectDiff]) -> None:
    bad = [diff for diff in diffs if diff.problem]
    for diff in bad[:_MOST_PROBLEMS]:
        out.error(f"cannot compare {diff.key}: {diff.problem}")
    if len(bad) > _MOST_PROBLEMS:
        out.error(f"and {len(bad) - _MOST_PROBLEMS:,} more (--json lists all)")


def _print_objects(out: Output, diffs: Sequence[ObjectDiff]) -> None:
    rows = [(diff.key, diff.difference) for diff in diffs if not diff.problem]
    if rows:
        out.table(("key", "A and B"), rows, title=f"different objects ({len(rows)}):", styles={0: "bold"})


def _summary(args: argparse.Namespace, diff: CheckpointDiff) -> str:
    facts = list(_facts(diff))
    if args.quick:
        return ", ".join(facts) or "the same keys, shapes and dtypes; values were not compared"
    compared = (
        f"compared {count(diff.tensors_compared, 'tensor')} ({format_bytes(diff.bytes)} on each side) and "
        f"{count(diff.objects_compared, 'object')}"
    )
    same = "the same within the tolerance" if diff.tensors and not diff else "the same"
    return f"{', '.join(facts) if diff else same}; {compared}"


def _facts(diff: CheckpointDiff) -> Iterator[str]:
    keys = diff.keys
    tensors = sum(item.differing > 0 and not item.problem for item in diff.tensors)
    objects = sum(not item.problem for item in diff.objects)
    bad = sum(bool(item.problem) for item in diff.tensors) + sum(bool(item.problem) for item in diff.objects)
    for number, text in (
        (len(keys.missing), "only in A"),
        (len(keys.unexpected), "only in B"),
        (len(keys.shapes), "of other shapes"),
        (len(keys.dtypes), "of other dtypes"),
        (tensors, f"{'tensor' if tensors == 1 else 'tensors'} with other values"),
        (objects, f"{'object' if objects == 1 else 'objects'} with other values"),
        (bad, "that cannot be compared"),
    ):
        if number:
            yield f"{number:,} {text}"


# ---- JSON ----


def _document(args: argparse.Namespace, diff: CheckpointDiff) -> dict[str, Any]:
    return {
        "a": args.a,
        "b": args.b,
        "same": not diff,
        "quick": args.quick,
        "atol": _plain(args.atol),
        "rtol": _plain(args.rtol),
        "compared": {"tensors": diff.tensors_compared, "objects": diff.objects_compared, "bytes": diff.bytes},
        "only_in_a": [_unmatched_document(item) for item in diff.keys.missing],
        "only_in_b": [_unmatched_document(item) for item in diff.keys.unexpected],
        "shapes": [_different_document(item) for item in diff.keys.shapes],
        "dtypes": [_different_document(item) for item in diff.keys.dtypes],
        "tensors": [
            {"elements": item.elements, **{name: _plain(value) for name, value in vars(item).items()}}
            for item in diff.tensors
        ],
        "objects": [vars(item) for item in diff.objects],
    }


def _unmatched_document(item: Unmatched) -> dict[str, Any]:
    return {"key": item.key, "closest": item.candidate, "cause": item.cause}


def _different_document(item: Different) -> dict[str, Any]:
    a, b = ({"shape": each.shape, "dtype": _plain(each.dtype)} for each in (item.wanted, item.stored))
    return {"key": item.key, "a": a, "b": b}


def _plain(value: Any) -> Any:
    """JSON has no infinities, NaN, complex numbers or dtypes: these are strings."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value).removeprefix("torch.")
