"""Rounds of conversions, from any format to any, some of which are interrupted."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from soak import states
from soak.faults import Fault, random_fault, small_disk
from soak.processes import Rank, run
from soak.states import Value
from soak.story import Story, flip, require

from dcpring import CheckpointError, convert, verify

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
ABSENT = 0


def _random_values(chance: random.Random) -> list[Value]:
    spec = states.random_spec(chance, 1, 24 << 20)
    return [
        Value(value.name, "tensor", value.shape, chance.choice(DTYPES), is_strided=value.is_strided)
        for value in spec.values
    ]


def _target(chance: random.Random, folder: Path) -> tuple[Path, dict[str, Any]]:
    return chance.choice(
        (
            (folder / "dcp", {"files": chance.choice((1, 2, 5))}),
            (folder / "target.pt", {}),
            (folder / "target.safetensors", {}),
            (folder / "shards", {"to": "safetensors", "shard_bytes": chance.choice((1 << 20, 5 << 20))}),
        )
    )


def do_make(rank: Rank, path: Path, values: list[Value], version: int) -> None:
    torch.save({value.name: states.whole(value, version) for value in values}, path)


def do_convert(rank: Rank, source: Path, target: Path, options: dict[str, Any], fault: Fault | None) -> None:
    rank.begun()
    with fault.planted(rank.rank) if fault else nullcontext():
        convert(source, target, overwrite=True, **options)


def do_read(rank: Rank, path: Path, values: list[Value], versions: list[int]) -> int:
    """Which version there is."""
    if not path.exists():
        return ABSENT
    back = path.with_name("back.pt")
    convert(path, back)
    found = _flat(torch.load(back, weights_only=True))
    back.unlink()
    for version in versions:
        expected = {value.name: states.whole(value, version) for value in values}
        if found.keys() == expected.keys() and all(states.same(found[name], expected[name]) for name in expected):
            return version
    raise AssertionError(f"{states.NEVER_SAVED}: {path.name} holds none of {versions}")


def _flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in state.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class Round:
    def __init__(self, chance: random.Random, folder: Path, story: Story, is_small_disk: bool) -> None:
        self._chance = chance
        self._folder = folder
        self._story = story
        self._is_small_disk = is_small_disk
        self._values = _random_values(chance)
        self._nbytes = sum(states.nbytes_of(value) for value in self._values)

    def play(self) -> None:
        sources = {version: [self.make(version)] for version in (1, 2)}
        self._story.tell(f"{len(self._values)} tensors, {self._nbytes} bytes")
        target, options = _target(self._chance, self._folder)
        there, seconds = [ABSENT], 1.0
        for _ in range(self._chance.randint(2, 5)):
            version = self._chance.choice((1, 2))
            source = self._chance.choice(sources[version])
            if self._chance.random() < 0.6:
                there = self.convert_badly(source, target, options, self._fault(), [*there, version], seconds)
            seconds = self.convert(source, target, options)
            there = self._read(target, [version])
            if target.suffix and self._chance.random() < 0.5:  # it is a source from now on
                kept = target.with_name(f"source-{version}-{len(sources[version])}{target.suffix}")
                target.rename(kept)
                sources[version].append(kept)
                target, options = _target(self._chance, self._folder)
                there = self._read(target, [ABSENT, 1, 2])
        if target.exists() and self._chance.random() < 0.5:
            self._flip(target, there)

    def make(self, version: int) -> Path:
        source = self._folder / f"source-{version}.pt"
        self._run(do_make, source, self._values, version)
        return source

    def _run(self, function: Any, *arguments: Any, **options: Any) -> Any:
        (answer,) = run(1, function, *arguments, **options)
        require(answer.ok, f"{function.__name__} failed", [answer])
        return answer.value

    def convert(self, source: Path, target: Path, options: dict[str, Any]) -> float:
        self._story.tell(f"convert {source.name} to {target.name} {options}")
        (answer,) = run(1, do_convert, source, target, options, None)
        require(answer.ok, "a conversion failed", [answer])
        left = [entry.name for entry in self._folder.iterdir() if entry.name.startswith(".")]
        require(not left, f"a conversion has left {left}")
        return answer.seconds

    def _fault(self) -> Fault:
        return random_fault(self._chance, "save", 1, self._nbytes, self._is_small_disk)

    def convert_badly(
        self, source: Path, target: Path, options: dict[str, Any], fault: Fault, versions: list[int], seconds: float
    ) -> list[int]:
        self._story.tell(f"convert {source.name} to {target.name} {options} with {fault}")
        with fault.around(target):
            answers = run(1, do_convert, source, target, options, fault, disturbance=fault.disturbance(seconds))
        self._story.tell("it failed" if not answers[0].ok else "it succeeded")
        fault.judge(answers)
        return self._read(target, versions[-1:] if answers[0].ok else versions)

    def _read(self, target: Path, versions: list[int]) -> list[int]:
        found = self._run(do_read, target, self._values, versions)
        require(found in versions, f"version {found} is there, not one of {versions}")
        return [found]

    def _flip(self, target: Path, there: list[int]) -> None:
        files = [target] if target.is_file() else sorted(target.iterdir())
        file = self._chance.choice(files)
        at, bit = self._chance.randrange(file.stat().st_size), self._chance.randrange(8)
        self._story.tell(f"bit {bit} of byte {at} of {file.name} is flipped")
        flip(file, at, bit)
        has_checks = target.is_dir() and (target / ".metadata").exists()
        if has_checks:
            (answer,) = run(1, do_read, target, self._values, there)
            require(states.NEVER_SAVED not in answer.error, "a flipped bit was converted", [answer])
            require(not answer.is_dead, "a flipped bit killed the process", [answer])
            try:
                is_good = verify(target).ok
            except CheckpointError:
                is_good = False
            require(answer.ok or not is_good, "verify finds nothing in what cannot be converted", [answer])
        flip(file, at, bit)


def play(chance: random.Random, folder: Path, story: Story) -> None:
    with small_disk(folder) if chance.random() < 0.3 else nullcontext() as disk:
        work = (disk or folder) / "work"
        work.mkdir()
        Round(chance, work, story, disk is not None).play()
