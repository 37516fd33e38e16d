"""Traces: real ones, of saves by several ranks, and made ones, whose times are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcpring import _C, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

# ---- real ones; in each rank ----


def save_traced(folder: str, slow_rank: int = -1, delay_ms: int = 0, err: int = 0) -> str:
    """Every rank writes some MiB; the fdatasync of one takes longer, or fails. Returns what the save raised."""
    rank = dist.get_rank()
    state = {f"w{rank}": torch.randn(1 << 20), "shared": torch.arange(1000)}
    if rank == slow_rank:
        _C.arm_fault("fdatasync", 1, err, True, delay_ms)
    writer = RingWriter(Path(folder, "checkpoint"), trace=Path(folder, "t.json"))
    try:
        dcp.save(state, storage_writer=writer, planner=RingSavePlanner())
    except BaseException as error:  # CheckpointException is one
        return str(error)
    finally:
        if rank == slow_rank:
            _C.disarm_fault()
    return ""


def load_alone(folder: str, rank: int) -> None:
    """Only one of the ranks reads, for itself."""
    if dist.get_rank() == rank:
        reader = RingReader(Path(folder, "checkpoint"), trace=Path(folder, "t.json"))
        dcp.load({"shared": torch.zeros(1000, dtype=torch.int64)}, storage_reader=reader, no_dist=True)


def load_traced(folder: str) -> None:
    """What all ranks need is handed on between them."""
    state = {f"w{dist.get_rank()}": torch.zeros(1 << 20), "shared": torch.zeros(1000, dtype=torch.int64)}
    reader = RingReader(Path(folder, "checkpoint"), trace=Path(folder, "t.json"))
    dcp.load(state, storage_reader=reader, planner=RingLoadPlanner(process_group=dist.group.WORLD, share="host"))
    assert torch.equal(state["shared"], torch.arange(1000))


# ---- made ones ----

SECOND = 1_000_000
START = 1_700_000_000 * SECOND

Timed = tuple[str, float, float]
"""A name, and from when to when, in seconds since START."""


def made(
    rank: int,
    phases: Sequence[Timed],
    io: Sequence[Timed] = (),
    *,
    world_size: int = 4,
    kind: str = "save",
    identity: str = "one",
    waits: Sequence[Timed] = (),
    failed: str = "",
    process: int = 0,
    shift: float = 0.0,
) -> dict[str, Any]:
    """A trace of one operation."""
    about = {"dcpring_trace": 1, "rank": rank, "world_size": world_size, "host": "here", "notes": []}
    about |= {"process": process or 100 + rank, "parent": 1}

    def event(name: str, category: str, begin: float, end: float, tid: int, **args: Any) -> dict[str, Any]:
        ts, until = (START + round((time + shift) * SECOND) for time in (begin, end))
        common = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": tid, "ts": ts, "dur": until - ts}
        return common | {"args": {"operation": 0, **args}}

    whole = {"id": identity, "kind": kind, "checkpoint": "/data/step-1", "coordinator": rank == 0, "alone": False}
    whole |= {"failed": failed} if failed else {}
    events = [
        {"ph": "M", "pid": rank, "tid": 1, "name": "thread_name", "args": {"name": "main"}},
        {"ph": "M", "pid": rank, "tid": 17, "name": "thread_name", "args": {"name": "worker 0 io 0"}},
        event(kind, "operation", phases[0][1], phases[-1][2], 1, **whole),
        *(event(name, "phase", begin, end, 1) for name, begin, end in phases),
        *(event(name, "wait", begin, end, 1) for name, begin, end in waits),
        *(
            event(name, "io", begin, end, 17 if name == "write" else 1, file=f"__{rank}_0", bytes=1 << 30)
            for name, begin, end in io
        ),
    ]
    return {"otherData": about, "traceEvents": events}


def slow_sync(shift: float = 0.0) -> list[dict[str, Any]]:
    """Four ranks save. Rank 1 is last to plan, rank 3 writes longest: of its 2.1 s 1.4 s are fsync.

    Args:
        shift: by which the clock of rank 3 is wrong.
    """
    traces = []
    for rank in range(4):
        planned, written = (0.2 if rank == 1 else 0.05), (2.4 if rank == 3 else 0.8)
        phases: list[Timed] = [("local plan", 0.0, planned)]
        io: list[Timed] = [("write", 0.3, 1.0 if rank == 3 else 0.7), ("fsync", 1.0 if rank == 3 else 0.7, written)]
        if rank == 0:
            phases += [("gather plans", planned, 0.2), ("global plan", 0.2, 0.3), ("scatter plans", 0.3, 0.3)]
            phases += [("write", 0.3, written), ("gather results", written, 2.4), ("commit", 2.4, 2.45)]
        else:
            phases += [("scatter plans", planned, 0.3), ("write", 0.3, written)]
        traces.append(made(rank, phases, io, shift=shift if rank == 3 else 0.0))
    return traces


def write(folder: Path, traces: Sequence[Any]) -> list[Path]:
    """As t.0.json and so on."""
    paths = [folder / f"t.{number}.json" for number in range(len(traces))]
    for path, trace in zip(paths, traces, strict=True):
        path.write_text(json.dumps(trace))
    return paths
