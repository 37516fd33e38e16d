"""Damaged, missing and unfitting input: one clear error with path, key and rank, and nothing changed."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _distributed import run
from fault._support import (
    MIB,
    StateDict,
    blank,
    data_files,
    equal,
    failure,
    flip_bit,
    load,
    needed_files,
    run_python,
    save,
    small_state,
    stock_load,
    storage_of,
    tensor_state,
)
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import (
    CheckpointError,
    CorruptCheckpointError,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
)
from dcpring.base.files import names_in, read_regular
from dcpring.format.metadata import placed_of

STATE = small_state(1)


def error_of_load(path: Path, like: StateDict = STATE, **options: Any) -> BaseException:
    """The error that loading must give, the state dict unchanged."""
    state = blank(like)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=RingReader(path, **options), no_dist=True)
    assert equal(state, blank(like)), "the caller's tensors have changed"
    return failure(caught.value)


def the_file(path: Path) -> Path:
    (name,) = data_files(path)
    return path / name


# ---- missing, truncated, garbage ----


def test_missing_directory(tmp_path: Path) -> None:
    message = str(error_of_load(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere" / ".metadata") in message
    assert f"{tmp_path / 'nowhere'} does not exist" in message
    assert not (tmp_path / "nowhere").exists()


def test_missing_metadata(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    (tmp_path / ".metadata").unlink()
    message = str(error_of_load(tmp_path))
    assert str(tmp_path / ".metadata") in message
    assert "is no checkpoint: there is no .metadata in it" in message


def test_a_folder_of_checkpoints(tmp_path: Path) -> None:
    save(STATE, tmp_path / "step-7")
    assert "is no checkpoint, but there are some in it: step-7" in str(error_of_load(tmp_path))


def test_a_folder_of_a_hubs_cache(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "4d7a").mkdir(parents=True)
    save_file({"x": torch.ones(1)}, tmp_path / "snapshots" / "4d7a" / "model.safetensors")
    assert "is no checkpoint, but there are some in it: snapshots/4d7a" in str(error_of_load(tmp_path))


def test_a_folder_of_torch_save(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    message = str(error_of_load(tmp_path))
    assert "what torch.save has written, pytorch_model.bin; dcpring convert makes safetensors of it" in message


@pytest.mark.parametrize("stock", (False, True), ids=("ours", "stock"))
def test_damaged_metadata(tmp_path: Path, stock: bool) -> None:
    if stock:
        dcp.save(STATE, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    else:
        save(STATE, tmp_path)
    file = tmp_path / ".metadata"
    whole = file.read_bytes()
    damaged = [b"", b"\0", b"garbage", os.urandom(1000), b"PK\3\4" + bytes(100), b"\x80\x04N.", b"dcpring\x01"]
    damaged += [whole[:size] for size in (1, 10, len(whole) // 2)] + [whole[10:]]
    for data in damaged:
        file.write_bytes(data)
        message = str(error_of_load(tmp_path))
        assert str(file) in message, data[:20]
        assert "damaged" in message or "not DCP metadata" in message or "has no need of" in message, message


def test_every_bit_of_metadata(tmp_path: Path) -> None:
    """A flipped bit is found, or changes nothing: that of the magic at the end, which makes it a stock file."""
    state = {"weight": torch.arange(4.0), "name": "x"}
    save(state, tmp_path)
    file = tmp_path / ".metadata"
    size = file.stat().st_size
    for offset in [*range(0, size - 60, 5), *range(size - 60, size)]:
        flip_bit(file, offset, offset % 8)
        try:
            assert equal(load(state, tmp_path), state), f"byte {offset}"
            assert offset >= size - 8, f"byte {offset} is not covered"
        except CheckpointException as caught:
            assert str(file) in str(failure(caught)), f"byte {offset}: {failure(caught)!r}"
            assert "damaged" in str(failure(caught)), f"byte {offset}: {failure(caught)!r}"
        flip_bit(file, offset, offset % 8)
    assert equal(load(state, tmp_path), state)


def test_missing_data_file(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    file = the_file(tmp_path)
    file.unlink()
    error = error_of_load(tmp_path)
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(file)
    assert "(rank 0)" in str(error)
    assert any(f"'{key}" in str(error) for key in STATE)


@pytest.mark.parametrize("stock", (False, True), ids=("ours", "stock"))
@pytest.mark.parametrize("left", (0.0, 0.5, 0.99))
def test_truncated_data_file(tmp_path: Path, stock: bool, left: float) -> None:
    if stock:
        dcp.save(STATE, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    else:
        save(STATE, tmp_path)
    file = the_file(tmp_path)
    os.truncate(file, int(file.stat().st_size * left))
    error = error_of_load(tmp_path)
    assert isinstance(error, CorruptCheckpointError)
    assert error.path == str(file)
    assert str(file) in str(error)
    assert "(rank 0)" in str(error)
    assert any(f"'{key}" in str(error) for key in STATE)


def test_truncated_where_only_torch_can_look(tmp_path: Path) -> None:
    """A sparse tensor at the end of a file is checked to be there before the dense ones are read."""
    state = {"dense": torch.arange(1000.0), "sparse": torch.eye(300).to_sparse()}
    save(state, tmp_path)
    info = storage_of(tmp_path, "sparse")
    os.truncate(tmp_path / info.relative_path, info.offset + info.length - 100)
    target = {"dense": torch.zeros(1000), "sparse": torch.zeros(300, 300).to_sparse()}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=RingReader(tmp_path), no_dist=True)
    assert "'sparse' (rank 0)" in str(failure(caught.value))
    assert torch.equal(target["dense"], torch.zeros(1000))


def test_data_file_of_another_checkpoint(tmp_path: Path) -> None:
    """Of the same size and place, with other bytes."""
    save(STATE, tmp_path / "a")
    save(small_state(2), tmp_path / "b")
    shutil.copy(the_file(tmp_path / "b"), the_file(tmp_path / "a"))
    with pytest.raises(CheckpointException) as caught:
        load(STATE, tmp_path / "a")
    assert "CRC-32" in str(failure(caught.value))


# ---- flipped bits ----


def flip_is_caught(path: Path, like: StateDict, file: Path, offset: int, key: str, **options: Any) -> None:
    flip_bit(file, offset, offset % 8)
    state = blank(like)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=RingReader(path, **options), no_dist=True)
    flip_bit(file, offset, offset % 8)
    error = failure(caught.value)
    assert isinstance(error, CorruptCheckpointError), repr(error)
    assert f"'{key}' (rank 0)" in str(error)
    assert str(file) in str(error)
    assert error.path == str(file)


@pytest.mark.parametrize("mode", ({"engine": "uring"}, {"engine": "threads", "direct": False, "workers": 1}), ids=str)
def test_flipped_bits(tmp_path: Path, mode: dict[str, Any]) -> None:
    """In every block, in the first and the last byte, in small tensors, and in objects."""
    state: StateDict = {"large": torch.arange(1_400_000, dtype=torch.int32), **{k: STATE[k] for k in ("half", "name")}}
    state["step"] = STATE["step"]
    save(state, tmp_path)
    for key in state:
        info = storage_of(tmp_path, key)
        placed = placed_of(info, key, "")
        first, size = placed.payload_offset, placed.payload_bytes
        places = {0, size - 1, size // 2, *range(MIB // 2, size, MIB)}
        for place in sorted(places):
            flip_is_caught(tmp_path, state, tmp_path / info.relative_path, first + place, key, **mode)
    assert equal(load(state, tmp_path), state)


def test_flipped_bits_of_stock_records(tmp_path: Path) -> None:
    state: StateDict = {"large": torch.arange(400_000, dtype=torch.int32), "half": STATE["half"], "name": "a name"}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    file = the_file(tmp_path)
    data = file.read_bytes()
    for key, needle in {
        "large": torch.arange(300_000, 300_004, dtype=torch.int32).numpy().tobytes(),
        "half": STATE["half"][-4:].view(torch.int16).numpy().tobytes(),
        "name": b"a name",
    }.items():
        offset = data.index(needle, storage_of(tmp_path, key).offset)
        flip_bit(file, offset)
        with pytest.raises(CheckpointException) as caught:
            load(state, tmp_path)
        flip_bit(file, offset)
        error = failure(caught.value)
        assert isinstance(error, CorruptCheckpointError), f"{key}: {error!r}"
        assert f"'{key}' (rank 0)" in str(error)
        assert str(file) in str(error)


class Rows(torch.distributed.checkpoint.DefaultLoadPlanner):
    """Loads some rows of every tensor, as a rank of many would."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.first, self.count = first, count

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            object.__setattr__(item, "storage_offsets", torch.Size([self.first, 0]))
            object.__setattr__(item, "lengths", torch.Size([self.count, *item.lengths[1:]]))
            object.__setattr__(item, "dest_offsets", torch.Size([self.first, 0]))
        return plan


def test_flipped_bits_in_slices(tmp_path: Path) -> None:
    """A slice checks the blocks that it covers, and no others."""
    state = {"weight": torch.arange(4 * MIB // 4, dtype=torch.int32).reshape(1024, 1024)}
    save(state, tmp_path)
    info = storage_of(tmp_path, "weight")
    placed = placed_of(info, "weight", "")
    file = tmp_path / info.relative_path
    flip_bit(file, placed.payload_offset + 2 * MIB + 5)  # rows 512 to 767

    def load_rows(first: int, count: int) -> torch.Tensor:
        target = {"weight": torch.zeros(1024, 1024, dtype=torch.int32)}
        reader = RingReader(tmp_path)
        dcp.load(target, storage_reader=reader, planner=Rows(first, count), no_dist=True)
        return target["weight"]

    assert torch.equal(load_rows(0, 400)[:400], state["weight"][:400])
    for first, count in ((0, 1024), (256, 512), (500, 300)):
        with pytest.raises(CheckpointException) as caught:
            load_rows(first, count)
        error = failure(caught.value)
        assert isinstance(error, CorruptCheckpointError)
        assert "'weight' (rank 0)" in str(error)
        assert str(file) in str(error)


def test_checksum_off(tmp_path: Path) -> None:
    """The damaged bytes load as they are."""
    state = tensor_state(1, mib=2, count=1)
    save(state, tmp_path)
    info = storage_of(tmp_path, "weight.0")
    placed = placed_of(info, "weight.0", "")
    flip_bit(tmp_path / info.relative_path, placed.payload_offset + 4 * 100)
    loaded = load(state, tmp_path, checksum=False)
    assert (loaded["weight.0"] != state["weight.0"]).nonzero().flatten().tolist() == [100]
    assert loaded["weight.0"][100] == state["weight.0"][100] ^ 1


def test_saved_without_checksums(tmp_path: Path) -> None:
    """Nothing can be checked; what was saved loads, here and with stock."""
    save(STATE, tmp_path, checksum=False)
    assert equal(load(STATE, tmp_path), STATE)
    assert equal(stock_load(STATE, tmp_path), STATE)


def test_an_error_that_comes_late_says_what_has_changed(tmp_path: Path) -> None:
    state = tensor_state(1, mib=8, count=2)
    save(state, tmp_path)
    info = storage_of(tmp_path, "weight.1")
    placed = placed_of(info, "weight.1", "")
    flip_bit(tmp_path / info.relative_path, placed.payload_offset + placed.payload_bytes - 1)
    target = blank(state)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=RingReader(tmp_path, workers=1, queue_depth=1), no_dist=True)
    message = str(failure(caught.value))
    assert "already overwritten in the state dict: 'weight.0', 'weight.1'" in message
    assert torch.equal(target["weight.0"], state["weight.0"])


# ---- what does not fit ----


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_layout_that_cannot_be_copied(tmp_path: Path) -> None:
    state = {"w": torch.eye(3).to_sparse_csr()}  # which torch 2.15's own planner does not save
    dcp.save(state, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner(), no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3, 3)}, storage_reader=RingReader(tmp_path), no_dist=True)
    layouts = "the checkpoint has torch.sparse_csr, the state dict torch.strided"
    assert f"'w' (rank 0) cannot be copied ({layouts})" in str(failure(caught.value))


def _load_in_parts(path: str) -> str:
    """What each rank has of the one is rows, of the other columns: they are read in two ways."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(torch.zeros(64, 64), mesh, [Shard(dim)])
        for name, dim in (("columns", 1), ("more columns", 1), ("more rows", 0), ("rows", 0))
    }
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=RingReader(path), planner=RingLoadPlanner(share="off"))
    return "; ".join(map(str, caught.value.failures.values()))


@pytest.mark.parametrize("damaged", ["columns", "more columns", "more rows", "rows"])
@pytest.mark.parametrize("planner", [DefaultSavePlanner, RingSavePlanner])
def test_damage_is_named_whichever_way_it_is_read(tmp_path: Path, damaged: str, planner: Any) -> None:
    """RingSavePlanner's checkpoints are loaded from tables, others item by item."""
    state = {name: torch.randn(64, 64) for name in ("columns", "more columns", "more rows", "rows")}
    dcp.save(state, storage_writer=RingWriter(tmp_path), planner=planner())
    place = placed_of(storage_of(tmp_path, damaged), damaged, str(tmp_path))
    for half in (0, 128):  # each rank reads one of them
        flip_bit(tmp_path / place.file, place.payload_offset + half + (64 * 4 * 32 if half else 0))
    for message in run(2, _load_in_parts, str(tmp_path)):
        assert f"'{damaged}' (rank" in message


def test_shape_mismatch(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    message = str(error_of_load(tmp_path, {**STATE, "matrix": torch.zeros(200, 301)}))
    assert "matrix" in message
    assert "301" in message


@pytest.mark.parametrize(("stored", "wanted"), ((torch.float32, torch.int32), (torch.complex64, torch.float32)))
def test_dtype_mismatch(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    """A cast that loses data is refused before any other tensor is read."""
    state = {"a": torch.ones(10), "weight": torch.ones(10).to(stored)}
    save(state, tmp_path)
    error = error_of_load(tmp_path, {"a": torch.ones(10), "weight": torch.ones(10).to(wanted)})
    assert isinstance(error, CheckpointError)
    for part in ("'weight' (rank 0)", str(stored), str(wanted)):
        assert part in str(error)


def test_missing_key(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    assert "extra" in str(error_of_load(tmp_path, {**STATE, "extra": torch.zeros(1)}))


# ---- paths ----


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    message = str(error_of_load(file))
    assert str(file) in message
    assert "Not a directory" in message
    for path in (file, file / "below"):
        with pytest.raises(CheckpointException) as caught:
            save(STATE, path)
        error = failure(caught.value)
        assert isinstance(error, OSError)
        assert error.errno in (errno.ENOTDIR, errno.EEXIST)
        assert str(file) in str(error)
        assert "a checkpoint is a directory" in str(error)
    assert file.read_bytes() == b"mine"


def test_metadata_that_is_a_directory(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    (tmp_path / ".metadata").unlink()
    (tmp_path / ".metadata").mkdir()
    assert str(tmp_path / ".metadata") in str(error_of_load(tmp_path))
    with pytest.raises(CheckpointException) as caught:
        save(STATE, tmp_path)
    assert isinstance(failure(caught.value), OSError)
    assert str(tmp_path) in str(caught.value)


def test_special_files_in_the_directory(tmp_path: Path) -> None:
    """With names like ours; a save neither waits for them nor fails."""
    os.mkfifo(tmp_path / "__0_0.distcp")
    (tmp_path / "__0_1.0123456789abcdef.distcp").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        save(STATE, tmp_path)
    assert equal(load(STATE, tmp_path), STATE)


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 200) / ("y" * 200) / ("z" * 200)
    save(STATE, path)
    assert equal(load(STATE, path), STATE)
    with pytest.raises(CheckpointException, match="File name too long"):
        save(STATE, tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", ("with space", "ünïcödé", "new\nline", "-rf", "%s%n", "a'b\"c"))
def test_odd_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save({name: torch.ones(3)}, path)
    assert equal(load({name: torch.ones(3)}, path), {name: torch.ones(3)})
    the_file(path).unlink()
    with pytest.raises(CheckpointException) as caught:
        load({name: torch.ones(3)}, path)
    assert repr(name) in str(failure(caught.value))


WITHOUT_PERMISSION = """
import sys
from fault._support import CheckpointException, Path, failure, load, save, small_state

action, path, state = {"save": save, "load": load}[sys.argv[1]], Path(sys.argv[2]), small_state(1)
try:
    action(state, path)
except CheckpointException as caught:
    print(type(failure(caught)).__name__, failure(caught))
"""


@pytest.mark.parametrize(
    ("action", "what", "mode"),
    [("save", ".", 0o555), ("save", ".", 0o333), ("load", "data", 0), ("load", ".metadata", 0), ("load", ".", 0o311)],
    ids=("save into what cannot be written", "nor listed", "load data", "load metadata", "load what cannot be listed"),
)
def test_no_permission(tmp_path: Path, action: str, what: str, mode: int) -> None:
    """Root needs none; so this root gives the privilege up."""
    path = tmp_path / "checkpoint"
    save(STATE, path)
    before = {entry.name for entry in path.iterdir()}
    closed = the_file(path) if what == "data" else path / what
    closed.chmod(mode)
    said = run_python(WITHOUT_PERMISSION, action, str(path), without=("dac_override", "dac_read_search"))
    closed.chmod(0o755)
    # DCP has words of its own for metadata that cannot be read, around ours.
    is_dcps = action == "load" and what != "data"
    assert said.startswith("AssertionError" if is_dcps else "PermissionError")
    assert "Permission denied" in said
    assert "check the permissions" in said
    assert str(path) in said
    if what == "data":
        assert "(rank 0)" in said
        assert any(f"'{key}" in said for key in STATE)
    assert {entry.name for entry in path.iterdir()} == before == needed_files(path)
    assert equal(load(STATE, path), STATE)


def test_errors_of_pythons_own_calls_say_path_and_cure_on_other_ranks_too(tmp_path: Path) -> None:
    (tmp_path / "itself").symlink_to("itself")
    for call, path, words in (
        (names_in, tmp_path / "itself", "put the file itself there"),
        (names_in, Path(__file__), "a checkpoint is a directory"),
        (read_regular, Path("/proc/self/mem"), "the device reported an error"),
    ):
        with pytest.raises(OSError, match=words) as caught:
            call(path)
        sent = pickle.loads(pickle.dumps(caught.value))
        assert str(sent) == str(caught.value) and str(path) in str(sent) and sent.errno == caught.value.errno


BELOW = """
import sys
from fault._support import Path, equal, load, save, small_state

path, state = Path(sys.argv[1]), small_state(1)
try:
    list(path.parent.parent.iterdir())
except PermissionError:
    save(state, path)
    assert equal(load(state, path), state)
    print("saved")
"""


def test_below_a_directory_that_may_not_be_read(tmp_path: Path) -> None:
    """It can be entered and written to, as far as mkdir -p is concerned."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o311)
    said = run_python(BELOW, str(closed / "run" / "step"), without=("dac_override", "dac_read_search"))
    closed.chmod(0o755)
    assert said == "saved\n"


# ---- arguments ----


@pytest.mark.parametrize(
    "options",
    (
        {"engine": "posix"},
        {"direct": "yes"},
        {"queue_depth": 0},
        {"queue_depth": 1 << 20},
        {"queue_depth": 1.5},
        {"block_size_bytes": 0},
        {"block_size_bytes": 1000},
        {"block_size_bytes": (1 << 20) + 4096},
        {"block_size_bytes": 1 << 40},
        {"workers": 0},
        {"workers": -1},
        {"workers": 1000},
    ),
    ids=str,
)
def test_bad_options(tmp_path: Path, options: dict[str, Any]) -> None:
    for cls in (RingWriter, RingReader):
        with pytest.raises(ValueError, match=next(iter(options))):
            cls(tmp_path, **options)
