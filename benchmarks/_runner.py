"""Runs the rounds: one group of processes per process count, every contestant in every round, in turning order.

A round saves with each contestant, loads each one's files cold, then warm, checks every load, and removes the files.
Nothing but the operation itself is inside the measured time: files are fresh, what others left to write is
synced first, and removal, poisoning of the target and comparison happen in between.
"""

from __future__ import annotations

import gc
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from _contestants import Case, Contestant, contestants
from _disk import files_under, make_cold, make_warm
from _group import Group, run_group
from _measure import LOAD_COLD, LOAD_WARM, PHASES, SAVE, Reading, Sample, merge_spans, release_free_memory
from _peers import peers
from _reshard import ReshardSample, measure_reshard
from _shapes import MIB, Shape, build_state, empty_like, local_bytes

WARM_UP = Shape("warm-up", "warm-up", 4, MIB)


@dataclass(frozen=True)
class Options:
    directory: Path
    shapes: tuple[Shape, ...]
    reshard_bytes: int
    procs: tuple[int, ...]
    rounds: int
    with_peers: bool


@dataclass
class Results:
    samples: list[Sample] = field(default_factory=list)
    reshard: list[ReshardSample] = field(default_factory=list)


class WrongData(Exception):
    """A load brought back something else than what was saved."""


def run(options: Options) -> Results:
    results = Results()
    for procs in options.procs:
        part: Results = run_group(procs, _measure_all, options)
        results.samples += part.samples
        results.reshard += part.reshard
    return results


def _measure_all(group: Group, options: Options) -> Results:
    results = Results()
    _measure_shape(group, WARM_UP, options, rounds=1)
    for shape in options.shapes:
        results.samples += _measure_shape(group, shape, options, options.rounds)
    if group.procs > 1:
        results.reshard = measure_reshard(group, options.directory, options.reshard_bytes, options.rounds)
    return results


def _measure_shape(group: Group, shape: Shape, options: Options, rounds: int) -> list[Sample]:
    state = build_state(shape, group.mesh)
    size_bytes = sum(group.gather(local_bytes(state)))
    case = Case(state, empty_like(state), size_bytes, group.rank)
    entrants = contestants(case) + (peers(case) if options.with_peers and group.procs == 1 else [])
    samples = []
    for number in range(rounds):
        group.say(f"{shape.title}, {group.procs} process(es): round {number + 1} of {rounds}")
        ordered = entrants if number % 2 == 0 else entrants[::-1]
        samples += _run_round(group, shape, ordered, number, options.directory / "round")
    return samples


def _run_round(group: Group, shape: Shape, ordered: list[Contestant], number: int, folder: Path) -> list[Sample]:
    samples = []
    for phase in PHASES:
        gc.collect()
        for contestant in ordered:
            if phase in contestant.phases:
                path = folder / contestant.folder
                seen = _merged(_measure(group, contestant, phase, path))
                samples.append(_sample(shape, group.procs, number, phase, contestant, seen, path))
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(folder)
    group.barrier()
    return samples


def _measure(group: Group, contestant: Contestant, phase: str, path: Path) -> list[Reading]:
    if phase != SAVE:
        contestant.prepare_load()
    release_free_memory()
    group.barrier()
    if group.rank == 0:
        _settle(phase, path)
    group.barrier()
    reading = contestant.save(path) if phase == SAVE else contestant.load(path)
    if phase != SAVE:
        _expect_right_data(group, contestant, phase)
    return [reading for reading in group.gather(reading) if reading is not None]


def _settle(phase: str, path: Path) -> None:
    if phase == SAVE:
        path.mkdir(parents=True)
    os.sync()
    if phase == LOAD_COLD:
        make_cold(path)
    elif phase == LOAD_WARM:
        make_warm(path)


def _expect_right_data(group: Group, contestant: Contestant, phase: str) -> None:
    for rank, wrong in enumerate(group.gather(contestant.wrong_tensor())):
        if wrong is not None:
            raise WrongData(f"{contestant.name}, {phase}, rank {rank}: {wrong} is not what was saved")


def _merged(readings: list[Reading]) -> Reading:
    return Reading(merge_spans([r.whole for r in readings]), merge_spans([r.data for r in readings]))


def _sample(
    shape: Shape, procs: int, number: int, phase: str, contestant: Contestant, seen: Reading, path: Path
) -> Sample:
    return Sample(
        shape=shape.key,
        procs=procs,
        round=number,
        phase=phase,
        who=contestant.name,
        tensor_bytes=contestant.case.size_bytes,
        file_bytes=sum(file.stat().st_size for file in files_under(path)),
        seconds=seen.whole.end - seen.whole.begin,
        data_seconds=seen.data.end - seen.data.begin,
        cpu_seconds=seen.whole.cpu_seconds,
        data_cpu_seconds=seen.data.cpu_seconds,
        peak_bytes=seen.whole.peak_bytes,
        data_peak_bytes=seen.data.peak_bytes,
        disk_read_bytes=seen.whole.disk_read_bytes,
        fsync=contestant.fsync,
        engine=contestant.engine,
    )
