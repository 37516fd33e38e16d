"""Directories of safetensors, saved from and loaded into shards: stock's way, that of others, and dcpring's, in turns.

    python benchmarks/huggingface.py                      # 2 GiB of bfloat16 on 4 and 2 ranks, minutes
    python benchmarks/huggingface.py --mib 256 --procs 2 --rounds 1
    python benchmarks/huggingface.py --procs 1 --axes 0 --loads        # whole, by one process
    python benchmarks/huggingface.py --mib 1024 --procs 4 --axes 1 --loads --plain  # columns of files as hubs have them

runai-model-streamer and fastsafetensors take part where they are installed.

A save is over when all is durable: what a way leaves in the page cache is synced within its time. Loads are cold where
the page cache can be dropped. Seconds are those of the slowest rank, CPU seconds and bytes read are summed over ranks,
memory is of the rank that needed most, beyond its state. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed.checkpoint as dcp
from _disk import make_cold
from _group import Group, run_group
from _measure import Meter, merge_spans, release_free_memory
from safetensors import safe_open
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcpring import RingHFReader, RingHFWriter, RingLoadPlanner, RingSavePlanner, RingWriter

State = dict[str, Any]
WIDTH = 4096


def make_state(group: Group, mib: int, axis: int) -> State:
    """Layers of a transformer: 32 MiB a matrix, and a vector beside each."""
    state: State = {}
    for number in range(mib // 32):
        generator = torch.Generator().manual_seed(number)
        matrix = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.bfloat16)
        for name, tensor, along in (("weight", matrix, axis), ("norm", matrix[0].clone(), 0)):
            if group.mesh is None:
                state[f"model.layers.{number}.{name}"] = tensor
                continue
            sharded = distribute_tensor(tensor, group.mesh, [Shard(along)], src_data_rank=None)
            local = sharded.to_local().clone()  # no rank keeps the whole
            state[f"model.layers.{number}.{name}"] = DTensor.from_local(
                local, group.mesh, [Shard(along)], shape=tensor.shape, stride=tensor.stride()
            )
    return state


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own(group: Group, tensor: torch.Tensor) -> tuple[int, slice]:
    """The dimension along which a tensor is cut, and what of it is this rank's."""
    axis = tensor.placements[0].dim if isinstance(tensor, DTensor) else 0
    rows = tensor.shape[axis] // group.procs
    return axis, slice(group.rank * rows, (group.rank + 1) * rows)


def synced(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# ---- saves ----


def save_stock(group: Group, state: State, folder: Path) -> None:
    writer = HuggingFaceStorageWriter(
        str(folder), save_distributed=True, enable_consolidation=True, thread_count_consolidation=2
    )
    dcp.save(state, storage_writer=writer)
    if group.rank == 0:
        synced(folder)


def save_stock_every_rank(group: Group, state: State, folder: Path) -> None:
    names = {name: 1 + number * 4 // len(state) for number, name in enumerate(state)}
    shards = folder / "sharded"
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(shards), names, save_distributed=True))
    consolidate_safetensors_files_on_every_rank(str(shards), str(folder), names)
    if group.rank == 0:
        synced(folder)


def save_ring(group: Group, state: State, folder: Path) -> None:
    dcp.save(state, storage_writer=RingHFWriter(folder), planner=RingSavePlanner())


def save_ring_plain(group: Group, state: State, folder: Path) -> None:
    """Files as others write them: without checksums."""
    dcp.save(state, storage_writer=RingHFWriter(folder, checksum=False), planner=RingSavePlanner())


def save_ring_dcp(group: Group, state: State, folder: Path) -> None:
    dcp.save(state, storage_writer=RingWriter(folder), planner=RingSavePlanner())


# ---- loads ----


def load_stock(group: Group, state: State, folder: Path) -> None:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), planner=DefaultLoadPlanner())


def load_ring(group: Group, state: State, folder: Path) -> None:
    dcp.load(state, storage_reader=RingHFReader(folder), planner=RingLoadPlanner())


def load_ring_shared(group: Group, state: State, folder: Path) -> None:
    planner = RingLoadPlanner(process_group=None if group.mesh is None else group.mesh.get_group(), share="host")
    dcp.load(state, storage_reader=RingHFReader(folder), planner=planner)


def load_safe_open(group: Group, state: State, folder: Path) -> None:
    """What one would write with the safetensors package."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name, tensor in state.items():
            (axis, mine), part = own(group, tensor), file.get_slice(name)
            local(tensor).copy_(part[mine] if axis == 0 else part[:, mine])


def load_runai(group: Group, state: State, folder: Path) -> None:
    """Each rank streams everything, and keeps its own: there are no slices."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(folder / "model.safetensors"))
        for name, whole in streamer.get_tensors():
            axis, mine = own(group, state[name])
            local(state[name]).copy_(whole[mine] if axis == 0 else whole[:, mine])


def load_fastsafetensors(group: Group, state: State, folder: Path) -> None:
    """The first rank reads, and scatters through the process group."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    ranks = SingleGroup() if group.mesh is None or group.procs == 1 else group.mesh.get_group()
    loader = SafeTensorsFileLoader(ranks, torch.device("cpu"), nogds=True)
    loader.add_filenames({0: [str(folder / "model.safetensors")]})
    files = loader.copy_files_to_device()
    for name, tensor in state.items():
        local(tensor).copy_(files.get_sharded(name, own(group, tensor)[0]))
    files.close()
    loader.close()


SAVES: dict[str, Callable[[Group, State, Path], None]] = {
    "stock, consolidated by rank 0": save_stock,
    "stock, consolidated by every rank": save_stock_every_rank,
    "RingHFWriter": save_ring,
    "RingHFWriter, checksum=False": save_ring_plain,
    "RingWriter (.distcp)": save_ring_dcp,
}
LOADED = save_ring, save_ring_plain
"""Whose files are loaded."""

LOADS: dict[str, Callable[[Group, State, Path], None]] = {
    "HuggingFaceStorageReader": load_stock,
    "safe_open, slices": load_safe_open,
    "RingHFReader": load_ring,
    'RingHFReader, share="host"': load_ring_shared,
}
LOADS |= {
    name: load
    for name, load in (("runai_model_streamer", load_runai), ("fastsafetensors", load_fastsafetensors))
    if find_spec(name) is not None
}


def measured(group: Group, work: Callable[[], None]) -> dict[str, float]:
    release_free_memory()
    group.barrier()
    with Meter() as meter:
        work()
    whole = merge_spans(group.gather(meter.reading().whole))
    found = {"s": whole.end - whole.begin, "CPU s": whole.cpu_seconds, "MiB read": whole.disk_read_bytes / 2**20}
    return found if whole.peak_bytes is None else {**found, "MiB of memory": whole.peak_bytes / 2**20}


def run(group: Group, folder: Path, mib: int, axis: int, rounds: int, skipped: list[str]) -> dict[str, Any]:
    state = make_state(group, mib, axis)
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        group.say(f"{group.procs} ranks, Shard({axis}), round {number + 1}")
        for who, save in SAVES.items():
            if who in skipped:
                continue
            target = folder / "saved"
            found.setdefault(who, []).append(
                measured(group, lambda save=save, target=target: save(group, state, target))
            )
            if group.rank == 0:
                shutil.rmtree(folder / "model", ignore_errors=True)
                if save in LOADED:
                    target.rename(folder / "model.kept")
                shutil.rmtree(target, ignore_errors=True)
                if (folder / "model.kept").exists():
                    (folder / "model.kept").rename(folder / "model")
            group.barrier()
            if save not in LOADED:
                continue
            for name, load in LOADS.items():
                if name in skipped:
                    continue
                if group.rank == 0:
                    make_cold(folder / "model")
                loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
                sample = measured(group, lambda load=load, loaded=loaded: load(group, loaded, folder / "model"))
                found.setdefault(name, []).append(sample)
                assert all(torch.equal(local(loaded[key]), local(state[key])) for key in state)
    return {who: {what: median(one[what] for one in samples) for what in samples[0]} for who, samples in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--procs", type=int, nargs="*", default=[4, 2])
    parser.add_argument("--axes", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", action="store_true", help="no saves but the one that is loaded")
    parser.add_argument("--plain", action="store_true", help="load files without checksums")
    parser.add_argument("--skip", nargs="*", default=[], help="names in the table")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, help="where results go, with a picture beside them")
    options = parser.parse_args()
    options.skip += [who for who, save in SAVES.items() if options.loads and save not in LOADED]
    options.skip += [who for who, save in SAVES.items() if save is (save_ring if options.plain else save_ring_plain)]
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    machine, results = _machine.describe(folder), []
    print(machine)
    try:
        for procs in options.procs:
            for axis in options.axes:
                found = run_group(procs, run, folder, options.mib, axis, options.rounds, options.skip)
                results.append({"mib": options.mib, "procs": procs, "axis": axis, "medians": found})
                print(f"\n{options.mib} MiB of bfloat16, {procs} ranks, Shard({axis})")
                for who, numbers in found.items():
                    print(
                        f"  {who:35}", "".join(f"{value:10.2f} {what}" for what, value in numbers.items()), flush=True
                    )
    finally:
        shutil.rmtree(folder)
    if options.json:
        from _huggingface_plot import draw

        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
        draw(options.json.with_suffix(".png"), results, list(SAVES), machine)


if __name__ == "__main__":
    main()
