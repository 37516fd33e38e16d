"""Directories of safetensors, as others and dcpring write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import _kinds
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcpring
from dcpring.format.model_files import read_model
from dcpring.format.safetensors import StoredPart, make_header

INDEX = "model.safetensors.index.json"
PLACED = {"rows": [Shard(0)], "columns": [Shard(1)], "whole": [Replicate()], "one": [Shard(0)]}
KINDS = ("one file", "index", "folders", "links", "links to folders", "stock's", "stock's shards", "ours")


MIB = 1 << 20


def tensors() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(5)
    return {
        "rows": torch.randn(1030, 257, generator=made),
        "columns": torch.randn(129, 66, generator=made).bfloat16(),
        "whole": torch.randn(33, generator=made).double(),
        "one": torch.randn(1, generator=made).half(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
    }


def write(path: Path, kind: str, given: dict[str, Tensor] | None = None) -> Path:
    """A directory of safetensors: of one file, or of several with an index, or as a hub's cache has it."""
    state = tensors() if given is None else given
    path.mkdir(parents=True)
    if kind == "one file":
        save_file(state, path / "model.safetensors")
    elif kind in ("index", "folders"):
        names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
        if kind == "folders":
            names = ["first/a.safetensors", names[1], "first/second/a.safetensors"]
            (path / "first" / "second").mkdir(parents=True)
        files = {name: names[number % 3] for number, name in enumerate(state)}
        for file in names:
            save_file({name: state[name] for name in state if files[name] == file}, path / file)
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    elif kind == "links":
        origin = write(path.parent / "origin", "index", state)
        (path.parent / "blobs").mkdir()
        for number, file in enumerate(sorted(origin.iterdir())):
            file.rename(path.parent / "blobs" / str(number))
            (path / file.name).symlink_to(Path("..", "blobs", str(number)))
    elif kind == "links to folders":
        write(path / "origin", "folders", state)
        (path / "first").symlink_to(path / "origin" / "first")
        (path / "first" / "second" / "a.safetensors").rename(path.parent / "blob")
        (path / "first" / "second" / "a.safetensors").symlink_to(Path("..", "..", "..", "..", "blob"))
        for name in (INDEX, "model-00002-of-00003.safetensors"):
            (path / "origin" / name).rename(path / name)
    elif kind == "ours":
        writer = dcpring.RingHFWriter(path, max_shard_bytes=1 << 17)
        dcp.save(state, storage_writer=writer, planner=dcpring.RingSavePlanner(), no_dist=True)
    else:
        writer = HuggingFaceStorageWriter(str(path), save_distributed=kind == "stock's shards")
        dcp.save(state, storage_writer=writer, no_dist=True)
    return path


def stored_in(path: Path) -> dict[str, StoredPart]:
    """Where the tensors of a model lie that is in one file, or in several and whole in each."""
    return {name: whole.parts[0] for name, whole in read_model(path).tensors.items()}


def save_shards(path: str) -> None:
    state = {name: tensor for name, tensor in tensors().items() if name in PLACED}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(tensor, mesh, PLACED[name]) for name, tensor in state.items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


def with_crcs(path: Path, given: dict[str, Tensor], note: Callable[[dict[str, str]], str] = json.dumps) -> None:
    """As RingHFWriter lays a file out."""
    entries = [(name, tensor.dtype, tensor.shape) for name, tensor in given.items()]
    sums = {name: "00" * 4 * (2 + tensor.nbytes // MIB) for name, tensor in given.items()}
    size = len(make_header(entries, {"dcpring.crcs": json.dumps(sums)}))
    begin, data = size, b"".join(map(_kinds.raw, given.values()))
    whole = bytes(size) + data
    for name, tensor in given.items():
        end, at, found = begin + tensor.nbytes, begin, b""
        while at < end:
            stop = min(end, (at // MIB + 1) * MIB)
            found += dcpring._C.crc32(whole[at:stop]).to_bytes(4, "little")
            at = stop
        sums[name], begin = found.hex(), end
    header = make_header(entries, {"dcpring.crcs": note(sums)})
    assert len(header) <= size or note is not json.dumps
    header = (size - 8).to_bytes(8, "little") + header[8:].ljust(size - 8)
    path.write_bytes(header + data)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(700, 500)
        self.head = torch.nn.Linear(500, 700, bias=False)
        self.head.weight = self.embedding.weight
