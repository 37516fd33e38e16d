"""Loads of one rank's part of a tensor that was saved whole: how much is read to get it.

The ranks load in turn, each by itself and cold, so that no rank finds in the page cache what another one read.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _contestants import STORAGES
from _disk import make_cold
from _group import Group
from _measure import Meter, Span
from _shapes import poison, random_floats, raw_bytes
from torch.distributed.checkpoint import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

COLUMNS = 16384


@dataclass
class ReshardSample:
    """One rank's load. `reported_bytes` is what the reader itself says it read, None if it does not say."""

    who: str
    placement: str
    round: int
    rank: int
    whole_bytes: int
    needed_bytes: int
    disk_read_bytes: int
    reported_bytes: int | None
    seconds: float


def measure_reshard(group: Group, directory: Path, size_bytes: int, rounds: int) -> list[ReshardSample]:
    torch.manual_seed(0)
    whole = random_floats(size_bytes // (4 * COLUMNS), COLUMNS)
    samples = []
    for number in range(rounds):
        group.say(f"parts of a tensor of {size_bytes >> 20} MiB: round {number + 1} of {rounds}")
        for who in list(STORAGES)[:: 1 if number % 2 == 0 else -1]:
            samples += _save_and_load_parts(group, whole, who, number, directory / "reshard")
    return samples


def _save_and_load_parts(group: Group, whole: torch.Tensor, who: str, number: int, path: Path) -> list[ReshardSample]:
    storage = STORAGES[who]
    if group.rank == 0:
        dcp.save({"weight": whole}, storage_writer=storage.writer(path), no_dist=True)
    samples = []
    for placement in (Shard(0), Shard(1)):
        for rank in range(group.procs):
            group.barrier()
            if rank == group.rank:
                samples.append(_load_part(group, whole, placement, who, number, path, storage.reader(path)))
    everyones = [sample for part in group.gather(samples) for sample in part]
    if group.rank == 0:
        shutil.rmtree(path)
    return everyones


def _load_part(
    group: Group, whole: torch.Tensor, placement: Shard, who: str, number: int, path: Path, reader: StorageReader
) -> ReshardSample:
    assert group.mesh is not None
    wanted = _part(whole, placement, group.mesh)
    state = {"weight": DTensor.from_local(torch.empty_like(wanted), group.mesh, [placement], run_check=False)}
    poison(state)
    span = _load_cold(state, reader, path)
    if not torch.equal(raw_bytes(state["weight"]), raw_bytes(wanted)):
        raise ValueError(f"{who}: rank {group.rank} did not get its {placement} part of what was saved")
    return ReshardSample(
        who=who,
        placement=f"Shard({placement.dim})",
        round=number,
        rank=group.rank,
        whole_bytes=whole.nbytes,
        needed_bytes=wanted.nbytes,
        disk_read_bytes=span.disk_read_bytes,
        reported_bytes=getattr(getattr(reader, "stats", None), "bytes", None),
        seconds=span.end - span.begin,
    )


def _load_cold(state: dict[str, Any], reader: StorageReader, path: Path) -> Span:
    os.sync()
    make_cold(path)
    with Meter() as meter:
        meter.watch(reader, "read_data")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return meter.reading().data


def _part(whole: torch.Tensor, placement: Shard, mesh: DeviceMesh) -> torch.Tensor:
    return whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
