"""Who writes what: an HSDP job on 4 processes, saved by stock DCP and with every strategy of RingSavePlanner.

    python examples/hsdp.py

The mesh is 2 x 2: parameters and AdamW's moments are sharded over two ranks, and two groups of ranks hold the same
shards. The table shows the bytes that each rank writes; how many bytes all ranks together then read from files with
RingLoadPlanner(share="host") (each needs half: it is twice the checkpoint where nothing is handed on); and
whether the loads of dcpring and of stock DCP give back what was saved, bit for bit. Exit status 0 means that all did.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_map

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

REPLICAS, SHARDS = 2, 2
WORLD = REPLICAS * SHARDS
LAYERS, WIDTH = 8, 256
# Loaded once, by the process that the ranks are forked from: it takes seconds.
LOADED_ONCE = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "dcpring.state_dict",
]
READ_ONCE = 1.05  # of the files; objects, which are small, are read by every rank
DATA_FILE = re.compile(r"__(\d+)_\d+.*\.distcp")

State = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way to save.

    Attributes:
        refused: the shards cannot be written so, and the save must say so.
        read_once: a load must read each byte once, and hand it on; of stock's records nothing is handed on.
    """

    title: str
    save: Callable[[State, Path], object]
    refused: bool = False
    read_once: bool = True


@dataclass(frozen=True)
class Outcome:
    """What rank 0 saw. `file_bytes` is by rank; `read_bytes` is what all ranks together read from files."""

    title: str
    error: str = ""
    file_bytes: tuple[int, ...] = ()
    read_bytes: int = 0
    wrong_by_dcpring: str | None = None
    wrong_by_stock: str | None = None
    as_expected: bool = True


# ---- the job, on every rank ----


def train() -> State:
    """A model after one step, and its optimizer."""
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": 1}


def ways() -> Iterator[Way]:
    yield Way("stock", lambda state, path: dcp.save(state, storage_writer=FileSystemWriter(path)), read_once=False)
    yield Way(
        "stock, dedup_save_to_lowest_rank",
        lambda state, path: dcp.save(
            state,
            storage_writer=FileSystemWriter(path),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        ),
        read_once=False,
    )
    # One process of the 2 x 2 cannot write all: it holds half of each tensor. All run on this one host.
    for writers in ("auto", "balanced", "split", "first_replica", 2, 1, "per_node"):
        yield Way(f"writers={writers!r}", _save_with(writers), refused=writers in (1, "per_node"))


def _save_with(writers: Any) -> Callable[[State, Path], object]:
    return lambda state, path: dcp.save(
        state, storage_writer=RingWriter(path), planner=RingSavePlanner(writers=writers, split_bytes=64 << 10)
    )


def run_way(way: Way, state: State, path: Path) -> Outcome:
    try:
        way.save(state, path)
    except CheckpointException as failure:
        return Outcome(way.title, error=_reason(failure), as_expected=way.refused)
    file_bytes = [0] * WORLD
    for file in path.iterdir():
        if match := DATA_FILE.fullmatch(file.name):
            file_bytes[int(match[1])] += file.stat().st_size
    reader = RingReader(path)
    planner = RingLoadPlanner(process_group=dist.group.WORLD, share="host")
    target = zeroed(state)
    dcp.load(target, storage_reader=reader, planner=planner)
    wrong_by_dcpring = first_wrong(state, target)
    target = zeroed(state)
    dcp.load(target, storage_reader=FileSystemReader(path))
    wrong_by_stock = first_wrong(state, target)
    read_bytes = sum(gathered(reader.stats.bytes))
    read_once = read_bytes <= READ_ONCE * sum(file_bytes)
    return Outcome(
        way.title,
        file_bytes=tuple(file_bytes),
        read_bytes=read_bytes,
        wrong_by_dcpring=wrong_by_dcpring,
        wrong_by_stock=wrong_by_stock,
        as_expected=not way.refused and not wrong_by_dcpring and not wrong_by_stock and read_once >= way.read_once,
    )


def _reason(failure: CheckpointException) -> str:
    return str(next(iter(failure.failures.values()))[0])


def zeroed(state: State) -> State:
    return tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else None, state)


def first_wrong(state: State, loaded: State) -> str | None:
    """The first key, of any rank, whose value is not the one that was saved."""
    found = [leaf for _, leaf in _leaves(loaded)]
    wrong = [key for (key, leaf), other in zip(_leaves(state), found, strict=True) if not _same(leaf, other)]
    return next((key for keys in gathered(wrong) for key in keys), None)


def _leaves(tree: State) -> list[tuple[str, Any]]:
    return [("".join(map(str, path)), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def _same(saved: Any, loaded: Any) -> bool:
    if not isinstance(saved, Tensor):
        return bool(saved == loaded)
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (saved, loaded)]
    first, second = (part.detach().contiguous().reshape(-1).view(torch.uint8) for part in parts)
    return torch.equal(first, second)


def gathered(value: Any) -> list[Any]:
    everyones: list[Any] = [None] * WORLD
    dist.all_gather_object(everyones, value)
    return everyones


def job(rank: int, directory: Path, results: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "rendezvous"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    state = train()
    for number, way in enumerate(ways()):
        outcome = run_way(way, state, directory / str(number))
        if rank == 0:
            results.put(outcome)
    dist.destroy_process_group()


# ---- the table ----


def show(outcomes: list[Outcome]) -> None:
    widest = max(len(outcome.title) for outcome in outcomes)
    heads = [
        *(f"rank {rank}" for rank in range(WORLD)),
        "largest / mean",
        "read by all",
        "dcpring loads",
        "stock loads",
    ]
    print(" ".join([" " * widest, *(head.rjust(14) for head in heads)]))
    for outcome in outcomes:
        if outcome.error:
            print(f"{outcome.title.ljust(widest)}  refused: {outcome.error}")
            continue
        sizes = outcome.file_bytes
        cells = [f"{size:,} B" if size else "no file" for size in sizes]
        cells.append(f"{max(sizes) * WORLD / sum(sizes):.2f}")
        cells.append(f"{outcome.read_bytes:,} B")
        cells += [
            "bit-equal" if wrong is None else f"WRONG: {wrong}"
            for wrong in (outcome.wrong_by_dcpring, outcome.wrong_by_stock)
        ]
        print(" ".join([outcome.title.ljust(widest), *(cell.rjust(14) for cell in cells)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the checkpoints go (default: here)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hsdp-", dir=arguments.dir) as scratch:
        results = mp.get_context("forkserver").SimpleQueue()
        mp.set_forkserver_preload(LOADED_ONCE)
        mp.start_processes(job, (Path(scratch), results), nprocs=WORLD, start_method="forkserver")
        outcomes = []
        while not results.empty():
            outcomes.append(results.get())
    print(f"HSDP {REPLICAS} x {SHARDS}, {LAYERS} x Linear({WIDTH}) with AdamW: bytes in the files of each rank\n")
    show(outcomes)
    if not all(outcome.as_expected for outcome in outcomes):
        sys.exit("\nnot everything was as it should be")


if __name__ == "__main__":
    main()
