"""Two saves to one directory at the same time: what is there in the end is one that was said to be good."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import failure, needed_files
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StoragePrefix

from dcpring import _C, RingReader, RingWriter, saved_key_map
from dcpring.format.metadata import load_metadata
from dcpring.store import layout

State = dict[str, Any]


def state_of(number: int) -> State:
    return {"tensor": torch.full((1000,), float(number)), "object": {"number": number}}


def save(path: Path, number: int, **options: Any) -> None:
    dcp.save(state_of(number), storage_writer=RingWriter(path, **options), no_dist=True)


def number_in(path: Path) -> int:
    state = {"tensor": torch.zeros(1000), "object": {"number": 0}}
    dcp.load(state, storage_reader=RingReader(path), no_dist=True)
    assert state["tensor"].eq(state["object"]["number"]).all()
    return int(state["object"]["number"])


class Turns:
    """Threads of which one at a time goes on, from one step to the next."""

    def __init__(self, works: list[Callable[[], None]]) -> None:
        self.errors: list[BaseException | None] = [None] * len(works)
        self._go = [threading.Semaphore(0) for _ in works]
        self._stopped = threading.Semaphore(0)
        self._own = threading.local()
        self._alive = list(range(len(works)))
        self._threads = [threading.Thread(target=self._run, args=pair) for pair in enumerate(works)]

    def _run(self, at: int, work: Callable[[], None]) -> None:
        self._own.at = at
        self._go[at].acquire()
        try:
            work()
        except CheckpointException as error:
            self.errors[at] = failure(error)
        finally:
            self._alive.remove(at)
            self._stopped.release()

    def step(self) -> None:
        """Called by the threads: another may go on here."""
        self._stopped.release()
        self._go[self._own.at].acquire()

    def run(self, chance: random.Random) -> None:
        for thread in self._threads:
            thread.start()
        while self._alive:
            self._go[chance.choice(self._alive)].release()
            self._stopped.acquire()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Turns]]:
    """Whose steps are taken before each call that looks at the directory, or changes it."""
    turns: list[Turns] = []

    def slowed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if turns:
                turns[-1].step()
            return real(*args, **options)

        return call

    for owner, names in (
        (_C, ("make_directory", "remove_files", "write_file", "rename_file")),
        (layout, ("names_in", "Claim", "_state_of", "referenced_files")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))
    yield turns


@pytest.mark.parametrize("seed", range(40))
def test_one_of_two_saves_is_there(tmp_path: Path, stepping: list[Turns], seed: int, monkeypatch: Any) -> None:
    chance = random.Random(seed)
    if chance.random() < 0.5:  # as where the coordinator has no data of its own, and sees none of the others'
        monkeypatch.setattr(layout, "check_data_files", lambda *_: None)
    if chance.random() < 0.5:
        save(tmp_path, 9)
    turns = Turns([lambda: save(tmp_path, 1), lambda: save(tmp_path, 2)])
    stepping.append(turns)
    turns.run(chance)
    stepping.clear()
    good = [number for number, error in enumerate(turns.errors, start=1) if error is None]
    assert number_in(tmp_path) in good
    for error in filter(None, turns.errors):
        assert "another save to the same directory is under way" in str(error)
    save(tmp_path, 3)
    assert number_in(tmp_path) == 3
    assert {path.name for path in tmp_path.iterdir()} == needed_files(tmp_path)


@pytest.mark.parametrize("seed", range(12))
def test_the_key_map_is_that_of_the_save_that_is_there(tmp_path: Path, stepping: list[Turns], seed: int) -> None:
    """All maps lie in one file, which each save writes anew before it commits."""

    def save_renamed(number: int) -> None:
        save(tmp_path, number, key_map={"tensor": f"renamed {number}"})

    save_renamed(9)
    turns = Turns([lambda: save_renamed(1), lambda: save_renamed(2)])
    stepping.append(turns)
    turns.run(random.Random(seed))
    stepping.clear()
    (name,) = (key for key in load_metadata(tmp_path / ".metadata")[0].state_dict_metadata if "renamed" in key)
    table = saved_key_map(tmp_path)
    assert table is not None and dict(table.exact) == {"tensor": name}
    assert name in [f"renamed {number}" for number, error in enumerate(turns.errors, start=1) if error is None]


class WithoutPlan(RingWriter):
    """Does what a save needs, and does not call what it has overridden."""

    def prepare_global_plan(self, plans: Any) -> Any:
        return [replace(plan, storage_data=_StoragePrefix(f"__{at}_")) for at, plan in enumerate(plans)]


def test_a_writer_whose_subclass_plans_by_itself(tmp_path: Path) -> None:
    for number in (1, 2):
        dcp.save(state_of(number), storage_writer=WithoutPlan(tmp_path), no_dist=True)
        assert number_in(tmp_path) == number
        assert {path.name for path in tmp_path.iterdir()} == needed_files(tmp_path)
