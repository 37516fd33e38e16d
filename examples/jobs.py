"""What the demo's worker processes do: train and save; resume and compare; race against the stock writer and reader."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import Trainer
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from dcpring import RingReader, RingWriter

State = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What both jobs agree on."""

    directory: Path
    steps_before: int
    steps_after: int
    rounds: int

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def digests(self) -> Path:
        return self.directory / "digests.json"


@dataclass(frozen=True)
class Stage:
    """A new stage begins: it has `total` ticks."""

    title: str
    sentence: str
    total: int


@dataclass(frozen=True)
class Tick:
    detail: str


@dataclass(frozen=True)
class Saved:
    keys: int
    size_bytes: int
    files: int
    seconds: float
    how: str


@dataclass(frozen=True)
class Trained:
    losses: list[float]


@dataclass
class Lap:
    """All rounds of one contender. Seconds are those of a whole dcp.save or dcp.load, planning included."""

    name: str
    size_bytes: int = 0
    files: int = 0
    save: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    still_cached: float = 0.0
    saved_how: str = ""
    loaded_how: str = ""


@dataclass(frozen=True)
class Resumed:
    losses: list[float]
    keys: int
    wrong_keys: list[str]


@dataclass(frozen=True)
class Raced:
    laps: list[Lap]
    loads: int
    wrong_loads: list[str]


class Job:
    """One rank of a process group of plain CPU processes; rank 0 tells the screen what happens."""

    def __init__(self, rank: int, world: int, plan: Plan, events: Queue[object]) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        self.rank, self.plan, self.events = rank, plan, events
        store = dist.FileStore(str(plan.directory / f"rendezvous-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def tell(self, event: object) -> None:
        if self.rank == 0:
            self.events.put(event)


def train_and_save(rank: int, world: int, plan: Plan, events: Queue[object]) -> None:
    """The first job: train, save in the middle, and go on as if nothing had happened."""
    job = Job(rank, world, plan, events)
    trainer = Trainer(seed=0)
    million = trainer.parameters / 1e6
    job.tell(
        Stage(
            "Train",
            f"A GPT of {million:.1f} million parameters learns Python's own standard library "
            f"({len(trainer.text) / 1e6:.1f} MB), byte by byte, on {world} processes (FSDP2, AdamW).",
            plan.steps_before,
        )
    )
    losses = train_steps(job, trainer, range(plan.steps_before))
    save_checkpoint(job, trainer)
    job.tell(
        Stage(
            "Go on",
            f"The same {world} processes train on, so that we know what the next losses should be.",
            plan.steps_after,
        )
    )
    losses += train_steps(job, trainer, range(plan.steps_before, plan.steps_before + plan.steps_after))
    job.tell(Trained(losses))
    dist.destroy_process_group()


def train_steps(job: Job, trainer: Trainer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(trainer.train(step))
        job.tell(Tick(f"step {step + 1}  loss {losses[-1]:.3f}"))
    return losses


def save_checkpoint(job: Job, trainer: Trainer) -> None:
    job.tell(Stage("Save", "RingWriter saves the model and its optimizer; a digest of every key is kept aside.", 2))
    state = state_of(trainer, step=job.plan.steps_before)
    writer = RingWriter(job.plan.checkpoint)
    seconds = timed(lambda: dcp.save(state, storage_writer=writer))
    size_bytes, files = size_of(job.plan.checkpoint)
    job.tell(Tick("saved"))
    keys = digests(state)
    if job.rank == 0:
        job.plan.digests.write_text(json.dumps(keys, indent=1))
    job.tell(Tick("digests"))
    job.tell(Saved(len(keys), size_bytes, files, seconds, how(writer)))


def resume_and_race(rank: int, world: int, plan: Plan, events: Queue[object]) -> None:
    """The second job: other processes, and another number of them, take over from the checkpoint."""
    job = Job(rank, world, plan, events)
    job.tell(
        Stage(
            "Resume",
            f"{world} new processes, which start from other random weights, load the checkpoint with RingReader "
            "and train the same steps again.",
            plan.steps_after + 2,
        )
    )
    trainer = Trainer(seed=1)
    state = state_of(trainer, step=0)
    reader = RingReader(plan.checkpoint)
    seconds = timed(lambda: dcp.load(state, storage_reader=reader))
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    job.tell(Tick(f"loaded in {seconds:.2f} s"))
    found = digests(state_of(trainer, step=state["step"]))
    job.tell(Tick("digests compared"))
    end = state["step"] + plan.steps_after
    losses = train_steps(job, trainer, range(state["step"], end))
    saved = json.loads(plan.digests.read_text())
    wrong_keys = sorted(key for key in saved.keys() | found.keys() if saved.get(key) != found.get(key))
    job.tell(Resumed(losses, len(saved), wrong_keys))
    job.tell(
        Stage(
            "Race",
            "PyTorch's own FileSystemWriter and FileSystemReader against dcpring, in turn: the same state, the same "
            f"disk, the same {world} processes. Both fsync what they save.",
            len(CONTENDERS) * (3 * plan.rounds + 1),
        )
    )
    race = Race(job, state_of(trainer, step=end))
    race.run()
    job.tell(race.result())
    dist.destroy_process_group()


def state_of(trainer: Trainer, step: int) -> State:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer, "step": step}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a state dict with its path, in an order that all ranks share."""
    if isinstance(tree, dict | list):
        for key, value in sorted(tree.items()) if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


def raw_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digests(state: State) -> dict[str, str]:
    """SHA-256 of every whole value (dtype, shape and bytes), however it is sharded. Collective; rank 0 hashes."""
    found = {}
    for path, value in leaves(state):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() != 0:
            continue
        digest = hashlib.sha256()
        if isinstance(whole, Tensor):
            digest.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
            digest.update(raw_bytes(whole).numpy().data)
        else:
            digest.update(repr(whole).encode())
        found[path] = digest.hexdigest()
    return found


def timed(work: Callable[[], object]) -> float:
    """Seconds until every rank is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def size_of(directory: Path) -> tuple[int, int]:
    sizes = [file.stat().st_size for file in directory.iterdir()]
    return sum(sizes), len(sizes)


def how(storage: RingWriter | RingReader) -> str:
    stats = storage.stats
    assert stats is not None
    engine = {"uring": "io_uring", "threads": "threads, as io_uring is not allowed here"}[stats.engine]
    return f"{engine}, {'direct' if stats.direct else 'buffered'} I/O"


CONTENDERS: dict[str, tuple[type[dcp.FileSystemWriter], type[dcp.FileSystemReader]]] = {
    "stock": (dcp.FileSystemWriter, dcp.FileSystemReader),
    "dcpring": (RingWriter, RingReader),
}


class Race:
    """Both contenders save and load one state dict, in turn. It is wiped before every load and checked after it."""

    def __init__(self, job: Job, state: State) -> None:
        self.job, self.state = job, state
        self.expected = {path: part(value).clone() for path, value in leaves(state) if isinstance(value, Tensor)}
        self.laps = {name: Lap(name) for name in CONTENDERS}
        self.loads = 0
        self.wrong_loads: list[str] = []

    def run(self) -> None:
        last = self.job.plan.rounds - 1
        for number in range(self.job.plan.rounds):
            order = list(CONTENDERS) if number % 2 == 0 else list(reversed(CONTENDERS))
            for name in order:
                self.save(name)
            for name in order:
                self.load_cold(name)
                self.load_warm(name)
            if number == last:
                self.swap()
            dist.barrier()
            if self.job.rank == 0:
                for name in order:
                    shutil.rmtree(self.directory(name))

    def result(self) -> Raced:
        return Raced(list(self.laps.values()), self.loads, self.wrong_loads)

    def directory(self, name: str) -> Path:
        return self.job.plan.directory / f"race-{name}"

    def save(self, name: str) -> None:
        lap, directory = self.laps[name], self.directory(name)
        writer = CONTENDERS[name][0](directory)
        lap.save.append(timed(lambda: dcp.save(self.state, storage_writer=writer)))
        lap.size_bytes, lap.files = size_of(directory)
        if isinstance(writer, RingWriter):
            lap.saved_how = how(writer)
        self.job.tell(Tick(f"{name}: save"))

    def load_cold(self, name: str) -> None:
        lap, directory = self.laps[name], self.directory(name)
        if self.job.rank == 0:
            drop_from_cache(directory)
            lap.still_cached = max(lap.still_cached, cached_fraction(directory))
        reader = CONTENDERS[name][1](directory)
        lap.cold.append(self.load(reader, f"{name} reading its own files, cold"))
        if isinstance(reader, RingReader):
            lap.loaded_how = how(reader)
        self.job.tell(Tick(f"{name}: cold load"))

    def load_warm(self, name: str) -> None:
        directory = self.directory(name)
        if self.job.rank == 0:
            fill_cache(directory)
        reader = CONTENDERS[name][1](directory)
        self.laps[name].warm.append(self.load(reader, f"{name} reading its own files, warm"))
        self.job.tell(Tick(f"{name}: warm load"))

    def swap(self) -> None:
        """Each reads what the other wrote."""
        for name, other in zip(CONTENDERS, reversed(CONTENDERS), strict=True):
            self.load(CONTENDERS[name][1](self.directory(other)), f"{name} reading {other}'s files")
            self.job.tell(Tick(f"{name} reads {other}'s files"))

    def load(self, reader: dcp.FileSystemReader, what: str) -> float:
        for path, value in leaves(self.state):
            if path in self.expected:
                part(value).zero_()
        seconds = timed(lambda: dcp.load(self.state, storage_reader=reader))
        same = all(
            torch.equal(raw_bytes(part(value)), raw_bytes(self.expected[path]))
            for path, value in leaves(self.state)
            if path in self.expected
        )
        self.loads += 1
        wrong_ranks = torch.tensor(0 if same else 1)
        dist.all_reduce(wrong_ranks)
        if wrong_ranks.item():
            self.wrong_loads.append(what)
        return seconds


def part(value: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def drop_from_cache(directory: Path) -> None:
    for file in directory.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(directory: Path) -> None:
    for file in directory.iterdir():
        file.read_bytes()


def cached_fraction(directory: Path) -> float:
    """How much of the directory's files lies in the page cache: mincore(2) on a mapping that is never touched."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    cached = pages = 0
    for file in directory.iterdir():
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            resident = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
            first = ctypes.c_char.from_buffer(view)
            status = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(view)), resident)
            del first
        if status != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
        cached += sum(page & 1 for page in resident)
        pages += len(resident)
    return cached / pages
