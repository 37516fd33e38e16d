"""What RingHFWriter's coordinator does between the plans of all ranks and what each of them is told, in CPU seconds.

python benchmarks/stripes.py                         # 256 ranks with 1000 tensors, by rows and by columns
python benchmarks/stripes.py --ranks 64 --tensors 200 --rounds 1
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcpring import _C, RingHFWriter, RingSavePlanner
from dcpring.format.properties import encode_properties
from dcpring.hf.writer import _ToldByRank
from dcpring.plan.items import Items
from dcpring.plan.messages import LocalMessage, RingPlan
from dcpring.plan.table import SHARD_ROW

SHAPE = (4096, 4096)


def plan_of(rank: int, ranks: int, tensors: int, axis: int) -> RingPlan:
    """What RingSavePlanner makes of so many matrices of bfloat16, cut along an axis."""
    encoded, dtype_bytes = encode_properties(TensorProperties(dtype=torch.bfloat16))
    size, offsets, lengths = SHAPE[axis] // ranks, [0, 0], list(SHAPE)
    offsets[axis], lengths[axis] = rank * size, size
    row = SHARD_ROW, SHAPE, tuple(offsets), tuple(lengths), encoded, dtype_bytes, 2, 0
    names = [f"model.layers.{number}.weight" for number in range(tensors)]
    table = _C.make_table(names, None, [row] * tensors, bytes(tensors), lambda *_: None)
    message = LocalMessage(rank, f"node{rank // 8}", table.encode(), str(rank), b"", False)
    return RingPlan(Items(table), storage_data=_ToldByRank(f"node{rank // 8}", {}), message=message)  # type: ignore[arg-type]


def measure(ranks: int, tensors: int, axis: int) -> float:
    plans = [plan_of(rank, ranks, tensors, axis) for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as folder, patch.object(RingHFWriter, "_create"):
        writer = RingHFWriter(folder, max_shard_bytes=5 << 30)
        writer.set_up_storage_writer(True)
        planned, _ = RingSavePlanner().create_global_plan(plans)
        planned = [
            dataclasses.replace(plan, storage_data=of.storage_data) for plan, of in zip(planned, plans, strict=True)
        ]
        start = time.process_time()
        writer.prepare_global_plan(planned)
        return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for axis, name in enumerate(("rows", "columns")):
        spent = [measure(args.ranks, args.tensors, axis) for _ in range(args.rounds)]
        print(f"{args.ranks} ranks, {args.tensors} tensors, {name:8}{statistics.median(spent):6.2f} CPU s", flush=True)


if __name__ == "__main__":
    main()
