"""dcpring side by side with stock DCP, with the disk's own limit, and with what else could be picked.

    python benchmarks/save_load.py                # all shapes, 1 and 4 processes, 7 rounds: about an hour
    python benchmarks/save_load.py --quick        # small sizes, one round: does everything work?
    python benchmarks/save_load.py --peers --procs 1 --shapes large medium

All contestants run in every round, in an order that turns from round to round; ratios are taken within a round,
and their medians are reported.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import _machine
from _disk import cache_drop_method, limit_tool
from _peers import missing_packages
from _program import Program, draw, print_machine, scratch, write
from _report import Measured, as_json, print_reshard, print_rows
from _runner import Options, run
from _shapes import FULL, KEYS, QUICK, ShapeSet
from _targets import print_targets, targets, targets_as_json

COPIES = 5  # of the largest state dict: one per contestant that writes it, peers included


def check_room(directory: Path, shapes: ShapeSet) -> None:
    largest = max(shape.count * shape.size_bytes for shape in shapes.shapes)
    free = shutil.disk_usage(directory).free
    if free < COPIES * largest:
        sys.exit(f"{directory} has {free >> 20} MiB free; {COPIES * largest >> 20} MiB are needed (--dir)")
    if _machine.file_system(directory) in ("tmpfs", "ramfs"):
        sys.exit(f"{directory} is in memory: choose a folder on a disk with --dir")


def print_conditions(machine: dict[str, str | int], arguments: argparse.Namespace) -> None:
    print_machine(machine)
    print(f"rounds: {arguments.rounds}; disk's limit by {limit_tool()}; cold by {cache_drop_method()}")
    print("every save is fsynced: stock and dcpring do it themselves, for peers it is added and counted")
    if arguments.peers:
        print("a peer that maps the file has its pages counted as memory; one that allocates its tensors, not these")
    if arguments.peers and (missing := missing_packages()):
        print(f"left out, not installed: {', '.join(missing)} (pip install {' '.join(missing)})")


def main() -> None:
    program = Program("save_load", __doc__, 7, ("json", "png"))
    program.add_argument("--shapes", nargs="+", choices=KEYS, default=KEYS, help="default: all")
    program.add_argument("--procs", nargs="+", type=int, help="process counts; default: 1 4; with --quick: 1 2")
    program.add_argument("--peers", action="store_true", help="add safetensors, torch.save and others (1 process)")
    given = program.given()
    shapes = QUICK if given.quick else FULL
    check_room(given.dir, shapes)
    machine = _machine.describe(given.dir)
    print_conditions(machine, given)
    with scratch(given.dir) as folder:
        results = run(
            Options(
                directory=folder,
                shapes=tuple(shapes.get(key) for key in given.shapes),
                reshard_bytes=shapes.reshard_bytes,
                procs=tuple(given.procs or ((1, 2) if given.quick else (1, 4))),
                rounds=given.rounds,
                with_peers=given.peers,
            )
        )
    measured = Measured(results.samples)
    found = targets(measured, results.reshard, shapes)
    print_rows(measured, shapes)
    print_reshard(results.reshard)
    print_targets(found, given.quick)
    conditions = {
        "rounds": given.rounds,
        "quick": given.quick,
        "disk_limit": limit_tool(),
        "cold": cache_drop_method(),
        "peers_save": "fsync of file and folder added by the benchmark",
    }
    made = as_json(measured, results.reshard)
    write(given.json, machine=machine, conditions=conditions, targets=targets_as_json(found), **made)
    draw(given.png, "_plot", measured, shapes, machine)


if __name__ == "__main__":
    main()
