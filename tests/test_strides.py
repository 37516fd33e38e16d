"""Strides, which TensorProperties has since torch 2.15: kept, and in no version's way."""

from __future__ import annotations

import copyreg
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _versions import needs
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from dcpring import _C, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.errors import CorruptCheckpointError
from dcpring.format import properties as encoding
from dcpring.format.lazy import Chunks
from dcpring.format.metadata import METADATA_NAME, load_metadata, pickle_metadata
from dcpring.plan import table as plans
from dcpring.torchside.dcp import HAS_STRIDES, contiguous_strides

with_strides = needs(HAS_STRIDES, "strides in TensorProperties")


def _state() -> dict[str, Any]:
    return {
        "plain": torch.arange(12.0).reshape(3, 4),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.zeros(2, 0, 3),
        "scalar": torch.tensor(1.0),
        "expanded": torch.ones(1).expand(5),
        "last": torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "object": 3,
    }


STRIDES = {key: value.stride() for key, value in _state().items() if isinstance(value, torch.Tensor)}


def _strides(metadata: Metadata) -> dict[str, Any]:
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    return {key: entry.properties.strides for key, entry in tensors.items()}  # type: ignore[attr-defined]


def _loaded(path: Path, reader: Any, planner: Any) -> dict[str, Any]:
    state: dict[str, Any] = {
        key: torch.full_like(value, -1) if isinstance(value, torch.Tensor) and value.numel() else value
        for key, value in _state().items()
    }
    dcp.load(state, storage_reader=reader, planner=planner)
    for key, value in _state().items():
        assert torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
    return state


# ---- as bytes ----


@pytest.mark.parametrize("value", _state().values(), ids=_state().keys())
def test_the_core_encodes_strides_as_python_does(value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        return
    properties = TensorProperties.create_from_tensor(value)
    properties.strides = value.stride()  # type: ignore[attr-defined]
    flags = plans._WITH_STRIDES | plans.DIVISIBLE << plans._ROW_FLAGS_SHIFT
    table = _C.make_table(["w"], None, [value], bytes([flags]), plans._row_of_tensor)
    assert table.properties() == [encoding.encode_properties(properties, tuple(value.shape))[0]]
    decoded = encoding._decode_strides(table.properties()[0].split(b"\0", 2)[2][3:], tuple(value.shape))
    assert decoded == value.stride()
    again = _C.decode_table(table.encode())
    assert again.properties() == table.properties()


@pytest.mark.parametrize("strides", [(), (0,), (1,), (128, 1), (1 << 40, 127, 0), tuple(range(60))])
def test_strides_round_trip(strides: tuple[int, ...]) -> None:
    for lengths in ((2,) * len(strides), (0,) * len(strides), (1,) * len(strides)):
        encoded = encoding._encode_strides(strides, lengths)
        assert encoding._decode_strides(encoded, lengths) == strides
        assert (len(encoded) == 1) == (strides == torch.empty(lengths, device="meta").stride())


@pytest.mark.parametrize("lengths", [(), (3,), (3, 4), (2, 0, 3), (0,), (1, 1, 5), (0, 0)])
def test_contiguous_strides_are_torchs(lengths: tuple[int, ...]) -> None:
    assert contiguous_strides(lengths) == torch.empty(lengths, device="meta").stride()


@pytest.mark.parametrize("tail", [b"\3", b"\2\x80", b"\0", b"\xff\1"])
def test_garbled_strides_are_refused(tail: bytes) -> None:
    encoded = b"torch.float32\0torch.strided\0\0\0\0" + tail
    with pytest.raises(plans.CheckpointError, match="which this torch lacks"):
        encoding.decode_properties(encoded, (3,))


# ---- in pickles ----


def test_the_cores_pickle_sets_strides_aside() -> None:
    values = [value for value in _state().values() if isinstance(value, torch.Tensor)]
    names = list(STRIDES)
    flags = bytes([plans._WITH_STRIDES] * len(values))
    table = _C.make_table(names, None, values, flags, plans._row_of_tensor)
    metadata = pickle.loads(Chunks(table, False).pickled(None, None))
    found = {key: entry.ring_strides for key, entry in metadata.state_dict_metadata.items()}
    assert found == {
        key: True if value.is_contiguous() and key != "expanded" else value.stride()
        for key, value in zip(names, values, strict=True)
    }
    without = _C.make_table(names, None, values, bytes(len(values)), plans._row_of_tensor)
    assert b"ring_strides" in Chunks(table, False).pickled(None, None)
    entries = pickle.loads(Chunks(without, False).pickled(None, None)).state_dict_metadata.values()
    assert not any(hasattr(entry, "ring_strides") for entry in entries)


def _as_torch_2_15(metadata: Metadata) -> bytes:
    """The pickle with states of six parts, as torch 2.15 writes it."""

    def reduced(properties: TensorProperties) -> tuple[Any, ...]:
        state = properties.__getstate__()  # type: ignore[no-untyped-call]
        return copyreg.__newobj__, (TensorProperties,), (*state[:5], (4, 1))  # type: ignore[attr-defined]

    out = io.BytesIO()
    pickler = pickle.Pickler(out)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: reduced}  # type: ignore[operator]
    pickler.dump(metadata)
    return out.getvalue()


@pytest.mark.parametrize("trusted", [False, True])
def test_metadata_of_stock_of_torch_2_15_is_read(tmp_path: Path, trusted: bool) -> None:
    dcp.save(_state(), storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=1))
    file = tmp_path / METADATA_NAME
    file.write_bytes(_as_torch_2_15(pickle.loads(file.read_bytes())))
    metadata, _ = load_metadata(file, trusted=trusted)
    entry = metadata.state_dict_metadata["plain"]
    assert isinstance(entry, TensorStorageMetadata) and type(entry.properties) is TensorProperties
    assert getattr(entry.properties, "strides", (4, 1)) == (4, 1)
    for planner in (None, RingLoadPlanner()):
        _loaded(tmp_path, RingReader(tmp_path, trusted=trusted), planner)


@pytest.mark.parametrize("planner", [None, RingSavePlanner], ids=["stock", "ring"])
def test_what_is_written_has_the_parts_that_all_versions_read(tmp_path: Path, planner: Any) -> None:
    """torch up to 2.14 unpacks exactly five."""
    dcp.save(_state(), storage_writer=RingWriter(tmp_path), planner=planner and planner())
    states: list[int] = []

    class Seen(TensorProperties):
        def __setstate__(self, state: Any) -> None:
            states.append(len(state))
            super().__setstate__(state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Seen if name == "TensorProperties" else super().find_class(module, name)

    Unpickler(io.BytesIO((tmp_path / METADATA_NAME).read_bytes())).load()
    assert states and set(states) == {5}
    for reader in (dcp.FileSystemReader(tmp_path), RingReader(tmp_path)):
        for loader in (None, RingLoadPlanner()):
            _loaded(tmp_path, reader, loader)


@with_strides
@pytest.mark.parametrize("planner", [None, RingSavePlanner], ids=["stock", "ring"])
@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, RingWriter], ids=["stock", "ring"])
def test_strides_come_back(tmp_path: Path, planner: Any, writer: Any) -> None:
    returned = dcp.save(_state(), storage_writer=writer(tmp_path), planner=planner and planner())
    assert _strides(returned) == STRIDES
    for trusted in (False, True):
        assert _strides(RingReader(tmp_path, trusted=trusted).read_metadata()) == STRIDES
    # To stock ours are contiguous, as their records are.
    expected = STRIDES if writer is dcp.FileSystemWriter else dict.fromkeys(STRIDES)
    assert _strides(dcp.FileSystemReader(tmp_path).read_metadata()) == expected


@with_strides
@pytest.mark.parametrize("strides", ["(4, 1)", [4, 1], (4, 1.0), (None,)])
def test_strides_that_are_none_are_refused(tmp_path: Path, strides: Any) -> None:
    metadata = dcp.save(_state(), storage_writer=RingWriter(tmp_path))
    entry = metadata.state_dict_metadata["plain"]
    entry.properties.strides = None
    entry.ring_strides = strides
    (tmp_path / METADATA_NAME).write_bytes(pickle_metadata(metadata))
    with pytest.raises(CorruptCheckpointError, match="its strides are no strides"):
        load_metadata(tmp_path / METADATA_NAME)
