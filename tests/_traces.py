"""A save of several ranks whose parts take what a test says, as DCP does it; and synthetic traces."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcpring import _C, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter


def save_with_a_slow_sync(folder: str, slow_rank: int, delay_ms: int) -> None:
    """Every rank writes some MiB; the fdatasync of one takes longer."""
    rank = dist.get_rank()
    state = {f"w{rank}": torch.randn(1 << 20), "shared": torch.arange(1000)}
    if rank == slow_rank:
        _C.arm_fault("fdatasync", 1, 0, True, delay_ms)
    try:
        writer = RingWriter(Path(folder, "checkpoint"), trace=Path(folder, "t.json"))
        dcp.save(state, storage_writer=writer, planner=RingSavePlanner())
    finally:
        if rank == slow_rank:
            _C.disarm_fault()


def load_traced(folder: str) -> None:
    rank = dist.get_rank()
    state = {f"w{rank}": torch.zeros(1 << 20), "shared": torch.zeros(1000, dtype=torch.int64)}
    reader = RingReader(Path(folder, "checkpoint"), trace=Path(folder, "t.json"))
    planner = RingLoadPlanner(process_group=dist.group.WORLD, share="host")
    dcp.load(state, storage_reader=reader, planner=planner)
