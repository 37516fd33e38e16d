"""What headers and indices of safetensors say of themselves: their own CRC-32, which notes are ties, and what of them
is not known here."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

import dcpring
from dcpring import (
    CheckpointError,
    CorruptCheckpointError,
    RingHFReader,
    RingHFWriter,
    RingLoadPlanner,
    RingSavePlanner,
)
from dcpring.format.model_files import INDEX_NAME, MODEL_NAME, read_model


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=RingHFWriter(path, **options), planner=RingSavePlanner(), no_dist=True)


def load(path: Path, **state: torch.Tensor) -> None:
    dcp.load(state, storage_reader=RingHFReader(path), planner=RingLoadPlanner(), no_dist=True)


def put(path: Path, header: Any, data: bytes = b"") -> None:
    """A file of this header, given as JSON or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def keys(path: Path) -> list[str]:
    return list(RingHFReader(path).read_metadata().state_dict_metadata)


# ---- checksums ----


def changed(path: Path, first: int, last: int) -> Iterator[int]:
    """The file with one bit of each of these bytes changed in turn, and then as it was."""
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for at in range(first, last):
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << at % 8]))
            yield at
            file.seek(at)
            file.write(data[at : at + 1])


def missed(path: Path, file: Path, first: int, last: int) -> list[int]:
    """The changes that are not noticed."""
    found = []
    for at in changed(file, first, last):
        try:
            read_model(path)
            found.append(at)
        except CorruptCheckpointError:
            pass
    read_model(path)
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_every_byte_of_a_header(tmp_path: Path, tied: bool) -> None:
    weight = torch.ones(4, 4)
    save(tmp_path, {"weight": weight, "other": torch.ones(3), **({"a.weight": weight} if tied else {})})
    file = tmp_path / MODEL_NAME
    size = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert missed(tmp_path, file, 0, size) == []


def test_every_byte_of_an_index(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(4, 4), "other": torch.ones(3)}, max_shard_bytes=20)
    index = tmp_path / INDEX_NAME
    name = index.read_bytes().index(b'"dcpring.crc32"')
    # Without its name it is not known for what it is: then it alone is what has changed.
    unseen = set(range(name, name + 17)) | set(range(5, 13))
    assert set(missed(tmp_path, index, 0, index.stat().st_size)) <= unseen


def test_another_dtype_in_a_header_is_found_by_all(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    dcpring.save_pretrained_weights(model, tmp_path)
    file = tmp_path / MODEL_NAME
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    (problem,) = dcpring.verify(tmp_path).problems
    assert problem.file == MODEL_NAME and "header is damaged (its CRC-32 is" in problem.what
    weight = torch.full((4, 4), 7.0)
    with pytest.raises(CheckpointException, match="fetch or save it again"):
        load(tmp_path, weight=weight)
    with pytest.raises(CheckpointError, match="CRC-32"):
        dcpring.load_pretrained(model, tmp_path)
    assert bool((weight == 7).all())


def test_without_checksums_there_is_none(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(3)}, checksum=False)
    with safe_open(tmp_path / MODEL_NAME, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    load(tmp_path, w=torch.zeros(3))


def test_an_index_that_is_written_anew(tmp_path: Path) -> None:
    """By a program that keeps what it does not know, or leaves it out."""
    save(tmp_path, {"weight": torch.ones(4, 4), "other": torch.ones(3)}, max_shard_bytes=20)
    index = tmp_path / INDEX_NAME
    said = json.loads(index.read_text())
    index.write_text(json.dumps(said, indent=4))
    with pytest.raises(CorruptCheckpointError, match=r"CRC-32.*notes that begin with 'dcpring'"):
        read_model(tmp_path)
    del said["metadata"]["dcpring.crc32"]
    index.write_text(json.dumps(said, indent=4))
    assert sorted(keys(tmp_path)) == ["other", "weight"]


# ---- ties ----


def test_a_free_note_is_no_key(tmp_path: Path) -> None:
    notes = {"format": "pt", "author": "w", "lm_head.weight": "embed.weight", "x.bias": "w"}
    save_file({"w": torch.ones(3), "embed.weight": torch.ones(2)}, tmp_path / MODEL_NAME, metadata=notes)
    assert sorted(keys(tmp_path)) == ["embed.weight", "lm_head.weight", "w"]


@pytest.mark.parametrize("how", ["save", "convert", "convert to shards"])
def test_ties_are_told_from_free_notes(tmp_path: Path, how: str) -> None:
    weight = torch.arange(6.0)
    if how == "save":
        save(tmp_path / "a", {"one": weight, "another": weight, "x": torch.ones(2)})
        path = tmp_path / "a" / MODEL_NAME
    else:
        file = tmp_path / "from.safetensors"
        save(tmp_path / "b", {"one": weight, "another": weight, "x": torch.ones(2)})
        dcpring.convert(tmp_path / "b", file)
        tensors = load_file(file)
        with safe_open(file, "pt") as opened:
            save_file(tensors, file, metadata={**opened.metadata(), "author": "x"})
        path = tmp_path / ("to.safetensors" if how == "convert" else "to")
        dcpring.convert(file, path, shard_bytes=None if how == "convert" else 10)
    assert sorted(keys(path)) == ["another", "one", "x"]
    with safe_open(path if path.is_file() else path / "model-00001-of-00002.safetensors", "pt") as opened:
        assert opened.metadata().get("author") == (None if how == "save" else "x")


def test_a_damaged_list_of_ties(tmp_path: Path) -> None:
    for listed in ("[", "3", '[["w"]]', "[" * 100_000):
        save_file({"w": torch.ones(3)}, tmp_path / MODEL_NAME, metadata={"v": "w", "dcpring.tied": listed})
        with pytest.raises(CorruptCheckpointError, match=r"dcpring.tied is damaged"):
            read_model(tmp_path)


# ---- what is not known here ----


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1"])
def test_headers_are_utf8(tmp_path: Path, encoding: str) -> None:
    header = {"é": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    put(tmp_path / MODEL_NAME, json.dumps(header, ensure_ascii=False).encode(encoding), bytes(4))
    with pytest.raises(CorruptCheckpointError, match="the header is damaged"):
        read_model(tmp_path)
    put(tmp_path / MODEL_NAME, json.dumps(header, ensure_ascii=False).encode(), bytes(4))
    assert keys(tmp_path) == ["é"]


def with_unknown(path: Path) -> None:
    header = {
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [6, 14]},
        "small": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]},
    }
    put(path, header, bytes(6) + torch.ones(2).numpy().tobytes())


def test_a_dtype_that_torch_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_unknown(tmp_path / MODEL_NAME)
    w = torch.zeros(2)
    with caplog.at_level(logging.WARNING, "dcpring"):
        load(tmp_path, w=w)
    assert w.tolist() == [1, 1]
    assert "'small' cannot be loaded: torch has no dtype F6_E2M3" in caplog.text
    with pytest.raises(CheckpointException, match=r"(?s)missing from the checkpoint.*'small'"):
        load(tmp_path, w=w, small=torch.zeros(8))
    report = dcpring.verify(tmp_path)
    assert not report.problems and any("6 bytes belong to no key" in note for note in report.notes)


def test_converting_what_torch_lacks(tmp_path: Path) -> None:
    with_unknown(tmp_path / MODEL_NAME)
    with pytest.raises(CheckpointError, match=r"lacks the dtypes of 'small'; leave them out with --exclude"):
        dcpring.convert(tmp_path, tmp_path / "out")
    dcpring.convert(tmp_path, tmp_path / "out", exclude="small")
    assert list(dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata) == ["w"]


@pytest.mark.parametrize("offsets", [[0, 5], [1, 6], [6, 0], [0, True], ["0", 6]])
def test_an_unknown_dtype_lies_among_the_others(tmp_path: Path, offsets: list[Any]) -> None:
    header = {
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [6, 14]},
        "small": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": offsets},
    }
    put(tmp_path / MODEL_NAME, header, bytes(14))
    with pytest.raises(CorruptCheckpointError):
        read_model(tmp_path)


def test_errors_about_many_names_are_short(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    names = [f"layers.{i}.{'abcdefghijklmnopqrstuvwxyz'[i % 26]}{i % 999}.w{i * i}" for i in range(3000)]
    put(tmp_path / MODEL_NAME, dict.fromkeys([*names, *(f"every.{3 * i}.one" for i in range(999))], entry))
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, missing=torch.zeros(2))
    said = str(caught.value).partition("does not fit")[2]
    assert "unexpected in the checkpoint (3999)" in said and "and 2981 more" in said
    assert len(said) < 3000
    with pytest.raises(CheckpointException, match=r"does not fit") as caught:
        load(tmp_path, **{f"other{i * i}": torch.zeros(2) for i in range(3000)})
    assert len(str(caught.value).partition("does not fit")[2]) < 6000


def test_numbers_that_are_no_ranges_are_short(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    put(tmp_path / MODEL_NAME, dict.fromkeys([f"every.{3 * i}.one" for i in range(999)], entry))
    with pytest.raises(CheckpointException, match=r"every\.0,3,6,.*,\.\.\.,2994\.one"):
        load(tmp_path, missing=torch.zeros(2))
