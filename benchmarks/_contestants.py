"""Who takes part: stock DCP, dcpring, DCP with a storage that does nothing, and the bare disk.

A contestant saves the case's state into a folder and loads it back into the case's target. Every rank calls it;
a contestant that works on the first rank only gives None on the others.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _disk
import torch.distributed.checkpoint as dcp
from _measure import LOAD_COLD, PHASES, SAVE, Meter, Reading
from _shapes import difference, poison
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpring import RingReader, RingWriter

DISK, NULL, STOCK, OURS = "disk", "null", "stock", "dcpring"


@dataclass(frozen=True)
class Storage:
    writer: Callable[[Path], StorageWriter]
    reader: Callable[[Path], StorageReader]


STORAGES = {STOCK: Storage(FileSystemWriter, FileSystemReader), OURS: Storage(RingWriter, RingReader)}


@dataclass
class Case:
    """One state dict on its way to the disk and back. `size_bytes` is of all ranks together."""

    state: dict[str, Any]
    target: dict[str, Any]
    size_bytes: int
    rank: int


class Contestant(ABC):
    name: str
    folder: str  # contestants that load the same files share it
    phases: tuple[str, ...] = PHASES
    fsync = "own"  # who syncs what `save` wrote
    engine = ""  # how the last operation did its I/O, where the contestant says so

    def __init__(self, case: Case) -> None:
        self.case = case

    @abstractmethod
    def save(self, path: Path) -> Reading | None: ...

    @abstractmethod
    def load(self, path: Path) -> Reading | None: ...

    def prepare_load(self) -> None:
        """Outside of the measurement: overwrites what the load is to bring back."""
        poison(self.case.target)

    def wrong_tensor(self) -> str | None:
        """Outside of the measurement: the name of a tensor that the last load got wrong."""
        return difference(self.case.state, self.case.target)


class NoData(Contestant):
    """Takes a time to compare with, and brings no tensor back."""

    phases = (SAVE, LOAD_COLD)

    def prepare_load(self) -> None: ...

    def wrong_tensor(self) -> str | None:
        return None


class Disk(NoData):
    name = folder = DISK

    def save(self, path: Path) -> Reading | None:
        return _disk.write_limit(path / "limit", self.case.size_bytes) if self.case.rank == 0 else None

    def load(self, path: Path) -> Reading | None:
        return _disk.read_limit(path / "limit", self.case.size_bytes) if self.case.rank == 0 else None


class Dcp(Contestant):
    """`dcp.save` and `dcp.load` with one of `STORAGES`."""

    def __init__(self, case: Case, name: str) -> None:
        super().__init__(case)
        self.name = self.folder = name
        self._storage = STORAGES[name]

    def save(self, path: Path) -> Reading:
        with Meter() as meter:
            writer = self._storage.writer(path)
            meter.watch(writer, "write_data")
            dcp.save(self.case.state, storage_writer=writer)
        self.engine = _engine(writer)
        return meter.reading()

    def load(self, path: Path) -> Reading:
        with Meter() as meter:
            reader = self._storage.reader(path)
            meter.watch(reader, "read_data")
            dcp.load(self.case.target, storage_reader=reader)
        self.engine = _engine(reader)
        return meter.reading()


class Null(NoData):
    """The cost of DCP itself: planning and collectives, without a byte moved or a file touched."""

    name = folder = NULL
    fsync = "none"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._metadata: Metadata | None = None

    def save(self, path: Path) -> Reading:
        with Meter() as meter:
            writer = NullWriter()
            meter.watch(writer, "write_data")
            self._metadata = dcp.save(self.case.state, storage_writer=writer)
        return meter.reading()

    def load(self, path: Path) -> Reading:
        assert self._metadata is not None
        with Meter() as meter:
            reader = NullReader(self._metadata)
            meter.watch(reader, "read_data")
            dcp.load(self.case.target, storage_reader=reader)
        return meter.reading()


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class NullWriter(StorageWriter):
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class NullReader(StorageReader):
    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _engine(storage: StorageWriter | StorageReader) -> str:
    stats = getattr(storage, "stats", None)
    if stats is None:
        return ""
    cached = f"{stats.cached_bytes / stats.bytes:.0%} cached" if stats.cached_bytes else ""
    return f"{stats.engine}, {cached or ('direct' if stats.direct else 'buffered')}"


def contestants(case: Case) -> list[Contestant]:
    """In the order of the even rounds; the disk is measured between the two that are compared with it."""
    return [Null(case), Dcp(case, STOCK), Disk(case), Dcp(case, OURS)]
