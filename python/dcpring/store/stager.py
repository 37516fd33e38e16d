"""RingStager: DCP's stager on memory that is kept, and whose copies are made beside training.

The calling thread opens the state; a thread of the stager's copies the tensors. DCP then saves the copy in a thread of
its own, or hands it to a process. A buffer is written to again when that save is over, which is known in one of two
ways: nobody refers to what lies in the buffer, or the thread has ended in which DCP asked for the copy. (A planner or
the traceback of an error may refer to the copy for long after its save.)

DCP's threads are held back until the save before is over (``base.order``). Its process in the background, too, takes
saves in any order and answers whoever reads first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from dcpring.base.arguments import checks_names, shown
from dcpring.base.groups import GroupBefore, agree, digest, rank_in
from dcpring.base.joint import failure_of
from dcpring.base.order import BackgroundSave, Line, line_of, pauses, wait_for_turn, wait_until
from dcpring.base.untold import WatchedFuture, without_frames
from dcpring.base.whose import about_ranks
from dcpring.errors import CheckpointError
from dcpring.move.staging import Opened, SideStreams, StagingBuffer
from dcpring.torchside.dcp import (
    AsyncSave,
    background_process_failure,
    calling_async_save,
    end_background_process,
    forget_background_process,
    has_background_process,
    save_of_thread,
)

__all__ = ["RingStager"]

logger = logging.getLogger("dcpring")

_TELL_SECONDS = 30.0
"""After so long a wait for a buffer the log says what is waited for."""

_UNASKED_SECONDS = 120.0
"""A copy that nobody has asked for by then is none of ``async_save``'s."""

_START_SECONDS = 1900.0
"""The same while DCP's process is being started, for which DCP itself waits as long as that."""


class RingStager(AsyncStager):
    """Stages states for ``dcp.async_save``, in a thread or in a process, in memory that is taken once.

        stager = RingStager()
        for batch in loader:
            loss(model, batch).backward()
            stager.synchronize()  # the last copy is complete: the state may change
            optimizer.step()
            if ...:
                response = dcp.async_save(state, storage_writer=RingWriter(path), async_stager=stager)
        response.upload_completion.result()
        stager.close()

    ``async_save`` returns an ``AsyncSaveResponse`` as soon as copying has begun: objects of the state are copied by
    then, tensors may change when ``synchronize`` returns, or when the response's ``staging_completion`` is done.

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
        self._turns: list[Turn] = []
        self._line = Line()
        self._last: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._let_go = 0

    @property
    def allocations(self) -> int:
        """How often memory was taken: it stays the same from the second save on, while states have the same sizes."""
        return self._let_go + sum(turn.buffer.allocations for turn in self._turns)

    @property
    def size_bytes(self) -> int:
        """The memory that is held now."""
        return sum(turn.buffer.size_bytes for turn in self._turns)

    def stage(self, state_dict: Any) -> Future[Any]:
        """Begins a copy. The state's tensors must not change until the Future is done.

        Returns:
            A Future of the copy. It is valid until its save by ``async_save`` is over; who asks for the result
            otherwise has it for as long as something refers to its tensors.

        Raises:
            RuntimeError: the stager is closed.
        """
        turn, call = self._claim(), calling_async_save()
        try:
            renew_background_process(call)  # when the save whose buffer this was has told how it ended
        except CheckpointError as error:  # which DCP shall hand to whoever waits for the save
            failed: Future[Any] = Future()
            failed.set_exception(without_frames(error))
            return failed
        turn.save = save = place_in_line(call, self._line)
        staged, self._last = StagedFuture(save), save.copied
        try:
            self._begin_to_fill(staged, turn.buffer, state_dict)
        except Exception as error:
            staged.fail(error)
        except BaseException:
            save.failed()
            raise
        return staged

    def _begin_to_fill(self, staged: StagedFuture, buffer: StagingBuffer, state_dict: Any) -> None:
        opened = buffer.open(state_dict, SideStreams(), self._frozen)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="dcpring-stage")
        try:
            self._executor.submit(_fill, staged, buffer, opened)
        except RuntimeError:  # no thread can be started: there is none, and what was queued waits for one
            self._executor = None
            raise

    def stage_now(self, state_dict: Any, save: BackgroundSave) -> Any:
        """The copy, complete. It is valid until that save is over."""
        turn = self._claim()
        tree = turn.buffer.stage(state_dict, self._frozen)
        turn.save = save
        return tree

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
        if self._process == os.getpid() and self._executor is not None:
            self._executor.shutdown()
        for turn in self._turns:
            turn.buffer.release()
        self._turns, self._executor, self._last = [], None, None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a RingStager can neither be pickled nor copied: it has a thread and memory of this process. Make one in "
            "each process, and keep it out of what is sent or copied"
        )

    def __enter__(self) -> RingStager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _claim(self) -> Turn:
        """A buffer that nobody needs any more."""
        if not self._is_open:
            raise RuntimeError("this RingStager is closed; make another one")
        if self._process != os.getpid():  # the parent's memory and thread are not this process's
            self._begin()
        began, is_told = time.monotonic(), False
        for pause in pauses():
            free = next((turn for turn in self._turns if turn.is_free), None)
            if free is not None:
                return free
            if len(self._turns) == self._most:
                self._let_go_of_one()
            if len(self._turns) < self._most:
                self._turns.append(Turn(StagingBuffer(self._workers, is_shared=True)))
                return self._turns[-1]
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
        left = next((turn for turn in self._turns if turn.is_left), None)
        if left is not None:
            self._let_go += left.buffer.allocations
            self._turns.remove(left)


class Turn:
    """A buffer, and the save that it holds a copy for."""

    def __init__(self, buffer: StagingBuffer) -> None:
        self.buffer = buffer
        self.save = BackgroundSave(0)
        self.save.copied.set_result(None)

    @property
    def is_free(self) -> bool:
        """Whether the buffer may be written to."""
        return self.save.copied.done() and (self.save.needs_no_copy or not self.buffer.is_used)

    @property
    def is_left(self) -> bool:
        """Whether the buffer is not to be waited for: somebody has the copy, and no save of it will end."""
        return self.save.copied.done() and self.save.is_nobodys


_of_process = Line()
"""All that DCP's process saves: there is one, for all stagers."""


def place_in_line(call: AsyncSave | None, own: Line) -> BackgroundSave:
    """The save that a copy is made for, behind those that it must not meet: of its group, or of ``own`` without one."""
    if call is not None and call.is_sent:
        return _of_process.join(_UNASKED_SECONDS if has_background_process() else _START_SECONDS)
    if call is None or call.is_alone or call.group is None:
        return own.join(_UNASKED_SECONDS)
    return line_of(call.group).join(_UNASKED_SECONDS)


class StagedFuture(Future[Any]):
    """A copy in the making, which notes who takes it.

    Attributes:
        save: that it is for.
    """

    def __init__(self, save: BackgroundSave) -> None:
        super().__init__()
        self.save, self._group = save, GroupBefore()
        self._quiet = threading.local()

    def result(self, timeout: float | None = None) -> Any:
        if not getattr(self._quiet, "is_called_back", False):
            here = save_of_thread()
            if here is not None and here.staged is self:
                wait_for_turn()
                watch_background_process()
                return self._for_saving()
            self.save.by_hand()
        return super().result(timeout)

    def _for_saving(self) -> Any:
        try:
            copied = super().result()
        except Exception as error:
            copied = uncopied(error)
        self._group.note()
        self._group.require()
        return copied

    def fill(self, buffer: StagingBuffer, opened: Opened) -> None:
        """Makes the copy."""
        try:
            tree = buffer.fill(opened)
        except BaseException as error:
            self.fail(error)
        else:
            self.save.copied.set_result(None)
            self.set_result(tree)

    def fail(self, error: BaseException) -> None:
        """There is no copy."""
        self.save.failed(without_frames(error))
        self.set_exception(error)

    def add_done_callback(self, fn: Callable[[Future[Any]], Any]) -> None:
        """As a Future does it. A callback that asks for the result, as DCP's does to see an error, does not take it."""

        def call(future: Future[Any]) -> None:
            self._quiet.is_called_back = True
            try:
                fn(future)
            finally:
                self._quiet.is_called_back = False

        super().add_done_callback(call)


def _fill(staged: StagedFuture, buffer: StagingBuffer, opened: Opened) -> None:
    try:
        staged.fill(buffer, opened)
    finally:
        del opened


def uncopied(error: Exception) -> dict[str, Any]:
    """What is to be saved in the place of a state that could not be copied on this rank: all ranks get its error.

    An error before DCP's collectives would leave the others in them, waiting for this rank.
    """
    text = str(error) if isinstance(error, CheckpointError) else f"cannot copy the state: {failure_of(error).text}"
    return {"state": _Uncopied(text)}


class _Uncopied:
    """Raises when it is planned, which DCP does in a collective."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __create_write_items__(self, *_: object) -> None:
        raise CheckpointError(self._text)


# ---- DCP's process in the background ----


def renew_background_process(call: AsyncSave | None) -> bool:
    """Has all ranks start a new process for ``async_save`` where that of one has died; called by ``stage``.

    DCP goes on sending saves to a process that has died. Starting one is collective, so ranks have to agree for each
    save, and none waits: the first to come says what it has. One that finds its process dead after another has said
    "go" lets this save fail, and with it the processes of all (``watch_background_process``), so that the first to come
    to the next one has none either.

    Returns:
        Whether such a process will save.

    Raises:
        CheckpointError: this rank has no process, and others go on with theirs.
    """
    if call is None or not call.is_sent:
        return False
    members = call.members
    wait_until(lambda: has_background_process() or _of_process.is_over)  # DCP would start one for each save
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
        wait_until(lambda: _of_process.is_over)  # what is under way looks for the process when it is sent
        forget_background_process()
        if call.group is not None:  # by which the ranks tell each other where the new ones meet
            line = line_of(call.group)
            wait_until(lambda: line.is_over)
    return True


def watch_background_process() -> None:
    """Ends the process if the save fails that is about to be sent to it, in any way that DCP has not told all ranks.

    A connection has ended then, or a rank has not come: the processes cannot reach each other any more, and those of
    other ranks may wait for this one. Called by DCP's thread.
    """
    here = save_of_thread()
    if here is not None and here.future is not None and here.is_sent and here.is_of_all:
        _FutureOfSentSave.watch(here.future)


class _FutureOfSentSave(WatchedFuture):
    """Tells of a failure when the process has ended: who hears of it may begin the next save at once."""

    def set_exception(self, exception: BaseException | None) -> None:
        if exception is not None and not isinstance(exception, CheckpointException):
            _end_background_process(exception)
        super().set_exception(exception)


def _end_background_process(error: BaseException) -> None:
    if background_process_failure() == "":
        logger.warning(
            "the process that saves in the background has failed alone, or cannot reach those of other ranks, and is "
            "ended, as they may wait for it: %s",
            error,
        )
        end_background_process()
