"""RingStager: copies of states in memory that is kept, made beside training.

The calling thread opens the state; another thread copies the tensors: the one that saves, for ``dcpring.async_save``,
or else one of the stager's. A buffer is written to again when the save of what it holds is over (``base.order.Turn``).
A copy that no ``async_save`` has asked for has no turn: it is never written over, and the next copy takes other memory.

The end of this file is about the process of torch's that saves in the background. It takes saves in any order, and
answers whoever reads first, so that it gets them one at a time, whatever their process group.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from dcpring.base.arguments import checks_names, shown
from dcpring.base.groups import agree, digest, rank_in
from dcpring.base.order import ALONE, Queue, is_over, pauses, take_turn, wait_until
from dcpring.base.whose import about_ranks
from dcpring.errors import CheckpointError
from dcpring.move.sending import Staged
from dcpring.move.staging import Copying, Devices, SideStreams, StagingBuffer
from dcpring.torchside.dcp import (
    AsyncSave,
    background_process_failure,
    calling_async_save,
    end_background_process,
    forget_background_process,
    future_of_thread,
    has_background_process,
)

__all__ = ["RingStager"]

logger = logging.getLogger("dcpring")

_TELL_SECONDS = 30.0
"""After so long a wait for a buffer the log says what is waited for."""

_UNASKED_SECONDS = 120.0
"""A thread of torch's that has not begun to save a complete copy by then has never been started."""

_START_SECONDS = 1900.0
"""The same while torch's process is being started, for which torch itself waits as long as that."""


class RingStager(AsyncStager):
    """Stages states for ``dcpring.async_save``, and for DCP's own, in memory that is taken once.

        stager = RingStager()
        for batch in loader:
            loss(model, batch).backward()
            stager.synchronize()  # the last copy is complete: the state may change
            optimizer.step()
            if ...:
                response = dcpring.async_save(state, storage_writer=RingWriter(path), stager=stager)
        response.result()
        stager.close()

    ``async_save`` returns as soon as copying has begun: objects of the state are copied by then, tensors may change
    when ``synchronize`` returns, or when the response's ``staging_completion`` is done. torch's
    ``torch.distributed.checkpoint.async_save`` takes it as ``async_stager=``.

    The memory is one mapping with one descriptor, whatever the number of tensors. A save in a process
    (``AsyncCheckpointerType.PROCESS``) maps it there and copies nothing. What lies on an accelerator is copied to
    pinned memory on a stream of its own, behind what the calling thread has given to the current stream.

    Args:
        buffers: states that are held at most. With 1 a save waits for the one before to be written; with 2 it can be
            copied meanwhile.
        workers: threads that copy what lies in host memory; default: 2, or one on a single processor.
        unchanged: "trust": parameters of the state that require no gradient are not copied again, unless they are seen
            to have changed (see docs/async.md). "copy", the default, copies everything.

    Raises:
        ValueError: an argument is out of range.
    """

    _synchronize_after_execute = False

    @checks_names()
    def __init__(
        self, buffers: int = 1, workers: int | None = None, unchanged: Literal["copy", "trust"] = "copy"
    ) -> None:
        for name, value in (("buffers", buffers), ("workers", workers)):
            if value is not None and (not isinstance(value, int) or not 1 <= value <= 64):
                raise ValueError(f"{name}={value!r}: must be an int from 1 to 64")
        if unchanged not in ("copy", "trust"):
            raise ValueError(f'unchanged={unchanged!r}: must be "copy" or "trust"')
        self._most, self._workers = buffers, workers
        self._frozen: Collection[Tensor] | None = () if unchanged == "trust" else None
        self._is_open = True
        self._begin()

    def __repr__(self) -> str:
        unchanged = "copy" if self._frozen is None else "trust"
        return shown(self, buffers=self._most, workers=self._workers, unchanged=unchanged)

    def _begin(self) -> None:
        self._slots: list[_Slot] = []
        self._last: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._let_go = 0

    @property
    def allocations(self) -> int:
        """How often memory was taken: it stays the same from the second save on, while states have the same sizes."""
        return self._let_go + sum(slot.buffer.allocations for slot in self._slots)

    @property
    def size_bytes(self) -> int:
        """The memory that is held now."""
        return sum(slot.buffer.size_bytes for slot in self._slots)

    def stage(self, state_dict: Any) -> Future[Any]:
        """Begins a copy. The state's tensors must not change until the Future is done.

        Called by torch's ``async_save``, it gives a copy that is valid until that save is over. Where the state cannot
        be copied, the copy raises the error when it is planned, on all ranks; ``synchronize`` raises it here.

        Returns:
            A Future of the copy. Whoever calls this himself owns the copy: the next one takes other memory.

        Raises:
            RuntimeError: the stager is closed.
        """
        call, staged = calling_async_save(), Future[Any]()
        try:
            renew_background_process(call)
        except CheckpointError as error:  # which DCP shall hand to whoever waits for the save
            staged.set_exception(error.with_traceback(None))
            return staged
        copying = self.begin_copy(state_dict, SideStreams())
        save = None if call is None else TorchSave(call)
        copying.turn = None if save is None else save.turn

        def fill() -> None:
            tree, error = copying.fill(), copying.copied.exception()
            if save is not None:
                staged.set_result(save.staged(tree))
            elif error is not None:
                staged.set_exception(error)
            else:
                staged.set_result(tree)

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="dcpring-stage")
        try:
            self._executor.submit(fill)
        except RuntimeError:  # no thread can be started, now or before
            self._executor = None
            fill()
        return staged

    def begin_copy(self, state_dict: Any, devices: Devices) -> Copying:
        """A copy of the state in a buffer that is free, for the caller to fill. An error is told by that."""
        slot = self._claim()
        slot.copying = Copying.of(slot.buffer, state_dict, devices, self._frozen)
        self._last = slot.copying.copied
        return slot.copying

    def synchronize(self) -> None:
        """Returns when the last copy is complete, and the state may change. Raises what went wrong with it, once."""
        last, self._last = self._last, None
        if last is not None and self._process == os.getpid():
            try:
                last.result()
            except BaseException:
                if not last.done():  # Ctrl-C has ended the wait, not the copy
                    self._last = last
                raise

    def synchronize_staging(self) -> None:
        """DCP's name for ``synchronize``."""
        self.synchronize()

    def close(self) -> None:
        """Gives the memory back, that of a save that is still being written when it is over."""
        self._is_open = False
        if self._process == os.getpid():
            if self._executor is not None:
                self._executor.shutdown()
            for slot in self._slots:
                if slot.copying is not None:
                    futures.wait([slot.copying.copied])  # by the thread that saves it
        for slot in self._slots:
            slot.buffer.release(slot.is_free)
        self._slots, self._executor, self._last = [], None, None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a RingStager can neither be pickled nor copied: it has a thread and memory of this process. Make one in "
            "each process, and keep it out of what is sent or copied"
        )

    def __enter__(self) -> RingStager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _claim(self) -> _Slot:
        """A buffer that nobody needs any more."""
        if not self._is_open:
            raise RuntimeError("this RingStager is closed; make another one")
        if self._process != os.getpid():  # the parent's memory and thread are not this process's
            self._begin()
        began, is_told = time.monotonic(), False
        for pause in pauses():
            free = next((slot for slot in self._slots if slot.is_free), None)
            if free is not None:
                return free
            if len(self._slots) == self._most:
                self._let_go_of_one()
            if len(self._slots) < self._most:
                self._slots.append(_Slot(StagingBuffer(self._workers, is_shared=True)))
                return self._slots[-1]
            if not is_told and time.monotonic() > began + _TELL_SECONDS:
                is_told = True
                logger.warning(
                    "staging waits for an earlier save to be written, whose memory it will use; "
                    "RingStager(buffers=%d) lets the next save be copied meanwhile",
                    self._most + 1,
                )
            time.sleep(pause)
        raise AssertionError

    def _let_go_of_one(self) -> None:
        left = next((slot for slot in self._slots if slot.is_left), None)
        if left is not None:
            self._let_go += left.buffer.allocations
            self._slots.remove(left)


class _Slot:
    """A buffer of a stager, and the copy that it holds."""

    def __init__(self, buffer: StagingBuffer) -> None:
        self.buffer = buffer
        self.copying: Copying | None = None

    @property
    def is_free(self) -> bool:
        """Whether the buffer may be written to: it holds no copy, or the save of the copy is over."""
        copying = self.copying
        return copying is None or (copying.copied.done() and copying.turn is not None and copying.turn.is_saved)

    @property
    def is_left(self) -> bool:
        """Whether the buffer belongs to whoever has the copy, as no save of it is to be expected."""
        copying = self.copying
        if copying is None or not copying.copied.done():
            return False
        return copying.turn is None or (copying.turn.is_over and not copying.turn.is_saved)


# ---- a copy for torch's own async_save ----

_sent_saves = Queue()
"""What the process in the background saves: there is one, for all stagers and process groups."""


class TorchSave:
    """A save by torch's ``async_save``. It takes its turn when this is made, in the thread that calls.

    Attributes:
        turn: which torch's thread begins.
    """

    def __init__(self, call: AsyncSave) -> None:
        self._call = call
        self._seconds = _UNASKED_SECONDS if has_background_process() or not call.is_sent else _START_SECONDS
        ranks = 1 if call.is_sent else len(call.members)
        self.turn = take_turn(_sent_saves if call.is_sent else call.group or ALONE, ranks)

    def staged(self, tree: Any) -> Staged:
        """The complete copy, as torch's thread gets it."""
        staged = Staged(tree)
        staged.begin = self._begin
        self.turn.expect(staged, self._seconds)
        return staged

    def _begin(self) -> None:
        """Called by torch's thread."""
        self.turn.begin()
        future = future_of_thread() if self._call.is_sent and self._call.group is not None else None
        if future is not None:
            _SentSave.last = sent = _SentSave(future)
            future.add_done_callback(sent.look)


# ---- the process in the background ----


def renew_background_process(call: AsyncSave | None) -> None:
    """Has all ranks start a new process for ``async_save`` where that of one has died; called by ``stage``.

    DCP goes on sending saves to a process that has died. Starting one is collective, so ranks have to agree for each
    save, and none waits: the first to come says what it has. One that finds its process dead after another has said
    "go" lets this save fail, and with it the processes of all (``_SentSave``), so that the first to come to the next
    save has none either.

    Raises:
        CheckpointError: this rank has no process, and others go on with theirs.
    """
    if call is None or not call.is_sent:
        return
    wait_until(lambda: has_background_process() or is_over(_sent_saves))  # DCP would start one for each save
    if _SentSave.last is not None:
        _SentSave.last.look()
    members = call.members
    failure, rank = background_process_failure(), members.index(rank_in())
    own = "go" if failure == "" else "start" if failure is None else f"on rank {rank}, of {failure}"
    word = agree(f"dcpring/background/{digest(members)}", own) or own
    if word == "go" != own:
        was = "could not be started" if failure is None else f"has died, of {failure}"
        text = f"the process of rank {rank} that saves in the background {was}; the next save starts another one"
        raise CheckpointError(text + about_ranks(text, members))
    if word not in ("go", "start"):
        logger.warning("the process that saves in the background has died %s; another one is started", word)
    if word != "go":
        wait_until(lambda: is_over(_sent_saves))  # what is under way looks for the process when it is sent
        forget_background_process()
        group = call.group
        if group is not None:  # by which the ranks tell each other where the new ones meet
            wait_until(lambda: is_over(group))


class _SentSave:
    """A save by the process in the background, which ends that process if it fails in a way that ranks do not share.

    A connection has ended then, or a rank has not come: the processes cannot reach each other any more, and those of
    other ranks may wait for this one. torch's thread looks when the save is over. So does the next save before it
    begins, in case that thread has not come to it yet.
    """

    last: _SentSave | None = None

    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self._lock = threading.Lock()
        self._is_known = False

    def look(self, _: object = None) -> None:
        """Ends the process if the save has failed so, once."""
        with self._lock:
            if self._is_known or not self._future.done():
                return
            self._is_known = True
            error = self._future.exception()
            is_shared = error is None or isinstance(error, CheckpointException)
            if is_shared or background_process_failure() != "":
                return
            logger.warning(
                "the process that saves in the background has failed alone, or cannot reach those of other ranks, and "
                "is ended, as they may wait for it: %s",
                error,
            )
            end_background_process()
