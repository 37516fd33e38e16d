"""``async_save``: a save in the background, in a thread of its own.

The calling thread opens the state, and takes the save's turn in its process group. The thread copies the tensors into
a buffer, of a stager's or of its own, waits for the turns before it, and saves the copy as ``dcp.save`` would. The
thread belongs to this one save, and owns the copy until that is over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import SavePlanner, StorageWriter
from torch.distributed.checkpoint.stateful import Stateful

from dcpring.base.groups import has_group, world_size
from dcpring.base.order import ALONE, take_turn
from dcpring.base.untold import BackgroundTask
from dcpring.move.staging import Copying, SideStreams, StagingBuffer
from dcpring.plan.save_planner import RingSavePlanner
from dcpring.store.stager import RingStager
from dcpring.store.writer import RingWriter
from dcpring.torchside import dcp
from dcpring.torchside.groups import device_of

__all__ = ["AsyncSaveResponse", "async_save"]


class AsyncSaveResponse(BackgroundTask):
    """What becomes of a save in the background: a Future of its metadata, done when the checkpoint is durable.

    Attributes:
        staging_completion: a Future that is done when the state has been copied, and may change.
    """

    def __init__(self, staging_completion: Future[None]) -> None:
        super().__init__()
        self.staging_completion = staging_completion

    @property
    def upload_completion(self) -> Future[Any]:
        """This Future, by the name that ``torch.distributed.checkpoint.async_save`` gives to it."""
        return self


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    stager: RingStager | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> AsyncSaveResponse:
    """Saves a state dict in the background, as ``dcp.save`` would save it now. All ranks call it.

        stager = RingStager()
        response = dcpring.async_save(state, storage_writer=RingWriter(path), stager=stager)
        ...
        stager.synchronize()  # or response.staging_completion.result(): the state may change
        ...
        response.result()  # the checkpoint is durable, or this raises what went wrong

    Saves of one process group are made in the order of the calls, one at a time; other saves and loads of the group by
    dcpring wait for them. A failure is logged at ERROR at once. If nobody has asked for it by the end of the program,
    it is printed then, and the exit status is 120. The program does not end before the save has.

    Args:
        state_dict: what is to be saved; of what has a ``state_dict()`` (``Stateful``) that.
        checkpoint_id: directory of the checkpoint, where the writer has none, or another one.
        storage_writer: any storage writer of DCP; default: ``RingWriter(checkpoint_id)``.
        planner: any save planner of DCP; default: ``RingSavePlanner()``.
        stager: has the memory for the copy, and keeps it for the next save. By default it is taken for this one save.
        process_group: the ranks that save together; default: all. It needs a backend for the CPU, such as gloo.
        no_dist: this process saves alone, also where there is a process group.

    Returns:
        A Future of the save's metadata. It has ``staging_completion`` and ``upload_completion``, as what
        ``torch.distributed.checkpoint.async_save`` returns has them.

    Raises:
        ValueError: there is no directory, or the process group cannot be used by a second thread.
        RuntimeError: the stager is closed.
    """
    if storage_writer is None:
        if checkpoint_id is None:
            raise ValueError("async_save needs a checkpoint_id or a storage_writer: it does not know where to save")
        storage_writer = RingWriter(checkpoint_id)
    group, ranks = None, 1
    if has_group() and not no_dist:
        group = process_group or dist.group.WORLD
        ranks = world_size(group)
        if device_of(group) != torch.device("cpu"):
            raise ValueError(
                "async_save needs a process group with a backend for the CPU, as training uses the others meanwhile: "
                'call init_process_group("cpu:gloo,cuda:nccl"), or give process_group=dist.new_group(backend="gloo")'
            )
    values = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
    buffer = StagingBuffer()
    if stager is None:
        copying = Copying.of(buffer, values, SideStreams(), None)
    else:
        copying = stager.begin_copy(values, SideStreams())
    copying.turn = turn = take_turn(ALONE if group is None else group, ranks)
    writer, chosen = storage_writer, RingSavePlanner() if planner is None else planner
    del values

    def work() -> Any:
        try:
            copied = copying.fill()
            turn.begin()
            writer.reset(checkpoint_id)
            return dcp.save(copied, writer, chosen, group)
        finally:
            turn.end()
            buffer.release()

    response = AsyncSaveResponse(copying.copied)
    try:
        response.start("dcpring-save", work)
    except RuntimeError:  # no thread can be started: the other ranks must not wait for this one
        response.run(work)
    return response
