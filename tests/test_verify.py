"""``dcpring.verify``: whole checkpoints are whole, and whatever happens to one is found and named."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _distributed
import _kinds
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fault._support import data_files, drop_cache, fault, flip_bit, leaks_descriptors, open_descriptors, storage_of
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import CheckpointError, RingSavePlanner, RingWriter, UntrustedCheckpointError, VerifyReport, verify
from dcpring.format.metadata import Trailer, join_metadata, load_metadata, split_metadata
from dcpring.options import IOOptions
from dcpring.tools.inspect import verify as inspect_verify

WRITERS: dict[str, Any] = {
    "stock": lambda path: {"storage_writer": FileSystemWriter(path)},
    "ring": lambda path: {"storage_writer": RingWriter(path)},
    "planner": lambda path: {"storage_writer": RingWriter(path), "planner": RingSavePlanner()},
}
OURS = ("ring", "planner")

each_writer = pytest.mark.parametrize("writer", WRITERS)


def state() -> dict[str, Any]:
    made = torch.Generator().manual_seed(5)
    return {
        "large": torch.randn(1_700_000, generator=made),
        "matrix": torch.randn(30, 20, generator=made).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "half": torch.randn(1000, generator=made).to(torch.bfloat16),
        "settings": {"lr": 0.1, "betas": [0.9, 0.95], "table": torch.arange(10)},
        "name": "a string",
    }


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("originals")
    for name, options in WRITERS.items():
        dcp.save(state(), no_dist=True, **options(folder / name))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint to damage."""

    def make(writer: str) -> Path:
        return Path(shutil.copytree(originals / writer, tmp_path / "checkpoint"))

    return make


def only_file(path: Path) -> Path:
    (name,) = data_files(path)
    return path / name


def the_problem(report: VerifyReport) -> tuple[str | None, str, str]:
    (problem,) = report.problems
    assert not report.ok and report.bad_keys == ([problem.key] if problem.key else [])
    return problem.key, problem.file, problem.what


def flipped(path: Path, offset: int) -> VerifyReport:
    file = only_file(path)
    flip_bit(file, offset, 4)
    report = verify(path)
    flip_bit(file, offset, 4)
    return report


def key_at(path: Path, offset: int) -> str:
    for key, info in _kinds.stored(path).items():
        if info.offset <= offset < info.offset + info.length:
            return key
    raise AssertionError(f"nobody owns byte {offset}")


# ---- whole checkpoints ----


@each_writer
def test_whole_checkpoints(originals: Path, writer: str) -> None:
    for quick in (False, True):
        before = open_descriptors()
        report = verify(originals / writer, quick=quick)
        assert report.ok and not report.notes and not report.unlisted
        assert (report.keys, report.records, report.files) == (9, 9, 1)
        assert report.bytes == only_file(originals / writer).stat().st_size
        assert not leaks_descriptors(before)
        assert str(report).startswith(f"ok  {originals / writer}: 6.5 MiB in 9 records of 1 file, ")


@each_writer
def test_every_kind_of_tensor(tmp_path: Path, writer: str) -> None:
    everything = _kinds.everything()
    dcp.save(everything | {"object": [1, "a"]}, no_dist=True, **WRITERS[writer](tmp_path))
    report = verify(tmp_path)
    assert report.ok and not report.notes and report.keys == len(everything) + 1


@each_writer
def test_an_empty_checkpoint(tmp_path: Path, writer: str) -> None:
    dcp.save({}, no_dist=True, **WRITERS[writer](tmp_path))
    report = verify(tmp_path)
    assert report.ok and (report.keys, report.records, report.bytes) == (0, 0, 0)


def test_a_save_without_checksums_says_so(tmp_path: Path) -> None:
    dcp.save(state(), no_dist=True, storage_writer=RingWriter(tmp_path, checksum=False))
    report = verify(tmp_path)
    assert report.ok and "5 records (6.5 MiB) were saved without checksums" in report.notes[0]
    flip_bit(only_file(tmp_path), storage_of(tmp_path, "matrix").offset + 5)
    assert the_problem(verify(tmp_path))[0] == "matrix"


# ---- damaged records ----


@pytest.mark.parametrize("writer", OURS)
def test_no_byte_of_ours_changes_unseen(copy: Callable[[str], Path], writer: str) -> None:
    path = copy(writer)
    file, chance = only_file(path), random.Random(1)
    small = [info for info in _kinds.stored(path).values() if info.length < 8000]
    offsets = [chance.randrange(file.stat().st_size) for _ in range(40)]
    offsets += [info.offset + chance.randrange(info.length) for info in small for _ in range(12)]
    for offset in offsets:
        report = flipped(path, offset)
        (problem,) = report.problems
        assert (problem.key, problem.file) == (key_at(path, offset), file.name)
        assert problem.offset <= offset < problem.offset + problem.length
    assert verify(path).ok


NOT_COVERED = {
    "local": {4, 5},  # the version needed to unpack it
    "central": {4, 5, 6, 7, 36, 37, 38, 39, 40, 41, 34, 35},  # versions, attributes, number of the disk
    "end64": {12, 13, 14, 15},  # versions
}
"""Of torch.save's zips: bytes that nothing else repeats, and nobody reads. And the padding of local headers."""


def uncovered(record: bytes) -> set[int]:
    found: set[int] = set()
    archive = zipfile.ZipFile(io.BytesIO(record))
    at = archive.start_dir
    for entry in archive.infolist():
        header = entry.header_offset
        name, extra = struct.unpack("<HH", record[header + 26 : header + 30])
        found |= {header + byte for byte in NOT_COVERED["local"]}
        found |= set(range(header + 30 + name, header + 30 + name + extra))
        later = entry.flag_bits & 8
        found |= set(range(header + 14, header + 26)) if later else set()
        found |= {at + byte for byte in NOT_COVERED["central"]}
        at += 46 + len(entry.filename) + len(entry.extra)
    return found | {at + byte for byte in NOT_COVERED["end64"]}


@pytest.mark.parametrize("key", ("matrix", "settings.lr", "empty"))
def test_what_of_stocks_records_is_covered(copy: Callable[[str], Path], key: str) -> None:
    path = copy("stock")
    info = storage_of(path, key)
    free = uncovered(_kinds.record(path, info))
    assert len(free) < info.length
    for at in range(0, info.length, 3 if key == "empty" else 11):
        report = flipped(path, info.offset + at)
        assert report.bad_keys == ([] if report.ok else [key])
        assert not report.ok or at in free, f"byte {at} of {key} changed unseen"


def test_flips_in_stocks_large_tensor(copy: Callable[[str], Path]) -> None:
    path, chance = copy("stock"), random.Random(2)
    info = storage_of(path, "large")
    for _ in range(10):
        report = flipped(path, info.offset + 2000 + chance.randrange(info.length - 4000))
        key, file, what = the_problem(report)
        assert (key, file) == ("large", only_file(path).name) and "its checksum does not match (CRC-32 is" in what


@each_writer
def test_a_page_of_zeros(copy: Callable[[str], Path], writer: str) -> None:
    """What a crash may leave: small records are gone with all that tells what they were."""
    path = copy(writer)
    gone = [key for key, info in _kinds.stored(path).items() if info.length < 3000]
    for key in gone:
        info = storage_of(path, key)
        with only_file(path).open("r+b") as stream:
            stream.seek(info.offset)
            stream.write(bytes(info.length))
    assert sorted(verify(path).bad_keys) == sorted(gone)


@each_writer
def test_several_faults_at_once(copy: Callable[[str], Path], writer: str) -> None:
    path = copy(writer)
    file, large, half = only_file(path), storage_of(path, "large"), storage_of(path, "half")
    flip_bit(file, large.offset + 3_000_000)
    flip_bit(file, large.offset + 6_000_000)
    flip_bit(file, half.offset + half.length - 2)
    report = verify(path)
    assert set(report.bad_keys) == {"large", "half"}
    assert len(report.problems) == (2 if writer == "stock" else 3)
    assert [p.offset for p in report.problems] == sorted(p.offset for p in report.problems)
    assert "BAD" in str(report) and "large" in str(report)


@each_writer
def test_quick_reads_headers_only(copy: Callable[[str], Path], writer: str) -> None:
    path = copy(writer)
    file, large = only_file(path), storage_of(path, "large")
    flip_bit(file, large.offset + 3_000_000)
    assert verify(path, quick=True).ok and not verify(path).ok
    flip_bit(file, large.offset + large.length - 10)
    assert verify(path, quick=True).bad_keys == ["large"]


# ---- files ----


@each_writer
@pytest.mark.parametrize("quick", (False, True))
def test_missing_and_short_files(copy: Callable[[str], Path], writer: str, quick: bool) -> None:
    path = copy(writer)
    file, last = only_file(path), max(_kinds.stored(path).items(), key=lambda item: item[1].offset)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    key, _, what = the_problem(verify(path, quick=quick))
    assert key == last[0] and what == "the file ends before it"
    os.truncate(file, 0)
    report = verify(path, quick=quick)
    assert {(p.what, p.offset) for p in report.problems} == {("its file ends before it", -1)}
    assert len(report.bad_keys) == 9 and len(report.rows()) == 1 and report.rows()[0][0].endswith(" and 8 more")
    file.unlink()
    report = verify(path, quick=quick)
    assert len(report.bad_keys) == 9 and {p.what for p in report.problems} == {"its file is missing"}


@each_writer
def test_bytes_and_files_that_no_key_is_in(copy: Callable[[str], Path], writer: str) -> None:
    path = copy(writer)
    with only_file(path).open("ab") as stream:
        stream.write(b"more")
    (path / "__7_0.distcp").write_bytes(b"left over")
    report = verify(path)
    assert report.ok and len(report.notes) == 2
    assert "4 bytes belong to no key" in report.notes[0] and "1 data file (9 B) that no key is in" in report.notes[1]


@each_writer
def test_a_dead_disk(copy: Callable[[str], Path], writer: str) -> None:
    path = copy(writer)
    drop_cache(path)
    with fault("pread", 1, errno.EIO, sticky=True):
        report = verify(path, options=IOOptions(engine="threads"))
    assert len(report.bad_keys) == 9
    assert {p.what for p in report.problems} == {"cannot be read: Input/output error"}
    assert verify(path).ok


@pytest.mark.parametrize("engine", ("uring", "threads"))
def test_a_read_that_fails_once(copy: Callable[[str], Path], engine: str) -> None:
    path = copy("planner")
    options = IOOptions(engine=engine, workers=1, queue_depth=1)  # type: ignore[arg-type]
    drop_cache(path)
    call = "uring_result" if engine == "uring" else "pread"
    clean = verify(path, options=options)
    assert clean.ok
    for nth in range(1, 8):
        drop_cache(path)
        with fault(call, nth):
            report = verify(path, options=options)
        assert report.ok or all("Input/output error" in p.what for p in report.problems)
        assert report.ok or report.bad_keys == ["large"]  # its header, which is read only once


# ---- metadata ----


def rewrite(path: Path, change: Callable[[Any], None], writer: str) -> None:
    """Changes the pickle; a trailer is made anew, so that its CRC is right."""
    file = path / ".metadata"
    parts = split_metadata(file.read_bytes(), file)
    metadata, trailer = load_metadata(file)
    change(metadata)
    pickled = pickle.dumps(metadata)
    file.write_bytes(pickled if trailer is None else join_metadata(pickled, trailer, bytes(parts.tables)))


@pytest.mark.parametrize("writer", OURS)
def test_every_byte_of_our_metadata(copy: Callable[[str], Path], writer: str) -> None:
    path, chance = copy(writer), random.Random(3)
    file = path / ".metadata"
    size = file.stat().st_size
    for offset in [*(chance.randrange(size - 16) for _ in range(25)), size - 16, size - 12]:
        flip_bit(file, offset, 2)
        report = verify(path)
        key, name, what = the_problem(report)
        assert (key, name) == (None, ".metadata") and "damaged" in what
        flip_bit(file, offset, 2)
    assert verify(path).ok


def test_damaged_metadata_of_stock(copy: Callable[[str], Path]) -> None:
    path = copy("stock")
    file = path / ".metadata"
    file.write_bytes(file.read_bytes()[:-30])
    assert "damaged or incomplete" in the_problem(verify(path))[2]
    file.unlink()
    assert "missing" in the_problem(verify(path))[2]


def test_what_is_no_checkpoint(tmp_path: Path, originals: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", originals, only_file(originals / "ring")):
        with pytest.raises(CheckpointError):
            verify(path)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_a_strangers_metadata_runs_no_code(copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = copy("stock")

    def change(metadata: Any) -> None:
        metadata.planner_data = Evil()

    rewrite(path, change, "stock")
    with pytest.raises(UntrustedCheckpointError):
        verify(path)
    assert "code ran" not in capsys.readouterr().out
    assert verify(path, trusted=True).ok


def test_a_large_pickle_is_compared_and_not_read(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million tensors its entries would take gigabytes."""
    path = copy("planner")
    read: list[Path] = []
    real = inspect_verify.entries_of_pickle

    def entries(parts: Any, path: Path, trusted: bool) -> Any:
        read.append(path)
        return real(parts, path, trusted)

    monkeypatch.setattr(inspect_verify, "entries_of_pickle", entries)
    assert verify(path).ok and len(read) == 1
    monkeypatch.setattr(inspect_verify, "_LARGE_PICKLE_BYTES", 0)
    assert verify(path).ok and len(read) == 1


@pytest.mark.parametrize("is_large", [False, True])
def test_the_two_forms_of_the_metadata_differ(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(inspect_verify, "_LARGE_PICKLE_BYTES", 0)
    path = copy("planner")

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["half"].properties.dtype = torch.float16

    rewrite(path, change, "planner")
    key, file, what = the_problem(verify(path))
    assert (key, file) == ("half", ".metadata") and "say different things" in what


def change_chunks(path: Path, key: str, chunks: list[tuple[list[int], list[int]]]) -> None:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[key]
        chunk, info = type(entry.chunks[0]), metadata.storage_data.pop(MetadataIndex(key, torch.Size([0])), None)
        info = info or metadata.storage_data.pop(MetadataIndex(key))
        entry.chunks = [chunk(torch.Size(o), torch.Size(n)) for o, n in chunks]
        for offsets, _ in chunks:
            metadata.storage_data[MetadataIndex(key, torch.Size(offsets))] = info

    rewrite(path, change, "stock")


@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([([0], [1000]), ([500], [500])], "its chunks overlap: they hold 1500 of 1000 elements"),
        ([([0], [400]), ([500], [500])], "its chunks leave a gap: they hold 900 of 1000 elements"),
        ([([0], [500]), ([400], [500])], "its chunks overlap, and leave a gap"),
        ([([0], [500]), ([600], [500])], "a chunk lies outside of its tensor of shape [1000]"),
    ],
)
def test_chunks_that_do_not_make_up_their_tensor(
    copy: Callable[[str], Path], chunks: list[tuple[list[int], list[int]]], what: str
) -> None:
    path = copy("stock")
    change_chunks(path, "half", chunks)
    assert ("half", ".metadata", what) in [(p.key, p.file, p.what) for p in verify(path).problems]


@pytest.mark.parametrize("writer", ("stock", "ring"))
def test_metadata_that_lies_about_records(copy: Callable[[str], Path], writer: str) -> None:
    lies: list[tuple[str, Callable[[Any], None]]] = [
        ("beyond the end of any file", lambda info: setattr(info, "length", 1 << 62 | 1 << 63)),
        ("outside of the checkpoint directory", lambda info: setattr(info, "relative_path", "../elsewhere")),
        ("a name in the metadata that none can have", lambda info: setattr(info, "relative_path", "a\0b")),
        ("shares bytes with another record", lambda info: setattr(info, "offset", info.offset - 10)),
        ("its file ends before it", lambda info: setattr(info, "offset", 1 << 40)),
    ]
    for what, lie in lies:
        path = copy(writer)

        def change(metadata: Any, lie: Callable[[Any], None] = lie) -> None:
            info = next(info for index, info in metadata.storage_data.items() if index.fqn == "half")
            info.__dict__.pop("ring", None)
            lie(info)

        rewrite(path, change, writer)
        assert what in " ".join(p.what for p in verify(path).problems if p.key == "half")
        shutil.rmtree(path)


def test_a_shape_that_is_not_the_records(copy: Callable[[str], Path]) -> None:
    path = copy("stock")
    change_chunks(path, "half", [([0], [999])])
    assert "its shape or dtype is not what the metadata says" in {p.what for p in verify(path).problems}


@pytest.mark.parametrize("writer", OURS)
def test_the_trailers_list_of_files(copy: Callable[[str], Path], writer: str) -> None:
    path = copy(writer)
    file = path / ".metadata"
    parts = split_metadata(file.read_bytes(), file)
    assert parts.trailer is not None
    name = parts.trailer.files[0]
    trailer = Trailer(files=["__1_0.distcp"], save_id=parts.trailer.save_id, version=parts.trailer.version)
    file.write_bytes(join_metadata(bytes(parts.pickled), trailer, bytes(parts.tables)))
    problems = [(p.file, p.what) for p in verify(path).problems]
    assert problems == [
        (name, ".metadata does not list it among its files: the next save would remove it"),
        ("__1_0.distcp", ".metadata lists it, but no key is in it"),
    ]


# ---- records that are not torch.save's usual ----


def replace(path: Path, key: str, data: bytes) -> None:
    (path / "__9_0.distcp").write_bytes(data)

    def change(metadata: Any) -> None:
        info = metadata.storage_data[MetadataIndex(key)]
        info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(data)

    rewrite(path, change, "stock")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_archives(copy: Callable[[str], Path], method: int) -> None:
    """torch.save makes none, and a few bytes could be any number: they are not unpacked."""
    path = copy("stock")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", method) as packed:
        packed.writestr("archive/data.pkl", bytes(5000))
    replace(path, "name", archive.getvalue())
    key, _, what = the_problem(verify(path))
    assert key == "name" and what.startswith("its entry 'archive/data.pkl' is compressed: ")


def test_objects_that_are_no_archives(copy: Callable[[str], Path]) -> None:
    path = copy("stock")
    legacy = io.BytesIO()
    torch.save({"a": 1}, legacy, _use_new_zipfile_serialization=False)
    replace(path, "name", legacy.getvalue())
    report = verify(path)
    assert report.ok and "1 record" in report.notes[0] and "without checksums" in report.notes[0]
    replace(path, "name", b"\0" * 300)
    assert the_problem(verify(path))[::2] == ("name", "it is no archive of torch.save")


# ---- several ranks ----


def _save_sharded(path: str, writer: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(70 * 1000.0).view(70, 1000)
    tied = torch.ones(500)
    sharded = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
    }
    dcp.save({**sharded, "embedding": tied, "head": tied}, **WRITERS[writer](path))


@each_writer
def test_sharded_and_tied(tmp_path: Path, writer: str) -> None:
    _distributed.run(2, _save_sharded, str(tmp_path), writer)
    report = verify(tmp_path)
    embedding, head = storage_of(tmp_path, "embedding"), storage_of(tmp_path, "head")
    tied = (embedding.relative_path, embedding.offset) == (head.relative_path, head.offset)
    assert tied == (writer != "stock")
    assert report.ok and not report.notes and (report.keys, report.files) == (4, 2)
    assert report.records == 6 - tied
    flip_bit(tmp_path / embedding.relative_path, embedding.offset + 1000)
    assert set(verify(tmp_path).bad_keys) == ({"embedding", "head"} if tied else {"embedding"})
    (tmp_path / storage_of(tmp_path, "rows").relative_path).unlink()
    assert {"rows", "columns"} <= set(verify(tmp_path).bad_keys)


def _save_alone(path: str) -> None:
    rank = dist.get_rank()
    dcp.save({f"rank{rank}": torch.full((4,), float(rank))}, storage_writer=RingWriter(path), use_collectives=False)


def test_rank_local_metadata(tmp_path: Path) -> None:
    _distributed.run(2, _save_alone, str(tmp_path))
    report = verify(tmp_path)
    assert report.ok and not report.notes and (report.keys, report.files) == (2, 2)
    file = tmp_path / "__1.metadata"
    info = next(iter(load_metadata(file)[0].storage_data.values()))  # type: ignore[union-attr]
    flip_bit(tmp_path / info.relative_path, info.offset + 5)
    assert the_problem(verify(tmp_path))[:2] == ("rank1", info.relative_path)
    file.unlink()
    report = verify(tmp_path)
    assert "are not of one save of 2 ranks: ranks 1 have none" in the_problem(report)[2]
    assert "1 data file" in report.notes[0]


def test_the_report_is_plain_data(originals: Path) -> None:
    from dataclasses import asdict

    document = json.loads(json.dumps(asdict(verify(originals / "ring"))))
    assert document["problems"] == [] and document["keys"] == 9
