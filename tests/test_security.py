"""A checkpoint from a stranger: nothing in it runs, reads or removes what it should not, unless it is trusted."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _cli
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import (
    MIB,
    StateDict,
    blank,
    data_files,
    equal,
    failure,
    load,
    need_root,
    quiet,
    save,
    small_state,
    storage_of,
    tensor_state,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import dcpring
from dcpring import (
    Checkpointer,
    CheckpointError,
    CorruptCheckpointError,
    Replicated,
    RingReader,
    RingWriter,
    UntrustedCheckpointError,
    saved_key_map,
)
from dcpring.format.metadata import OPAQUE, load_metadata, placed_of

STATE = small_state(1)


def refusal(path: Path, like: StateDict = STATE, **options: Any) -> str:
    """The text of the error that loading must give."""
    with pytest.raises(CheckpointException) as caught:
        load(like, path, **options)
    return str(failure(caught.value))


def stock_metadata(path: Path) -> Metadata:
    metadata, _ = load_metadata(path / ".metadata")
    return metadata


def write_metadata(path: Path, metadata: Any) -> None:
    """As stock would: a bare pickle."""
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def changed(path: Path, change: Callable[[Metadata], None]) -> None:
    metadata = stock_metadata(path)
    change(metadata)
    write_metadata(path, metadata)


# ---- pickles that want to run code ----


class Reduced:
    """Unpickles as the result of a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def touch(canary: Path) -> Reduced:
    return Reduced(os.system, f"touch {canary}")


def line(text: str) -> bytes:
    return text.encode() + b"\n"


def string(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes([len(data)]) + data if len(data) < 256 else b"X" + struct.pack("<I", len(data)) + data


def by_reduce(canary: Path) -> bytes:
    return pickle.dumps(touch(canary))


def by_old_protocol(canary: Path) -> bytes:
    return pickle.dumps(touch(canary), protocol=0)


def by_inst(canary: Path) -> bytes:
    return b"(Vtouch " + str(canary).encode() + b"\nios\nsystem\n."


def by_obj(canary: Path) -> bytes:
    return b"(cos\nsystem\n" + string(f"touch {canary}") + b"o."


def by_dotted_name(canary: Path) -> bytes:
    """STACK_GLOBAL with a qualified name that starts at something harmless."""
    call = string("torch") + string("serialization.os.system") + b"\x93" + string(f"touch {canary}") + b"\x85R."
    return b"\x80\x04" + call


def by_dotted_allowed_class(canary: Path) -> bytes:
    module = "torch.distributed.checkpoint.metadata"
    call = string(module) + string("Metadata.__init__.__globals__") + b"\x93."
    return b"\x80\x04" + call


def by_torch_load(canary: Path) -> bytes:
    inner = canary.with_suffix(".pt")
    torch.save(touch(canary), inner)
    return b"ctorch\nload\n" + string(str(inner)) + b"\x85R."


def by_planner_data(canary: Path) -> bytes:
    return pickle.dumps(Metadata({}, planner_data={"nested": [touch(canary)]}, storage_data={}))


def by_storage_meta(canary: Path) -> bytes:
    return pickle.dumps(Metadata({}, storage_data={}, storage_meta=touch(canary)))


def by_build(canary: Path) -> bytes:
    """BUILD with a __setstate__ that the instance was given just before."""
    info = b"c" + line("torch.distributed.checkpoint.filesystem") + line("_StorageInfo") + b")\x81"
    return b"\x80\x04" + info + b"}" + string("__setstate__") + b"cos\nsystem\nsb" + string(f"touch {canary}") + b"b."


def by_extension(canary: Path) -> bytes:
    """A number of the copyreg registry, where os.system has one."""
    return b"\x80\x04\x82\xf0" + string(f"touch {canary}") + b"\x85R."


ATTACKS = [
    by_reduce,
    by_old_protocol,
    by_inst,
    by_obj,
    by_dotted_name,
    by_dotted_allowed_class,
    by_torch_load,
    by_planner_data,
    by_storage_meta,
    by_build,
    by_extension,
]


@pytest.fixture
def registered_extension() -> Any:
    import copyreg

    copyreg.add_extension("os", "system", 0xF0)
    yield
    copyreg.remove_extension("os", "system", 0xF0)


@pytest.mark.usefixtures("registered_extension")
@pytest.mark.parametrize("attack", ATTACKS)
def test_metadata_does_not_run(tmp_path: Path, attack: Callable[[Path], bytes]) -> None:
    path, canary = tmp_path / "checkpoint", tmp_path / "canary"
    save(STATE, path)
    (path / ".metadata").write_bytes(attack(canary))
    message = refusal(path)
    assert not canary.exists()
    assert "trusted=True" in message
    assert "safe_globals=[" in message
    assert str(path / ".metadata") in message
    named = {by_torch_load: "torch.load", by_dotted_allowed_class: "Metadata", by_extension: "EXT1"}
    assert named.get(attack, "system") in message


@pytest.mark.parametrize("attack", (by_reduce, by_inst, by_build))
def test_saving_over_malicious_metadata_does_not_run_it(tmp_path: Path, attack: Callable[[Path], bytes]) -> None:
    path, canary = tmp_path / "checkpoint", tmp_path / "canary"
    dcp.save(STATE, storage_writer=FileSystemWriter(path), no_dist=True)
    (path / ".metadata").write_bytes(attack(canary))
    save(STATE, path)
    assert not canary.exists()
    assert equal(load(STATE, path), STATE)


def test_the_attacks_would_work(tmp_path: Path) -> None:
    """Else the tests above show nothing."""
    for attack in (by_reduce, by_old_protocol, by_inst, by_obj, by_dotted_name, by_build):
        canary = tmp_path / attack.__name__
        pickle.loads(attack(canary))
        assert canary.exists(), attack.__name__


def test_trusted_opens_it(tmp_path: Path) -> None:
    path, canary = tmp_path / "checkpoint", tmp_path / "canary"
    save(STATE, path)
    metadata = stock_metadata(path)
    metadata.planner_data = touch(canary)
    write_metadata(path, metadata)
    assert equal(load(STATE, path, trusted=True), STATE)
    assert canary.exists()


class Mine:
    """A class of the user's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and self.value == other.value


def test_safe_globals_open_what_they_name(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    metadata = stock_metadata(tmp_path)
    metadata.planner_data = Mine(3)
    write_metadata(tmp_path, metadata)
    assert "test_security.Mine" in refusal(tmp_path)
    assert equal(load(STATE, tmp_path, safe_globals=[Mine]), STATE)


def class_setting(name: str, attribute: str) -> bytes:
    """BUILD on a class sets attributes of the class itself."""
    cls = b"c" + line("torch.distributed.checkpoint.metadata") + line(name)
    return b"\x80\x04" + cls + b"N}" + string(attribute) + string("poison") + b"s\x86b."


@pytest.mark.parametrize("name", ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "StorageMeta"))
@pytest.mark.parametrize("attribute", ("__init__", "__eq__", "brand_new"))
def test_classes_are_not_changed(tmp_path: Path, name: str, attribute: str) -> None:
    save(STATE, tmp_path)
    cls = getattr(dcp_metadata, name)
    before = dict(vars(cls))
    good = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(class_setting(name, attribute))
    assert refusal(tmp_path)
    assert dict(vars(cls)) == before
    (tmp_path / ".metadata").write_bytes(good)
    assert equal(load(STATE, tmp_path), STATE)


def test_enum_members_are_not_changed(tmp_path: Path) -> None:
    """They are shared by the whole process, and every later save would write what they were changed to."""
    save(STATE, tmp_path)
    member = b"c" + line("torch.distributed.checkpoint.metadata") + line("_MEM_FORMAT_ENCODING") + b"K\x00\x85R"
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + member + b"}" + string("_value_") + b"K\x03sb.")
    assert refusal(tmp_path)
    assert [member.value for member in dcp_metadata._MEM_FORMAT_ENCODING] == [0, 1, 2]


# ---- shapes ----

WIDE = torch.Size([1 << 60])


def enlarge(path: Path, key: str) -> None:
    """Has the metadata say that a tensor has 2^60 elements, all of them in the record that is there."""

    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        entry.size, entry.chunks[0].sizes = WIDE, WIDE

    changed(path, change)


class Making(DefaultLoadPlanner):
    """Makes a tensor for each item, as planners do that have no state dict."""

    made = 0

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.made += 1
        return torch.empty(read_item.lengths)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None: ...


@pytest.mark.parametrize("writer", [RingWriter, FileSystemWriter])
def test_no_memory_is_asked_for_that_the_files_cannot_fill(tmp_path: Path, writer: Any) -> None:
    path = tmp_path / "step-1"
    dcp.save({"weight": torch.ones(1000), "it": {"w": torch.ones(9)}}, storage_writer=writer(path), no_dist=True)
    enlarge(path, "weight")
    with pytest.raises(CorruptCheckpointError, match=r"distcp: 'weight': .*1152921504606846976.* need"):
        dcpring.load(path)
    planner = Making()
    wanted = {"weight": torch.ones(1, device="meta").expand(WIDE)}
    with pytest.raises(CheckpointException, match=r"'weight'.*: the record has "):
        dcp.load(wanted, storage_reader=RingReader(path), planner=planner, no_dist=True)
    assert not planner.made
    enlarge(path, "it.w")
    checkpointer = Checkpointer(tmp_path, {"it": Replicated({})})
    with checkpointer, pytest.raises(CheckpointError, match=r"'it\.w': .*1152921504606846976"):
        checkpointer.load(exclude=["weight"])


def test_a_tensor_for_which_there_is_no_memory(tmp_path: Path) -> None:
    """Nobody knows how large what is compressed will be."""
    save({"weight": torch.ones(3)}, tmp_path)
    enlarge(tmp_path, "weight")

    def compress(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["zstd"]

    changed(tmp_path, compress)
    with pytest.raises(CheckpointError, match=r"'weight': no tensor of \[1152921504606846976\] torch"):
        dcpring.load(tmp_path)


# ---- objects ----


def replace_object(path: Path, key: str, data: bytes) -> None:
    """Puts other bytes where an object was stored; a stock file has no checksum of them."""
    file = path / "evil.distcp"
    file.write_bytes(data)

    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                info.relative_path, info.offset, info.length = file.name, 0, len(data)
                info.__dict__.pop("ring", None)

    changed(path, change)


def saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


OBJECT_ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "zip": lambda canary: saved(touch(canary)),
    "legacy": lambda canary: saved(touch(canary), _use_new_zipfile_serialization=False),
    "pickle": lambda canary: pickle.dumps(touch(canary)),
    "nested": lambda canary: saved({"a": [torch.zeros(2), touch(canary)]}),
}


@pytest.mark.parametrize("kind", OBJECT_ATTACKS)
@pytest.mark.parametrize("stock", (False, True), ids=("ours", "stock"))
def test_objects_do_not_run(tmp_path: Path, kind: str, stock: bool) -> None:
    path, canary = tmp_path / "checkpoint", tmp_path / "canary"
    if stock:
        dcp.save(STATE, storage_writer=FileSystemWriter(path), no_dist=True)
    else:
        save(STATE, path)
    replace_object(path, "name", OBJECT_ATTACKS[kind](canary))
    message = refusal(path)
    assert not canary.exists()
    assert "'name' (rank 0)" in message
    if kind in ("zip", "nested"):
        assert "trusted=True" in message
        assert "safe_globals" in message
        assert "system" in message


def test_object_attacks_would_work(tmp_path: Path) -> None:
    for kind in ("zip", "legacy", "nested"):
        canary = tmp_path / kind
        torch.load(io.BytesIO(OBJECT_ATTACKS[kind](canary)), weights_only=False)
        assert canary.exists(), kind


def test_objects_of_trusted_checkpoints(tmp_path: Path) -> None:
    state = {"config": Mine(7), "weight": torch.arange(3.0)}
    save(state, tmp_path)
    message = refusal(tmp_path, state)
    assert "Mine" in message
    assert "'config' (rank 0)" in message
    assert "trusted=True" in message
    assert equal(load(state, tmp_path, trusted=True), state)
    assert equal(load(state, tmp_path, safe_globals=[Mine]), state)
    assert refusal(tmp_path, state), "what is allowed is not allowed for ever"


def test_a_refused_object_leaves_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(STATE, path)
    replace_object(path, "name", saved(touch(tmp_path / "canary")))
    state = blank(STATE)
    with pytest.raises(CheckpointException):
        dcp.load(state, storage_reader=RingReader(path), no_dist=True)
    assert equal(state, blank(STATE))


# ---- paths ----


def move_data(path: Path, target: Path, name: str) -> None:
    """The data file goes elsewhere, and the metadata says where."""
    (old,) = data_files(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    (path / old).rename(target)

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    changed(path, change)


@pytest.mark.parametrize("stock", (False, True), ids=("ours", "stock"))
@pytest.mark.parametrize("kind", ("absolute", "dotdot", "inner dotdot", "symlink", "symlinked folder"))
def test_paths_that_lead_out_are_refused(tmp_path: Path, kind: str, stock: bool) -> None:
    path, outside = tmp_path / "checkpoint", tmp_path / "outside" / "data"
    if stock:
        dcp.save(STATE, storage_writer=FileSystemWriter(path), no_dist=True)
    else:
        save(STATE, path)
    name = {
        "absolute": str(outside),
        "dotdot": "../outside/data",
        "inner dotdot": "inside/../../outside/data",
        "symlink": "link",
        "symlinked folder": "folder/data",
    }[kind]
    move_data(path, outside, name)
    (path / "inside").mkdir()
    (path / "link").symlink_to("../outside/data")
    (path / "folder").symlink_to(outside.parent)
    assert equal(stock_loaded(path), STATE), "stock follows it"
    state = blank(STATE)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=RingReader(path), no_dist=True)
    assert "out of the checkpoint directory" in str(caught.value) or "outside of the checkpoint" in str(caught.value)
    assert name in str(caught.value)
    assert "rank 0" in str(caught.value)
    assert equal(state, blank(STATE))


def stock_loaded(path: Path) -> StateDict:
    state = blank(STATE)
    dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


@pytest.mark.parametrize("kind", ("folder", "symlink", "symlinked folder"))
def test_paths_within_are_followed(tmp_path: Path, kind: str) -> None:
    save(STATE, tmp_path)
    name = {"folder": "sub/data", "symlink": "link", "symlinked folder": "folder/data"}[kind]
    move_data(tmp_path, tmp_path / "sub" / "data", name)
    (tmp_path / "link").symlink_to("sub/data")
    (tmp_path / "folder").symlink_to("sub")
    assert equal(load(STATE, tmp_path), STATE)


def _make_device(path: Path) -> None:
    need_root("it makes a device")
    os.mknod(path, 0o20600, os.makedev(1, 5))


SPECIAL: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "directory": os.mkdir,
    "device": _make_device,
}


@pytest.fixture(params=SPECIAL)
def make_special(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """Makes what is no file; whoever waits for it does not do so for ever."""

    def give_up(*_: object) -> None:
        raise AssertionError("somebody waits for a FIFO")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield SPECIAL[request.param]
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_what_is_no_file_is_refused(tmp_path: Path, make_special: Callable[[Path], None]) -> None:
    save(STATE, tmp_path)
    move_data(tmp_path, tmp_path / "moved", "special")
    make_special(tmp_path / "special")
    assert "special" in refusal(tmp_path)


def test_no_file_for_the_metadata(tmp_path: Path, make_special: Callable[[Path], None]) -> None:
    path = tmp_path / "checkpoint"
    save(STATE, path)
    (path / ".metadata").unlink()
    make_special(path / ".metadata")
    assert "not a regular file" in refusal(path)
    for command in (["ls"], ["verify"], ["verify", "--quick"], ["keys"], ["diff", path]):
        result = _cli.run(*command, path)
        assert result.status in (1, 2) and "not a regular file" in result.err + result.out, (command, result)
    assert "not a regular file" in _cli.run("convert", path, tmp_path / "target.pt").err


def test_no_file_for_the_key_map(tmp_path: Path, make_special: Callable[[Path], None]) -> None:
    save(STATE, tmp_path, key_map={next(iter(STATE)): "other"})
    (tmp_path / ".dcpring.json").unlink()
    make_special(tmp_path / ".dcpring.json")
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        saved_key_map(tmp_path)
    result = _cli.run("keys", tmp_path)
    assert result.status == 0 and "other" in result.out and "key map of the save cannot be read" in result.err


def test_no_file_to_convert(tmp_path: Path, make_special: Callable[[Path], None]) -> None:
    for name in ("x", "x.safetensors", "x.safetensors.index.json"):
        folder = tmp_path / f"in {name}"
        folder.mkdir()
        make_special(folder / name)
        for source in (folder, folder / name):
            result = _cli.run("convert", source, tmp_path / "target")
            assert result.status == 2 and not (tmp_path / "target").exists()
            assert re.search(r"not a regular file|no checkpoint|nothing in it", result.err), (source, result)


def test_removal_stays_in_the_directory(tmp_path: Path) -> None:
    """The old metadata, which a stranger may have written, says which files are superseded."""
    path = tmp_path / "checkpoint"
    dcp.save(STATE, storage_writer=FileSystemWriter(path), no_dist=True)
    precious = [tmp_path / "precious", tmp_path / "__0_0.distcp", path / "precious", path / "sub" / "__0_1.distcp"]
    (path / "sub").mkdir()
    (path / "linked").symlink_to(tmp_path)
    for file in precious:
        file.write_bytes(b"precious")

    def change(metadata: Metadata) -> None:
        infos = list(metadata.storage_data.values())
        names = ["../precious", "../__0_0.distcp", str(precious[0]), "precious", "sub/__0_1.distcp", "linked/precious"]
        for info, name in zip(infos, names, strict=False):
            info.relative_path = name

    changed(path, change)
    save(STATE, path)
    save(STATE, path)
    assert all(file.read_bytes() == b"precious" for file in precious)
    assert equal(load(STATE, path), STATE)


def test_a_data_file_that_is_a_symlink_is_removed_itself(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    dcp.save(STATE, storage_writer=FileSystemWriter(path), no_dist=True)
    (stock,) = data_files(path)
    (path / stock).rename(tmp_path / "shared")
    (path / stock).symlink_to(tmp_path / "shared")
    save(STATE, path)
    assert (tmp_path / "shared").exists()
    assert not (path / stock).is_symlink()


# ---- metadata that lies ----


def big_info(path: Path) -> Any:
    return storage_of(path, "large")


HUGE = (-1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, (1 << 64) + 128, 1 << 200)
WRONG = (None, "12", 1.5, (1,), True)


def lie(path: Path, key: str, field: str, value: Any) -> None:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn != key:
                continue
            if field in ("offset", "length", "relative_path"):
                setattr(info, field, value)
            else:
                place = ("version", "kind", "payload_offset", "payload_bytes", "crcs").index(field)
                ring = list(info.__dict__["ring"])
                ring[place] = value
                info.__dict__["ring"] = tuple(ring)

    changed(path, change)


def refused_without_change(path: Path, like: StateDict = STATE, harmless: bool = False) -> None:
    """A clear error, and nothing is written to; where a lie may be harmless, the right data do as well."""
    state = blank(like)
    try:
        dcp.load(state, storage_reader=RingReader(path), no_dist=True)
    except CheckpointException as caught:
        error = failure(caught)
        assert isinstance(error, (CheckpointError, OSError)), repr(error)
        assert equal(state, blank(like))
        return
    assert harmless, "a lie was believed"
    assert equal(state, like)


@pytest.mark.parametrize("key", ("large", "name"))
@pytest.mark.parametrize("field", ("payload_offset", "payload_bytes", "offset", "length"))
def test_lying_numbers(tmp_path: Path, key: str, field: str) -> None:
    save(STATE, tmp_path)
    good = (tmp_path / ".metadata").read_bytes()
    for value in (*HUGE, *WRONG):
        (tmp_path / ".metadata").write_bytes(good)
        lie(tmp_path, key, field, value)
        # A tensor is found by its payload's place alone, an object by the record's.
        bounds = "length" if key == "large" else "payload_bytes"
        refused_without_change(tmp_path, harmless=field == bounds)


@pytest.mark.parametrize("field", ("offset", "length"))
@pytest.mark.parametrize("key", ("large", "name"))
def test_lying_numbers_of_stock(tmp_path: Path, key: str, field: str) -> None:
    dcp.save(STATE, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    good = (tmp_path / ".metadata").read_bytes()
    for value in (*HUGE, *WRONG):
        (tmp_path / ".metadata").write_bytes(good)
        lie(tmp_path, key, field, value)
        refused_without_change(tmp_path)


@pytest.mark.parametrize("crcs", (b"1234", b"x" * 400, "text", 7, [1, 2], (b"1234",)))
def test_lying_crcs(tmp_path: Path, crcs: Any) -> None:
    save(STATE, tmp_path)
    lie(tmp_path, "large", "crcs", crcs)
    refused_without_change(tmp_path)


@pytest.mark.parametrize("ring", (7, "text", (), (1,), (1, 0, 0), (2, 0, 0, 0, None), (1, 9, 0, 0, None), {"a": 1}))
def test_lying_ring(tmp_path: Path, ring: Any) -> None:
    save(STATE, tmp_path)

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.__dict__["ring"] = ring

    changed(tmp_path, change)
    refused_without_change(tmp_path)


@pytest.mark.parametrize("name", (7, None, "", ".", "..", "/", "a\0b", b"bytes", ("a",), "x" * 5000))
def test_lying_names(tmp_path: Path, name: Any) -> None:
    save(STATE, tmp_path)
    lie(tmp_path, "large", "relative_path", name)
    refused_without_change(tmp_path)


def reshaped(path: Path, key: str, sizes: tuple[int, ...], chunk: tuple[int, ...] | None = None) -> None:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        entry.size = torch.Size(sizes)
        entry.chunks[0] = dcp_metadata.ChunkStorageMetadata(
            torch.Size([0] * len(chunk or sizes)), torch.Size(chunk or sizes)
        )

    changed(path, change)


@pytest.mark.parametrize("sizes", ((1 << 62,), (1 << 40, 1 << 40), (400_001, 1 << 45), (400_002,), (3,)))
@pytest.mark.parametrize("stock", (False, True), ids=("ours", "stock"))
def test_oversized_shapes(tmp_path: Path, sizes: tuple[int, ...], stock: bool) -> None:
    """The state dict has the true shape, the chunk claims another."""
    state = {"large": STATE["large"]}
    if stock:
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    else:
        save(state, tmp_path)
    reshaped(tmp_path, "large", (400_001,), sizes)
    loaded = blank(state)
    with pytest.raises(CheckpointException):
        dcp.load(loaded, storage_reader=RingReader(tmp_path), no_dist=True)
    assert equal(loaded, blank(state))


def test_lying_shape_that_fits_the_state_dict(tmp_path: Path) -> None:
    """State dict and metadata agree on more than is stored."""
    state = tensor_state(1, mib=1, count=1)
    save(state, tmp_path)
    reshaped(tmp_path, "weight.0", (2 * MIB,))
    refused_without_change(tmp_path, {"weight.0": torch.zeros(2 * MIB, dtype=torch.int32)})


def test_lying_dtype(tmp_path: Path) -> None:
    state = tensor_state(1, mib=1, count=1)
    save(state, tmp_path)

    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["weight.0"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.properties.dtype = torch.float64

    changed(tmp_path, change)
    refused_without_change(tmp_path, {"weight.0": torch.zeros(MIB // 4, dtype=torch.float64)})


# ---- stock records that lie ----


def stock_record(tensor: torch.Tensor, tmp_path: Path) -> tuple[Path, int, int]:
    """A stock checkpoint of one tensor: its data file, and where the record is."""
    dcp.save({"t": tensor}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    info = storage_of(tmp_path, "t")
    assert placed_of(info, "t", "").kind == OPAQUE
    return tmp_path / info.relative_path, info.offset, info.length


def test_every_damaged_byte_of_a_stock_record(tmp_path: Path) -> None:
    """Each byte of a record changed in turn: an error, or the right tensor."""
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    file, offset, length = stock_record(tensor, tmp_path)
    good = file.read_bytes()
    wrong: list[str] = []
    places = [at for at in range(offset, offset + length) if good[at : at + 1] != b"Z"]  # torch's padding
    for at in places:
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        state = {"t": torch.full((3, 4), 77.0)}
        try:
            with quiet():
                dcp.load(state, storage_reader=RingReader(tmp_path, engine="threads"), no_dist=True)
        except CheckpointException as error:
            if not isinstance(failure(error), (CheckpointError, OSError)):
                wrong.append(f"byte {at - offset}: {failure(error)!r}")
            continue
        if not torch.equal(state["t"], tensor):
            wrong.append(f"byte {at - offset} changed loads as {state['t'].tolist()}")
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:20])


def rewritten_zip(data: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    """The same archive with other members, all of its headers and CRCs in order."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return out.getvalue()


LYING_PICKLES: dict[str, tuple[bytes, bytes]] = {
    "larger size": (b"K\x03K\x04\x86", b"K\x03K\x7f\x86"),
    "smaller size": (b"K\x03K\x04\x86", b"K\x02K\x04\x86"),
    "stride": (b"K\x04K\x01\x86", b"K\x7fK\x01\x86"),
    "another dtype": (b"FloatStorage", b"DoubleStorage"),
}


@pytest.mark.parametrize("kind", LYING_PICKLES)
def test_stock_records_with_lying_pickles(tmp_path: Path, kind: str) -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    file, offset, length = stock_record(tensor, tmp_path)
    old, new = LYING_PICKLES[kind]
    record = file.read_bytes()[offset : offset + length]

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        assert old in data
        return data.replace(old, new)

    lying = rewritten_zip(record, change)
    file.write_bytes(lying)

    def point(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(lying)

    changed(tmp_path, point)
    refused_without_change(tmp_path, {"t": tensor})


def test_stock_record_that_runs_code(tmp_path: Path) -> None:
    path, canary = tmp_path / "checkpoint", tmp_path / "canary"
    file, _, _ = stock_record(torch.zeros(4), path)
    evil = saved(touch(canary))
    file.write_bytes(evil)

    def point(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(evil)

    changed(path, point)
    with pytest.raises(CheckpointException) as caught:
        load({"t": torch.zeros(4)}, path)
    assert isinstance(failure(caught.value), UntrustedCheckpointError)
    assert not canary.exists()
