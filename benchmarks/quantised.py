"""How fast quantised weights of safetensors become floats, on the way from the disk and from memory.

    python benchmarks/quantised.py             # 2^29 elements of FP8 and of MXFP4, 5 rounds: about 5 minutes
    python benchmarks/quantised.py --quick     # small sizes, one round: does everything work?

A model of such weights is loaded into bfloat16 and float32, on one thread (``workers=1``) and with the default, cold
and warm (from the page cache), by

- dcpring: RingQuantizedHFReader;
- dcpring, as stored: RingHFReader loads the codes alone, which is as fast as its bytes can be read;
- stock: QuantizedHuggingFaceStorageReader, of FP8. With MXFP4 it does not fill the tensors.

The ways take turns. What dequantising takes of a core is the CPU time of a whole load: reading, DCP's planning and,
where it is warm, the copy out of the page cache are part of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed.checkpoint as dcp
from _disk import cache_drop_method, make_cold, sync_file
from _measure import Meter
from _program import Program, scratch, write
from _report import print_table
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader

from dcpring import RingHFReader, RingLoadPlanner, RingQuantizedHFReader

DTYPES = (torch.bfloat16, torch.float32)
ONE, OURS, RAW, STOCK = "dcpring, one thread", "dcpring", "dcpring, as stored", "stock"
COLD, WARM = "cold", "warm"


@dataclass(frozen=True)
class Sample:
    """One load: wall and CPU seconds, of so many elements."""

    form: str
    dtype: str
    who: str
    cache: str
    round: int
    elements: int
    seconds: float
    cpu_seconds: float


class Model:
    """A directory of one form; ``shapes`` are of what is made of it."""

    def __init__(self, form: str, side: int, count: int, folder: Path) -> None:
        self.form, self.path = form, folder / form
        self.path.mkdir()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.codes: dict[str, Tensor] = {}
        listed: dict[str, str] = {}
        for number in range(count):
            state = _float8(number, side) if form == "FP8" else _mxfp4(number, side)
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            save_file(state, self.path / file)
            sync_file(self.path / file)
            listed.update(dict.fromkeys(state, file))
            name, codes = next(iter(state.items()))
            self.shapes[name], self.codes[name] = (side, side) if form == "FP8" else (1, side, side), codes
        index = {"metadata": {}, "weight_map": listed}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))
        self.elements = count * side * side

    def ways(self, dtype: torch.dtype) -> dict[str, Callable[[], tuple[float, float]]]:
        floats = {name: torch.zeros(shape, dtype=dtype) for name, shape in self.shapes.items()}
        codes = {name: torch.zeros_like(tensor) for name, tensor in self.codes.items()}
        path = str(self.path)
        options: Any = {"target_dtype": dtype}
        ways = {
            ONE: lambda: _load(floats, RingQuantizedHFReader(path, **options, workers=1)),
            OURS: lambda: _load(floats, RingQuantizedHFReader(path, **options)),
            RAW: lambda: _load(codes, RingHFReader(path)),
            STOCK: lambda: _load(floats, QuantizedHuggingFaceStorageReader(path, **options)),
        }
        if self.form != "FP8":
            del ways[STOCK]
        return ways


def _float8(number: int, side: int) -> dict[str, Tensor]:
    codes = torch.randint(0, 120, (side, side), dtype=torch.uint8).view(torch.float8_e4m3fn)
    name = f"layers.{number}.weight"
    return {name: codes, f"{name}_scale_inv": torch.rand(-(-side // 128), -(-side // 128))}


def _mxfp4(number: int, side: int) -> dict[str, Tensor]:
    codes = torch.randint(0, 256, (1, side, side // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (1, side, side // 32), dtype=torch.uint8)
    return {f"layers.{number}_blocks": codes, f"layers.{number}_scales": scales}


def _load(state: dict[str, Tensor], reader: Any) -> tuple[float, float]:
    with Meter() as meter:
        dcp.load(dict(state), storage_reader=reader, planner=RingLoadPlanner(unexpected="ignore"), no_dist=True)
    span = meter.reading().whole
    return span.end - span.begin, span.cpu_seconds


def run(side: int, count: int, rounds: int, folder: Path) -> list[Sample]:
    samples = []
    for form in ("FP8", "MXFP4"):
        model = Model(form, side, count, folder)
        for dtype in DTYPES:
            ways = list(model.ways(dtype).items())
            ways[0][1]()  # what is done only once per process is not to count
            for number in range(rounds):
                print(f"{form} into {dtype}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                for who, way in ways if number % 2 == 0 else ways[::-1]:
                    samples += [_measured(model, dtype, who, cache, number, way) for cache in (COLD, WARM)]
    return samples


def _measured(
    model: Model, dtype: torch.dtype, who: str, cache: str, number: int, way: Callable[[], tuple[float, float]]
) -> Sample:
    make_cold(model.path)
    if cache == WARM:
        for file in model.path.iterdir():
            file.read_bytes()
    return Sample(model.form, str(dtype).removeprefix("torch."), who, cache, number, model.elements, *way())


def print_samples(samples: list[Sample]) -> None:
    for form in dict.fromkeys(sample.form for sample in samples):
        lines = []
        for key in dict.fromkeys((one.dtype, one.who) for one in samples if one.form == form):
            found = [one for one in samples if (one.form, one.dtype, one.who) == (form, *key)]
            speeds = []
            for cache in (COLD, WARM):
                each = [one for one in found if one.cache == cache]
                speeds.append(f"{each[0].elements / median(one.seconds for one in each) / 1e9:.2f}")
                speeds.append(f"{each[0].elements / median(one.cpu_seconds for one in each) / 1e9:.2f}")
            lines.append((*key, *speeds))
        print_table(f"{form}, 10^9 elements", ("into", "", "a s, cold", "a CPU s", "a s, warm", "a CPU s"), lines)


def main() -> None:
    given = Program("quantised", __doc__, 5).given()
    machine = _machine.describe(given.dir)
    side, count = (1024, 2) if given.quick else (8192, 8)
    with scratch(given.dir) as folder:
        samples = run(side, count, given.rounds, folder)
    print_samples(samples)
    write(
        given.json, machine=machine, conditions={"rounds": given.rounds, "cold": cache_drop_method()}, samples=samples
    )


if __name__ == "__main__":
    main()
