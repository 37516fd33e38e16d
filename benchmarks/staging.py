"""What a save in the background costs the training that it is beside: the stall, the memory, the speed.

    python benchmarks/staging.py             # 1 GiB and 20000 x 4 KiB, 3 rounds, all ways in turns: ten minutes
    python benchmarks/staging.py --copies    # the stagers alone, by turns in one process: nothing is written
    python benchmarks/staging.py --copies --frozen 0.99   # the same with so much of the state frozen, as with LoRA
    python benchmarks/staging.py --quick     # small: does everything work?

Each way has a process of its own in each round, which saves several times; the first save, which takes the memory, is
not counted. Of each other save: seconds until the call returns, until the state may change, and until it is written;
how much of its training a loop loses from the call on, in seconds of its undisturbed speed; and what it keeps of its
speed after the state may change. The loop trains a small network on one thread. For comparison: one copy of the tensors
by torch with two threads.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _group import Group, run_group
from _report import print_table
from _shapes import KIB, MIB
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from dcpring import Checkpointer, RingSavePlanner, RingStager, RingWriter, Sharded, empty_cache

RESULTS = Path(__file__).parent / "results"
COPY = "one copy by torch, 2 threads"


class Save:
    """One save: whether the state may change, whether it is written, and waiting for both."""

    def __init__(self, may_change: Callable[[], None], written: Callable[[], bool], wait: Callable[[], Any]) -> None:
        self.wait_until_it_may_change, self.is_written, self.wait = may_change, written, wait


class StockAlone:
    """``async_save`` without a stager."""

    writer: Any = FileSystemWriter
    planner: Any = DefaultSavePlanner
    stager: Any = None

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state, self._path = state, folder / "checkpoint"

    def save(self, _: int) -> Save:
        options = {} if self.stager is None else {"async_stager": self.stager}
        response: Any = dcp.async_save(
            self._state, storage_writer=self.writer(self._path), planner=self.planner(), no_dist=True, **options
        )
        if self.stager is None:
            return Save(lambda: None, response.done, response.result)
        upload = response.upload_completion
        return Save(response.staging_completion.result, upload.done, upload.result)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class StockShared(StockAlone):
    """With the stager that copies in a thread, to shared memory that it keeps."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        super().__init__(state, folder)
        self.stager = DefaultStager(StagingOptions(False, True, True, False))


class RingAlone(StockAlone):
    writer, planner = RingWriter, RingSavePlanner


class RingStaged(RingAlone):
    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        super().__init__(state, folder)
        self.stager = RingStager()


class Holds:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class Whole:
    """``Checkpointer.save(blocking=False)``."""

    async_staging = False

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._checkpointer = Checkpointer(folder / "steps", {"model": Sharded(Holds(state["model"]))}, keep_last=1)

    def save(self, number: int) -> Save:
        handle = self._checkpointer.save(number, blocking=False, async_staging=self.async_staging)
        return Save(handle.wait_staged, handle.done, handle.wait)

    def close(self) -> None:
        self._checkpointer.close()


class WholeAsync(Whole):
    async_staging = True


WAYS: dict[str, Any] = {
    "stock, no stager": StockAlone,
    "stock, shared and async": StockShared,
    "RingWriter, no stager": RingAlone,
    "RingStager": RingStaged,
    "Checkpointer": Whole,
    "Checkpointer, async_staging": WholeAsync,
}


class Training:
    """A small network on one thread, whose steps are counted."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batch = torch.randn(32, 128)
        self.rate = 0.0
        end = time.perf_counter() + 0.2
        self.while_(lambda: time.perf_counter() < end)
        end = time.perf_counter() + 1.0
        steps, seconds = self.while_(lambda: time.perf_counter() < end)
        self.rate = steps / seconds

    def while_(self, goes_on: Callable[[], bool]) -> tuple[int, float]:
        """Steps, and seconds."""
        steps, start = 0, time.perf_counter()
        while goes_on():
            self._optimizer.zero_grad()
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()
            steps += 1
        return steps, time.perf_counter() - start


def memory_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(("RssAnon", "RssShmem")))


def measure(_: Group, way: str, count: int, size_bytes: int, saves: int, folder: Path) -> dict[str, Any]:
    """Medians of all saves but the first, or why there are none."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    state = {"model": {f"layer.{i}": torch.rand(size_bytes // 4) for i in range(count)}}
    if way == COPY:
        return measure_copy(state)
    taken: list[tuple[float, ...]] = []
    try:
        saver = WAYS[way](state, folder)
        training = Training()
        memory, descriptors = memory_bytes(), len(os.listdir("/proc/self/fd"))
        for number in range(saves + 1):
            start = time.perf_counter()
            save = saver.save(number)
            returned = time.perf_counter() - start
            save.wait_until_it_may_change()
            changeable = time.perf_counter() - start
            steps, seconds = training.while_(lambda save=save: not save.is_written())
            save.wait()
            whole = time.perf_counter() - start
            lost = whole - steps / training.rate
            taken.append((returned, changeable, whole, lost, steps / max(seconds, 1e-9) / training.rate))
        held = memory_bytes() - memory
        empty_cache()  # of rings, which are no part of a state
        descriptors = len(os.listdir("/proc/self/fd")) - descriptors
        saver.close()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    names = ("returned", "changeable", "written", "lost", "share")
    columns = zip(*taken[1:], strict=True)
    found: dict[str, Any] = {name: median(column) for name, column in zip(names, columns, strict=True)}
    return found | {"first": taken[0][1], "held_bytes": held, "descriptors": descriptors}


def measure_copy(state: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(2)
    sources = torch.cat(list(state["model"].values()))
    target, seconds = torch.zeros_like(sources), []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(sources)
        seconds.append(time.perf_counter() - start)
    return {"returned": median(seconds), "changeable": median(seconds)}


def compare_copies(count: int, size_bytes: int, rounds: int, frozen: float) -> list[list[str]]:
    """Stagers alone, in turns: medians of all calls but the first of each, in a table. The last tensors are trained."""
    torch.set_num_threads(2)
    first_trained = round(count * frozen)
    state = {
        "model": {
            f"layer.{i}": torch.nn.Parameter(torch.rand(size_bytes // 4), requires_grad=i >= first_trained)
            for i in range(count)
        }
    }
    sources = torch.cat([tensor.detach() for tensor in state["model"].values()])
    target = torch.zeros_like(sources)
    shared = DefaultStager(StagingOptions(False, True, True, False))
    cached = RingWriter("unused", cache_staged_state_dict=True)
    ways: dict[str, Callable[[], Any]] = {
        COPY: lambda: target.copy_(sources),
        "stock, no stager": functools.partial(BlockingAsyncStager().stage, state),
        "stock, shared and async": functools.partial(shared.stage, state),
        "RingWriter, no stager": functools.partial(RingWriter("unused").stage, state),
        "RingWriter, cache_staged_state_dict": functools.partial(cached.stage, state),
        "RingStager": functools.partial(RingStager().stage, state),
    }
    if frozen:
        ways['RingStager, "trust"'] = functools.partial(RingStager(unchanged="trust").stage, state)
    taken: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    errors: dict[str, str] = {}
    for _ in range(rounds + 1):
        for way, stage in ways.items():
            try:
                taken[way].append(_staged(stage))
            except (OSError, RuntimeError) as error:
                errors[way] = str(error)[:60]
    tensors = f"{count} x {size_bytes // KIB} KiB" + (f", {frozen:.0%} frozen" if frozen else "")
    rows = []
    for way, found in taken.items():
        cells = [f"{median(column):.4f}" for column in zip(*found[1:], strict=True)] or [errors[way], "", ""]
        rows.append([tensors, way, *cells])
    return rows


def _staged(stage: Callable[[], Any]) -> tuple[float, float, float]:
    """Seconds until it returns, and until the copy is complete; CPU seconds."""
    cpu, start = time.process_time(), time.perf_counter()
    result = stage()
    returned = time.perf_counter() - start
    if isinstance(result, Future):
        result.result()
    return returned, time.perf_counter() - start, time.process_time() - cpu


def combined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    good = [one for one in rounds if "error" not in one]
    return {name: median(one[name] for one in good) for name in good[0]} if good else rounds[0]


def draw(path: Path, rows: list[dict[str, Any]], machine: dict[str, str | int]) -> None:
    """Bars for each way: the seconds until it returns, and until the state may change; shorter ones are better."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    shapes = list(dict.fromkeys(row["tensors"] for row in rows))
    figure = Figure(figsize=(13, 3.6), dpi=130, layout="constrained")
    panels = [(shape, name) for shape in shapes for name in ("stall", "lost")]
    titles = {"stall": "stall, s", "lost": "training lost by a save, s"}
    for axes, (shape, name) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        found = [row for row in rows if row["tensors"] == shape and (name == "stall" or row["way"] != COPY)]
        names = [row["way"] + (" (fails)" if "error" in row else "") for row in found]
        colors = ["#b8bcc4" if "stock" in row["way"] or row["way"] == COPY else "#1f6feb" for row in found]
        whole = [row.get("changeable" if name == "stall" else "lost", 0.0) for row in found]
        bars = axes.barh(names, whole, color=colors, alpha=0.45 if name == "stall" else 1)
        axes.bar_label(bars, [f"{value:.3f}" if value else "" for value in whole], fontsize=7, padding=2)
        if name == "stall":
            axes.barh(names, [row.get("returned", 0.0) for row in found], color=colors)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_title(f"{shape}: {titles[name]}", fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"dark: until the call returns, light: until the state may change. {machine['cores']} cores, {machine['cpu']}, "
        f"{machine['file_system']}, torch {machine['torch']}; medians, from the second save on",
        fontsize=8,
        color="#666666",
    )
    figure.savefig(path)


def cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["tensors"], row["way"], row["error"], *[""] * 6]
    if "lost" not in row:
        return [row["tensors"], row["way"], "", f"{row['changeable']:.3f}", *[""] * 5]
    return [
        *(row["tensors"], row["way"]),
        *(f"{row[name]:.3f}" for name in ("returned", "changeable", "written", "lost")),
        *(f"{row['share']:.0%}", f"{row['held_bytes'] / MIB:.0f}", f"{row['descriptors']:.0f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, one round; results are not kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4, help="in each round, beside the first")
    parser.add_argument(
        "--dir", type=Path, default=Path("/var/tmp"), help="where the checkpoints go: a disk, not tmpfs"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "staging.json")
    parser.add_argument("--png", type=Path, default=RESULTS / "staging.png")
    parser.add_argument("--copies", action="store_true", help="the stagers alone")
    parser.add_argument("--frozen", type=float, default=0.0, help="with --copies: the part that is not trained")
    arguments = parser.parse_args()
    large = (256, 4 * MIB) if arguments.frozen else (32, 32 * MIB)
    shapes = [(200, 4 * KIB)] if arguments.quick else [large, (20000, 4 * KIB)]
    if arguments.copies:
        table = [
            row for count, size in shapes for row in compare_copies(count, size, 4 * arguments.rounds, arguments.frozen)
        ]
        print_table("Staging alone", ["tensors", "way", "returns, s", "may change, s", "CPU s"], table)
        return
    rounds, saves = (1, 1) if arguments.quick else (arguments.rounds, arguments.saves)
    folder = Path(tempfile.mkdtemp(prefix="dcpring-staging-", dir=arguments.dir))
    found: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    try:
        for number in range(rounds):
            for count, size in shapes:
                for way in [COPY, *(list(WAYS) if number % 2 == 0 else reversed(WAYS))]:
                    result = run_group(1, measure, way, count, size, saves, folder / "way")
                    found.setdefault((count, size, way), []).append(result)
                    print(number, count, way, json.dumps(result), file=sys.stderr, flush=True)
        machine = _machine.describe(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [
        {"tensors": f"{count} x {size // KIB} KiB", "way": way, **combined(results)}
        for (count, size, way), results in found.items()
    ]
    heads = ["tensors", "way", "returns, s", "may change, s", "written, s", "lost, s", "speed", "held, MiB", "fds"]
    print_table("What a save costs the training beside it", heads, [cells(row) for row in rows])
    if not arguments.quick or arguments.json.parent != RESULTS:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    if not arguments.quick or arguments.png.parent != RESULTS:
        draw(arguments.png, rows, machine)


if __name__ == "__main__":
    main()
