"""Headers of safetensors, as a load needs them: read by one rank of each host, and handed on to the others there.

A model of many files costs each rank an open for each, and the time to make tables of what they say. Where all ranks of
a group load, one of each host does so, and puts the tables into memory that the others map. They are in step there:
what is wrong is the same error on all (``base.joint``). Where not all come, or memory cannot be shared, all read.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dcpring.base import groups
from dcpring.base.collector import collection_paused
from dcpring.base.files import new_tag
from dcpring.base.joint import GroupChannel, Joint, joined
from dcpring.format.lazy import Chunks
from dcpring.format.quantised import Quantised, find_quantised
from dcpring.format.safetensors import Files, read_model
from dcpring.move.host_memory import offered
from dcpring.store.safetensors import chunks_of

logger = logging.getLogger("dcpring")

MEET_SECONDS = 10.0
"""How long ranks wait for all to come. One that comes later costs only the sharing."""


class Headers(NamedTuple):
    """What a load knows of a model.

    Attributes:
        files: that hold it.
        chunks: its tables.
        quantised: what is made of others, tensors or parts of them.
    """

    files: Files
    chunks: Chunks
    quantised: list[Quantised]


def read_headers(path: Path, dequantize: torch.dtype | None, block_size: int) -> Headers:
    """What a path leads to; raises as ``read_model`` does.

    Args:
        dequantize: what is made of quantised tensors; None: they are as they are stored.
        block_size: as for ``find_quantised``.
    """
    model = read_model(path)
    with collection_paused():
        quantised = {} if dequantize is None else find_quantised(model, dequantize, block_size)
    return Headers(model.files, chunks_of(model, quantised), list(itertools.chain(*quantised.values())))


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
        logger.warning("every rank reads all headers for itself, as ranks have not met to share them: %s", error)
        yield None
    else:
        with joined(Joint(GroupChannel(group), "read headers")) as joint:
            yield joint


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
