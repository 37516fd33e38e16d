"""dcpring side by side with stock DCP, with the disk's own limit, and with what else could be picked.

    python benchmarks/save_load.py                # all shapes, 1 and 4 processes, 7 rounds: about an hour
    python benchmarks/save_load.py --quick        # small sizes, one round: does everything work?
    python benchmarks/save_load.py --peers --procs 1 --shapes large medium

All contestants run in every round, in an order that turns from round to round; ratios are taken within a round,
and their medians are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _machine
from _disk import cache_drop_method, limit_tool
from _peers import missing_packages
from _report import Measured, as_json, print_reshard, print_rows
from _runner import Options, run
from _shapes import FULL, KEYS, QUICK, ShapeSet
from _targets import print_targets, targets

RESULTS = Path(__file__).parent / "results"
COPIES = 5  # of the largest state dict: one per contestant that writes it, peers included


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=KEYS, default=KEYS, help="default: all")
    parser.add_argument("--rounds", type=int, help="default: 7; with --quick: 1")
    parser.add_argument("--procs", nargs="+", type=int, help="process counts; default: 1 4; with --quick: 1 2")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the checkpoints go (default: here)")
    parser.add_argument("--json", type=Path, help=f"default: {RESULTS.name}/save_load.json; with --quick: none")
    parser.add_argument("--png", type=Path, help=f"default: {RESULTS.name}/save_load.png; with --quick: none")
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test, not a measurement")
    parser.add_argument("--peers", action="store_true", help="add safetensors, torch.save and others (1 process)")
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else 7
    if arguments.procs is None:
        arguments.procs = [1, 2] if arguments.quick else [1, 4]
    if not arguments.quick:
        arguments.json = arguments.json or RESULTS / "save_load.json"
        arguments.png = arguments.png or RESULTS / "save_load.png"
    return arguments


def check_room(directory: Path, shapes: ShapeSet) -> None:
    largest = max(shape.count * shape.size_bytes for shape in shapes.shapes)
    free = shutil.disk_usage(directory).free
    if free < COPIES * largest:
        sys.exit(f"{directory} has {free >> 20} MiB free; {COPIES * largest >> 20} MiB are needed (--dir)")
    if _machine.file_system(directory) in ("tmpfs", "ramfs"):
        sys.exit(f"{directory} is in memory: choose a folder on a disk with --dir")


def print_conditions(machine: dict[str, str | int], arguments: argparse.Namespace) -> None:
    print(", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in machine.items()))
    print(f"load average before: {os.getloadavg()[0]:.1f}; what else runs on the machine shows in every number")
    print(f"rounds: {arguments.rounds}; disk's limit by {limit_tool()}; cold by {cache_drop_method()}")
    print("every save is fsynced: stock and dcpring do it themselves, for peers it is added and counted")
    if arguments.peers:
        print("a peer that maps the file has its pages counted as memory; one that allocates its tensors, not these")
    if arguments.peers and (missing := missing_packages()):
        print(f"left out, not installed: {', '.join(missing)} (pip install {' '.join(missing)})")


def write_json(
    path: Path, machine: dict[str, str | int], arguments: argparse.Namespace, measured: dict[str, Any]
) -> None:
    conditions = {
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "disk_limit": limit_tool(),
        "cold": cache_drop_method(),
        "peers_save": "fsync of file and folder added by the benchmark",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "conditions": conditions, **measured}, indent=1) + "\n")
    print(f"\nwritten: {path}")


def draw_picture(path: Path, measured: Measured, shapes: ShapeSet, machine: dict[str, str | int]) -> None:
    try:
        from _plot import draw
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed (pip install matplotlib)")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path, measured, shapes, machine)
    print(f"drawn: {path}")


def main() -> None:
    arguments = parse_arguments()
    shapes = QUICK if arguments.quick else FULL
    check_room(arguments.dir, shapes)
    machine = _machine.describe(arguments.dir)
    print_conditions(machine, arguments)
    with tempfile.TemporaryDirectory(prefix="save_load-", dir=arguments.dir) as scratch:
        results = run(
            Options(
                directory=Path(scratch),
                shapes=tuple(shapes.get(key) for key in arguments.shapes),
                reshard_bytes=shapes.reshard_bytes,
                procs=tuple(arguments.procs),
                rounds=arguments.rounds,
                with_peers=arguments.peers,
            )
        )
    measured = Measured(results.samples)
    found = targets(measured, results.reshard, shapes)
    print_rows(measured, shapes)
    print_reshard(results.reshard)
    print_targets(found)
    if arguments.quick:
        print("  (--quick: these sizes say that it works, not how fast)")
    content = {
        "targets": [{**asdict(target), "verdict": target.verdict} for target in found],
        **as_json(measured, results.reshard),
    }
    if arguments.json:
        write_json(arguments.json, machine, arguments, content)
    if arguments.png:
        draw_picture(arguments.png, measured, shapes, machine)


if __name__ == "__main__":
    main()
