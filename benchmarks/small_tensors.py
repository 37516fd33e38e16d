"""Saves and loads of tens of thousands of small tensors in one process, where planning is most of the time.

    python benchmarks/small_tensors.py                # 20000 x 4 KiB, 5 rounds: about 10 minutes
    python benchmarks/small_tensors.py --quick        # 500 tensors, one round: does everything work?

All of stock (DefaultSavePlanner, FileSystemWriter, FileSystemReader, DefaultLoadPlanner) against all of dcpring,
dcpring's storage with stock's planners, and dcp.save and dcp.load with planners and storage that do nothing.
In two forms: {"model": {name: tensor}}, as programs save, and {name: tensor}, where DCP itself looks at every tensor.

Every save is synced to the disk by its writer. The ways take turns, every load is checked byte for byte, and ratios are
taken within a round.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed.checkpoint as dcp
from _contestants import NULL, OURS, STOCK, NullReader, NullWriter
from _disk import cache_drop_method, make_cold, make_warm
from _measure import LOAD_COLD, LOAD_WARM, PHASES, SAVE, Meter
from _program import Program, print_machine, scratch, write
from _report import print_table, ratios
from _shapes import KIB, difference, empty_like, poison
from _targets import Target, print_targets, targets_as_json
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

TIMES_STOCK = 20.0
NESTED, FLAT = '{"model": tensors}', "{name: tensor}"


class NullSavePlanner(SavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: Any) -> Any:
        raise NotImplementedError


class NullLoadPlanner(LoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: Any) -> Any:
        raise NotImplementedError

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Way:
    """One way to save and load. `stores` is False for the one that does nothing."""

    name: str
    title: str
    writer: Callable[[Path], StorageWriter]
    reader: Callable[[Path], StorageReader]
    save_planner: Callable[[], SavePlanner]
    load_planner: Callable[[], LoadPlanner]
    stores: bool = True


STORAGE_ONLY = "dcpring storage"
WAYS = (
    Way(STOCK, "stock DCP", FileSystemWriter, FileSystemReader, DefaultSavePlanner, DefaultLoadPlanner),
    Way(
        STORAGE_ONLY, "dcpring storage, stock planners", RingWriter, RingReader, DefaultSavePlanner, DefaultLoadPlanner
    ),
    Way(OURS, "dcpring storage and planners", RingWriter, RingReader, RingSavePlanner, RingLoadPlanner),
    Way(
        NULL,
        "dcp.save and dcp.load alone",
        lambda path: NullWriter(),
        lambda path: NullReader(Metadata({})),
        NullSavePlanner,
        NullLoadPlanner,
        stores=False,
    ),
)


@dataclass(frozen=True)
class SmallSample:
    """Wall and CPU seconds of one whole dcp.save or dcp.load."""

    form: str
    who: str
    phase: str
    round: int
    seconds: float
    cpu_seconds: float


class WrongData(Exception):
    """A load brought back something else than what was saved."""


# ---- running ----


def run(count: int, rounds: int, directory: Path) -> list[SmallSample]:
    tensors = {f"layers.{i // 10}.experts.{i % 10}.weight": torch.rand(KIB) for i in range(count)}
    forms = {NESTED: {"model": tensors}, FLAT: tensors}
    for state in forms.values():  # what is done only once per process is not to count
        _run_round("", {"model": torch.zeros(4)} if "model" in state else {"w": torch.zeros(4)}, WAYS, 0, directory)
    samples = []
    for form, state in forms.items():
        for number in range(rounds):
            print(f"{form}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            samples += _run_round(form, state, WAYS if number % 2 == 0 else WAYS[::-1], number, directory)
    return samples


def _run_round(
    form: str, state: dict[str, Any], ways: Sequence[Way], number: int, directory: Path
) -> list[SmallSample]:
    target = empty_like(state)
    samples = []
    for phase in PHASES:
        for way in ways:
            path = directory / way.name
            if phase != SAVE and way.stores:
                (make_cold if phase == LOAD_COLD else make_warm)(path)
            poison(target)
            os.sync()
            gc.collect()
            samples.append(_measure(form, way, phase, number, state if phase == SAVE else target, path))
            wrong = difference(state, target) if phase != SAVE and way.stores else None
            if wrong is not None:
                raise WrongData(f"{way.title}, {form}, {phase}: {wrong} is not what was saved")
    for way in ways:
        shutil.rmtree(directory / way.name, ignore_errors=True)
    return samples


def _measure(form: str, way: Way, phase: str, number: int, state: dict[str, Any], path: Path) -> SmallSample:
    with Meter() as meter:
        if phase == SAVE:
            dcp.save(state, storage_writer=way.writer(path), planner=way.save_planner())
        else:
            dcp.load(state, storage_reader=way.reader(path), planner=way.load_planner())
    spent = meter.reading().whole
    return SmallSample(form, way.name, phase, number, spent.end - spent.begin, spent.cpu_seconds)


# ---- results ----


def of(samples: Sequence[SmallSample], form: str, who: str, *phases: str) -> list[SmallSample]:
    return [sample for sample in samples if (sample.form, sample.who) == (form, who) and sample.phase in phases]


def sums(
    samples: Sequence[SmallSample], form: str, who: str, phases: Sequence[str], cost: Callable[[SmallSample], float]
) -> list[float]:
    """The cost of the phases together, round by round."""
    by_phase = [[cost(sample) for sample in of(samples, form, who, phase)] for phase in phases]
    return [sum(values) for values in zip(*by_phase, strict=True)]


def seconds(sample: SmallSample) -> float:
    return sample.seconds


def cpu_seconds(sample: SmallSample) -> float:
    return sample.cpu_seconds


BOTH = {f"{SAVE} + {load}": (SAVE, load) for load in (LOAD_COLD, LOAD_WARM)}
COLUMNS = {SAVE: (SAVE,), LOAD_COLD: (LOAD_COLD,), LOAD_WARM: (LOAD_WARM,), **BOTH}


def print_samples(samples: Sequence[SmallSample], count: int) -> None:
    for form in (NESTED, FLAT):
        for title, cost in (("seconds", seconds), ("CPU seconds", cpu_seconds)):
            lines = []
            for way in WAYS:
                line = [way.title]
                for phases in COLUMNS.values():
                    ours, stock = (sums(samples, form, who, phases, cost) for who in (way.name, STOCK))
                    line += [f"{median(ours):.3f}", "" if way.name == STOCK else f"{median(ratios(stock, ours)):.1f}x"]
                lines.append(line)
            heads = ["", *(head for column in COLUMNS for head in (column, ""))]
            print_table(
                f"{count} x 4 KiB as {form}, 1 process: {title}, and how many times faster than stock", heads, lines
            )


def targets(samples: Sequence[SmallSample]) -> list[Target]:
    found = []
    for form in (NESTED, FLAT):
        for title, phases in BOTH.items():
            stock, ours = (sums(samples, form, who, phases, seconds) for who in (STOCK, OURS))
            found.append(Target(f"{form}, {title}: stock's time, of dcpring's", TIMES_STOCK, True, ratios(stock, ours)))
    return found


def medians(samples: Sequence[SmallSample]) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds by form, way and phase."""
    return {
        form: {
            way.name: {name: median(sums(samples, form, way.name, phases, seconds)) for name, phases in COLUMNS.items()}
            for way in WAYS
        }
        for form in (NESTED, FLAT)
    }


def main() -> None:
    given = Program("small_tensors", __doc__, 5).given()
    warnings.filterwarnings("ignore")  # DCP says in every call that there is only one process
    count = 500 if given.quick else 20000
    machine, cold = _machine.describe(given.dir), cache_drop_method()
    print_machine(machine)
    print(f"rounds: {given.rounds}; cold by {cold}")
    with scratch(given.dir) as folder:
        samples = run(count, given.rounds, folder)
    print_samples(samples, count)
    found = targets(samples)
    print_targets(found, given.quick)
    write(
        given.json,
        machine=machine,
        conditions={"rounds": given.rounds, "tensors": count, "cold": cold},
        targets=targets_as_json(found),
        medians=medians(samples),
        samples=samples,
    )


if __name__ == "__main__":
    main()
