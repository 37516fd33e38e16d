"""Faults of dcpring that test_soak.py plants in the ranks, where they stay until the rank ends; all must be found."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from soak import conversions, processes
from torch.futures import Future

from dcpring import Checkpointer, RingReader, RingWriter
from dcpring.store import layout

_finish = RingWriter.finish
_read_data = RingReader.read_data
_load = Checkpointer.load


def reads_nothing(rank: int) -> None:
    """The last rank that loads leaves its state as it is."""

    def read_data(self: RingReader, plan: Any, planner: Any) -> Future[None]:
        if plan.items and rank > 0:
            future: Future[None] = Future()
            future.set_result(None)
            return future
        return _read_data(self, plan, planner)

    RingReader.read_data = read_data  # type: ignore[method-assign]


def trusts_the_disk(rank: int) -> None:
    """Checksums are not looked at."""
    made = RingReader.__init__

    def init(self: RingReader, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options | {"checksum": False})

    RingReader.__init__ = init  # type: ignore[method-assign]


def keeps_a_descriptor(rank: int) -> None:
    processes.SETTLE_SECONDS = 0.5  # it never goes away

    def finish(self: RingWriter, **given: Any) -> None:
        _finish(self, **given)
        os.open(os.devnull, os.O_RDONLY)

    RingWriter.finish = finish  # type: ignore[method-assign]


def leaves_a_file(rank: int) -> None:
    def finish(self: RingWriter, **given: Any) -> None:
        _finish(self, **given)
        Path(self.path, "left").touch()

    RingWriter.finish = finish  # type: ignore[method-assign]


def leaves_a_temporary_file(rank: int) -> None:
    processes.SETTLE_SECONDS = 0.5  # its descriptor never goes away

    def finish(self: RingWriter, **given: Any) -> None:
        _finish(self, **given)
        tempfile.mkstemp()

    RingWriter.finish = finish  # type: ignore[method-assign]


def dies(rank: int) -> None:
    def write_data(self: RingWriter, *arguments: Any) -> None:
        os._exit(0)

    if rank > 0:
        RingWriter.write_data = write_data  # type: ignore[method-assign, assignment]


def never_returns(rank: int) -> None:
    def finish(self: RingWriter, **given: Any) -> None:
        time.sleep(3600)

    RingWriter.finish = finish  # type: ignore[method-assign]


def removes_early(rank: int) -> None:
    """The old data go before the new are committed."""
    committed = RingWriter._commit

    def commit(self: RingWriter, sizes: Any, *arguments: Any) -> None:
        folder = Path(self.path)
        layout.remove_superseded(folder, layout.superseded_files(folder, os.listdir(folder)), set(sizes))
        committed(self, sizes, *arguments)

    RingWriter._commit = commit  # type: ignore[method-assign]


def hears_of_nothing(rank: int) -> None:
    """A rank takes a save that failed for one that did not."""
    save = dcp.save

    def deaf(*arguments: Any, **options: Any) -> None:
        try:
            save(*arguments, **options)
        except BaseException:
            if rank == 0:
                raise

    dcp.save = deaf


def resumes_without_the_optimizer(rank: int) -> None:
    def load(self: Checkpointer, *arguments: Any, **options: Any) -> Any:
        return _load(self, *arguments, **options | {"exclude": ["optimizer"]})

    Checkpointer.load = load  # type: ignore[method-assign]


def converts_in_place(rank: int) -> None:
    """What is there goes before something else is."""
    convert = conversions.convert

    def removing(source: Path, target: Path, **options: Any) -> Any:
        if target.is_dir():
            shutil.rmtree(target)
        elif target.name != "back.pt":
            target.unlink(missing_ok=True)
        return convert(source, target, **options)

    conversions.convert = removing  # type: ignore[attr-defined]
