"""What a load reads before it plans: by one rank, and handed on to the others.

Headers of safetensors are read by one rank of each host.

A model of many files costs each rank an open for each, and the time to make tables of what they say. Where all ranks of
a group load, one of each host does so, and puts the tables into memory that the others map. So is metadata that is not
small; what is large one rank of all reads, and sends to one of each host. They are in step there: what is wrong is the
same error on all (``base.joint``). Where not all come, or memory cannot be shared, all read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcpring import _C
from dcpring.base import groups
from dcpring.base.collector import collection_paused
from dcpring.base.files import new_tag, read_regular
from dcpring.base.joint import GroupChannel, Joint, joined
from dcpring.errors import CorruptCheckpointError
from dcpring.format.lazy import Chunks, LazyMetadata
from dcpring.format.metadata import METADATA_NAME, OPAQUE, TENSOR, load_metadata
from dcpring.format.model_files import Files, Model, is_model, read_model
from dcpring.format.quantised import Quantised, find_quantised
from dcpring.move.host_memory import offered
from dcpring.plan.flatten import path_code
from dcpring.plan.sharing import hops
from dcpring.plan.table import table_of_chunks
from dcpring.torchside.groups import device_of

logger = logging.getLogger("dcpring")

MEET_SECONDS = 10.0
"""How long ranks wait for all to come. One that comes later costs only the sharing."""


class Headers(NamedTuple):
    """The files and the tables of a model that is loaded.

    Attributes:
        files: that hold it.
        chunks: its tables.
        quantised: what is made of others, tensors or parts of them.
    """

    files: Files
    chunks: Chunks
    quantised: list[Quantised]


def read_headers(path: Path, dequantize: torch.dtype | None, block_size: int) -> Headers:
    """Reads the headers of a model, and makes its tables of them. Raises what ``read_model`` raises.

    Args:
        dequantize: what is made of quantised tensors; None: they are as they are stored.
        block_size: as for ``find_quantised``.
    """
    model = read_model(path)
    with collection_paused():
        quantised = {} if dequantize is None else find_quantised(model, dequantize, block_size)
    return Headers(model.files, chunks_of(model, quantised), list(itertools.chain(*quantised.values())))


def chunks_of(model: Model, quantised: Mapping[str, list[Quantised]] | None = None) -> Chunks:
    """Makes the tables of a model: they have a row for each part of a tensor, and for each part that is dequantised.

    Raises:
        CorruptCheckpointError: names that no table can have.
    """
    with collection_paused():
        return _tables(model, quantised or {})


def _tables(model: Model, quantised: Mapping[str, list[Quantised]]) -> Chunks:
    properties = functools.cache(lambda dtype: TensorProperties(dtype=dtype))
    chunks, places = [], []
    for name, whole in model.tensors.items():
        made = quantised.get(name)
        if made is None:
            kind, dtype, shape = TENSOR, whole.dtype, whole.shape
            parts = [(part.offsets, part.shape, part.place, part.crcs) for part in whole.parts]
        else:
            kind, dtype, shape = OPAQUE, made[0].dtype, made[0].whole
            parts = [(part.begins, part.shape, part.place, None) for part in made]
        places += [(file, kind, at, size, at, size, crcs) for _, _, (file, at, size), crcs in parts]
        chunks.append([(shape, offsets, sizes, properties(dtype)) for offsets, sizes, _, _ in parts])
    try:
        table = table_of_chunks(list(model.tensors), [path_code({"": ("",)}, "")] * len(model.tensors), chunks)
        storage = _C.StorageIndex(len(table))
        storage.put(places)
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"the header holds what no checkpoint can ({error})", str(model.path)) from error
    return Chunks(table, True, storage)


def metadata_of(path: Path) -> Metadata:
    """The metadata of a checkpoint's directory, or made of the headers that a path leads to.

    Raises:
        CheckpointError, CorruptCheckpointError, UntrustedCheckpointError, OSError: it cannot be read.
    """
    return (
        LazyMetadata(source=chunks_of(read_model(path))) if is_model(path) else load_metadata(path / METADATA_NAME)[0]
    )


@contextlib.contextmanager
def meeting(group: dist.ProcessGroup | None) -> Iterator[Joint | None]:
    """An operation of all ranks of a group that begin it at about the same time; None where they do not."""
    if group is None or dist.get_world_size(group) == 1:
        yield None
        return
    members = dist.get_process_group_ranks(group)
    try:
        groups.assemble(f"dcpring/headers/{groups.digest(members)}", len(members), MEET_SECONDS)
    except (TimeoutError, RuntimeError) as error:  # not all have come; or there is no store, or it cannot be reached
        logger.warning("every rank reads headers or metadata for itself, as ranks have not met for it: %s", error)
        yield None
    else:
        with joined(Joint(GroupChannel(group), "read headers")) as joint:
            yield joint


SHARED_BYTES, SENT_BYTES = 64 << 10, 1 << 20
"""Metadata of at least so many bytes is read by one rank of each host, or by one of all, which sends it to other hosts.

That takes messages of all ranks. What is smaller each rank reads: from the page cache of its host, mostly.
"""


def bytes_once(joint: Joint, path: Path) -> bytes:
    """A file, which one rank of each host reads, or one of all where it is large."""
    own = groups.host_id(), new_tag(), path.stat().st_size
    told = joint.gather("metadata", own)
    smallest = min(size for *_, size in told)
    if len(told) == 1 or smallest < SHARED_BYTES:
        return read_regular(path)
    rank, hosts = told.index(own), [host for host, *_ in told]
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    leader = hosts.index(own[0])
    readers = leaders if smallest < SENT_BYTES else [0]
    data = read_regular(path) if rank in readers else b""
    sizes = joint.gather("size", len(data))
    size = sizes[leader] or sizes[0]
    if rank in leaders and readers != leaders:
        data = _passed_on(joint.group, leaders, rank, data, size)
    with offered(joint, rank, leader, size, data) as (memory, _):
        data = data or bytes(memory)
        joint.settle("taken")
    return data or read_regular(path)


def _passed_on(group: dist.ProcessGroup | None, leaders: list[int], rank: int, data: bytes, size: int) -> bytes:
    """What the first of some ranks has, on all of them."""
    own = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8).to(device_of(group))
    for hop in hops(leaders, rank):
        call = dist.isend if hop.is_sent else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(call, own, group=group, group_peer=hop.peer)]):
            work.wait()
    return data or own.cpu().numpy().tobytes()


def read_once(joint: Joint, read: Callable[[], Headers]) -> Headers:
    """What one rank of each host reads, on all its ranks."""
    own = groups.host_id(), new_tag()
    told = joint.gather("hosts", own)
    if len(told) == len({host for host, _ in told}):
        return read()
    rank = told.index(own)
    reader = next(other for other, (host, _) in enumerate(told) if host == own[0])
    found = read() if rank == reader else None
    data = pickle.dumps(found) if found else b""
    with offered(joint, rank, reader, len(data), data) as (memory, _):
        if memory:
            found = found or pickle.loads(memory)
        joint.settle("taken")
    return found or read()
