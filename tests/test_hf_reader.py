"""RingHFReader, and RingReader where it is given safetensors: what others wrote comes back, and what is wrong is said
before a tensor is touched."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _distributed
import _kinds
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _hf import INDEX, KINDS, MIB, PLACED, Tied, save_shards, stored_in, tensors, with_crcs, write
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcpring
from dcpring import CheckpointError, CorruptCheckpointError, KeyMismatchError, RingHFReader, RingLoadPlanner, RingReader
from dcpring.format.safetensors import DTYPES

PLANNERS: dict[str, Any] = {"stock": DefaultLoadPlanner, "ring": RingLoadPlanner}


def load(state: dict[str, Any], reader: Any, planner: Any = None, **options: Any) -> None:
    """As ``dcp.load`` of one process; what a rank raised is raised."""
    try:
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True, **options)
    except CheckpointException as error:
        raise error.failures[0][0] from error


def refused(reader: RingReader, said: str, kind: type[Exception] = CorruptCheckpointError, **state: Tensor) -> None:
    """A path that leads to nothing that can be loaded. DCP tells the words of its metadata's errors, not the kind."""
    with pytest.raises(kind, match=said):
        reader.read_metadata()
    wanted = blank(state or tensors())
    with pytest.raises(CheckpointException):
        dcp.load(wanted, storage_reader=reader, planner=RingLoadPlanner(), no_dist=True)
    assert is_blank(wanted)


def blank(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: _kinds.poisoned(tensor) for name, tensor in state.items()}


def is_blank(state: dict[str, Tensor]) -> bool:
    return all(_kinds.raw(tensor) == _kinds.raw(_kinds.poisoned(tensor)) for tensor in state.values())


# ---- what is there comes back ----


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("reader", (RingReader, RingHFReader))
@pytest.mark.parametrize("kind", KINDS)
def test_what_others_wrote(tmp_path: Path, kind: str, reader: type[RingReader], planner: str) -> None:
    expected = tensors()
    if kind.startswith("stock"):  # which writes neither of them well
        del expected["scalar"], expected["empty"]
    path = write(tmp_path / "model", kind, expected)
    state = blank(expected)
    load(state, reader(str(path)), PLANNERS[planner]())
    _kinds.assert_same_bits(state, expected)


@pytest.mark.parametrize("name", ("model.safetensors", INDEX))
def test_a_path_may_be_that_of_a_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model", "index" if name == INDEX else "one file")
    state = blank(tensors())
    load(state, RingHFReader(path / name), RingLoadPlanner())
    _kinds.assert_same_bits(state, tensors())


def test_every_dtype(tmp_path: Path) -> None:
    expected = {called: _kinds.random(dtype, 6, 4) for called, dtype in DTYPES.items()}
    save_file(expected, tmp_path / "model.safetensors")
    state = blank(expected)
    load(state, RingHFReader(tmp_path), RingLoadPlanner())
    _kinds.assert_same_bits(state, expected)


def test_the_file_goes_before_the_index(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "index")
    save_file({name: tensor + 1 for name, tensor in tensors().items()}, path / "model.safetensors")
    state = blank(tensors())
    load(state, RingHFReader(path))
    assert torch.equal(state["whole"], tensors()["whole"] + 1)


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "index")
    save_file({"stale": torch.ones(3)}, path / "model-00001-of-00009.safetensors")
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (path / name).write_text("{}")
    state = blank(tensors())
    load(state, RingReader(path), RingLoadPlanner(unexpected="error"))
    _kinds.assert_same_bits(state, tensors())


def test_the_index_is_not_there(tmp_path: Path) -> None:
    """Files of two saves may have such names: nothing tells that they are of one."""
    path = write(tmp_path / "model", "index")
    (path / INDEX).unlink()
    for left in ("00001", "00003"):  # until the last of them is there alone
        refused(
            RingHFReader(path), rf"holds parts of a model, .*{left}.*, and no index of them, {INDEX}", CheckpointError
        )
        (path / f"model-{left}-of-00003.safetensors").unlink()
    refused(RingHFReader(path), r"holds parts of a model, model-00002-of-00003\.safetensors, and", CheckpointError)


def test_a_checkpoint_of_dcp_stays_one(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=dcpring.RingWriter(tmp_path), no_dist=True)
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    state = {"a": torch.full((3,), 5.0)}
    load(state, RingReader(tmp_path))
    assert state["a"].tolist() == [1, 1, 1]
    load(state, RingHFReader(tmp_path))
    assert state["a"].tolist() == [0, 0, 0]


def test_paths_that_lead_to_none(tmp_path: Path) -> None:
    refused(RingHFReader(tmp_path / "nowhere"), "nowhere does not exist", CheckpointError)
    refused(RingHFReader(tmp_path), "holds no safetensors", CheckpointError)
    for name in "ab":
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    for reader in (RingHFReader, RingReader):
        refused(reader(tmp_path), r"several models; name one of a\.safetensors, b\.safetensors", CheckpointError)


def test_casts_and_names(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "index")
    state = {"net.rows": torch.zeros(1030, 257, dtype=torch.float64)}
    load(state, RingHFReader(path, key_map={"prefixes": {"": "net."}}), RingLoadPlanner())
    assert torch.equal(state["net.rows"], tensors()["rows"].double())
    with pytest.raises(CheckpointError, match="can lose values"):
        load({"rows": torch.zeros(1030, 257, dtype=torch.int32)}, RingHFReader(path))
    with pytest.raises(KeyMismatchError, match=r"'rowz'"):
        load({"rowz": torch.zeros(1030, 257)}, RingHFReader(path), RingLoadPlanner())


def test_what_stock_takes(tmp_path: Path) -> None:
    """Positions and names of its arguments; and a reader is one of stock's."""
    path = write(tmp_path / "model", "one file")
    reader = RingHFReader(str(path), 4)
    assert isinstance(reader, HuggingFaceStorageReader) and isinstance(reader, RingReader)
    assert RingHFReader(path=str(path), thread_count=2).thread_count == 2
    metadata, stocks = reader.read_metadata(), HuggingFaceStorageReader(str(path)).read_metadata()
    assert metadata.state_dict_metadata.keys() == stocks.state_dict_metadata.keys()
    for name, entry in metadata.state_dict_metadata.items():
        theirs = stocks.state_dict_metadata[name]
        assert (entry.size, entry.properties.dtype, entry.chunks) == (
            *(theirs.size, theirs.properties.dtype, theirs.chunks),
        )


def test_without_a_state_dict(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "index")
    _kinds.assert_same_bits(dcpring.load(path), tensors())
    found = _load_state_dict_from_keys({"whole"}, storage_reader=RingHFReader(path))
    assert found.keys() == {"whole"} and torch.equal(found["whole"], tensors()["whole"])


# ---- tied ----


@pytest.mark.parametrize("planner", PLANNERS)
def test_tied_names(tmp_path: Path, planner: str) -> None:
    """safetensors writes one of the names, and the other into the notes."""
    model = Tied()
    save_model(model, str(tmp_path / "model.safetensors"))
    assert len(load_file(tmp_path / "model.safetensors")) == 1
    state = {name: torch.zeros(700, 500) for name in model.state_dict()}
    load(state, RingHFReader(tmp_path), PLANNERS[planner]())
    assert all(torch.equal(tensor, model.head.weight) for tensor in state.values())
    reader = RingHFReader(tmp_path)
    load(state, reader, RingLoadPlanner())
    assert reader.stats is not None and reader.stats.bytes < 1.1 * model.head.weight.nbytes, "read once"


def test_notes_that_tie_nothing(tmp_path: Path) -> None:
    given = {"pt": torch.ones(1), "a": torch.ones(2), "b": torch.zeros(3)}
    save_file(given, tmp_path / "model.safetensors", {"format": "pt", "b": "a", "c": "nothing"})
    metadata = RingHFReader(tmp_path).read_metadata()
    assert set(metadata.state_dict_metadata) == {"pt", "a", "b"}
    assert metadata.state_dict_metadata["b"].size == (3,)


# ---- checksums that dcpring has noted ----


def test_checksums_are_compared(tmp_path: Path) -> None:
    given = {"small": torch.randn(9), "large": torch.randn(3 * MIB // 4 + 5), "none": torch.empty(0)}
    path = tmp_path / "model.safetensors"
    with_crcs(path, given)
    state = blank(given)
    load(state, RingHFReader(tmp_path), RingLoadPlanner())
    _kinds.assert_same_bits(state, given)
    _kinds.assert_same_bits(load_file(path), given)
    where = stored_in(path)["large"].begin + 2 * MIB
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    for planner in PLANNERS.values():
        with pytest.raises(CorruptCheckpointError, match=r"'large'.*CRC-32"):
            load(blank(given), RingHFReader(tmp_path), planner())


@pytest.mark.parametrize(
    "note",
    (
        lambda sums: "{",
        lambda sums: "[]",
        lambda sums: "{}",
        lambda sums: json.dumps(sums | {"b": 7}),
        lambda sums: json.dumps(sums | {"b": "xy" * 4}),
        lambda sums: json.dumps(sums | {"b": sums["b"] + "00"}),
    ),
)
def test_damaged_checksums(tmp_path: Path, note: Callable[[dict[str, str]], str]) -> None:
    with_crcs(tmp_path / "model.safetensors", {"a": torch.ones(3), "b": torch.ones(3)}, note)
    refused(RingHFReader(tmp_path), r"the note dcpring\.crcs in the header is damaged", a=torch.zeros(3))


# ---- what is wrong is said before a tensor is touched ----


def damaged(path: Path, change: Callable[[Path, dict[str, Any]], str]) -> str:
    """Changes a directory with an index; gives what is to be said."""
    index = json.loads((path / INDEX).read_text())
    said = change(path, index)
    (path / INDEX).write_text(json.dumps(index))
    return said


def no_shard(path: Path, index: dict[str, Any]) -> str:
    (path / "model-00002-of-00003.safetensors").unlink()
    return r"index\.json: .*model-00002-of-00003\.safetensors is not there"


def cut_off(path: Path, index: dict[str, Any]) -> str:
    file = path / "model-00001-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 3)
    return r"00001.*cut off: the header describes \d+ bytes of data, and there are \d+; fetch or save it again"


def of_git_lfs(path: Path, index: dict[str, Any]) -> str:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (path / "model-00001-of-00003.safetensors").write_text(pointer)
    return r"00001.*git lfs pull"


def in_another_file(path: Path, index: dict[str, Any]) -> str:
    index["weight_map"]["rows"] = "model-00003-of-00003.safetensors"
    return "'rows' is not in 'model-00003-of-00003.safetensors', where the index says"


def outside(path: Path, index: dict[str, Any]) -> str:
    index["weight_map"]["rows"] = "../model-00001-of-00003.safetensors"
    return "names .../model-00001-of-00003.safetensors., which is no file beside it"


def outside_by_a_link(path: Path, index: dict[str, Any]) -> str:
    (path.parent / "elsewhere").mkdir()
    (path / "model-00001-of-00003.safetensors").rename(path.parent / "elsewhere" / "a.safetensors")
    (path / "below").symlink_to(Path("..", "elsewhere"))
    files = index["weight_map"]
    files.update({name: "below/a.safetensors" for name, file in files.items() if "00001" in file})
    return r"names 'below/a\.safetensors', which is no file beside it or below"


def no_map(path: Path, index: dict[str, Any]) -> str:
    del index["weight_map"]
    return "no index of safetensors files"


def overlapping(path: Path, index: dict[str, Any]) -> str:
    def change(header: dict[str, Any]) -> None:
        header["columns"]["data_offsets"] = [header["columns"]["data_offsets"][0] - 2] * 2

    rewrite(path / "model-00002-of-00003.safetensors", change)
    return "the header is damaged"


def other_dtype(path: Path, index: dict[str, Any]) -> str:
    def change(header: dict[str, Any]) -> None:
        header["columns"]["dtype"] = "F64"

    rewrite(path / "model-00002-of-00003.safetensors", change)
    return r"'columns' has \d+ bytes for F64"


CHANGES = (no_shard, cut_off, of_git_lfs, in_another_file, outside, outside_by_a_link, no_map, overlapping, other_dtype)


def a_folder(path: Path, index: dict[str, Any]) -> str:
    (path / "model-00002-of-00003.safetensors").unlink()
    (path / "model-00002-of-00003.safetensors").mkdir()
    return "not a regular file"


def a_fifo(path: Path, index: dict[str, Any]) -> str:
    (path / "model-00002-of-00003.safetensors").unlink()
    os.mkfifo(path / "model-00002-of-00003.safetensors")
    return "not a regular file"


def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a file's header."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + data[8 + size :])


@pytest.mark.parametrize("reader", (RingReader, RingHFReader))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wanted", ("rows", "whole"))
def test_damage(tmp_path: Path, change: Any, reader: type[RingReader], wanted: str) -> None:
    """Whether or not what is wanted is damaged itself."""
    path = write(tmp_path / "model", "index")
    refused(reader(path), damaged(path, change), **{wanted: tensors()[wanted]})


@pytest.mark.parametrize("change", (a_folder, a_fifo))
def test_what_is_no_file(tmp_path: Path, change: Any) -> None:
    path = write(tmp_path / "model", "index")
    refused(RingReader(path), damaged(path, change))


@pytest.mark.parametrize("when", ("before", "while"))
def test_a_file_that_is_written_anew(tmp_path: Path, when: str) -> None:
    """Between its header and its data, and while they are read."""
    path = write(tmp_path / "model", "one file")
    other = write(tmp_path / "other", "one file", {name: tensor.clone() for name, tensor in tensors().items()})
    os.utime(other / "model.safetensors", (1, 1))

    class Planner(RingLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            if when == "before":
                shutil.move(other / "model.safetensors", path / "model.safetensors")
            return super().finish_plan(new_plan)

        def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
            if when == "while" and (other / "model.safetensors").exists():
                shutil.move(other / "model.safetensors", path / "model.safetensors")

    state = blank(tensors())
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: written anew"):
        load(state, RingHFReader(path), Planner())
    assert is_blank(state) == (when == "before")


# ---- several ranks ----


def placed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, PLACED[name]) if name in PLACED else tensor.clone()
        for name, tensor in given.items()
    }


def load_placed(path: str, names: list[str], planner: str, options: dict[str, Any]) -> dict[str, Any]:
    expected = {name: tensor for name, tensor in tensors().items() if name in names}
    state = placed(expected)
    reader = RingHFReader(path)
    group = dist.group.WORLD if options else None
    made = RingLoadPlanner(process_group=group, **options) if planner == "ring" else DefaultLoadPlanner()
    dcp.load(state, storage_reader=reader, planner=made)
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected[name]), name
    assert reader.stats is not None
    return {"bytes": reader.stats.bytes, "share": made.report().share if planner == "ring" else None}


@pytest.mark.parametrize("planner, options", (("stock", {}), ("ring", {}), ("ring", {"share": "host"})))
@pytest.mark.parametrize("kind", ("one file", "links", "stock's shards"))
def test_sharded(tmp_path: Path, kind: str, planner: str, options: dict[str, Any]) -> None:
    names = [name for name in tensors() if not (kind == "stock's shards" and name in ("scalar", "empty"))]
    path = write(tmp_path / "model", kind, {name: tensors()[name] for name in names})
    got = _distributed.run(4, load_placed, str(path), names, planner, options)
    if options:
        assert {one["share"] for one in got} == {"host"}
        needed = sum(tensor.nbytes for name, tensor in tensors().items() if name in names)
        assert sum(one["bytes"] for one in got) <= 1.1 * needed + 4 * 64


def test_shards_of_all_ranks(tmp_path: Path) -> None:
    _distributed.run(4, save_shards, str(tmp_path))
    for world_size in (4, 2):
        _distributed.run(world_size, load_placed, str(tmp_path), list(PLACED), "ring", {"share": "host"})
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    refused(RingHFReader(tmp_path), "cannot be put together: its chunks leave a gap")


def load_large(path: str, name: str, shape: tuple[int, ...], share: str) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(torch.zeros(shape, dtype=torch.bfloat16), mesh, [Shard(int(name))])}
    reader = RingHFReader(path)
    options: dict[str, Any] = {"process_group": dist.group.WORLD, "share": share}
    dcp.load(state, storage_reader=reader, planner=RingLoadPlanner(**options))
    whole = state[name].full_tensor()
    assert torch.equal(whole, torch.arange(whole.numel()).bfloat16().view(shape))
    assert reader.stats is not None
    return reader.stats.bytes


@pytest.mark.parametrize("dimension, share", ((0, "off"), (0, "host"), (1, "host")))
def test_only_what_is_needed_is_read(tmp_path: Path, dimension: int, share: str) -> None:
    shape = (1000, 4000)
    given = {name: torch.arange(4_000_000).bfloat16().view(shape) for name in ("0", "1", "2")}
    path = write(tmp_path / "model", "one file", given)
    read = sum(_distributed.run(4, load_large, str(path), str(dimension), shape, share))
    assert read <= 1.1 * given["0"].nbytes


def load_columns(path: str, options: dict[str, Any]) -> tuple[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.zeros(3000, 1024), mesh, [Shard(1)])}
    reader = RingHFReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=RingLoadPlanner())
    assert torch.equal(state["w"].full_tensor(), torch.arange(3000 * 1024.0).view(3000, 1024))
    assert reader.stats is not None
    return reader.stats.engine, reader.stats.cached_bytes


@pytest.mark.parametrize("kind", ("one file", "ours"))
@pytest.mark.parametrize(
    "options, engine", (({}, "mmap"), ({"direct": False}, "mmap"), ({"engine": "threads"}, "threads"))
)
def test_columns_come_from_where_the_page_cache_has_them(
    tmp_path: Path, kind: str, options: dict[str, Any], engine: str
) -> None:
    """Without a copy, and whether or not there are checksums, unless an engine is asked for."""
    path = write(tmp_path / "model", kind, {"w": torch.arange(3000 * 1024.0).view(3000, 1024)})
    for found, cached in _distributed.run(4, load_columns, str(path), options):
        assert found == engine and (cached > 0 or engine != "mmap")


def columns_fail(path: str) -> list[int]:
    with pytest.raises(CheckpointException, match="CRC-32") as caught:
        load_columns(path, {})
    return sorted(caught.value.failures)


def test_damage_between_columns_is_found(tmp_path: Path) -> None:
    """Where there are checksums all bytes are looked at, though few are wanted."""
    path = write(tmp_path / "model", "ours", {"w": torch.arange(3000 * 1024.0).view(3000, 1024)})
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-10] ^= 1  # of the last columns
    file.write_bytes(data)
    assert _distributed.run(2, columns_fail, str(path)) == [[0, 1], [0, 1]]


def all_fail(path: str) -> tuple[str, list[int]]:
    state = {"rows": torch.zeros(1030, 257)}
    try:
        dcp.load(state, storage_reader=RingHFReader(path), planner=RingLoadPlanner())
    except CheckpointException as error:
        assert not state["rows"].any()
        return str(error), sorted(error.failures)
    return "nothing", []


def test_ranks_fail_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "index")
    (path / "model-00003-of-00003.safetensors").unlink()
    for text, ranks in _distributed.run(2, all_fail, str(path)):
        assert ranks == [0, 1]
        assert text.count("model-00003-of-00003.safetensors is not there") >= 2


# ---- installed ----


def test_installed(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "index")
    with dcpring.install():
        assert type(HuggingFaceStorageReader(str(path), thread_count=3)) is RingHFReader
        state = blank(tensors())
        load(state, None, checkpoint_id=path)
        _kinds.assert_same_bits(state, tensors())
        state = blank(tensors())
        load(state, HuggingFaceStorageReader(str(path)))
        _kinds.assert_same_bits(state, tensors())
    assert type(HuggingFaceStorageReader(str(path))) is HuggingFaceStorageReader


# ---- headers that nobody has written ----

_NUMBERS = ("0", "-1", "1.5", "true", "null", "9" * 25, "1e9", '"1"', "[]", str(1 << 62))


def mutated(header: bytes, chance: random.Random) -> bytes:
    """A header in which something is another number, or bytes are others, gone, or there twice."""
    kind = chance.randrange(4)
    at = chance.randrange(len(header))
    if kind == 0:
        numbers = [match.span() for match in re.finditer(rb"\d+", header)]
        begin, end = chance.choice(numbers)
        return header[:begin] + chance.choice(_NUMBERS).encode() + header[end:]
    if kind == 1:
        return header[:at] + bytes([header[at] ^ 1 << chance.randrange(8)]) + header[at + 1 :]
    length = chance.randrange(1, 30)
    return header[:at] + (header[at : at + length] * 2 if kind == 2 else b"") + header[at + length :]


@pytest.mark.parametrize("kind", ("one file", "stock's shards", "checksums"))
def test_random_headers(tmp_path: Path, kind: str) -> None:
    """Each is refused with one of our errors, or means tensors that lie in the file."""
    given = {name: tensor for name, tensor in tensors().items() if name not in ("rows", "scalar", "empty")}
    if kind == "checksums":
        with_crcs(tmp_path / "model.safetensors", given)
    else:
        write(tmp_path / "x", kind, given)
        next((tmp_path / "x").glob("*.safetensors")).rename(tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    chance, refusals = random.Random(kind), 0
    for _ in range(500):
        header = mutated(data[8 : 8 + size], chance)
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        try:
            metadata = RingReader(tmp_path).read_metadata()
            assert metadata.state_dict_metadata is not None
            for stored in stored_in(file).values():
                assert 8 + len(header) <= stored.begin <= stored.end <= file.stat().st_size
        except CheckpointError:
            refusals += 1
    assert 250 < refusals < 500
