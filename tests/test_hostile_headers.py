"""Headers of safetensors that are damaged or made to harm: refused with an error, or read as what they say.

The million of inputs: ``pytest --slow tests/test_hostile_headers.py``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpring import CheckpointError, CorruptCheckpointError, RingHFWriter, RingSavePlanner
from dcpring.format.model_files import INDEX_NAME, MODEL_NAME, read_model
from dcpring.store.headers import chunks_of

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 7, 8, 64, 1 << 31, (1 << 62) - 1, 1 << 62, 1 << 64, 10**40, 1.5, 1e308),
    *("", "F32", "BF16", "F4", "F8_E4M3", "U8", "a", "\0", "\ud800", "é", "../x", "/etc/passwd", "__metadata__"),
    *([], [0], [0, 0], [1, 2], [-1, 4], [[0], 4], [1] * 70, {}, {"a": 1}, {"dtype": "U8"}),
]


def seeds(folder: Path) -> dict[str, bytes]:
    """Files of ours, of the safetensors package's kind, of a rank's shard, and of nothing."""
    values = {"a": torch.ones(300, 1000), "b.weight": torch.ones(7, 3).bfloat16(), "c": torch.tensor(3.0)}
    tied = {**values, "tied": values["a"]}
    dcp.save(tied, storage_writer=RingHFWriter(folder / "ours"), planner=RingSavePlanner(), no_dist=True)
    sharding = json.dumps({"a": {"saved_offsets": [4, 0]}, "b": {"saved_offsets": []}})
    entries = {
        "plain": {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}},
        "shard": {
            "__metadata__": {"DCP_SHARDING_INFO": sharding, "DCP_VERSION": "1"},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
        },
        "nothing": {},
    }
    found = {"ours": (folder / "ours" / MODEL_NAME).read_bytes()}
    for name, header in entries.items():
        text = json.dumps(header).encode()
        size = max((one["data_offsets"][1] for key, one in header.items() if key != "__metadata__"), default=0)
        found[name] = len(text).to_bytes(8, "little") + text + bytes(size)
    return found


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


class Bytes(NamedTuple):
    """A file: its first bytes, and how long it is. The data behind the header are nothing that is looked at."""

    first: bytes
    size: int


def without_data(data: bytes) -> Bytes:
    return Bytes(data[: 8 + int.from_bytes(data[:8], "little")], len(data))


def mutated(data: Bytes, chance: random.Random) -> Bytes:
    """Other bytes, another length, or another value somewhere in the header or in a note of it."""
    head = bytearray(data.first[8:])
    length, body = len(head), data.size - len(data.first)
    kind = chance.randrange(6)
    if kind == 0:
        for _ in range(chance.randint(1, 4)):
            head[chance.randrange(len(head))] = chance.randrange(256)
    elif kind == 1:
        size = chance.choice([chance.randrange(len(data.first)), chance.randrange(data.size)])
        return Bytes(data.first[:size], size)
    elif kind == 2:
        wrong = chance.choice([0, 1, length - 1, length + 1, 1 << 40, (1 << 64) - 1, chance.randrange(1 << 20)])
        return Bytes(wrong.to_bytes(8, "little") + head, data.size)
    else:
        tree = json.loads(head)
        found = list(places(tree))
        owner, key = chance.choice(found) if found else (tree, "new")
        note = owner.get(key) if isinstance(owner, dict) else None
        if kind == 5 and isinstance(note, str) and note.startswith("{"):
            inner = json.loads(note)
            deep, at = chance.choice(list(places(inner)) or [(inner, "x")])
            deep[at] = chance.choice(VALUES)
            owner[key] = json.dumps(inner)
        elif kind == 4 and isinstance(owner, dict) and chance.random() < 0.5:
            owner[str(chance.choice(VALUES))] = owner.pop(key, None)
        else:
            owner[key] = chance.choice(VALUES)
        text = json.dumps(tree, ensure_ascii=chance.random() < 0.9)
        head = bytearray(text.encode("utf-8", "surrogatepass"))
    return Bytes(len(head).to_bytes(8, "little") + head, 8 + len(head) + body)


@contextlib.contextmanager
def filled(path: Path) -> Iterator[Callable[[Bytes], None]]:
    """Makes the file what it is given. It stays open and is never empty: ext4 would write such files to the disk."""
    with path.open("wb", buffering=0) as file:

        def fill(data: Bytes) -> None:
            os.pwrite(file.fileno(), data.first, 0)
            os.ftruncate(file.fileno(), len(data.first))
            os.ftruncate(file.fileno(), data.size)

        yield fill


def look(path: Path, size: int) -> bool:
    """Whether a file is a model; what it says then lies in it."""
    try:
        model = read_model(path)
        chunks_of(model)
    except CheckpointError:
        return False
    for name, whole in model.tensors.items():
        for part in whole.parts:
            assert 8 <= part.begin <= part.end <= size, name
            assert math.prod(part.shape) * part.dtype.itemsize == part.end - part.begin, name
            bounds = zip(part.offsets, part.shape, whole.shape, strict=True)
            assert all(first + length <= extent for first, length, extent in bounds), name
    return True


@pytest.mark.slow(but=["2000"])
@pytest.mark.parametrize("count", [2000, 1_000_000])
def test_any_header(tmp_path: Path, count: int) -> None:
    files = {name: without_data(data) for name, data in seeds(tmp_path).items()}
    path = tmp_path / "fuzzed.safetensors"
    chance, good = random.Random(f"headers {count}"), 0
    with filled(path) as fill:
        for name, data in files.items():
            fill(data)
            assert look(path, data.size) or name in ("shard", "nothing"), name
        for _ in range(count):
            data = mutated(files[chance.choice(list(files))], chance)
            fill(data)
            good += look(path, data.size)
    assert 0 < good < count / 2


def test_any_index(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(seeds(tmp_path)["plain"])
    chance, index, good = random.Random("index"), tmp_path / INDEX_NAME, 0
    with filled(index) as fill:
        for _ in range(1000):
            tree = {"metadata": {"total_size": 24}, "weight_map": {"a": "x.safetensors"}}
            owner, key = chance.choice(list(places(tree)))
            owner[key] = chance.choice(VALUES)
            data = json.dumps(tree).encode()
            if chance.random() < 0.3:
                data = data[: chance.randrange(len(data))]
            fill(Bytes(data, len(data)))
            good += look(tmp_path, 1 << 20)
    assert 0 < good < 1000


def test_an_index_that_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "x.safetensors").write_bytes(seeds(tmp_path)["plain"])
    (tmp_path / "model" / "below").mkdir()
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors"), "..", "", "x\0", "below/../../x.safetensors"):
        (tmp_path / "model" / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CorruptCheckpointError, match=r"no file beside it|no index"):
            read_model(tmp_path / "model")
