"""Rounds of saves and loads: any state, on any ranks, with any options, and something that goes wrong."""

from __future__ import annotations

import contextlib
import random
import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from soak import states
from soak.faults import Fault, random_fault, small_disk
from soak.processes import Rank, resources, run
from soak.states import Spec
from soak.story import Story, flip, require, require_no_growth
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter, saved_key_map, verify
from dcpring.sources.contents import open_contents

Options = dict[str, Any]
STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True)
class Step:
    """A save, or a load.

    Attributes:
        version: to save; 0 for a load.
        how: "here" (no_dist), "all" or "async".
        ring_storage, ring_planner: whether they are ours.
        options: for the writer or reader.
        planner: options for the planner.
    """

    version: int
    how: str
    ring_storage: bool
    ring_planner: bool
    options: Options = field(default_factory=dict)
    planner: Options = field(default_factory=dict)
    fault: Fault | None = None

    @property
    def is_renamed(self) -> bool:
        return "key_map" in self.options or "key_map" in self.planner

    def __str__(self) -> str:
        storage, planner = ("ours" if is_ring else "stock's" for is_ring in (self.ring_storage, self.ring_planner))
        what = f"version {self.version}" if self.version else "a load"
        text = f"{what}, {self.how}, storage {storage} {self.options}, planner {planner} {self.planner}"
        return f"{text}, {self.fault}" if self.fault else text


# ---- in a rank ----


def do_saves(rank: Rank, path: Path, spec: Spec, steps: list[Step]) -> list[dict[str, int]]:
    """Saves one version after the other; returns what the process holds after each if they are alike."""
    held: list[dict[str, int]] = []
    planners: dict[str, Any] = {}
    for step in steps:
        planner_class = RingSavePlanner if step.ring_planner else DefaultSavePlanner
        planner = planners.setdefault(f"{planner_class} {step.planner}", planner_class(**step.planner))  # for its cache
        _do_save(rank, path, spec, step, planner)
        held.append(resources(held[1] if len(held) > 1 else None))
    with contextlib.suppress(RuntimeError):  # whoever is gone by now has answered
        _meet()
    return held if all(replace(step, version=steps[0].version) == steps[0] for step in steps) else []


def _do_save(rank: Rank, path: Path, spec: Spec, step: Step, planner: Any) -> None:
    state = states.make(spec, step.version, rank.rank)
    writer = (RingWriter if step.ring_storage else FileSystemWriter)(path, **step.options)
    _meet()
    rank.begun()
    with step.fault.planted(rank.rank) if step.fault else nullcontext():
        if step.how == "async":
            future = dcp.async_save(state, storage_writer=writer, planner=planner)
            states.spoil(state)  # it has been copied
            future.result()
        else:
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=step.how == "here")


def do_load(rank: Rank, path: Path, spec: Spec, step: Step, versions: list[int]) -> int:
    """Which version there is."""
    state = states.make(spec, None, rank.rank)
    options, planner_options = dict(step.options), dict(step.planner)
    if step.ring_storage and (table := saved_key_map(path)) is not None:
        options["key_map"] = table.inverse()
    if step.ring_planner and rank.world_size > 1:
        planner_options["process_group"] = dist.group.WORLD
    reader = (RingReader if step.ring_storage else FileSystemReader)(path, **options)
    planner = (RingLoadPlanner if step.ring_planner else DefaultLoadPlanner)(**planner_options)
    _meet()
    rank.begun()
    with step.fault.planted(rank.rank) if step.fault else nullcontext():
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=rank.world_size == 1)
    return states.version_of(state, spec, versions, rank.rank)


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


# ---- what is chosen ----


def random_io(chance: random.Random) -> Options:
    options: Options = {
        "engine": chance.choice(("auto", "uring", "threads")),
        "direct": chance.choice(("auto", False)),
        "queue_depth": chance.choice((1, 2, 8, 16)),
        "block_size_bytes": chance.choice((1 << 20, 2 << 20, 4 << 20)),
        "workers": chance.randint(1, 4),
    }
    return {key: value for key, value in options.items() if chance.random() < 0.5}


def random_save(chance: random.Random, spec: Spec, version: int, can_be_stock: bool = True) -> Step:
    ring_storage = not can_be_stock or chance.random() < 0.95
    ring_planner = chance.random() < 0.7
    options: Options = random_io(chance) if ring_storage else {"overwrite": True}
    choices: list[tuple[str, Any]] = [("single_file_per_rank", False), ("thread_count", 3)]
    choices += [("sync_files", False), ("keep_superseded", True)] if ring_storage else []
    options |= {name: value for name, value in choices if chance.random() < 0.2}
    planner: Options = {"enable_plan_caching": True} if chance.random() < 0.3 else {}
    if ring_planner:
        planner["writers"] = chance.choice(("auto", "balanced", "split", "first_replica"))
        if all(value.kind in ("tensor", "object") for value in spec.values):  # any rank can write all
            planner["writers"] = chance.choice((planner["writers"], "per_node", 1, 2))
        planner["split_bytes"] = chance.choice((1, 1 << 16, 4 << 20))
    if ring_storage and chance.random() < 0.2:
        renamed = {f"part{number}": f"of.version.{version}.{number}" for number in range(3)}
        (planner if ring_planner and chance.random() < 0.5 else options)["key_map"] = renamed
    how = chance.choice(("here", "async") if spec.world_size == 1 else ("all", "all", "all", "async"))
    return Step(version, how, ring_storage, ring_planner, options, planner)


def random_load(chance: random.Random, must_be_ours: bool) -> Step:
    ring_storage = must_be_ours or chance.random() < 0.9
    ring_planner = chance.random() < 0.7
    planner: Options = {"share": chance.choice(("auto", "off", "host", "all"))} if ring_planner else {}
    return Step(0, "all", ring_storage, ring_planner, random_io(chance) if ring_storage else {}, planner)


# ---- rounds ----


class Round:
    """A checkpoint that is saved again and again; one of the versions in ``_committed`` must be there."""

    def __init__(self, chance: random.Random, path: Path, story: Story, spec: Spec, is_small_disk: bool) -> None:
        self._chance = chance
        self._path = path
        self._story = story
        self._is_small_disk = is_small_disk
        self._spec = spec
        self._committed: list[int] = []
        self._must_be_ours = True
        self._has_kept = False

    def play(self) -> None:
        version = 0
        for number in range(self._chance.choice((1, 2, 3))):
            if number and self._chance.random() < 0.3:
                self._move()
            self._story.tell(f"state: {self._spec}")
            clean = self._clean_steps(version + 1)
            seconds = self.save(clean)
            version += len(clean)
            self.load()
            if self._chance.random() < 0.8:
                version += 1
                self.save_badly(self._faulty_step(version), seconds)
                self.load()
            if self._chance.random() < 0.5:
                self._load_badly()
                self.load()
        if self._chance.random() < 0.5:
            self.flip()

    # ---- saves ----

    def _clean_steps(self, version: int) -> list[Step]:
        """One save, some of different kinds, or some that are alike, after which nothing more may be held."""
        count, are_alike = self._chance.choice(((1, False), (1, False), (3, False), (4, True)))
        steps = [random_save(self._chance, self._spec, version + number) for number in range(count)]
        return [replace(steps[0], version=step.version) for step in steps] if are_alike else steps

    def save(self, steps: list[Step]) -> float:
        """Saves that must succeed, and leave nothing behind; returns the seconds of one."""
        self._story.tell(f"save {'; '.join(map(str, steps))}")
        self._note_kept(steps)
        answers = run(self._spec.world_size, do_saves, self._path, self._spec, steps)
        require(all(answer.ok for answer in answers), "a save failed", answers)
        for answer in answers:
            require_no_growth(answer.value)
        self._committed, self._must_be_ours = [steps[-1].version], steps[-1].is_renamed
        self._require_tidy(steps[-1])
        return max(answer.seconds for answer in answers) / len(steps)

    def _note_kept(self, steps: list[Step]) -> None:
        self._has_kept |= any(step.options.get("keep_superseded") for step in steps)

    def _require_tidy(self, step: Step) -> None:
        if step.ring_storage and not step.options.get("keep_superseded"):
            needed = {".metadata", ".dcpring.json", *open_contents(self._path).files}
            left = {entry.name for entry in self._path.iterdir()} - needed
            if self._has_kept:  # of what was kept then, stock's names are not RingWriter's to remove later
                left = {name for name in left if not STOCK_FILE.fullmatch(name)}
            require(not left, f"a save has left {sorted(left)}")

    def _faulty_step(self, version: int) -> Step:
        fault = random_fault(self._chance, "save", self._spec.world_size, self._spec.nbytes, self._is_small_disk)
        return replace(random_save(self._chance, self._spec, version, can_be_stock=False), fault=fault)

    def save_badly(self, step: Step, seconds: float) -> None:
        """A save with a fault, where one without takes so long: all ranks fail, or none."""
        world_size, fault = self._spec.world_size, step.fault
        assert fault is not None
        self._story.tell(f"save with a fault: {step}")
        self._note_kept([step])
        with fault.around(self._path):
            disturbance = fault.disturbance(seconds)
            answers = run(world_size, do_saves, self._path, self._spec, [step], disturbance=disturbance)
        self._story.tell(f"{sum(not answer.ok for answer in answers)} of {world_size} ranks failed")
        fault.judge(answers)
        is_saved = all(answer.ok for answer in answers)
        self._committed = [step.version] if is_saved else [*self._committed, step.version]
        self._must_be_ours = True

    # ---- loads ----

    def load(self) -> None:
        """A load that must give what was committed, on any ranks."""
        spec = states.respread(self._chance, self._spec, self._chance.choice((1, 2, 3, 4)))
        self.load_by(spec, random_load(self._chance, self._must_be_ours))

    def load_by(self, spec: Spec, step: Step) -> None:
        self._story.tell(f"load by {spec.world_size} ranks: {step}; there is one of {self._committed}")
        answers = run(spec.world_size, do_load, self._path, spec, step, self._committed)
        require(all(answer.ok for answer in answers), "a load failed", answers)
        found = {answer.value for answer in answers}
        require(len(found) == 1, f"ranks have loaded versions {found}")
        self._committed = sorted(found)
        report = verify(self._path)
        require(report.ok, f"verify: {report}")

    def _load_badly(self) -> None:
        spec = states.respread(self._chance, self._spec, self._chance.choice((1, 2, 3)))
        fault = random_fault(self._chance, "load", spec.world_size, self._spec.nbytes, self._is_small_disk)
        step = replace(random_load(self._chance, True), fault=fault)
        self._story.tell(f"load with a fault by {spec.world_size} ranks: {step}")
        answers = run(
            *(spec.world_size, do_load, self._path, spec, step, self._committed), disturbance=fault.disturbance(0.5)
        )
        self._story.tell(f"{sum(not answer.ok for answer in answers)} of {spec.world_size} ranks failed")
        require(not any(states.NEVER_SAVED in a.error for a in answers), "wrong values were loaded", answers)
        fault.judge(answers)

    def _move(self) -> None:
        """What is saved from now on is on other ranks."""
        moved = states.respread(self._chance, self._spec, self._chance.choice((1, 2, 3, 4)))
        self._spec = replace(moved, owners=moved.world_size)

    def flip(self) -> None:
        """A flipped bit: an error, or no harm."""
        contents = open_contents(self._path)
        if contents.writer != "dcpring" or not contents.files:
            return
        file = self._path / self._chance.choice([*contents.files, ".metadata"])
        at, bit = self._chance.randrange(file.stat().st_size), self._chance.randrange(8)
        self._story.tell(f"bit {bit} of byte {at} of {file.name} is flipped")
        flip(file, at, bit)
        step = Step(0, "all", True, True, random_io(self._chance))
        answers = run(self._spec.world_size, do_load, self._path, self._spec, step, self._committed)
        require(not any(states.NEVER_SAVED in a.error for a in answers), "a flipped bit was loaded", answers)
        require(not any(answer.is_dead for answer in answers), "a flipped bit killed a rank", answers)
        if not all(answer.ok for answer in answers):
            require(not verify(self._path).ok, "verify finds nothing in what does not load", answers)
        flip(file, at, bit)
        self.load()


def play(chance: random.Random, folder: Path, story: Story) -> None:
    with small_disk(folder) if chance.random() < 0.3 else nullcontext() as disk:
        spec = states.random_spec(chance, chance.choice((1, 1, 2, 2, 3, 4)))
        Round(chance, (disk or folder) / "checkpoint", story, spec, disk is not None).play()
