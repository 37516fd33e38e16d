"""Saves of a state of which much, or nothing, has not changed: unchanged="write", "link" and "trust", in turns.

    python benchmarks/unchanged.py                       # 2 GiB on 4 ranks, 7 rounds: minutes
    python benchmarks/unchanged.py --mib 256 --procs 2 --rounds 3 --cases lora

lora: a frozen base of so many MiB, adapters beside it with what AdamW keeps of them, of which all changes between two
saves; "alone" is a save of these without the base. full: float32 weights of which every element changes. small: 4 KiB
each, 20,000 of them, all changing.

A save is over when all is durable. Seconds are those of the slowest rank, CPU seconds and bytes are sums. The first
save of each way is shown by itself; of the others the medians. The page cache does not matter: nothing is read.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import _machine
import torch
import torch.distributed.checkpoint as dcp
from _group import Group, run_group
from _measure import Meter, merge_spans, release_free_memory
from _program import scratch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dcpring import RingSavePlanner, RingWriter

State = dict[str, Any]
Way = Literal["write", "link", "trust", "alone"]
WAYS: tuple[Way, ...] = ("write", "link", "trust", "alone")
WIDTH, RANK = 4096, 16


def sharded(group: Group, rows: int, columns: int, dtype: torch.dtype, seed: int) -> DTensor:
    """A matrix of which each rank has some rows."""
    assert group.mesh is not None
    own = rows // group.procs
    made = torch.Generator().manual_seed(seed * group.procs + group.rank)
    local = torch.randn(own, columns, generator=made).to(dtype)
    return DTensor.from_local(local, group.mesh, [Shard(0)], shape=torch.Size((rows, columns)), stride=(columns, 1))


def lora(group: Group, mib: int) -> tuple[State, list[Tensor]]:
    """A state, and of it what changes, as this rank has it."""
    base = {f"layers.{n}.weight": sharded(group, WIDTH, WIDTH, torch.bfloat16, n) for n in range(mib // 32)}
    frozen = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in base.items()}
    adapters = {
        f"layers.{n}.adapter.{kind}": sharded(group, *shape, torch.float32, n)
        for n in range(mib // 32)
        for kind, shape in (("a", (RANK, WIDTH)), ("b", (WIDTH, RANK)))
    }
    moments = {
        f"{name}.{what}": sharded(group, *tensor.shape, torch.float32, 1)
        for name, tensor in adapters.items()
        for what in ("exp_avg", "exp_avg_sq")
    }
    changing = [tensor.to_local() for tensor in (*adapters.values(), *moments.values())]
    return {"model": {**frozen, **adapters}, "optimizer": moments}, changing


def full(group: Group, mib: int) -> tuple[State, list[Tensor]]:
    weights = {f"layers.{n}.weight": sharded(group, WIDTH, WIDTH // 2, torch.float32, n) for n in range(mib // 32)}
    return {"model": weights}, [tensor.to_local() for tensor in weights.values()]


def small(group: Group, mib: int) -> tuple[State, list[Tensor]]:
    weights = {f"layers.{group.rank}.{n}.weight": torch.randn(1024) for n in range(20_000 // group.procs)}
    return {"model": weights}, list(weights.values())


CASES: dict[str, Callable[[Group, int], tuple[State, list[Tensor]]]] = {"lora": lora, "full": full, "small": small}


def saved(group: Group, state: State, path: Path, way: Way, before: Path) -> dict[str, float]:
    if way == "alone":
        model = {key: value for key, value in state["model"].items() if not isinstance(value, torch.nn.Parameter)}
        state, way = {**state, "model": model}, "write"
    writer = RingWriter(path, unchanged=way, unchanged_from=before)
    release_free_memory()
    group.barrier()
    with Meter() as meter:
        dcp.save(state, storage_writer=writer, planner=RingSavePlanner())
    whole = merge_spans(group.gather(meter.reading().whole))
    assert writer.stats is not None
    written = sum(group.gather(writer.stats.bytes)) / 2**20
    return {"s": whole.end - whole.begin, "CPU s": whole.cpu_seconds, "MiB written": written}


def run(group: Group, folder: Path, case: str, mib: int, rounds: int) -> dict[str, Any]:
    state, changing = CASES[case](group, mib)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        group.say(f"{case}, round {number} of {rounds}")
        for way in WAYS if number % 2 else reversed(WAYS):
            path, before = folder / way / f"step-{number}", folder / way / f"step-{number - 1}"
            found[way].append(saved(group, state, path, way, before))
            group.barrier()
            if group.rank == 0:
                shutil.rmtree(before, ignore_errors=True)
            group.barrier()
        for tensor in changing:
            tensor.add_(0.37)
    if group.rank == 0:
        for way in WAYS:
            shutil.rmtree(folder / way)
    group.barrier()
    changing_mib = sum(group.gather(sum(tensor.nbytes for tensor in changing))) / 2**20
    return {"changing MiB": changing_mib, "samples": found}


def show(case: str, result: dict[str, Any]) -> None:
    print(f"\n{case}: {result['changing MiB']:.1f} MiB change")
    for way, samples in result["samples"].items():
        for label, some in (("first", samples[:1]), ("later", samples[1:])):
            cells = (f"{median(one[what] for one in some):10.3f} {what}" for what in some[0])
            print(f"  {way:6} {label:6}", "".join(cells))
    plain = result["samples"]["write"][1:]
    for way in WAYS[1:]:
        later = result["samples"][way][1:]
        for what in ("s", "CPU s"):
            ratios = [one[what] / other[what] for one, other in zip(later, plain, strict=True)]
            print(f"  {way} / write, {what}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        times = median(one["MiB written"] for one in later) / result["changing MiB"]
        print(f"  MiB written by {way}, of those that change: {times:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--procs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with scratch(options.folder) as folder:
        print(_machine.describe(folder))
        for case in options.cases:
            show(case, run_group(options.procs, run, folder, case, options.mib, options.rounds))


if __name__ == "__main__":
    main()
