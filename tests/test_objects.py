"""Objects in checkpoints: what comes back, what a save says of what will not, and where ls and verify show it."""

from __future__ import annotations

import collections
import datetime
import io
import json
import logging
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import _cli
import _distributed
import _pickles
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _logs import logged
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import (
    _C,
    Checkpointer,
    CheckpointError,
    Replicated,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
    verify,
)
from dcpring.base.values import digest
from dcpring.format.unpickler import Safe
from dcpring.move import objects
from dcpring.sources.contents import open_contents

WRITERS = {"stock": FileSystemWriter, "ring": RingWriter}
READERS = {"stock": FileSystemReader, "ring": RingReader}
SAVE_PLANNERS = {"stock": DefaultSavePlanner, "ring": RingSavePlanner}
LOAD_PLANNERS = {"stock": DefaultLoadPlanner, "ring": RingLoadPlanner}


def train_state() -> io.BytesIO:
    """As torchtitan keeps it: where it was read to counts, too."""
    out = io.BytesIO()
    torch.save({"step": 3, "losses": [torch.ones(2)]}, out)
    out.seek(7)
    return out


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(4.0)},
        "data": {key: [value] for key, value in _pickles.VALUES.items() if not isinstance(value, dict)},
        "mappings": [(value, 1) for value in _pickles.VALUES.values() if isinstance(value, dict)],
        "numpy": _pickles.numpy_values(),
        "train_state": train_state(),
        "nested": [1, {"a": (datetime.date(2020, 1, 2), {"x": np.float32(1)})}],
        "with tensors": (torch.ones(3), {"when": datetime.timedelta(1)}, np.arange(2)),
        "subclasses": collections.OrderedDict(a=collections.Counter("ab")),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("planner", SAVE_PLANNERS)
def test_objects_come_back(tmp_path: Path, writer: str, planner: str) -> None:
    saved = state()
    dcp.save(saved, storage_writer=WRITERS[writer](tmp_path), planner=SAVE_PLANNERS[planner](), no_dist=True)
    expected = _loaded(tmp_path, "stock", "stock")
    for reader, loader in (("ring", "stock"), ("ring", "ring"), ("stock", "ring")):
        found = _loaded(tmp_path, reader, loader)
        assert digest(found) == digest(expected) == digest(saved), (reader, loader)
        assert type(found["train_state"]) is io.BytesIO
        assert found["train_state"].tell() == 7 and found["train_state"].getvalue() == train_state().getvalue()
    assert not verify(tmp_path).refused and verify(tmp_path).ok


def _loaded(path: Path, reader: str, planner: str) -> dict[str, Any]:
    found = state()
    found["model"]["w"].zero_()
    for key in ("data", "numpy"):
        found[key] = dict.fromkeys(found[key])
    found |= {"train_state": None, "with tensors": None, "mappings": None}
    dcp.load(found, storage_reader=READERS[reader](path), planner=LOAD_PLANNERS[planner](), no_dist=True)
    return found


def test_a_planner_of_its_own_gets_a_stream(tmp_path: Path) -> None:
    class Planner(RingLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            given[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    given: dict[str, Any] = {}
    saved = {"a": datetime.date(2020, 1, 2), "b": [1], "c": np.arange(3), "d": (torch.ones(1),)}
    dcp.save(saved, storage_writer=RingWriter(tmp_path), no_dist=True)
    dcp.load(dict.fromkeys(saved), storage_reader=RingReader(tmp_path), planner=Planner(), no_dist=True)
    assert digest(given) == digest(saved)


@pytest.mark.parametrize("planner", LOAD_PLANNERS)
def test_a_checkpoint_of_another_python(tmp_path: Path, planner: str) -> None:
    """pathlib._local was pathlib's home in 3.13; stock cannot load that elsewhere."""
    saved = {"w": torch.ones(2), "path": [Path("a/b")]}
    dcp.save(saved, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    metadata = tmp_path / ".metadata"
    data = metadata.read_bytes()
    moved = data.replace(b"\x8c\x07pathlib\x94", b"\x8c\x0epathlib._local\x94")
    if b"pathlib._local" not in data:  # as 3.13 has it by itself
        assert moved != data
        metadata.write_bytes(_unframed(moved))
    found: dict[str, Any] = {"w": torch.zeros(2), "path": None}
    dcp.load(found, storage_reader=RingReader(tmp_path), planner=LOAD_PLANNERS[planner](), no_dist=True)
    assert torch.equal(found["w"], torch.ones(2)) and found["path"] == [Path("a/b")]


def test_what_is_refused_leaves_sound_garbage(tmp_path: Path) -> None:
    """A view of a BytesIO's buffer in a cycle, as a traceback makes them, crashes some versions of Python."""
    program = """
import gc, sys
import torch
import torch.distributed.checkpoint as dcp
from dcpring import RingReader, RingWriter

class Named(torch.Tensor):
    pass

dcp.save({"x": torch.ones(4).as_subclass(Named)}, storage_writer=RingWriter(sys.argv[1]), no_dist=True)
try:
    dcp.load({"x": torch.zeros(4)}, storage_reader=RingReader(sys.argv[1]), no_dist=True)
except BaseException as error:
    assert "Named" in str(error)
gc.collect()
print("sound")
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "sound\n"


def _unframed(data: bytes) -> bytes:
    """A small pickle without its frame, whose length is not right any more."""
    return data[:2] + data[11:] if data[2] == 0x95 else data


# ---- what a save says ----


class Config:
    """A class of the user's."""

    def __init__(self, name: str = "x") -> None:
        self.name = name


class Other(Config):
    pass


def test_a_save_reads_only_what_names_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long bytes, in which anything may stand, take the time that it takes to pickle them."""

    def refusal_of(value: object) -> str:
        archive = io.BytesIO()
        torch.save(value, archive)
        return objects.refusal(archive.getvalue(), Safe())

    looks_alike = b"cposix\nsystem\n" * 3
    read, load = [], objects.load
    monkeypatch.setattr(objects, "load", lambda *args: (read.append(args), load(*args)))
    assert refusal_of({"bytes": looks_alike, "text": looks_alike.decode(), "tensor": torch.ones(2)}) == ""
    assert not read
    assert refusal_of([Config()]) == f"{__name__}.Config"


class Number(int):
    pass


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _often(levels: int) -> Any:
    """Few lists, of which each holds the one before twice: as a tree it has 2**levels leaves."""
    value: Any = [1]
    for _ in range(levels):
        value = [value, value]
    return value


DATA: dict[str, Any] = {
    "number": 3,
    "long": 1 << 100,
    "float": float("nan"),
    "text": "text \udc80",
    "bytes": b"\0\xff",
    "dtype": [torch.bfloat16, torch.Size([2, 3])],
    "sets": ({1, 2}, frozenset(["a"])),
    "dicts": {1: {None: {"a": (1j, True)}}, "b": collections.OrderedDict(z=1, a=[])},
    "empty": [{}, [], (), set(), ""],
}
OTHERS: dict[str, Any] = {
    "tensor": torch.arange(3),
    "tensor within": {"a": [torch.ones(2)]},
    "subclass": [Number(3)],
    "attributes": collections.Counter("abca"),
    "path": Path("a/b"),
    "deep": _nested(100),
}


@pytest.mark.parametrize("name", [*DATA, *OTHERS])
def test_an_archive_is_read_as_what_torch_saves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {**DATA, **OTHERS}[name]
    saved = io.BytesIO()
    torch.save(value, saved)
    if name in DATA:
        monkeypatch.setattr(torch, "save", None)
    archive = objects.archive_of(value)
    entries, stocks = objects.entries_of(memoryview(archive)), objects.entries_of(memoryview(saved.getvalue()))
    assert entries and stocks
    assert archive[entries["data.pkl"]] == saved.getvalue()[stocks["data.pkl"]]
    assert digest(torch.load(io.BytesIO(archive), weights_only=False)) == digest(value)
    assert digest(objects.load(io.BytesIO(archive), Safe([Number])).value) == digest(value)
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        assert file.testzip() is None


def test_what_is_shared_within_an_object_stays_so() -> None:
    both: list[Any] = [1]
    found = torch.load(io.BytesIO(objects.archive_of([both, both, {"a": both}])), weights_only=True)
    assert found[0] is found[1] is found[2]["a"]
    found = objects.load(io.BytesIO(objects.archive_of(_often(45))), Safe()).value
    assert found[0] is found[1]
    itself: list[Any] = []
    itself.append(itself)
    found = torch.load(io.BytesIO(objects.archive_of(itself)), weights_only=True)
    assert found[0] is found


def test_names_are_seen_without_running_a_pickle() -> None:
    assert _C.names_in_pickle(pickle.dumps([1, "c\nd\n"], 2)) == set()
    assert _C.names_in_pickle(pickle.dumps((set, b"x", 1), 2)) == {(b"__builtin__", b"set"), (b"_codecs", b"encode")}
    for unseen in (pickle.dumps(int, 4), b"\x80\x02(i__builtin__\nint\n.", b"\x80\x02\x82\x01.", b"\x80\x02", b""):
        assert _C.names_in_pickle(unseen) is None
    with pytest.raises(TypeError):
        _C.names_in_pickle("text")


def test_a_save_says_what_a_load_will_refuse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {"a": {"config": Config()}, "b": [1, Other()], "c": datetime.date(2020, 1, 2), "w": torch.ones(2)}
    for planner in SAVE_PLANNERS.values():
        caplog.clear()
        writer = RingWriter(tmp_path)
        with caplog.at_level(logging.WARNING, "dcpring"):
            dcp.save(saved, storage_writer=writer, planner=planner(), no_dist=True)
        (record,) = caplog.records
        said = record.getMessage()
        assert f"'a.config' ({__name__}.Config)" in said and f"'b' ({__name__}.Other)" in said and "'c'" not in said
        assert f"safe_globals=[{__name__}.Config, {__name__}.Other]" in said and "trusted=True" in said
        assert writer.stats is not None and writer.stats.refused == {
            "a.config": f"{__name__}.Config",
            "b": f"{__name__}.Other",
        }
    found: dict[str, Any] = {"a": {"config": None}, "b": None, "c": None, "w": torch.zeros(2)}
    with pytest.raises(CheckpointException, match=r"a\.config|'b'"):
        dcp.load(found, storage_reader=RingReader(tmp_path), no_dist=True)
    dcp.load(found, storage_reader=RingReader(tmp_path, safe_globals=[Config, Other]), no_dist=True)
    assert digest(found) == digest(saved)


def test_what_is_allowed_is_not_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def saved(**options: Any) -> None:
        dcp.save({"a": Config()}, storage_writer=RingWriter(tmp_path, **options), no_dist=True)

    with caplog.at_level(logging.WARNING, "dcpring"):
        saved(objects="allow")
        saved(safe_globals=[Config])
        saved(objects="error", safe_globals=[Config])
        with torch.serialization.safe_globals([Config]):
            saved(objects="error")
    assert not caplog.records
    with pytest.raises(ValueError, match='"warn", "error" or "allow"'):
        RingWriter(tmp_path, objects="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", SAVE_PLANNERS)
def test_an_error_leaves_what_was_there(tmp_path: Path, planner: str) -> None:
    dcp.save({"a": 1, "w": torch.ones(2)}, storage_writer=RingWriter(tmp_path), no_dist=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"a": Config(), "w": torch.zeros(2)},
            storage_writer=RingWriter(tmp_path, objects="error"),
            planner=SAVE_PLANNERS[planner](),
            no_dist=True,
        )
    error = caught.value.failures[0][0]
    assert isinstance(error, CheckpointError) and f"'a' ({__name__}.Config)" in str(error)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def save_on_ranks(path: str, objects: str, ring: bool) -> tuple[str, list[str], list[str]]:
    """One object of this rank's own, one that all have."""
    rank = dist.get_rank()
    saved = {f"own.{rank}": Config() if rank else 3, "all": [Other()], "w": torch.ones(1000)}
    error = ""
    with logged() as messages:
        try:
            planner = RingSavePlanner() if ring else DefaultSavePlanner()
            dcp.save(saved, storage_writer=RingWriter(path, objects=objects), planner=planner)  # type: ignore[arg-type]
        except BaseException as caught:
            error = str(caught)
    dist.barrier()
    return error, messages, sorted(entry.name for entry in Path(path).iterdir())


@pytest.mark.parametrize("ring", (True, False))
def test_ranks_say_it_together(tmp_path: Path, ring: bool) -> None:
    found = _distributed.run(3, save_on_ranks, str(tmp_path), "warn", ring)
    assert not any(error for error, _, _ in found)
    ((said,),) = [messages for _, messages, _ in found if messages]
    assert (
        f"'own.1' ({__name__}.Config)" in said
        and "'own.2'" in said
        and "'own.0'" not in said
        and said.count(f"({__name__}.Other)") == 1
    )


def test_an_error_is_one_on_all_ranks_before_anything_is_written(tmp_path: Path) -> None:
    found = _distributed.run(3, save_on_ranks, str(tmp_path), "error", True)
    assert all("Config" in error and "Other" in error for error, _, _ in found)
    assert all(not files for _, _, files in found)


# ---- where it is shown ----


def test_ls_and_verify_show_it(tmp_path: Path) -> None:
    saved = {"a": {"config": Config()}, "n": 1, "w": torch.ones(2), "date": datetime.date(2020, 1, 2)}
    for writer in WRITERS.values():
        dcp.save(saved, storage_writer=writer(tmp_path), no_dist=True)
        report = verify(tmp_path)
        assert report.ok and report.refused == {"a.config": f"{__name__}.Config"}
        assert f"'a.config' ({__name__}.Config)" in str(report)
        result = _cli.run("verify", tmp_path)
        assert result.status == 0 and "safe_globals" in result.out and "a.config" in result.out
        shown = json.loads(_cli.run("verify", "--json", tmp_path).out)["checkpoints"][0]
        assert shown["refused"] == {"a.config": f"{__name__}.Config"}
        listed = json.loads(_cli.run("ls", "--json", tmp_path).out)["keys"]
        assert {key["key"]: key["refused"] for key in listed} == {
            **dict.fromkeys(("n", "w", "date")),
            "a.config": f"{__name__}.Config",
        }
        text = _cli.run("ls", tmp_path)
        assert f"{__name__}.Config" in text.out and "safe_globals" in text.err
    assert "safe_globals" not in _cli.run("ls", "--keys", "n", tmp_path).err


def test_damaged_objects_are_left_to_verify(tmp_path: Path) -> None:
    dcp.save({"a": [1], "b": Config()}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    place = {index.fqn: info for index, info in metadata.storage_data.items()}["a"]
    file = tmp_path / place.relative_path
    data = bytearray(file.read_bytes())
    data[place.offset : place.offset + 200] = bytes(200)
    file.write_bytes(data)
    assert open_contents(tmp_path).refused() == {"b": f"{__name__}.Config"}
    assert not verify(tmp_path).ok


# ---- Checkpointer ----


class Kept:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        self.value = loaded["value"]


def test_a_checkpointer_keeps_data_of_every_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"plain": {**_pickles.VALUES}, "numpy": [*_pickles.numpy_values().values()], "sets": {1: {frozenset({2})}}}
    with caplog.at_level(logging.WARNING, "dcpring"), Checkpointer(tmp_path, {"x": Replicated(Kept(values))}) as one:
        one.save(1)
    assert not caplog.records
    other = Kept(None)
    with Checkpointer(tmp_path, {"x": Replicated(other)}) as one:
        one.load()
    assert digest(other.value) == digest(values)


def test_a_checkpointer_refuses_what_it_would_not_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Checkpointer(tmp_path, {"x": Replicated(Kept([Config()]))}) as one,
        pytest.raises(CheckpointError, match=rf"'value\[0\]'.*{__name__}.Config.*safe_globals"),
    ):
        one.save(1)
    for options in ({"safe_globals": [Config]}, {"trusted": True}):
        kept = Kept([Config("kept")])
        with (
            caplog.at_level(logging.WARNING, "dcpring"),
            Checkpointer(tmp_path, {"x": Replicated(kept)}, reader_options=options) as one,
        ):
            one.save(1)
            kept.value = None
            one.load()
        assert kept.value[0].name == "kept"
    assert not caplog.records, "what this Checkpointer loads needs no warning"


def test_a_loaders_state(tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True, num_workers=0)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    kept = loader.state_dict()
    for saved in ({"rank_0": (kept,)}, {"dp_rank_0": pickle.dumps(kept)}):
        dcp.save({"dataloader": saved}, storage_writer=RingWriter(tmp_path, objects="error"), no_dist=True)
        found = {"dataloader": {key: None for key in saved}}
        dcp.load(found, storage_reader=RingReader(tmp_path), no_dist=True)
        assert digest(found["dataloader"]) == digest(saved)
