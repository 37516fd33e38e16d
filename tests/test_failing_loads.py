"""What a load that fails has changed: nothing, where it could be known before; else what the error says."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _kinds import failure, save, stored
from fault._support import flip_bit
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.format.zip import wrong_archive
from dcpring.move import device

PLANNERS = pytest.mark.parametrize("planner", [RingLoadPlanner, DefaultLoadPlanner])
State = dict[str, Any]


def load_with(state: State, path: Path, planner: Any, **options: Any) -> str:
    """The error's text, "" for none."""
    reader = RingReader(path, **options)
    return failure(lambda: dcp.load(state, storage_reader=reader, planner=planner(), no_dist=True))


def compact_save(state: State, path: Path) -> None:
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner(), no_dist=True)


def damage(path: Path, key: str) -> None:
    """Flips a bit in the middle of what is stored of a key."""
    place = stored(path)[key]
    flip_bit(path / place.relative_path, place.offset + place.length // 2)


def hostile_archive(size: int) -> bytes:
    """What torch.save would not make: a pickle that calls something, in an archive of this size."""

    def made(padding: int) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Call(), protocol=2))
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/padding", bytes(padding))
        return file.getvalue()

    return made(size - len(made(0)))


class Call:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


# ---- what can be known before ----


REFUSED: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], str]] = {
    "lossy": (lambda: torch.ones(40), lambda: torch.zeros(40, dtype=torch.int32), "can lose values"),
    "expanded": (lambda: torch.ones(4, 6), lambda: torch.zeros(1, 6).expand(4, 6), "single memory location"),
    "sparse target": (lambda: torch.ones(4, 6), lambda: torch.zeros(4, 6).to_sparse(), "torch.sparse_coo"),
}


@PLANNERS
@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_be_refused_before_changes_nothing(tmp_path: Path, kind: str, planner: Any) -> None:
    value, target, words = REFUSED[kind]
    compact_save({"a": torch.ones(1000), "b": value()}, tmp_path)
    loaded = {"a": torch.zeros(1000), "b": target()}
    text = load_with(loaded, tmp_path, planner)
    assert words in text and "'b' (rank 0)" in text and "overwritten" not in text
    assert not loaded["a"].any() and not loaded["b"].to_dense().any()


@PLANNERS
def test_a_pickle_that_could_run_code_is_refused_before(tmp_path: Path, planner: Any) -> None:
    """In the record of a sparse tensor, which is unpickled like an object."""
    compact_save({"a": torch.ones(1000), "s": torch.eye(300).to_sparse()}, tmp_path)
    place = stored(tmp_path)["s"]
    path = tmp_path / place.relative_path
    whole = path.read_bytes()
    record = hostile_archive(place.length)
    path.write_bytes(whole[: place.offset] + record + whole[place.offset + place.length :])
    loaded = {"a": torch.zeros(1000), "s": torch.zeros(300, 300).to_sparse()}
    text = load_with(loaded, tmp_path, planner, checksum=False)
    assert "UntrustedCheckpointError: 's' (rank 0)" in text and "overwritten" not in text
    assert not loaded["a"].any()


# ---- damage, which is found when it is read ----


LATE: dict[str, tuple[Tensor, Tensor]] = {
    "plain": (torch.ones(1 << 16), torch.zeros(1 << 16)),
    "cast": (torch.ones(1 << 16), torch.zeros(1 << 16, dtype=torch.float64)),
    "strided": (torch.ones(300, 200), torch.zeros(300, 400)[:, ::2]),
}


@PLANNERS
@pytest.mark.parametrize("kind", LATE)
def test_damage_names_all_that_was_overwritten(tmp_path: Path, kind: str, planner: Any) -> None:
    """Whatever way they took."""
    value, target = LATE[kind]
    saved = {"a": torch.ones(1 << 16), "c": torch.ones(50), "s": torch.eye(30).to_sparse(), "z": value}
    compact_save(saved, tmp_path)
    damage(tmp_path, "z")
    loaded: State = {
        "a": torch.zeros(1 << 16),
        "c": torch.zeros(50, dtype=torch.float64),
        "s": torch.zeros(30, 30).to_sparse(),
        "z": target.clone() if kind != "strided" else torch.zeros(300, 400)[:, ::2],
    }
    text = load_with(loaded, tmp_path, planner, queue_depth=1, workers=1)
    changed = {key for key in ("a", "c", "s") if loaded[key].to_dense().any()}
    note = re.search(r"already overwritten in the state dict: (.*)", text)
    assert "'z' (rank 0)" in text and "CRC-32" in text
    assert note is not None or not changed
    assert changed <= set(re.findall(r"'(\w+)'", note[1] if note else ""))
    assert "s" in changed  # what is unpickled comes first


@PLANNERS
def test_damage_behind_many_windows_names_those_before(
    tmp_path: Path, planner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "HOST_BYTES", 1 << 13)
    saved = {f"{n:02}": torch.ones(1000) for n in range(12)}
    compact_save(saved, tmp_path)
    damage(tmp_path, "11")
    loaded = {key: torch.zeros(1000, dtype=torch.float64) for key in saved}
    text = load_with(loaded, tmp_path, planner)
    assert "'11' (rank 0)" in text and "already overwritten in the state dict: '00', '01'" in text
    assert loaded["00"].all() and not loaded["11"].any()


@PLANNERS
@pytest.mark.parametrize("byte", [8, 10])
def test_a_damaged_zip_directory_names_the_key(tmp_path: Path, planner: Any, byte: int) -> None:
    """Its flags and its method: another method means another library's errors."""
    save({"a": torch.ones(1000), "object": tuple(range(100))}, tmp_path, "stock")
    place = stored(tmp_path)["object"]
    path = tmp_path / place.relative_path
    whole = path.read_bytes()
    begin = whole.index(b"PK\x01\x02", place.offset)
    for bit in range(16):
        data = bytearray(whole)
        data[begin + byte + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        loaded = {"a": torch.zeros(1000), "object": None}
        text = load_with(loaded, tmp_path, planner)
        assert not text or ("CorruptCheckpointError" in text and "'object' (rank 0)" in text), text


@PLANNERS
@pytest.mark.parametrize("trusted", [False, "warn", True])
@pytest.mark.parametrize("key", ["a", "object"])
def test_what_was_zeroed_is_damaged_and_nothing_to_be_trusted(
    tmp_path: Path, planner: Any, trusted: Any, key: str
) -> None:
    """As crashes leave files. Records of stock have no CRC that would tell."""
    save({"a": torch.ones(1000), "object": tuple(range(100))}, tmp_path, "stock")
    place = stored(tmp_path)[key]
    with (tmp_path / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))
    text = load_with({"a": torch.zeros(1000), "object": None}, tmp_path, planner, trusted=trusted)
    where = re.escape(f"'{key}' (rank 0) is damaged: it is no archive of torch.save")
    assert re.match(rf"CorruptCheckpointError: {tmp_path}/\S+\.distcp: {where}", text)


class OwnBytes(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> io.BytesIO:
        return io.BytesIO(str(object).encode())


class OwnText(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read().decode()


@pytest.mark.parametrize("trusted", ["warn", True])
def test_a_planner_of_its_own_reads_what_it_has_made(tmp_path: Path, trusted: Any) -> None:
    dcp.save({"object": "text"}, storage_writer=RingWriter(tmp_path), planner=OwnBytes(), no_dist=True)
    loaded: State = {"object": None}
    assert not load_with(loaded, tmp_path, OwnText, trusted=trusted)
    assert loaded == {"object": "text"}
    refused = load_with(loaded, tmp_path, OwnText)
    assert "UntrustedCheckpointError: 'object'" in refused and "trusted=True" in refused


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    """A few bytes could be a lot of work."""
    save({"a": torch.ones(1000), "object": tuple(range(100_000))}, tmp_path, "stock")
    place = stored(tmp_path)["object"]
    path = tmp_path / place.relative_path
    data = path.read_bytes()
    record = data[place.offset : place.offset + place.length]
    begin, end = record.index(b"PK\x01\x02"), record.rindex(b"PK\x05\x06")
    first = record[begin : record.index(b"PK\x01\x02", begin + 4)]
    directory = first + b"".join(first.replace(b"data.pkl", b"dat%05d" % n) for n in range(200))
    tail = bytearray(record[end : end + 22])
    tail[8:12] = (201).to_bytes(2, "little") * 2
    tail[12:20] = len(directory).to_bytes(4, "little") + begin.to_bytes(4, "little")
    assert "overlap" in wrong_archive(io.BytesIO(record[:begin] + directory + bytes(tail)))
    assert not wrong_archive(io.BytesIO(record))


# ---- words ----


def test_casts_are_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {f"{n:03}": torch.ones(3) for n in range(200)}
    compact_save(saved, tmp_path)
    loaded = {key: torch.zeros(3, dtype=torch.bfloat16) for key in saved}
    with caplog.at_level(logging.INFO, "dcpring"):
        assert not load_with(loaded, tmp_path, RingLoadPlanner)
    (line,) = [message for message in caplog.messages if "cast from" in message]
    assert "from torch.float32 to torch.bfloat16" in line and "'000', '001'" in line and "195 more" in line
    assert all(bool(tensor.all()) for tensor in loaded.values())
