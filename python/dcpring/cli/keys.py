"""``dcpring keys``: what a checkpoint's keys are called, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dcpring.cli._output import Output, in_words
from dcpring.cli._parser import Commands, add_checkpoint, add_json, add_key_map, add_rank, add_trusted
from dcpring.errors import CheckpointError
from dcpring.names.diff import folded

if TYPE_CHECKING:
    from dcpring.names.key_map import KeyTable
    from dcpring.tools.keys import KeyReport

_MOST_PLACES = 4

DESCRIPTION = """\
Shows the names in a checkpoint: as they are, without what wrappers (torch.compile, FSDP, activation checkpointing)
put in, and as a key map makes them; which wrappers there were, and which parts may be anybody's.

On a terminal names that differ in numbers only are one line. Status 1 if the key map makes two names one."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "keys",
        run,
        "what the keys are called, what wrappers have put in, and what a key map makes of them",
        DESCRIPTION,
        [
            ("dcpring keys old", "names, and which wrappers they come from"),
            ("dcpring keys old --key-map normalize", "names as RingReader(key_map='normalize') has them"),
            (
                "dcpring keys ckpt/step-100 --key-map map.json",
                "what a table would do: renamed, collisions, unused rules",
            ),
        ],
    )
    add_checkpoint(parser)
    add_key_map(parser, "shows what it makes of the names")
    add_rank(parser)
    add_trusted(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.sources.contents import open_all
    from dcpring.tools.keys import report_keys

    parts = open_all(args.checkpoint, rank=args.rank, trusted=args.trusted)
    report = report_keys(dict.fromkeys(key for contents in parts for key in contents), args.key_map)
    saved, problem = _saved_key_map(args.checkpoint, args.rank)
    if args.json:
        out.json(_document(args.checkpoint, report, saved, problem))
    else:
        _print_rows(out, report)
        _print_origins(out, report)
        _print_clashes(out, "without what wrappers add", report.clashes)
        if args.key_map is not None:
            _print_map(out, report)
        _print_saved(out, saved)
    if problem:
        out.error(problem)
    return 1 if report.collisions else 0


def _saved_key_map(checkpoint: str, rank: int | None) -> tuple[KeyTable | None, str]:
    """The key map that the checkpoint was saved with, or why it cannot be read."""
    from dcpring.tools.keys import saved_key_map

    try:
        return saved_key_map(checkpoint, rank), ""
    except FileNotFoundError:  # metadata of several ranks: each may have its own
        return None, ""
    except (OSError, ValueError, CheckpointError) as error:
        return None, f"the key map of the save cannot be read: {in_words(error)}"


# ---- for people ----


def _print_rows(out: Output, report: KeyReport) -> None:
    """A name that stays as it is is "="."""
    has_map = bool(report.rows) and report.rows[0].mapped is not None
    header = ["key", "canonical", *(["with the key map"] if has_map else [])]
    named = ((row.key, row.canonical, *([row.mapped or ""] if has_map else [])) for row in report.rows)
    rows: Iterable[tuple[str, ...]] = (
        (key, *("=" if name == key else name for name in names)) for key, *names in named
    )
    if out.interactive:
        rows = folded(rows, len(header))
        header.append("keys")
    out.table(header, rows, right=(3 if has_map else 2,), styles={0: "bold", 1: "cyan", 2: "green" if has_map else ""})


def _print_origins(out: Output, report: KeyReport) -> None:
    out.text()
    if not report.origins:
        out.text("No part of these names is one that wrappers use.")
        return
    rows = []
    for origin in report.origins:
        places = [place for place, _ in folded(((place,) for place in origin.places), 1)]
        more = ", ..." if len(places) > _MOST_PLACES else ""
        rows.append((origin.part, origin.origin, f"{origin.keys:,}", ", ".join(places[:_MOST_PLACES]) + more))
    out.table(("part", "put there by", "keys", "where"), rows, right=(2,), styles={0: "bold"})
    if any(not origin.certain for origin in report.origins):
        out.text(
            "Parts that may be the model's own stay; where they are a wrapper's, a key map takes them out: "
            '{"prefixes": {"module.": ""}}'
        )


def _print_clashes(out: Output, when: str, clashes: Mapping[str, list[str]]) -> None:
    for new, old in clashes.items():
        out.error(f"{', '.join(old[:_MOST_PLACES])}{', ...' * (len(old) > _MOST_PLACES)} would all become {new} {when}")


def _print_map(out: Output, report: KeyReport) -> None:
    renamed = sum(row.mapped != row.key for row in report.rows)
    out.text(
        f"The key map renames {renamed:,} of {len(report.rows):,} keys"
        + (f", and makes {len(report.collisions):,} names of several keys" if report.collisions else "")
    )
    for rule in report.unused:
        out.text(f"No key is renamed by the {rule.kind} {rule.old!r} (to {rule.new!r})")
    _print_clashes(out, "with the key map", report.collisions)


def _print_saved(out: Output, saved: KeyTable | None) -> None:
    if saved is None:
        return
    about = f" ({saved.source} to {saved.target})" if saved.source or saved.target else ""
    out.text(f"Saved with a key map{about}, from the state dict's names to these:")
    rows = [(rule.kind, rule.old, rule.new) for rule in saved.rules()]
    if out.interactive:
        names = folded((rule[1:] for rule in rows), 2)
        out.table(("in the state dict", "in the checkpoint", "keys"), names, right=(2,))
    else:
        out.table(("rule", "in the state dict", "in the checkpoint"), rows)


# ---- JSON ----


def _document(checkpoint: str, report: KeyReport, saved: KeyTable | None, problem: str) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "problem": problem,
        "origins": [vars(origin) for origin in report.origins],
        "clashes": report.clashes,
        "collisions": report.collisions,
        "unused_rules": [rule._asdict() for rule in report.unused],
        "saved_key_map": None if saved is None else saved.as_json(),
        "keys": [row._asdict() for row in report.rows],
    }
