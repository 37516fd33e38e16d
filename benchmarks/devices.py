"""Saves and loads of an accelerator, beside those of host memory: how much of the disk's and the link's speed is left.

    python benchmarks/devices.py                   # a simulated device, 1 GiB and 20000 x 4 KiB, 3 rounds: minutes
    python benchmarks/devices.py --device cuda     # a real one
    python benchmarks/devices.py --mib 256 --rounds 1

Without a device the twin of the tests stands in for one. A thread of its own makes its copies, in order and one after
the other, each in the time that a link of ``--gb-per-second`` would take. Every copy runs on a processor that the save
or the load needs as well, and each of its tensors costs what Python costs: many small ones say nothing about a GPU.

In each round host memory and device take turns, and the link is measured alone. A save is over when all is durable;
loads are cold. "Of what is possible" is the longer of the two, host memory's time and the link's, over the time taken.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed.checkpoint as dcp
from _disk import make_cold
from _program import scratch, write
from _report import print_table
from torch import Tensor

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import _twin

RESULTS = Path(__file__).parent / "results"
SIMULATED = "simulated"


class Linked(_twin.Twin):
    """The twin, with a thread that does its work, and a link that takes time."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__("needed only", devices=1)
        self._bytes_per_second = bytes_per_second
        self._submitted: queue.SimpleQueue[tuple[_twin.Stream, int] | None] = queue.SimpleQueue()
        self._done = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submitted(self, stream: _twin.Stream) -> None:
        self._submitted.put((stream, len(stream.work)))

    def wait_for(self, stream: _twin.Stream, place: int) -> None:
        self._submitted.put((stream, place))
        with self._done:
            self._done.wait_for(lambda: stream.done >= place or self._error)
        if self._error is not None:
            raise RuntimeError("the device's thread has failed") from self._error

    def close(self) -> None:
        self._submitted.put(None)
        self._thread.join()

    def _serve(self) -> None:
        free_at = 0.0
        try:
            while (item := self._submitted.get()) is not None:
                stream, place = item
                while stream.done < place:
                    size = getattr(stream.work[stream.done], "size", 0)
                    free_at = max(free_at, time.perf_counter()) + size / self._bytes_per_second
                    stream.run(stream.done + 1)
                    time.sleep(max(free_at - time.perf_counter(), 0))
                    with self._done:
                        self._done.notify_all()
        except BaseException as error:
            self._error = error
            with self._done:
                self._done.notify_all()


@contextmanager
def device(name: str, gb_per_second: float) -> Iterator[Callable[[Tensor], Tensor]]:
    """Gives what moves a tensor to the device."""
    if name != SIMULATED:
        yield lambda tensor: tensor.to(name)
        return
    twin = Linked(gb_per_second * 1e9)
    with _twin.active(twin):
        yield twin.tensor
        twin.close()


def link_seconds(size_bytes: int, move: Callable[[Tensor], Tensor]) -> float:
    """Of copies of so many bytes from the device to pinned memory and nothing else, in pieces of 8 MiB."""
    from dcpring.torchside import accelerators

    piece = 8 << 20
    hosts = [accelerators.active.pinned(piece) for _ in range(2)]
    source = move(torch.zeros(piece, dtype=torch.uint8))
    began = time.perf_counter()
    for number in range(-(-size_bytes // piece)):
        hosts[number % 2].copy_(source, non_blocking=True)
    accelerators.active.synchronize(source.device)
    return time.perf_counter() - began


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def one_round(states: dict[str, dict[str, Tensor]], folder: Path) -> dict[str, tuple[float, float]]:
    """Seconds and CPU seconds: "save host", "load device", ..."""
    found: dict[str, tuple[float, float]] = {}
    for where, state in states.items():
        path = folder / where
        save = timed(lambda: dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner()))  # noqa: B023
        found[f"save {where}"] = save
    for where, state in states.items():
        path = folder / where
        make_cold(path)
        load = timed(lambda: dcp.load(state, storage_reader=RingReader(path), planner=RingLoadPlanner()))  # noqa: B023
        found[f"load {where}"] = load
    return found


def measure(name: str, gb_per_second: float, count: int, size_bytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    host = {f"layers.{n}.weight": torch.randn(size_bytes // 4) for n in range(count)}
    with device(name, gb_per_second) as move:
        states = {"host": host, "device": {key: move(tensor) for key, tensor in host.items()}}
        one_round(states, folder)  # memory, engines, and the caches of whatever is called
        samples = []
        for _ in range(rounds):
            samples.append(one_round(states, folder))
            samples[-1]["link alone"] = (link_seconds(count * size_bytes, move), 0.0)
            states = dict(reversed(states.items()))
    medians = {key: [median(sample[key][n] for sample in samples) for n in (0, 1)] for key in samples[0]}
    shares = {
        what: median(
            max(sample[f"{what} host"][0], sample["link alone"][0]) / sample[f"{what} device"][0] for sample in samples
        )
        for what in ("save", "load")
    }
    return {"seconds, CPU seconds": medians, "of what is possible": shares}


def cells(label: str, result: dict[str, Any]) -> list[list[str]]:
    medians, shares = result["seconds, CPU seconds"], result["of what is possible"]
    link = f"{medians['link alone'][0]:.2f}"
    return [
        [
            label,
            what,
            *(
                f"{medians[f'{what} {where}'][0]:.2f} s, {medians[f'{what} {where}'][1]:.2f}"
                for where in ("host", "device")
            ),
            link,
            f"{shares[what]:.2f}",
        ]
        for what in ("save", "load")
    ]


def draw(path: Path, rows: list[list[str]], machine: dict[str, str | int], of: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    figure = Figure(figsize=(9, 3.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    labels = [f"{row[1]}\n" + row[0].replace(", ", "\n") for row in rows]
    seconds = [[float(row[column].partition(" ")[0]) for row in rows] for column in (2, 3, 4)]
    for n, (name, values) in enumerate(zip(("host memory", "device", "the link alone"), seconds, strict=True)):
        axes.bar([place + 0.27 * (n - 1) for place in range(len(rows))], values, 0.25, label=name)
    axes.set_xticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylabel("seconds")
    axes.legend(fontsize=7, frameon=False)
    figure.supxlabel(f"{of}; {machine['cpu']}, {machine['cores']} cores, {machine['disk']} disk", fontsize=7)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=SIMULATED)
    parser.add_argument("--gb-per-second", type=float, nargs="*", default=[1.0, 4.0], help="of a simulated link")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with scratch(options.folder) as folder:
        machine = _machine.describe(folder)
        shapes = [(max(options.mib // 32, 1), 32 << 20), (20 * options.mib * 1000 // 1024, 4 << 10)]
        rows, results = [], {}
        for speed in options.gb_per_second if options.device == SIMULATED else [0.0]:
            of = f"{speed:g} GB/s, " if speed else ""
            for count, size in shapes:
                label = f"{of}{count} x {size >> 10} KiB"
                results[label] = measure(options.device, speed, count, size, options.rounds, folder)
                rows += cells(label, results[label])
                print(rows[-2], rows[-1], flush=True)
    print(machine)
    heads = ["tensors", "", "host memory, CPU s", "device", "the link alone", "of what is possible"]
    print_table(f"device: {options.device}", heads, rows)
    write(options.json, machine=machine, device=options.device, results=results)
    if options.png:
        of_twin = f" {shapes[1][1] >> 10} KiB" if options.device == SIMULATED else "nothing"  # it is most of that
        draw(options.png, [row for row in rows if not row[0].endswith(of_twin)], machine, f"device: {options.device}")


if __name__ == "__main__":
    main()
