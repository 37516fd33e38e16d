"""Writers, readers and planners that are used again, after a failure, or by several threads: nothing is left over."""

from __future__ import annotations

import gc
import json
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _kinds import failure
from torch.distributed.checkpoint import FileSystemReader

from dcpring import CheckpointError, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter, saved_key_map

MAP = {"prefixes": {"a.": "a.b."}}
"""Twice it would make another name of each."""


def state(*names: str, value: float = 1.0) -> dict[str, Any]:
    return {"a": {name: torch.full((3,), value) for name in names}}


def stored(path: Path) -> set[str]:
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


# ---- key maps ----


def test_a_writer_used_twice_stores_the_second_table(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, key_map=MAP)
    for names in (("x",), ("x", "y")):
        dcp.save(state(*names), storage_writer=writer)
        table = saved_key_map(tmp_path)
        assert table is not None and table.exact == {f"a.{name}": f"a.b.{name}" for name in names}


@pytest.fixture(params=("dict", "file", "function"))
def key_map(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "dict":
        return dict(MAP)
    if request.param == "function":
        return lambda name: name.replace("a.", "a.b.", 1)
    file = tmp_path / "map.json"
    file.write_text(json.dumps(MAP))
    return str(file)


def test_a_key_map_given_to_both_is_applied_once(tmp_path: Path, key_map: Any) -> None:
    path = tmp_path / "checkpoint"
    dcp.save(state("x"), storage_writer=RingWriter(path, key_map=key_map), planner=RingSavePlanner(key_map=key_map))
    assert stored(path) == {"a.b.x"}
    table = saved_key_map(path)
    assert table is not None and table.exact == {"a.x": "a.b.x"}

    back = {"prefixes": {"a.b.": "a."}}
    loaded = state("x", value=0.0)
    dcp.load(loaded, storage_reader=RingReader(path, key_map=back), planner=RingLoadPlanner(key_map=dict(back)))
    assert torch.equal(loaded["a"]["x"], torch.ones(3))


def test_normalizing_on_both_sides(tmp_path: Path) -> None:
    wrapped = {"module.w": torch.ones(2), "module.module.v": torch.ones(2)}
    dcp.save(
        wrapped,
        storage_writer=RingWriter(tmp_path, key_map="normalize"),
        planner=RingSavePlanner(key_map="normalize"),
    )
    loaded = {name: torch.zeros(2) for name in wrapped}
    dcp.load(
        loaded,
        storage_reader=RingReader(tmp_path, key_map="normalize"),
        planner=RingLoadPlanner(key_map="normalize"),
    )
    assert all(torch.equal(value, torch.ones(2)) for value in loaded.values())


def test_two_key_maps_are_refused(tmp_path: Path) -> None:
    other = {"prefixes": {"a.": "c."}}
    writer, planner = RingWriter(tmp_path, key_map=MAP), RingSavePlanner(key_map=other)
    text = failure(lambda: dcp.save(state("x"), storage_writer=writer, planner=planner))
    assert "different key maps" in text and "give key_map= to one of the two" in text
    assert not (tmp_path / ".metadata").exists()

    dcp.save(state("x"), storage_writer=RingWriter(tmp_path))
    reader, loads = RingReader(tmp_path, key_map=MAP), RingLoadPlanner(key_map=other)
    assert "different key maps" in failure(lambda: dcp.load(state("x"), storage_reader=reader, planner=loads))


# ---- after a failure ----


class FailsAtTheEnd(RingWriter):
    fails = True

    def finish(self, metadata: Any, results: Any) -> None:
        if self.fails:
            raise OSError("the end of the world")
        super().finish(metadata, results)


def test_a_failed_save_leaves_nothing_in_the_writer(tmp_path: Path) -> None:
    writer = FailsAtTheEnd(tmp_path)

    def fail() -> weakref.ref[Any]:
        first, planner = state("x"), RingSavePlanner(key_map=MAP)
        assert "the end of the world" in failure(lambda: dcp.save(first, storage_writer=writer, planner=planner))
        return weakref.ref(first["a"]["x"])

    kept = fail()
    gc.collect()
    assert kept() is None, "the writer keeps what a failed save was to write"

    writer.fails = False
    dcp.save(state("y"), storage_writer=writer)
    assert stored(tmp_path) == {"a.y"}
    assert saved_key_map(tmp_path) is None


def test_saves_of_one_writer_have_ids_of_their_own(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path)
    seen = set()
    for _ in range(2):
        dcp.save(state("x"), storage_writer=writer)
        about = FileSystemReader(tmp_path).read_metadata().storage_meta
        assert about is not None and about.save_id == writer.save_id
        seen.add(writer.save_id)
    copy = pickle.loads(pickle.dumps(writer))
    dcp.save(state("x"), storage_writer=copy)
    assert len({*seen, copy.save_id}) == 3


def test_planners_used_again(tmp_path: Path) -> None:
    saves, loads = RingSavePlanner(), RingLoadPlanner(key_map=lambda name: name.replace("q.", "a.", 1))
    for number, names in enumerate((("x", "y"), ("z",), ("x",))):
        path = tmp_path / str(number)
        top = "q" if number == 0 else "a"
        dcp.save({top: state(*names, value=number)["a"]}, storage_writer=RingWriter(path), planner=saves)
        loaded = state(*names, value=-1.0)
        dcp.load(loaded, storage_reader=RingReader(path), planner=loads)
        assert all(torch.equal(loaded["a"][name], torch.full((3,), float(number))) for name in names)


def test_a_reader_for_several_checkpoints(tmp_path: Path) -> None:
    reader = RingReader(tmp_path / "0")
    for number in range(2):
        dcp.save(state("x", value=number), storage_writer=RingWriter(tmp_path / str(number)))
    for number in (0, 1, 0):
        loaded = state("x", value=-1.0)
        dcp.load(loaded, checkpoint_id=tmp_path / str(number), storage_reader=reader)
        assert torch.equal(loaded["a"]["x"], torch.full((3,), float(number)))


def test_a_load_of_objects_alone_has_read_a_file(tmp_path: Path) -> None:
    dcp.save({"n": [1]}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner(), no_dist=True)
    reader = RingReader(tmp_path)
    dcp.load({"n": 0}, storage_reader=reader, planner=RingLoadPlanner(), no_dist=True)
    assert reader.stats is not None and reader.stats.files == 1


# ---- several threads ----


@pytest.mark.parametrize("trace", (False, True))
def test_a_reader_for_several_threads(tmp_path: Path, trace: bool) -> None:
    """Each has a load of its own, with other keys, and whichever planner."""
    names = [f"t{number}" for number in range(40)]
    whole = {"a": {name: torch.full((1000,), float(number)) for number, name in enumerate(names)}}
    dcp.save(whole, storage_writer=RingWriter(tmp_path / "checkpoint"), planner=RingSavePlanner())
    options: dict[str, Any] = {"trace": tmp_path / "trace.json"} if trace else {}
    reader = RingReader(tmp_path / "checkpoint", **options)
    start = threading.Barrier(4)
    failed: list[BaseException | str] = []

    def load(number: int) -> None:
        mine = names[number * 10 : number * 10 + 10]
        start.wait()
        for turn in range(5):
            wanted = {"a": {name: torch.zeros(1000) for name in mine}}
            planner = RingLoadPlanner(unexpected="ignore") if (turn + number) % 2 else None
            try:
                dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
                failed.extend(name for name in mine if not torch.equal(wanted["a"][name], whole["a"][name]))
            except BaseException as error:  # CheckpointException is one
                failed.append(error)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_saves_of_several_threads(tmp_path: Path) -> None:
    """With plan caches of the module, of which there are fewer than planners."""
    failed: list[BaseException] = []

    def save(number: int) -> None:
        try:
            for turn in range(6):
                planner = RingSavePlanner(enable_plan_caching=True)
                for _ in range(2):
                    path = tmp_path / f"{number}.{turn}"
                    dcp.save(state("x", value=number), storage_writer=RingWriter(path), planner=planner, no_dist=True)
                assert stored(path) == {"a.x"}
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_reason_is_that_of_this_save(tmp_path: Path) -> None:
    planner = RingSavePlanner(enable_plan_caching=True)
    for name in ("first", "second"):
        path = tmp_path / name
        dcp.save(state("x"), storage_writer=RingWriter(path), planner=planner, no_dist=True)
        assert str(path) in planner.report().reason
    assert planner.report().cached == 1


def test_a_planner_that_has_planned_nothing_here_says_so() -> None:
    assert str(RingSavePlanner().report()).startswith("this process has planned no save")


# ---- remote storage, which there is none of yet ----

URL = "gs://bucket/step-1"


def test_urls_are_no_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for make in (RingWriter, RingReader):
        with pytest.raises(CheckpointError, match=r"gs://bucket/step-1 is remote storage.*FsspecWriter"):
            make(URL)
    with pytest.raises(CheckpointError, match="remote storage"):
        dcp.save(state("x"), checkpoint_id=URL, storage_writer=RingWriter(tmp_path / "here"), no_dist=True)
    with pytest.raises(CheckpointError, match="remote storage"):
        dcp.load(state("x"), checkpoint_id=URL, storage_reader=RingReader(tmp_path / "here"), no_dist=True)
    assert not list(tmp_path.iterdir())
    dcp.save(state("x"), storage_writer=RingWriter(Path("gs:")), no_dist=True)  # a folder, by its name
    assert stored(tmp_path / "gs:") == {"a.x"}
